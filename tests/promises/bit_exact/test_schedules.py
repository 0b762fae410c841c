"""Every copy schedule, under every pipeline schedule of Megatron-core, restores the same bits."""

from __future__ import annotations

import functools
import time
from itertools import product
from typing import Any

import pytest

from ftckpt.memory.control_block import ControlBlock
from tests.support import jobs, plain
from tests.support.pool import run_ranks
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc

PIPELINES = {
    "no-pipelining": (2, []),
    "1f1b": (4, ["--pp", "4", "--layers", "4"]),
    "interleaved": (2, ["--pp", "2", "--vpp", "2", "--layers", "4"]),
}
UNTIL, KILLED = 12, 10
"""Iterations: enough for windows to be measured and planned for before the kill."""


@functools.cache
def reference(name: str) -> list[jobs.Outcome]:
    """The unbroken run."""
    world_size, argv = PIPELINES[name]
    return jobs.outcomes(world_size, jobs.Run(argv, until=UNTIL))


@pytest.mark.parametrize(
    ("name", "schedule"),
    by_default(product(PIPELINES, ["sync", "thread", "stream", "bubble"]), [("interleaved", "bubble")]),
)
def test_resume_is_bit_exact(name: str, schedule: str, settings: dict[str, Any]) -> None:
    world_size, argv = PIPELINES[name]
    settings |= {"schedule": schedule, "chunk_size": "64KiB", "timeline_every": 2, "overhead_budget": 0.0}
    first = jobs.broken(world_size, jobs.Run(argv, until=KILLED, settings=settings, end="die"))
    assert all(map(jobs.killed, first)), [r.error for r in first]
    resumed = jobs.outcomes(world_size, jobs.Run(argv, until=UNTIL, settings=settings))
    assert jobs.assert_continues(reference(name), resumed) in (KILLED - 1, KILLED)
    assert not jobs.events(settings, "snapshot_error")
    copied = jobs.events(settings, "copied")
    assert len(copied) >= world_size * (KILLED - 2)
    planned = jobs.events(settings, "planned")
    assert {event["rank"] for event in planned} == (set(range(world_size)) if schedule == "bubble" else set())
    timelines = jobs.events(settings, "timeline")
    assert {event["iteration"] for event in timelines} >= {2, 4, 6}
    for event in timelines:
        assert sum(event["moved_bytes"].values()) == sum(nbytes for _, _, nbytes in event["copies"]) > 0
        kinds = [kind for kind, _, _ in event["spans"]]
        assert kinds[:2] == ["boundary", "start"] and kinds[-2:] == ["fence", "optimizer"]
        assert kinds.count("forward") == kinds.count("backward") > 0
        ends = [end for _, _, end in event["spans"]]
        assert [begin for _, begin, _ in event["spans"]] == [0.0, *ends[:-1]]


def test_no_copy_runs_beside_training_when_all_is_copied_at_the_boundary(settings: dict[str, Any]) -> None:
    settings |= {"schedule": "sync", "timeline_every": 1}
    jobs.outcomes(2, jobs.Run(["--pp", "2"], until=5, settings=settings))
    moved = [set(event["moved_bytes"]) for event in jobs.events(settings, "copied")]
    assert moved and all(kinds == {"boundary"} for kinds in moved)


def sealed_at_boundaries(rank: int, world_size: int, settings: dict[str, Any]) -> list[int]:
    """The newest snapshot after each ``step``, with seals that take a while."""
    seal = ControlBlock.seal

    def seal_late(*arguments: Any, **named: Any) -> None:
        time.sleep(0.02)
        seal(*arguments, **named)

    ControlBlock.seal = seal_late  # type: ignore[method-assign]
    checkpointer, state = plain.restarted(rank, world_size, settings)
    found = []
    for iteration in range(1, 31):
        plain.iterate(checkpointer, state, iteration)
        newest = checkpointer.capture.newest if checkpointer.capture is not None else None
        found.append(newest.iteration if newest is not None else -1)
    checkpointer.close(remove=False)
    return found


def test_a_snapshot_at_the_boundary_is_sealed_when_training_goes_on(settings: dict[str, Any]) -> None:
    settings |= {"schedule": "sync", "protect": "none"}
    ranks = [result.value for result in run_ranks(sealed_at_boundaries, 2, settings)]
    assert ranks == [list(range(1, 31))] * 2
