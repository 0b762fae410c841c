"""Shares that follow the windows: agreed once, taken over slot by slot, kept by a restart, bit-exact throughout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs
import pytest

from ftckpt.errors import MemoryBudgetError
from ftckpt.testing.faults import Fault
from ftckpt.testing.pool import RankResult, run_ranks

pytestmark = pytest.mark.multiproc

ARGV = ["--pp", "2", "--no-distributed-optimizer"]
RANKS = 4
UNTIL = 24
WEIGHED_AT = 16
ROOMS = [1000, 10**9, 1000, 10**9]


def with_room(rank: int, world_size: int, run: jobs.Run, rooms: list[int]) -> jobs.Outcome:
    """A job whose ranks measured windows that take ``rooms[rank]`` bytes."""
    from ftckpt.capture.pacer import Pacer

    Pacer.capacity_bytes = property(lambda self: rooms[rank])  # type: ignore[method-assign, assignment]
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


@pytest.mark.parametrize("killed", [WEIGHED_AT, WEIGHED_AT + 1, 20])
def test_the_rank_with_room_copies_more_and_a_restart_goes_on_so(
    killed: int, settings: dict[str, Any], arena_root: Path
) -> None:
    """Killed before the first snapshot with new shares is whole, while it becomes so, and after."""
    reference = jobs.outcomes(RANKS, jobs.Run(ARGV, until=UNTIL))
    assert all(map(jobs.killed, attempt(settings, killed, ROOMS)))
    plans = copied(settings)
    assert [len(plan) for plan in plans] == [2] * RANKS
    for rank in range(RANKS):
        before, after = plans[rank]
        assert after > 1.5 * before if ROOMS[rank] > 1000 else after < before / 2
    assert sum(plan[0] for plan in plans) == pytest.approx(sum(plan[1] for plan in plans), rel=0.001)
    whole = max(e["iteration"] for e in jobs.events(settings, "snapshot"))
    # Small slots are mostly room for objects: the whole is what two slots of each rank take.
    slots = {e["slot_bytes"] for e in jobs.events(settings, "arena")}
    assert used_bytes(arena_root) <= 2 * RANKS * max(slots)
    resumed = [result.value for result in attempt(settings, UNTIL, ROOMS, end="close")]
    assert jobs.assert_continues(reference, resumed) in (whole - 1, whole)
    if killed == 20:
        assert [plan[2] for plan in copied(settings)] == [plan[1] for plan in plans], "the restart forgot the shares"
        again = [e for e in jobs.events(settings, "arena")][-RANKS:]
        assert all(event["reused"] for event in again)
    assert not jobs.events(settings, "snapshot_error")
    assert not list(arena_root.iterdir())


def test_the_old_arena_stays_while_no_snapshot_in_the_new_one_is_whole(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    reference = jobs.outcomes(RANKS, jobs.Run(ARGV, until=UNTIL))
    failing = Fault(1, WEIGHED_AT, "copy", tmp_path / "failing", "raise")
    dead = Fault("all", WEIGHED_AT + 1, "begin", tmp_path / "dead", "kill", secs=20)
    run = jobs.Run(ARGV, until=20, settings=settings, faults=[failing, dead])
    run_ranks(with_room, RANKS, run, ROOMS, expect_failures=True, grace_secs=3.0)
    assert failing.fired(1) and all(dead.fired(rank) for rank in range(RANKS))
    assert [len(plan) for plan in copied(settings)] == [2] * RANKS
    resumed = [result.value for result in attempt(settings, UNTIL, ROOMS, end="close")]
    assert jobs.assert_continues(reference, resumed) == WEIGHED_AT - 1


def test_the_only_slot_is_written_again_while_no_snapshot_in_it_is_whole(
    settings: dict[str, Any], tmp_path: Path, arena_root: Path
) -> None:
    failing = Fault(1, WEIGHED_AT, "copy", tmp_path / "failing", "raise")
    run = jobs.Run(ARGV, until=20, settings=settings, faults=[failing])
    run_ranks(with_room, RANKS, run, ROOMS)
    assert failing.fired(1)
    assert [event["rank"] for event in jobs.events(settings, "snapshot_error")] == [1]
    assert {e["rank"] for e in jobs.events(settings, "slots_allocated")} == set(range(RANKS))
    snapshots = jobs.events(settings, "snapshot")
    second = [e["slot"] for e in snapshots if e["iteration"] in (WEIGHED_AT, WEIGHED_AT + 1)]
    assert second == [0] * len(second) and len(second) >= 2 * RANKS - 1
    assert not list(arena_root.iterdir())


@pytest.mark.parametrize("rooms", [[10**9] * 4, [0] * 4, [10**9, 10**8, 10**9, 10**8]], ids=["even", "none", "ample"])
def test_shares_stay_where_nothing_is_won(rooms: list[int], settings: dict[str, Any]) -> None:
    attempt(settings, 20, rooms, end="close")
    assert [len(plan) for plan in copied(settings)] == [1] * RANKS


def no_memory(rank: int, world_size: int, run: jobs.Run) -> jobs.Outcome:
    """There was room at start, and there is none for anything more."""
    from ftckpt.capture import node_arenas

    check, calls = node_arenas.check_budget, [0]

    def full(path: Path, nbytes: int) -> None:
        calls[0] += 1
        if calls[0] > 1:
            raise MemoryBudgetError("no room")
        check(path, nbytes)

    node_arenas.check_budget = full
    largest = node_arenas.NodeArenas._check_memory
    node_arenas.NodeArenas._check_memory = lambda self, now, later: largest(self, now + (1 << 20), later)  # type: ignore[method-assign]
    return with_room(rank, world_size, run, ROOMS)


def test_without_memory_for_new_shares_the_old_ones_stay(settings: dict[str, Any]) -> None:
    reference = jobs.outcomes(RANKS, jobs.Run(ARGV, until=UNTIL))
    run = jobs.Run(ARGV, until=20, settings=settings, end="die")
    run_ranks(no_memory, RANKS, run, expect_failures=True, grace_secs=3.0)
    assert {event["rank"] for event in jobs.events(settings, "shares_kept")} == set(range(RANKS))
    assert not jobs.events(settings, "turned_off")
    plans = copied(settings)
    assert all(plan[1] == plan[0] for plan in plans)
    resumed = [result.value for result in attempt(settings, UNTIL, [10**9] * 4, end="close")]
    assert jobs.assert_continues(reference, resumed) in (19, 20)
