"""A rank of a real job whose compute steps take longer is named, though an iteration takes all ranks equally long."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from tests.support import jobs
from tests.support.pool import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

SLEEP_SECS = 0.05


def slowed(rank: int, world_size: int, run: jobs.Run) -> Any:
    """Rank 2 sleeps in each forward step. Ranks are compared all 10 iterations."""
    from megatron.core.models.gpt import GPTModel

    from ftckpt.job import slow_ranks

    slow_ranks._ITERATIONS = 10
    logging.getLogger("ftckpt").setLevel(logging.INFO)
    forward = GPTModel.forward

    def late(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(SLEEP_SECS * (rank == 2))
        return forward(self, *args, **kwargs)

    GPTModel.forward = late
    return jobs.train_and_tell(rank, world_size, run)


def test_a_slow_rank_of_a_pipeline_is_named(settings: dict[str, Any]) -> None:
    """Ranks 0 and 1 are the first stage, 2 and 3 the second, whose work is another one."""
    # Milliseconds of four ranks on fewer cores differ by more than those of a cluster.
    settings["slow_rank_share"] = 2.0
    run = jobs.Run(["--pp", "2"], 24, settings=settings, nodes=["n0", "n0", "n1", "n1"])
    results = run_ranks(slowed, 4, run)
    found = [event for event in jobs.events(settings, "slow_ranks") if event["rank"] == 0]
    assert found and all([one["rank"] for one in event["ranks"]] == [2] for event in found)
    (slow,) = found[-1]["ranks"]
    # Two micro-batches; what else the other stage computes takes as long as that of the first, or not.
    assert slow["node"] == "n1" and slow["compute_secs"] > 2 * SLEEP_SECS > slow["median_secs"]
    logs = [result.value[1] for result in results]
    assert "rank 2 on n1" in logs[0] and "rank 2 on n1" not in logs[1], "one rank tells it"


def slowed_replica(rank: int, world_size: int, settings: dict[str, Any], loads: bool) -> None:
    """A job under DDP of which rank 1 sleeps for as long as a step takes: where it loads, or in its forward."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import ftckpt.plain
    from ftckpt.config import Config
    from ftckpt.job import slow_ranks

    slow_ranks._ITERATIONS = 10

    class Slow(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(SLEEP_SECS / 5 + SLEEP_SECS * (rank == 1 and not loads))
            return super().forward(x)

    model = DistributedDataParallel(Slow(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    config = Config(enabled=True, node="node", protect="none", slow_rank_share=1.0, **settings)
    checkpointer = ftckpt.plain.attach(model, optimizer, config=config)
    assert checkpointer is not None
    checkpointer.restore()
    for iteration in range(1, 25):
        time.sleep(SLEEP_SECS * (rank == 1 and loads))
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step(iteration)
    checkpointer.close()


@pytest.mark.parametrize("loads", [True, False])
def test_of_replicas_the_one_that_computes_longer_is_named_and_none_that_waits(
    settings: dict[str, Any], loads: bool
) -> None:
    """In DDP's backward the fastest waits longest."""
    run_ranks(slowed_replica, 2, settings, loads, stand_in=False)
    found = [event for event in jobs.events(settings, "slow_ranks") if event["rank"] == 0]
    assert [[one["rank"] for one in event["ranks"]] for event in found] == ([] if loads else [[1]] * len(found))
    assert loads or found
