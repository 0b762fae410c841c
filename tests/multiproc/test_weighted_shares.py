"""Shares that follow the windows: measured in one run, cut by the next start, bit-exact throughout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftckpt.schedule.window_scheduler import WindowScheduler
from tests.support import jobs
from tests.support.pool import RankResult, run_ranks
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc

ARGV = ["--pp", "2", "--no-distributed-optimizer"]
RANKS = 4
UNTIL = 24
MEASURED_AT = 16
ROOMS = [1000, 10**9, 1000, 10**9]


def with_room(rank: int, world_size: int, run: jobs.Run, rooms: list[int]) -> jobs.Outcome:
    """A job whose ranks measured windows that take ``rooms[rank]`` bytes."""
    WindowScheduler.capacity_bytes = property(lambda self: rooms[rank])  # type: ignore[method-assign, assignment]
    return jobs.train(rank, world_size, run)


def attempt(settings: dict[str, Any], until: int, rooms: list[int], end: str = "die") -> list[RankResult]:
    run = jobs.Run(ARGV, until=until, settings=settings, end=end)
    return run_ranks(with_room, RANKS, run, rooms, expect_failures=end == "die", grace_secs=3.0)


def copied(settings: dict[str, Any]) -> list[list[int]]:
    """By rank what each of its plans copies, in order."""
    plans = jobs.events(settings, "plan")
    return [[e["copied_bytes"] for e in plans if e["rank"] == rank] for rank in range(RANKS)]


def used_bytes(root: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in root.rglob("slot*"))


@pytest.mark.slow
@pytest.mark.parametrize("again", by_default([MEASURED_AT + 1, 20], [MEASURED_AT + 1]))
def test_the_rank_with_room_copies_more_from_the_next_start_on(
    again: int, settings: dict[str, Any], arena_root: Path
) -> None:
    """The second attempt is killed while the first snapshot with new shares becomes whole, or after."""
    reference = jobs.outcomes(RANKS, jobs.Run(ARGV, until=UNTIL))
    assert all(map(jobs.killed, attempt(settings, MEASURED_AT, ROOMS)))
    assert [len(plan) for plan in copied(settings)] == [1] * RANKS, "shares were cut anew while training ran"
    assert all(map(jobs.killed, attempt(settings, again, [1] * RANKS)))
    plans = copied(settings)
    for rank in range(RANKS):
        before, after = plans[rank]
        assert after > 1.5 * before if ROOMS[rank] > 1000 else after < before / 2
    assert sum(plan[0] for plan in plans) == pytest.approx(sum(plan[1] for plan in plans), rel=0.001)
    # Small slots are mostly room for objects: the whole is what two slots of each rank take.
    slots = {e["slot_bytes"] for e in jobs.events(settings, "arena")}
    assert used_bytes(arena_root) <= 2 * RANKS * max(slots)
    whole = max(e["iteration"] for e in jobs.events(settings, "snapshot"))
    resumed = [result.value for result in attempt(settings, UNTIL, [1] * RANKS, end="close")]
    assert jobs.assert_continues(reference, resumed) in (whole - 1, whole)
    assert [plan[2] for plan in copied(settings)] == [plan[1] for plan in plans], "the restart forgot the shares"
    if again == 20:
        assert all(event["reused"] for event in jobs.events(settings, "arena")[-RANKS:])
    assert not jobs.events(settings, "snapshot_error")
    assert not list(arena_root.iterdir())


@pytest.mark.parametrize(
    "rooms", by_default([[0] * 4, [10**9, 10**8, 10**9, 10**8]], [[0] * 4]), ids=["none", "ample"]
)
def test_shares_stay_where_nothing_is_won(rooms: list[int], settings: dict[str, Any]) -> None:
    attempt(settings, 20, rooms)
    attempt(settings, 21, rooms, end="close")
    assert all(len(plan) == 2 and plan[0] == plan[1] for plan in copied(settings))
