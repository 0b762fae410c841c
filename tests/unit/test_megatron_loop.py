"""The train loop of Megatron-DeepSpeed: what of it is replaced, what counts, and what is refused."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ftckpt.deepspeed import initialize, section
from ftckpt.deepspeed.megatron_deepspeed import Counters, TrainLoop, install
from ftckpt.errors import ConfigError, FtckptError, UnsupportedError
from tests.support.errors import raises

NAMES = ("setup_model_and_optimizer", "train_step", "train", "training_log")
COUNTED = {
    "iteration": 5, "consumed_train_samples": 40, "consumed_valid_samples": 8, "consumed_train_tokens": 320,
}  # fmt: skip


@pytest.fixture(autouse=True)
def door() -> Iterator[None]:
    yield
    initialize.remove()


def loop_of(**arguments: Any) -> ModuleType:
    """A ``megatron.training`` with the functions that are replaced; each returns its name."""
    training: Any = ModuleType("megatron.training")
    given = Namespace(deepspeed=True, deepspeed_config_dict={}, inference=False, skip_train=False, **arguments)
    training.get_args = lambda: given
    training._create_ds_config_dict = dict
    for name in NAMES:
        setattr(training, name, lambda *_, name=name: name)
    loop: ModuleType = training
    return loop


def replaced(training: ModuleType) -> list[str]:
    return [name for name in NAMES if hasattr(getattr(training, name), "__wrapped__")]


def test_the_loop_is_replaced_once_and_put_back() -> None:
    training = loop_of()
    install(training)
    first = training.train
    install(training)
    assert replaced(training) == list(NAMES) and training.train is first
    assert [getattr(training, name)({}, {}) for name in NAMES] == list(NAMES), "it was not switched on"
    initialize.remove()
    assert not replaced(training)


def test_the_loop_of_megatron_lm_is_left_alone() -> None:
    training = loop_of()
    del training._create_ds_config_dict
    install(training)
    assert not replaced(training)


def test_a_loop_without_one_of_the_functions_is_refused_by_name() -> None:
    training = loop_of()
    del training.train_step
    with raises(UnsupportedError, "megatron.training has no train_step"):
        install(training)


def test_the_loop_is_replaced_as_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "megatron").mkdir()
    functions = "".join(f"def {name}(*_): pass\n" for name in ("_create_ds_config_dict", *NAMES))
    (tmp_path / "megatron" / "training.py").write_text(functions)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    initialize.install()
    importlib.import_module("megatron.training")  # of the folder

    assert replaced(sys.modules.pop("megatron.training")) == list(NAMES)
    del sys.modules["megatron"]


def test_the_loop_is_made_to_stand_where_it_stood() -> None:
    counters, sums = Counters(Namespace(**COUNTED)), {"lm loss": torch.ones(1)}
    assert not counters.sums.follow({"lm loss": torch.ones(())}, sums)
    sums["lm loss"] += 2.0  # the loop's own dict
    state = counters.state_dict()
    for load in (Counters.load_state_dict, lambda counters, state: counters.load_reshaped([state, {}])):
        arguments = Namespace(**dict.fromkeys(COUNTED, 0), other=3)
        restored, fresh = Counters(arguments), dict[str, Any]()
        load(restored, state)
        assert vars(arguments) == {**COUNTED, "other": 3}
        assert restored.sums.follow({"lm loss": torch.ones(())}, fresh) and fresh == {"lm loss": torch.tensor([3.0])}
        assert not restored.sums.follow({}, fresh), "only the first iteration goes on"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"kd": True}, UnsupportedError, "Megatron-DeepSpeed's --kd is not supported"),
        ({"compression_training": True}, UnsupportedError, "compression_training, in the JSON, is not supported"),
        ({"mos": True}, UnsupportedError, "Megatron-DeepSpeed's --mos is not supported"),
        ({"deepspeed": False}, ConfigError, "ftckpt is switched on, and --deepspeed is not"),
    ],
)
def test_what_is_not_known_is_refused_before_anything_is_built(
    arguments: dict[str, Any], error: type[FtckptError], words: str
) -> None:
    training = loop_of()
    vars(training.get_args()).update(arguments)
    section.configure({"enabled": True})

    def build() -> None:
        raise AssertionError("it was built")

    with raises(error, words):
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
