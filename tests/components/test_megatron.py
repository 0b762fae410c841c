"""Megatron's arguments and train loops."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ftckpt.deepspeed import active_engine, initialize, megatron_deepspeed, section
from ftckpt.deepspeed.megatron_deepspeed import LoopCounters, TrainLoop, install
from ftckpt.errors import ConfigError, FtckptError, UnsupportedError
from ftckpt.megatron.counters import Counters
from ftckpt.model import objects
from ftckpt.universal.megatron.common import make_common
from tests.support.errors import raises

# --- the arguments of a Megatron-LM job in its snapshots, and in what ``ftckpt convert`` makes of them ---


@pytest.mark.parametrize(
    ("iteration", "ckpt_step", "kind", "told"),
    [
        pytest.param(0, None, None, (0, False, True), id="nothing loaded"),
        pytest.param(200, None, None, (200, False, True), id="the newest"),
        pytest.param(200, None, "local", (200, False, False), id="perhaps a node's own"),
        pytest.param(100, 100, "local", (100, True, True), id="--ckpt-step"),
        pytest.param(0, 100, None, (0, False, True), id="--ckpt-step --finetune"),
    ],
)
def test_a_step_that_was_named_is_a_rollback(
    iteration: int,
    ckpt_step: int | None,
    kind: str | None,
    told: tuple[int, bool, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    class Restored:
        def restore(self, newer_than: int, rollback: bool, lasting: bool) -> None:
            calls.append((newer_than, rollback, lasting))

    pytest.importorskip("megatron.core")
    from ftckpt.megatron import train_loop

    monkeypatch.setattr("ftckpt.megatron.attach", lambda *args: Restored())
    monkeypatch.setattr(train_loop, "_counters", None)
    given = Namespace(iteration=iteration, ckpt_step=ckpt_step, non_persistent_ckpt_type=kind)
    train_loop.restore(given, [], object(), None)
    assert calls == [told]


class Backend(Enum):
    """A type like those of some of Megatron-LM's arguments."""

    AUTO = 1


def arguments(**more: Any) -> Namespace:
    return Namespace(
        num_layers=4, hidden_size=64, num_attention_heads=4, lr=1e-3, bf16=True, load=None, split=[9, 1],
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, iteration=0, consumed_train_samples=0,
        consumed_valid_samples=0, skipped_train_samples=0, num_floating_point_operations_so_far=0,
        rank=3, local_rank=3, ftckpt=True, ftckpt_job="name", attention_backend=Backend.AUTO, dtype=object(), **more,
    )  # fmt: skip


def snapshot(**more: Any) -> dict[str, Any]:
    """The objects of a snapshot of iteration 5, as ``ftckpt convert`` reads them."""
    args = arguments(**more)
    counters = Counters(args)
    args.consumed_train_samples, args.consumed_valid_samples = 80, 16
    counters.current = {"iteration": 5, "num_floating_point_operations_so_far": 1.5e9}
    saved = {"scheduler": {"num_steps": 80}, "objects": {"counters": counters.state_dict()}, "optimizers": []}
    return {"shards": {"tp0-pp0-dp0": objects.decode(objects.encode(saved))}}


def test_megatron_finds_its_position_among_the_arguments() -> None:
    made = make_common(snapshot(), 5, None, False, {})
    assert made["iteration"] == 5
    assert made["num_floating_point_operations_so_far"] == 1.5e9
    args = made["args"]
    assert isinstance(args, Namespace)
    assert (args.consumed_train_samples, args.consumed_valid_samples, args.skipped_train_samples) == (80, 16, 0)
    assert (args.num_layers, args.hidden_size, args.num_attention_heads) == (4, 64, 4)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
    assert args.no_save_rng is True
    assert (args.lr, args.bf16, args.load, args.split) == (1e-3, True, None, [9, 1])


# --- the train loop of Megatron-DeepSpeed ---


