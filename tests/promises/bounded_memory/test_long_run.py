"""Hundreds of snapshots leave no more memory, files or threads than the first few."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support import jobs
from tests.support.pool import run_ranks

pytestmark = pytest.mark.multiproc

SNAPSHOTS, SETTLED = 300, 100
ARGV = ["--pp", "2"]
GROWTH_BYTES = 3 << 20
"""The noise of allocators and Python's own caches; 1 % of a leak of the state per snapshot would be far above."""


def usage() -> tuple[int, int, int]:
    """Bytes of anonymous memory, open files and threads of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) << 10, len(os.listdir("/proc/self/fd")), threading.active_count()


def measured(rank: int, world_size: int, run: jobs.Run) -> list[tuple[int, int, int]]:
    """Usage after each iteration of a job that is killed in the end."""
    import train_gpt

    found: list[tuple[int, int, int]] = []
    step = train_gpt.train_step

    def counted(job: Any) -> Any:
        if job.iteration in (SETTLED, SNAPSHOTS - 1):
            found.append(usage())
            if job.iteration == SNAPSHOTS - 1:
                Path(run.settings["events"], f"usage{rank}").write_text(json.dumps(found))  # type: ignore[index]
        return step(job)

    train_gpt.train_step = counted
    return jobs.train(rank, world_size, run)  # type: ignore[return-value]


@pytest.mark.slow
def test_nothing_grows_and_the_last_snapshot_is_good(settings: dict[str, Any]) -> None:
    settings |= {"timeline_every": 10, "chunk_size": "64KiB", "overhead_budget": 0.0}
    reference = jobs.outcomes(2, jobs.Run(ARGV, until=SNAPSHOTS + 3))
    run = jobs.Run(ARGV, until=SNAPSHOTS, settings=settings, end="die")
    results = run_ranks(measured, 2, run, timeout_secs=200.0, expect_failures=True, grace_secs=3.0)
    assert all(map(jobs.killed, results)), [r.error for r in results]
    snapshots = jobs.events(settings, "snapshot")
    assert len(snapshots) == 2 * SNAPSHOTS
    for rank in range(2):
        early, late = json.loads(Path(settings["events"], f"usage{rank}").read_text())
        assert late[0] - early[0] < GROWTH_BYTES, f"rank {rank}: {early} → {late}"
        assert late[1:] == early[1:], f"rank {rank}: {early} → {late}"
    resumed = jobs.outcomes(2, jobs.Run(ARGV, until=SNAPSHOTS + 3, settings=settings))
    assert jobs.assert_continues(reference, resumed) >= SNAPSHOTS - 1
