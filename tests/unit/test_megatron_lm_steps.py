"""Optimizer state as Megatron-LM's loading leaves it: one ``step`` for all parameters of torch's Adam."""

from __future__ import annotations

import torch

from ftckpt.frameworks.optimizers import materialise


def test_each_parameter_counts_its_own_steps() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    inner = torch.optim.AdamW(parameters)
    step = torch.tensor(5.0)
    for parameter in parameters[:2]:
        inner.state[parameter] = {"step": step, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    materialise(inner)
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    inner.step()
    assert [float(inner.state[parameter]["step"]) for parameter in parameters] == [6.0, 6.0, 1.0]