NAMES = ("setup_model_and_optimizer", "train_step", "train", "training_log")
COUNTED = {"iteration": 5, "consumed_train_samples": 40, "consumed_valid_samples": 8, "consumed_train_tokens": 320}


@pytest.fixture(autouse=True)
def integration() -> Iterator[None]:
    yield
    initialize.remove()


def loop_of(**arguments: Any) -> ModuleType:
    """A ``megatron.training`` with the functions that are replaced; each returns its name."""
    training: Any = ModuleType("megatron.training")
    given = Namespace(deepspeed=True, deepspeed_config_dict={}, consumed_train_samples=0, **arguments)
    training.get_args = lambda: given
    training._create_ds_config_dict = dict
    for name in NAMES:
        setattr(training, name, lambda *_, name=name: name)
    loop: ModuleType = training
    return loop


def replaced(training: ModuleType) -> list[str]:
    return [name for name in NAMES if hasattr(getattr(training, name, None), "__wrapped__")]


def replaced_twice(training: ModuleType) -> list[str]:
    return [name for name in replaced(training) if hasattr(getattr(training, name).__wrapped__, "__wrapped__")]


class Session:
    """Counts the boundaries that an engine's session would take."""

    def __init__(self) -> None:
        self.boundaries = 0

    def take_boundary(self) -> None:
        self.boundaries += 1


def follow_with(
    loop: TrainLoop, counters: LoopCounters, monkeypatch: pytest.MonkeyPatch
) -> tuple[Namespace, Session]:
    """An engine, which stands where ``counters`` do, and what takes its boundaries."""
    engine, session = Namespace(global_steps=5), Session()
    monkeypatch.setattr(active_engine.integration, "checkpointer", object())
    loop.follow(engine, counters, session)  # type: ignore[arg-type]
    return engine, session


def test_the_loop_is_replaced_once_and_put_back() -> None:
    training = loop_of()
    install(training)
    first = training.train
    install(training)
    assert replaced(training) == list(NAMES) and training.train is first
    assert [getattr(training, name)({}, {}) for name in NAMES] == list(NAMES), "it was not switched on"
    initialize.remove()
    assert not replaced(training)


