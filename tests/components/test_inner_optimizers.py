"""State that an optimizer inside DeepSpeed's gets ahead of its first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from ftckpt.deepspeed import inner_optimizers
from ftckpt.errors import MismatchError, UnsupportedError
from tests.support.errors import raises

OPTIMIZERS: dict[str, Any] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "adamw": torch.optim.AdamW,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
}


def made(name: str) -> tuple[list[torch.nn.Parameter], Any]:
    torch.manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(3, 2)), torch.nn.Parameter(torch.randn(4), requires_grad=False)]
    return parameters, OPTIMIZERS[name](parameters)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_the_same_and_frozen_parameters_get_no_state(name: str) -> None:
    results = []
    for ahead in (True, False):
        parameters, optimizer = made(name)
        if ahead:
            inner_optimizers.materialise(optimizer)
            before = {key: value.data_ptr() for key, value in optimizer.state[parameters[0]].items()}
            assert before
            assert name == "adagrad" or not optimizer.state.get(parameters[1])
        for _ in range(3):
            parameters[0].grad = torch.randn(3, 2)
            optimizer.step()
        if ahead:
            after = {key: value.data_ptr() for key, value in optimizer.state[parameters[0]].items()}
            assert after == before
        results.append(parameters)
        assert [group["params"] for group in optimizer.param_groups] == [parameters]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_unknown_optimizers_are_refused_with_the_known_ones() -> None:
    parameters, _ = made("adam")
    with raises(UnsupportedError, "torch.optim.rmsprop.RMSprop", "FusedAdam"):
        inner_optimizers.materialise(torch.optim.RMSprop(parameters))


def reshaped(
    groups: list[list[dict[str, Any]]], numbers: list[list[dict[str, int]]]
) -> tuple[Any, list[dict[str, int]]]:
    """Groups and numbers of a dense and an expert's parameter after what ranks of another layout had."""
    dense, expert = (torch.nn.Parameter(torch.randn(2)) for _ in range(2))
    settings = [{"params": [dense]}, {"params": [expert], "moe": True, "name": "ep_size_4"}]
    optimizer = torch.optim.SGD(settings, lr=0.1)
    optimizer.state[dense]["step"] = 0
    saved = [{"kind": "SGD", "groups": g, "numbers": n} for g, n in zip(groups, numbers, strict=True)]
    inner_optimizers.load_reshaped(optimizer, [dense, expert], saved)
    return optimizer.param_groups, [dict(optimizer.state[owner]) for owner in (dense, expert)]


DENSE = {"lr": 0.5}
EXPERTS = {"lr": 0.25, "moe": True, "name": "ep_size_2"}


def test_groups_and_numbers_of_another_layout_are_taken_by_what_they_are_for() -> None:
    groups, numbers = reshaped([[EXPERTS, EXPERTS, DENSE], [DENSE]], [[{"step": 7}, {}, {"step": 7}], [{"step": 7}]])
    assert [group["lr"] for group in groups] == [0.5, 0.25]
    assert groups[1]["name"] == "ep_size_4"
    assert numbers == [{"step": 7}, {}]


def test_what_only_the_old_layout_can_hold_is_refused() -> None:
    with raises(MismatchError, "3", "7"):
        reshaped([[DENSE, EXPERTS]], [[{"step": 7}, {"step": 3}]])
    with raises(MismatchError, "1", "2"):
        reshaped([[DENSE, {"lr": 0.75}, EXPERTS]], [[{"step": 7}]])
    with raises(MismatchError, "1"):
        reshaped([[DENSE, EXPERTS], [{"lr": 0.75}, EXPERTS]], [[{"step": 7}]] * 2)
    with raises(MismatchError, "torch.optim.sgd.SGD"):
        reshaped([[DENSE, EXPERTS]], [[{}]])
