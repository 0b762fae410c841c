"""A tensor that was moved, replaced or added is detected, whoever did it; unchanged tensors are only checked."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ftckpt.errors import CaptureError
from ftckpt.frameworks.live_tensors import Holders, LiveTensors
from ftckpt.frameworks.optimizers import materialise, state_tensors

PART = "part"


class Job:
    """A model with a module that has nothing, under Adam; ``named`` is how often names were asked for."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(), nn.BatchNorm1d(2), nn.Linear(2, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        materialise(self.optimizer)
        self.named = 0
        self.live = LiveTensors(self._tensors, lambda: Holders((self.model,), (self.optimizer,)), PART)
        self.live.note()
        self.named = 0

    @property
    def first(self) -> Any:
        return self.model[0]

    def _tensors(self) -> Iterator[tuple[str, object, torch.Tensor]]:
        self.named += 1
        for name, parameter in self.model.named_parameters():
            yield "parameter", name, getattr(parameter, PART, parameter)
        yield from (("buffer", name, buffer) for name, buffer in self.model.named_buffers())
        yield from state_tensors(self.optimizer)

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 3)).sum().backward()
        self.optimizer.step()


def assigned(job: Job) -> None:
    job.model.load_state_dict(copy.deepcopy(job.model.state_dict()), assign=True)


def exchanged(job: Job) -> None:
    weight, bias = job.model[2].weight, job.model[2].bias
    weight.data, bias.data = bias.data, weight.data


def replaced_moment(job: Job) -> None:
    state = job.optimizer.state[job.first.weight]
    state["exp_avg"] = state["exp_avg"].clone()


def moved_moment(job: Job) -> None:
    state = job.optimizer.state[job.first.weight]
    state["exp_avg_sq"].data = state["exp_avg_sq"].data.clone()


CHANGES: dict[str, Callable[[Job], Any]] = {
    "data moved": lambda job: setattr(job.first.weight, "data", job.first.weight.data.clone()),
    "data of two exchanged": exchanged,
    "parameter replaced": lambda job: setattr(job.first, "weight", nn.Parameter(job.first.weight.detach().clone())),
    "parameter added": lambda job: job.first.register_parameter("scale", nn.Parameter(torch.ones(1))),
    "first parameter added": lambda job: job.model[1].register_parameter("rate", nn.Parameter(torch.ones(1))),
    "parameter taken away": lambda job: delattr(job.first, "bias"),
    "buffer replaced": lambda job: setattr(job.model[2], "running_mean", torch.zeros(2)),
    "module replaced": lambda job: job.model.__setitem__(0, nn.Linear(3, 2)),
    "first module added": lambda job: job.model[1].add_module("within", nn.Linear(1, 1)),
    "loaded by assignment": assigned,
    "group added": lambda job: job.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "moment replaced": replaced_moment,
    "moment moved": moved_moment,
    "state loaded": lambda job: job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict())),
    "state added": lambda job: job.optimizer.state[job.first.bias].update(max_exp_avg_sq=torch.ones(2)),
    "state forgotten": lambda job: job.optimizer.state.clear(),
}


REPLACED = "replaced after training began; attach later"
ADDED = "added after training began; .* before ftckpt is attached, with a learning rate of 0"
GONE = "removed after training began; attach later"
HOW = {
    "parameter added": ADDED, "first parameter added": ADDED, "first module added": ADDED, "group added": ADDED,
    "state added": ADDED, "state forgotten": GONE, "parameter taken away": GONE,
}  # fmt: skip
"""The reported change, where it is not ``REPLACED``."""


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_moved_replaced_or_added_is_noticed(change: str) -> None:
    job = Job()
    job.train()
    job.live.check("")
    CHANGES[change](job)
    with pytest.raises(CaptureError, match=f"(was|were) {HOW.get(change, REPLACED)}"):
        job.live.check("attach later")
    # As long as it is so: nobody has described it anew.
    with pytest.raises(CaptureError):
        job.live.check("")


def test_while_nothing_moves_nobody_asks_for_names() -> None:
    job = Job()
    for _ in range(3):
        job.train()
        job.model.load_state_dict(copy.deepcopy(job.model.state_dict()))
        job.live.check("")
    assert job.named == 0


def test_hooks_go_with_those_who_asked() -> None:
    hooks = nn.modules.module._global_parameter_registration_hooks
    gc.collect()  # what other tests have left in circles would go in the middle of this one
    before = len(hooks)
    jobs = [Job(), Job()]
    assert len(hooks) == max(before, 1)
    while jobs:
        del jobs[0].live
        jobs.pop(0)
    assert len(hooks) == before
