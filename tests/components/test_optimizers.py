"""FusedAdam of Transformer Engine and of Apex: its state ahead of its first step, and the forms that are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftckpt.errors import MismatchError, UnsupportedError
from ftckpt.frameworks import optimizers
from ftckpt.universal.megatron.common import hyperparameters
from tests.standin.te.fused_adam import ApexFusedAdam, FusedAdam
from tests.support.errors import raises

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
