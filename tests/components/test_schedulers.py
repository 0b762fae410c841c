"""Schedulers come back to exactly what was saved, those of Megatron, torch and DeepSpeed, or are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ftckpt.errors import MismatchError
from ftckpt.frameworks import schedulers
from ftckpt.model.objects import decode, encode
from tests.support.errors import raises


def optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3, momentum=0.9)


def megatron(**changed: Any) -> Any:
    scheduler = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    settings = {
        "init_lr": 0.0, "max_lr": 1e-3, "min_lr": 1e-5, "lr_warmup_steps": 40, "lr_decay_steps": 400,
        "lr_decay_style": "cosine", "start_wd": 0.0, "end_wd": 0.1, "wd_incr_steps": 400, "wd_incr_style": "linear",
        "use_checkpoint_opt_param_scheduler": False,
    }  # fmt: skip
    return scheduler.OptimizerParamScheduler(optimizer(), **{**settings, **changed})


def sequential() -> Any:
    own = optimizer()
    parts = [torch.optim.lr_scheduler.LinearLR(own), torch.optim.lr_scheduler.CosineAnnealingLR(own, 20)]
    return torch.optim.lr_scheduler.SequentialLR(own, parts, [4])


def multi_step() -> Any:
    """Its milestones are a ``collections.Counter``."""
    return torch.optim.lr_scheduler.MultiStepLR(optimizer(), [2, 5, 11])


def deepspeed() -> Any:
    return pytest.importorskip("deepspeed.runtime.lr_schedules").WarmupLR(optimizer(), warmup_num_steps=9)


def steps(scheduler: Any, number: int) -> None:
    for _ in range(number):
        scheduler.optimizer.step()
        scheduler.step(*([8] if hasattr(scheduler, "num_steps") else []))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("build", [megatron, sequential, multi_step, deepspeed])
@pytest.mark.parametrize("before", [0, 3, 9])
def test_what_a_scheduler_counted_before_does_not_count(build: Callable[[], Any], before: int) -> None:
    unbroken, other = build(), build()
    steps(unbroken, 7)
    saved = decode(encode(schedulers.save(unbroken)))
    steps(other, before)
    for _ in range(2):
        schedulers.load(other, saved)
    assert other.state_dict() == saved
    other.optimizer.load_state_dict(copy.deepcopy(unbroken.optimizer.state_dict()))
    rates = []
    for scheduler in (unbroken, other):
        steps(scheduler, 6)
        rates.append([(group["lr"], group["weight_decay"]) for group in scheduler.optimizer.param_groups])
    assert rates[0] == rates[1]


class Adding:
    """Adds what it loads, as Megatron's does, under a name that nobody knows."""

    def __init__(self) -> None:
        self.rate, self.counted = 1e-3, 0

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self.rate, "counted": self.counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counted += state["counted"]


def test_a_scheduler_that_is_not_what_was_saved_is_refused_by_name() -> None:
    scheduler = Adding()
    schedulers.load(scheduler, {"rate": 1e-3, "counted": 5})
    with raises(MismatchError, "10", "5"):
        schedulers.load(scheduler, {"rate": 1e-3, "counted": 5})
    with pytest.raises(MismatchError, match=r"more is missing, rate is 0.001, it was 0.002|rate .*, more is missing"):
        schedulers.load(Adding(), {"rate": 2e-3, "counted": 0, "more": 1})


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({}, "AssertionError 0.002 0.001"),
        ({"override_opt_param_scheduler": True}, "max_lr 0.002 0.001"),
    ],
)
def test_settings_that_differ_are_refused_whatever_megatrons_flags_say(flags: dict[str, bool], text: str) -> None:
    with raises(MismatchError, "OptimizerParamScheduler", *text.split()):
        schedulers.load(megatron(max_lr=2e-3, **flags), schedulers.save(megatron()))


def test_a_scheduler_on_one_side_alone_is_refused() -> None:
    schedulers.load(None, schedulers.save(None))
    with pytest.raises(MismatchError):
        schedulers.load(None, {"counted": 1})
    with pytest.raises(MismatchError):
        schedulers.load(Adding(), None)
