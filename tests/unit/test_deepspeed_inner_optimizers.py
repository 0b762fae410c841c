"""State that an optimizer inside DeepSpeed's gets ahead of its first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from ftckpt.deepspeed import inner_optimizers
from ftckpt.errors import UnsupportedError
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


def test_numbers_of_state_come_back() -> None:
    parameters, optimizer = made("adamw")
    inner_optimizers.materialise(optimizer)
    optimizer.state[parameters[0]]["count"] = 7
    saved = inner_optimizers.save(optimizer, parameters)
    assert saved["numbers"] == [{"count": 7}, {}]
    optimizer.state[parameters[0]]["count"] = 9
    optimizer.param_groups[0]["lr"] = 5.0
    inner_optimizers.load(optimizer, parameters, saved)
    assert optimizer.state[parameters[0]]["count"] == 7
    assert optimizer.param_groups[0]["lr"] == 1e-3
