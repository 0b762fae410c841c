"""State other than tensors: flags, generators of scripts, the optimizer's kind, and changes after a boundary."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ftckpt.errors import MismatchError
from ftckpt.frameworks import optimizers
from ftckpt.frameworks.flags import TrainingFlags
from ftckpt.frameworks.late_changes import LateChanges
from ftckpt.frameworks.torch_state import as_object, generators_in
from tests.support.errors import raises


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
