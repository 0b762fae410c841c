"""When ranks of a real job learn what became of a snapshot, at an interval of many iterations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from ftckpt.memory.directory import clean_job
from ftckpt.memory.heartbeat import FlushState
from ftckpt.model.snapshot import SnapshotId
from tests.support import plain
from tests.support.pool import run_ranks

pytestmark = pytest.mark.multiproc

INTERVAL = 10


class Step(NamedTuple):
    """A rank's knowledge after a boundary, iterations and -1 for none, and the work of its node's SMP by then."""

    whole: int = -1
    protected: int = -1
    persisted: int = -1
    covered: int = -1
    flushed: int = -1


@pytest.fixture
def job(settings: dict[str, Any], arena_root: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    (tmp_path / "storage").mkdir()
    yield settings | {
        "protect": "node", "smp_cores": 0, "chunk_size": "64KiB", "objects_size": "1MiB", "on_error": "raise",
        "interval": INTERVAL, "persist": str(tmp_path / "storage"), "persist_interval": INTERVAL,
    }  # fmt: skip
    clean_job(arena_root, "test")


def trained(rank: int, world_size: int, settings: dict[str, Any]) -> list[Step]:
    """Three snapshots, with steps after the last one until it is on storage; ranks go through them together."""
    checkpointer, state = plain.restarted(rank, world_size, settings)
    steps, deadline = [Step()], time.monotonic() + 60.0
    while min(_of_all(steps[-1].persisted)) < 3 * INTERVAL:
        assert time.monotonic() < deadline
        plain.iterate(checkpointer, state, len(steps))
        protection, ours = checkpointer.rank.protection, checkpointer.rank.state
        target, flush = ours.targets.target, ours.flushes.current
        covered = target if protection.observe(target).covered else ours.targets.protected
        is_flushed = protection.observe_flush(flush).state == FlushState.DONE
        flushed = flush if is_flushed else ours.flushes.persisted
        known = checkpointer.committed, checkpointer.protected, checkpointer.persisted
        steps.append(Step(*map(_iteration, (*known, covered, flushed))))
        time.sleep(0.02)  # to the SMP, and to what ranks tell each other
    checkpointer.close()
    return steps


def _of_all(value: int) -> list[int]:
    values: list[int] = [-1] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _iteration(snapshot: SnapshotId | None) -> int:
    return snapshot.iteration if snapshot is not None else -1


def first(steps: list[Step], field: str, iteration: int) -> int:
    """The step after which ``field`` is of that iteration, or of a later one."""
    return next(index for index, step in enumerate(steps) if getattr(step, field) >= iteration)


def test_a_snapshot_is_whole_protected_and_persisted_as_soon_as_it_is_at_any_interval(job: dict[str, Any]) -> None:
    ranks = [result.value for result in run_ranks(trained, 3, job)]
    for begun in (INTERVAL, 2 * INTERVAL, 3 * INTERVAL):
        assert max(first(steps, "whole", begun) for steps in ranks) <= begun + 2
        for done, known in (("covered", "protected"), ("flushed", "persisted")):
            done_at = max(first(steps, done, begun) for steps in ranks)
            # Votes get rarer with the wait: on a loaded machine the work itself takes dozens of steps.
            latest = done_at + 3 + (done_at - begun) // 4
            assert max(first(steps, known, begun) for steps in ranks) <= latest, (begun, known)
