"""State of modules and generators, by framework."""

from __future__ import annotations

import io
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ftckpt.errors import MismatchError, UnsupportedError
from ftckpt.frameworks import optimizers
from ftckpt.frameworks import torch_state as rng
from ftckpt.frameworks.extra_state import ExtraState, scaling_states
from ftckpt.frameworks.flags import TrainingFlags
from ftckpt.frameworks.late_changes import LateChanges
from ftckpt.frameworks.torch_state import as_object, generators_in
from ftckpt.torch.state import PlainState
from tests.standin import te
from tests.standin.te import modules
from tests.support.errors import raises

# --- generators on a rank of another layout ---


def seeded(seed: int) -> dict[str, Any]:
    """The state after the set-up of a job that seeds everything alike."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return rng.save_generators()


def drawn_from(state: dict[str, Any]) -> tuple[list[float], ...]:
    """The next numbers of every generator of the host."""
    rng.load_generators(state)
    normal = random.gauss(0, 1)  # leaves half of a pair for later
    return [random.random(), normal], np.random.rand(3).tolist(), torch.rand(3).tolist()


@pytest.fixture(autouse=True)
def _left_as_it_was() -> Any:
    before = rng.save_generators()
    yield
    rng.load_generators(before)


def test_alike_stays_alike_and_the_same_restart_draws_the_same() -> None:
    first, second = rng.derive_generators(seeded(1), 7), rng.derive_generators(seeded(1), 7)
    assert drawn_from(first) == drawn_from(second)
    assert drawn_from(first) == drawn_from(first)  # once more, after loaders drew


@pytest.mark.parametrize("seed, iteration", [(2, 7), (1, 8)])
def test_other_seeds_and_other_iterations_draw_others(seed: int, iteration: int) -> None:
    one, other = (
        drawn_from(rng.derive_generators(seeded(1), 7)),
        drawn_from(rng.derive_generators(seeded(seed), iteration)),
    )
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_each_name_has_its_own_seed() -> None:
    state = torch.Generator().manual_seed(1).get_state()
    names = ("torch", "device", "tracker/model-parallel-rng", "tracker/expert-parallel-rng")
    assert len({rng.derived_seed(name, state, 7) for name in names}) == len(names)
    assert rng.derived_seed("torch", state.clone(), 7) == rng.derived_seed("torch", state, 7) < 2**64


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a device")
def test_generators_of_a_tracker_are_the_hosts_where_there_is_no_device() -> None:
    """DeepSpeed's trackers have states of its accelerator, and its CPU has the host's."""
    built = {"model-parallel-rng": torch.Generator().manual_seed(1).get_state()}
    (state,) = rng.derive_tracker("tracker/megatron", built, 7).values()
    seed = rng.derived_seed("tracker/megatron/model-parallel-rng", built["model-parallel-rng"], 7)
    assert torch.equal(state, torch.Generator().manual_seed(seed).get_state())


def test_a_seed_is_known_for_good() -> None:
    """Numbers after a reshape must not depend on the version of ftckpt."""
    assert rng.derived_seed("numpy", {"words": np.arange(4, dtype=np.uint32)}, 3) == 10693449236378811701


# --- extra state of modules ---


class Keeper(torch.nn.Module):
    def __init__(self, kept: Any = None) -> None:
        super().__init__()
        self.kept = kept

    def get_extra_state(self) -> Any:
        return self.kept


def model(**inner: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.ModuleDict(inner)


def multiply() -> modules.Linear:
    return modules.Linear(16, 16, init_method=torch.nn.init.ones_)


@pytest.fixture(params=te.RELEASES)
def _release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te, "release", request.param)
    monkeypatch.setattr(modules.FP8GlobalStateManager, "buffers", {})


@pytest.mark.usefixtures("_release")
def test_modules_of_transformer_engine_that_keep_nothing_are_accepted() -> None:
    norm = modules.LayerNorm(16, 1e-5, torch.float32)
    linear, scaled_now = multiply(), multiply()
    with modules.fp8_autocast(fp8_recipe=modules.Float8CurrentScaling()):
        scaled_now(torch.ones(2, 16))
    # Before 2.4 all of these give something, after it the last one still does, up to 2.17.
    assert (linear.get_extra_state().numel() > 0) == (te.release == "2.2") == (norm.get_extra_state().numel() > 0)
    assert (scaled_now.get_extra_state().numel() > 0) == (te.release != "2.18")
    ExtraState(model(norm=norm, linear=linear, scaled_now=scaled_now)).refuse()
    assert not scaling_states(scaled_now)


@pytest.mark.usefixtures("_release")
def test_delayed_scaling_is_refused_where_it_cannot_be_saved_once_it_is_there() -> None:
    linear = multiply()
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    state = PlainState(linear, optimizer, None, {})
    state.describe()
    state.save_objects()  # at the start of training
    with modules.fp8_autocast():
        linear(torch.ones(2, 16)).sum().backward()
    for _ in range(3):  # no boundary after it may pass
        with raises(UnsupportedError):
            state.save_objects()


@pytest.mark.parametrize(
    "kept, words",
    [
        (torch.ones(3), "12"),
        (torch.ones(2, 2, dtype=torch.uint8)[:, 0], "2"),
        (io.BytesIO(b"12345"), "5"),
        ({"scale": 1.0}, ""),
        (torch.frombuffer(bytearray(b"\x80\x04K\x01."), dtype=torch.uint8), "5"),
    ],
)
def test_other_extra_state_is_refused_by_the_name_of_its_module(kept: Any, words: str) -> None:
    with raises(UnsupportedError, "outer.keeper", *words.split()):
        ExtraState(model(outer=model(keeper=Keeper(kept)))).refuse()


def test_what_comes_with_the_first_iteration_is_seen() -> None:
    keeper = Keeper()
    extra = ExtraState(model(keeper=keeper))
    extra.refuse()
    extra.look_again()
    keeper.kept = torch.ones(1)
    for _ in range(3):
        with raises(UnsupportedError, "keeper"):
            extra.look_again()


# --- state other than tensors ---


def flags_of(model: nn.Module) -> TrainingFlags:
    return TrainingFlags(model.named_parameters(), model.named_modules())


def layers(frozen: str = "") -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != frozen)
    return model


def test_flags_come_back_in_the_same_layout_and_in_another() -> None:
    model = layers("0.weight")
    flags = flags_of(model)
    model[0].weight.requires_grad_(True)
    model[1].bias.requires_grad_(False)
    model[1].eval()
    saved = flags.state_dict()
    assert flags.state_dict() is saved, "made again only where a flag has changed"
    same, other = layers("0.bias"), layers("0.weight")
    flags_of(same).load_state_dict(saved)
    assert [p.requires_grad for p in same.parameters()] == [True, True, True, False]
    assert [module.training for module in same] == [True, False]
    other[0].bias.requires_grad_(False)
    flags_of(other).load_reshaped([{**saved, "frozen": "[]"}, {**saved, "thawed": "[]"}])
    assert [p.requires_grad for p in other.parameters()] == [True, False, True, False], "0.bias is as it was built"
    assert all(module.training for module in other)


GENERATORS: dict[str, Any] = {
    "torch": lambda: torch.Generator().manual_seed(1),
    "numpy": lambda: np.random.default_rng(1),
    "numpy, old": lambda: np.random.RandomState(1),
    "python": lambda: random.Random(1),
}


def drawn(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return torch.rand(1, generator=generator).item()
    return float(generator.random() if hasattr(generator, "random") else generator.rand())


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_come_back_and_draw_other_numbers_in_another_layout(kind: str) -> None:
    one, other = GENERATORS[kind](), GENERATORS[kind]()
    saved = as_object(one).state_dict()
    first = drawn(one)
    as_object(one).load_state_dict(saved)
    assert drawn(one) == first
    elsewhere = [as_object(other), as_object(GENERATORS[kind]())]
    for generator in elsewhere:
        generator.load_reshaped([saved])
    assert drawn(other) != first
    assert elsewhere[0].state_dict().keys() == {"state"}


def test_generators_of_modules_are_found_once_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].drops = model[1].drops = torch.Generator()
    model[1].jitter = random.Random(1)
    assert list(generators_in(model.named_modules())) == ["ftckpt.generator 0.drops", "ftckpt.generator 1.jitter"]


def test_fused_optimizers_of_one_algorithm_are_one_kind() -> None:
    fused = SimpleNamespace(adam_w_mode=1)
    optimizers.check_kind(fused, optimizers.kind_of(SimpleNamespace(adam_w_mode=True)))
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for other, kind in ((fused, "AdamW"), (SimpleNamespace(adam_w_mode=0), "AdamW (fused)"), (sgd, "AdamW")):
        with raises(MismatchError, str(kind)):
            optimizers.check_kind(other, kind)
    with raises(MismatchError, "1", "2"):
        optimizers.load_groups(sgd, [{}, {}])


def late(changes: list[str], frozen: tuple[str, ...] = ()) -> list[str]:
    """The reports of iterations before which a script makes ``changes``."""
    state = dict.fromkeys("ab", 0)
    reported: list[str] = []
    watch = LateChanges(lambda: {name: value for name, value in state.items()}, "do so", frozen)
    watch.report = reported.append  # type: ignore[method-assign]
    for changed in changes:
        watch.boundary()
        for name in changed:
            state[name] += 1
        watch.begin()
        watch.begin()  # a second micro-batch
    return reported


def test_what_changes_before_later_iterations_alone_is_late() -> None:
    assert late(["", "", "b"]) == ["b"]
    assert late(["a", "a", "ab", "b"]) == ["b"], "once"
    assert late(["a", "a", ""]) == [] and late(["ab", "a", "b"]) == []
    assert late(["a", "a"], ("a",)) == ["a"] and late(["a", ""], ("a",)) == []
    assert late(["", "", "", "", "b"]) == [], "not looked at for ever"
