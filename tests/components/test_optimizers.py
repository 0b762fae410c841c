"""FusedAdam's state and that of schedulers, in their own and another layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftckpt.errors import MismatchError, UnsupportedError
from ftckpt.frameworks import optimizers, schedulers
from ftckpt.model.objects import decode, encode
from ftckpt.universal.megatron.common import hyperparameters
from tests.standin.te.fused_adam import ApexFusedAdam, FusedAdam
from tests.support.errors import raises

# --- FusedAdam of Transformer Engine and of Apex ---


KINDS: dict[str, Any] = {
    "te": FusedAdam,
    "te-masters": lambda parameters: FusedAdam(parameters, master_weights=True),
    "te-remainders": lambda parameters: FusedAdam(parameters, master_weights=True, store_param_remainders=True),
    "apex": ApexFusedAdam,
}


def made(kind: str) -> tuple[torch.nn.Parameter, Any]:
    torch.manual_seed(1)
    parameter = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.bfloat16))
    return parameter, KINDS[kind]([parameter])


@pytest.mark.parametrize("kind", KINDS)
def test_state_made_ahead_is_that_of_the_first_step(kind: str) -> None:
    found = []
    for ahead in (True, False):
        parameter, optimizer = made(kind)
        if ahead:
            optimizers.materialise(optimizer)
            assert "step" not in optimizer.param_groups[0]
        before = {name: value.data_ptr() for name, value in optimizer.state[parameter].items()}
        for _ in range(2):
            parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        state = optimizer.state[parameter]
        assert not ahead or {name: value.data_ptr() for name, value in state.items()} == before
        found.append([parameter.detach(), *(state[name] for name in sorted(state))])
    assert len(found[0]) == len(found[1]) == (4 if "-" in kind else 3)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("setting", ["capturable", "master_weights", "exp_avg_dtype", "exp_avg_sq_dtype"])
def test_what_keeps_more_than_its_state_is_refused_by_the_setting(setting: str) -> None:
    values = {"capturable": True, "master_weights": True}
    kind: Any = ApexFusedAdam if setting in values else FusedAdam
    optimizer = kind([torch.nn.Parameter(torch.ones(2))], **{setting: values.get(setting, torch.bfloat16)})
    with raises(UnsupportedError, setting):
        optimizers.materialise(optimizer)


def test_classes_of_one_name_are_different_optimizers() -> None:
    kinds = [
        type("Lion", (torch.optim.SGD,), {"__module__": module}) for module in ("one.lion", "other", "torch.optim")
    ]
    parameter = torch.nn.Parameter(torch.ones(2))
    names = [optimizers.kind_of(kind([parameter], lr=0.1)) for kind in kinds]
    assert len({*names}) == 3 and names[2] == "Lion"
    with raises(MismatchError, *names[:2]):
        optimizers.check_kind(kinds[0]([parameter], lr=0.1), names[1])


def leaf(*groups: dict[str, Any]) -> Any:
    return SimpleNamespace(optimizer=SimpleNamespace(param_groups=list(groups)))


def test_another_layout_takes_the_steps_that_are_counted() -> None:
    """Loading Megatron's own checkpoint leaves a number in a group that this rank has nothing of, and it stays."""
    megatron = pytest.importorskip("ftckpt.megatron.optimizers")
    saved = megatron.save_hyperparameters(
        leaf({"params": [], "wd_mult": 1.0, "step": 4}, {"params": [1], "wd_mult": 0.0, "step": 7})
    )
    groups: list[dict[str, Any]] = [{"params": [1], "wd_mult": 1.0}, {"params": [], "wd_mult": 0.0}]
    megatron.load_reshaped([leaf(*groups)], [saved])
    assert groups == [{"params": [1], "wd_mult": 1.0, "step": 7}, {"params": [], "wd_mult": 0.0}]
    other = {"groups": [{"wd_mult": 1.0, "step": 6}], "scaler": None}
    with raises(MismatchError, "6", "7"):
        megatron.load_reshaped([leaf(*groups)], [saved, other])


def test_a_group_that_a_rank_has_nothing_of_is_converted_with_the_steps_of_the_others() -> None:
    """The first rank that has a group gives its values, and has counted no steps for it."""
    ranks = [[{"wd_mult": 1.0}, {"wd_mult": 0.0, "step": 7}], [{"wd_mult": 1.0, "step": 7}]]
    shards = {str(rank): {"optimizers": [{"groups": groups}]} for rank, groups in enumerate(ranks)}
    assert [group["step"] for group in hyperparameters({"shards": shards}).groups] == [7, 7]
    for groups in ranks:
        for group in groups:
            group.pop("step", None)
    assert not any("step" in group for group in hyperparameters({"shards": shards}).groups)


# --- schedulers of Megatron, torch and DeepSpeed ---


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
    [({}, "AssertionError 0.002 0.001"), ({"override_opt_param_scheduler": True}, "max_lr 0.002 0.001")],
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
