"""A fence that costs more than its budget makes snapshots rarer, at the same iteration on all ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ftckpt.memory.directory import node_directory
from ftckpt.session.attempt import write_interval
from tests.support import jobs, plain
from tests.support.pool import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]


def train(rank: int, world_size: int, settings: dict[str, Any], iterations: int, slow_until: int) -> None:
    """Iterations of 20 ms; the copies of rank 1 take longer than that."""
    checkpointer, state = plain.restarted(rank, world_size, settings)
    slow = [True]
    plain.before_each_copy(lambda: time.sleep(0.1 if rank == 1 and slow[0] else 0.0))
    for iteration in range(1, iterations + 1):
        slow[0] = iteration < slow_until
        time.sleep(0.02)
        plain.iterate(checkpointer, state, iteration)
    checkpointer.close()


def taken(settings: dict[str, Any]) -> list[list[int]]:
    """Iterations of the snapshots of each rank."""
    snapshots = jobs.events(settings, "snapshot")
    return [[e["iteration"] for e in snapshots if e["rank"] == rank] for rank in range(3)]


def test_snapshots_become_rarer_together_and_frequent_again(settings: dict[str, Any]) -> None:
    settings |= {"overhead_budget": 0.3, "replica_check_interval": 0}
    run_ranks(train, 3, settings, 120, 40)
    assert not jobs.events(settings, "snapshot_error")
    changes = jobs.events(settings, "interval_changed")
    by_rank = [[event["interval"] for event in changes if event["rank"] == rank] for rank in range(3)]
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert by_rank[0][0] in (3, 4), "the least interval at which the fence takes less than 0.3 of the time"
    iterations = taken(settings)
    assert iterations[0] == iterations[1] == iterations[2]
    gaps = [b - a for a, b in zip(iterations[0], iterations[0][1:], strict=False)]
    assert gaps.count(by_rank[0][0]) > 2
    assert by_rank[0][-1] == 1 and iterations[0][-1] == 120, "nothing is slow any more"


def test_an_attempt_begins_with_the_interval_of_the_one_before(settings: dict[str, Any], arena_root: Path) -> None:
    """Which one of its nodes knows, if that was for the same budget."""
    settings |= {"interval": "auto", "overhead_budget": 0.1, "replica_check_interval": 0}
    for node, interval, budget in (("n0", 9, 0.2), ("n1", 7, 0.1)):
        write_interval(node_directory(arena_root, "test", node), interval, budget)
    run_ranks(go_on, 3, settings, 20)
    assert taken(settings) == [[7, 14]] * 3


def go_on(rank: int, world_size: int, settings: dict[str, Any], iterations: int) -> None:
    checkpointer, state = plain.restarted(rank, world_size, settings, ["n0", "n1", "n1"])
    plain.train(checkpointer, state, range(1, iterations + 1))
    checkpointer.close()
