"""Ranks that are replicas for a while and then train apart: a restart gives each its own, never a mixture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ftckpt.torch
from ftckpt.config import Config
from tests.support.pool import run_ranks
from tests.support.waiting import until

pytestmark = pytest.mark.multiproc

DRIFT_AT, LAST = 9, 14


def drifting(rank: int, world_size: int, settings: dict[str, Any], mode: str) -> dict[int, list[float]]:
    """This rank's weights by iteration. Gradients are averaged until ``DRIFT_AT`` by hand, or never by a hook."""
    torch.manual_seed(7)
    inner: torch.nn.Module = torch.nn.Linear(64, 64)
    model = DistributedDataParallel(inner) if mode == "hook" else inner
    if mode == "hook":
        model.register_comm_hook(None, own_gradients)  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = Config(enabled=True, **settings)
    checkpointer = ftckpt.torch.attach(model, optimizer, config=config)
    start = checkpointer.restore() or 0
    weights = {start: inner.weight.detach().flatten().tolist()}
    if start:
        return weights
    torch.manual_seed(100 + rank)
    for iteration in range(1, LAST + 1):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).pow(2).mean().backward()
        if iteration < DRIFT_AT and mode == "by hand":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        checkpointer.step(iteration)
        weights[iteration] = inner.weight.detach().flatten().tolist()
    until(lambda: checkpointer.capture is None or not checkpointer.capture.flying)
    checkpointer.close(remove=False)
    return weights


def own_gradients(state, bucket):  # type: ignore[no-untyped-def]  # torch checks what annotations there are
    """A hook of the user's own that gives each rank its own gradients."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.parametrize("mode", ["by hand", "hook"])
def test_ranks_that_train_apart_have_their_own_back(mode: str, settings: dict[str, Any]) -> None:
    settings |= {"protect": "none", "node": "n0"}
    before = [result.value for result in run_ranks(drifting, 2, settings, mode)]
    after = [result.value for result in run_ranks(drifting, 2, settings, mode)]
    for had, has in zip(before, after, strict=True):
        ((iteration, weights),) = has.items()
        assert iteration >= DRIFT_AT and weights == had[iteration]
    assert before[0][LAST] != before[1][LAST]