def test_a_loop_without_one_of_the_functions_is_refused_by_name_once_ftckpt_is_on() -> None:
    training = loop_of()
    del training.train_step
    install(training)
    assert replaced(training) == ["setup_model_and_optimizer"]
    assert training.setup_model_and_optimizer() == "setup_model_and_optimizer"
    section.configure({"enabled": True})
    with raises(UnsupportedError, "megatron.training", "train_step"):
        training.setup_model_and_optimizer()
    initialize.remove()
    assert not replaced(training)
    del training.setup_model_and_optimizer
    install(training)
    assert not replaced(training)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``megatron.training`` that can be imported; whatever is called so is put back."""
    (tmp_path / "megatron").mkdir()
    functions = "".join(f"def {name}(*_): pass\n" for name in ("_create_ds_config_dict", *NAMES))
    (tmp_path / "megatron" / "training.py").write_text(functions)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    # What the test imports is taken out again before those others come back.
    for name in ("megatron", "megatron.training"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        del sys.modules[name]


@pytest.mark.usefixtures("package")
def test_the_loop_is_replaced_as_it_is_imported_and_reloaded() -> None:
    initialize.install()
    training = importlib.import_module("megatron.training")  # of the folder
    assert replaced(training) == list(NAMES)
    loop = megatron_deepspeed._loops[training]
    importlib.reload(training)
    assert replaced(training) == list(NAMES) and not replaced_twice(training)
    assert megatron_deepspeed._loops[training] is loop
    initialize.remove()
    assert not replaced(training) and not megatron_deepspeed._loops


def test_the_loop_is_made_to_stand_where_it_stood() -> None:
    counters, sums = LoopCounters(Namespace(**COUNTED)), {"lm loss": torch.ones(1)}
    assert not counters.sums.follow({"lm loss": torch.ones(())}, sums)
    sums["lm loss"] += 2.0  # the loop's own dict
    state = counters.state_dict()
    for load in (LoopCounters.load_state_dict, lambda counters, state: counters.load_reshaped([state, {}])):
        arguments = Namespace(**dict.fromkeys(COUNTED, 0), other=3)
        restored, fresh = LoopCounters(arguments), dict[str, Any]()
        load(restored, state)
        assert vars(arguments) == {**COUNTED, "other": 3}
        assert restored.sums.follow({"lm loss": torch.ones(())}, fresh) and fresh == {"lm loss": torch.tensor([3.0])}
        assert not restored.sums.follow({}, fresh), "only the first iteration goes on"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"kd": True}, UnsupportedError, "Megatron-DeepSpeed --kd"),
        ({"compression_training": True}, UnsupportedError, "compression_training"),
        ({"mos": True}, UnsupportedError, "Megatron-DeepSpeed --mos"),
        ({"deepspeed": False}, ConfigError, "--deepspeed"),
        ({"consumed_train_samples": None}, UnsupportedError, "Megatron-DeepSpeed args.consumed_train_samples"),
    ],
)
def test_what_is_not_known_is_refused_before_anything_is_built(
    arguments: dict[str, Any], error: type[FtckptError], words: str
) -> None:
    training = loop_of()
    given = vars(training.get_args())
    given.update(arguments)
    for name in [name for name, value in given.items() if value is None]:
        del given[name]
    section.configure({"enabled": True})

    def build() -> None:
        raise AssertionError("it was built")

    with raises(error, *words.split()):
        TrainLoop(training).set_up(build)


@pytest.mark.parametrize("name", ["inference", "skip_train"])
def test_where_nothing_is_trained_nothing_is_followed(name: str) -> None:
    training = loop_of()
    vars(training.get_args()).update({name: True, "deepspeed_config_dict": {"ftckpt": {"enabled": True}}})
    seen = []

    def build() -> Any:
        # An engine that is made here is none of ``deepspeed.initialize``'s to follow.
        seen.append(initialize._initialize(lambda config: "engine", config={"ftckpt": {"enabled": True}}))
        return ["engine"], None, None

    assert TrainLoop(training).set_up(build) == (["engine"], None, None) and seen == ["engine"]


@pytest.mark.parametrize("iteration", [0, 9], ids=["with the engine", "with --finetune"])
def test_a_loop_that_counts_elsewhere_is_told_so_at_its_boundary(
    iteration: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = loop_of(iteration=iteration)
    loop, arguments = TrainLoop(training), training.get_args()
    engine, _ = follow_with(loop, LoopCounters(arguments), monkeypatch)
    loop.check_counted()
    for _ in range(2):
        engine.global_steps += 1
        with raises(ConfigError, f"args.iteration is {arguments.iteration}", "megatron.training.train"):
            loop.check_counted()
        arguments.iteration += 1
        loop.check_counted()
    arguments.iteration += 1  # before the step: a restart would leave out an iteration
    with raises(ConfigError, f"args.iteration is {arguments.iteration}"):
        loop.check_counted()


@pytest.mark.parametrize(
    ("code", "trained", "taken"), [(None, 0, 1), (0, 0, 1), (1, 0, 0), ("told to stop", 0, 0), (None, 1, 0)]
)
def test_only_a_loop_that_exits_well_between_iterations_has_a_last_boundary(
    code: Any, trained: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = TrainLoop(loop_of())
    engine, session = follow_with(loop, LoopCounters(Namespace(**COUNTED)), monkeypatch)

    def train() -> None:
        engine.global_steps += trained
        sys.exit(code)

    with pytest.raises(SystemExit) as ended:
        loop.train(train)
    assert (ended.value.code, session.boundaries) == (code, taken)
