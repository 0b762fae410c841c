"""Changes to another manifest: never more slots than configured, and committed snapshots stay."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import MemoryBudgetError
from ftckpt.memory import ledger, mapping
from ftckpt.memory.arena import Arena
from ftckpt.memory.directory import list_arenas
from ftckpt.memory.image import SlotImage
from ftckpt.model.snapshot import SnapshotId
from ftckpt.session.protection import ArenaRemains, in_all_arenas
from tests.support import arenas
from tests.support.arenas import SHARE, Rank, complete, end, on_all, ranks, settle, start, stop
from tests.support.snapshots import LINEAGE, fill, seal, write

KEEP = SnapshotId(LINEAGE, 4)
MORE = SHARE + 8192


def trained(root: Path, number: int = 2, slots: int = 2) -> list[Rank]:
    """Ranks with snapshot 4 committed; 5 is sealed by rank 0 and half written by the others."""

    def train(member: Rank) -> None:
        start(member)
        fill(member.have, 0, 4, hashed=True)
        member.have.control.mark_whole(KEEP)
        write(member.have, 1, 5)
        if member.rank == 0:
            seal(member.have, 1, 5, hashed=True)

    members = ranks(root, number, slots)
    on_all(members, train)
    return members


def replace(member: Rank, keep: SnapshotId | None = KEEP, share: int = MORE) -> None:
    member.arena = member.arenas.replace(member.have, keep, member.manifest(share))
    settle(member)


def finish(member: Rank) -> list[int]:
    member.arenas.remove_old()
    return complete(member)


def files(member: Rank) -> list[int]:
    """Number of slot files in each arena of this rank's shard."""
    mine = [path for path in list_arenas(member.arenas.path) if path.name.startswith(member.shard)]
    return sorted(len(list(path.glob("slot*"))) for path in mine)


def chosen(root: Path) -> int | None:
    """The iteration that a restart of two ranks would take."""
    decision = arenas.choose(root, 2)
    return decision and decision.snapshot.iteration


@pytest.fixture
def peaks(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The peak memory of each shard, measured whenever pages have been allocated."""
    seen: dict[str, int] = {}
    reserve = mapping.reserve
    one_at_a_time = threading.Lock()

    def watched(fd: int, path: Path, begin: int, end: int, *halted: Any) -> None:
        reserve(fd, path, begin, end, *halted)
        with one_at_a_time:
            for shard in ("dp0", "dp1"):
                seen[shard] = max(seen.get(shard, 0), arenas.used_bytes(arena_root, shard))

    monkeypatch.setattr(mapping, "reserve", watched)
    return seen


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("share", [SHARE - 8192, MORE])
def test_no_more_slots_than_configured_at_any_time(
    arena_root: Path, peaks: dict[str, int], slots: int, share: int
) -> None:
    members = trained(arena_root, slots=slots)
    small, large = sorted(SlotImage.of(members[0].manifest(size)).file_bytes for size in (SHARE, share))
    full = slots * members[0].have.image.file_bytes
    # What a look at files finds that get their names meanwhile is less, if anything.
    assert small < large and max(peaks.values()) <= full
    assert arenas.used_bytes(arena_root, "dp0") == arenas.used_bytes(arena_root, "dp1") == full
    peaks.clear()
    on_all(members, lambda member: replace(member, share=share))
    assert [files(member) for member in members] == [sorted([1, slots - 1])] * 2
    assert max(peaks.values()) <= slots * large
    on_all(members, complete)
    assert [files(member) for member in members] == [sorted([1, slots - 1])] * 2, "allocated before the old one went"
    on_all(members, lambda member: fill(member.have, 0, 6, hashed=True))
    assert on_all(members, finish) == [[slots - 1]] * 2
    assert [files(member) for member in members] == [[slots]] * 2 and max(peaks.values()) <= slots * large
    on_all(members, lambda member: fill(member.have, slots - 1, 7, hashed=True))
    assert chosen(arena_root) == 7
    end(members)
    assert list(arena_root.iterdir()) == []


def test_marks_that_differ_by_a_verdict_cost_nothing_that_is_protected(arena_root: Path) -> None:
    """Rank 1 had not read yet that 4 is protected, when the job died. The restart is in another layout."""
    members = ranks(arena_root, 2, slots=4)
    on_all(members, start)
    for member in members:
        for slot, iteration in enumerate((2, 3, 4, 5)):
            fill(member.have, slot, iteration, hashed=True)
        member.have.control.mark_protected(SnapshotId(LINEAGE, 4 - member.rank))
    stop(members)
    again, whole = ranks(arena_root, 2, slots=4), SnapshotId(LINEAGE, 5)
    old = list_arenas(again[0].arenas.path)
    on_all(again, lambda member: start(member, MORE, whole))
    for path in old:
        with closing(Arena.open(path)) as arena:
            assert {snapshot.iteration for snapshot in arena.snapshots()} == {3, 4, 5}
    end(again)


def test_what_is_protected_after_a_restart_is_the_newest_that_any_mark_names() -> None:
    held = [SnapshotId(LINEAGE, iteration) for iteration in (5, 4, 3)]
    ranks = [ArenaRemains(mark, tuple(held)) for mark in (held[1], held[2], None)]
    assert in_all_arenas(ranks, held[0]) == (held[1], held[0])
    assert in_all_arenas(ranks, held[1]) == (held[1], held[1])
    assert in_all_arenas(ranks, held[1], rebuilt=True) == (held[2], held[1]), "of an older one nothing was lost"


def test_without_room_nothing_is_freed(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The protected snapshot would have been dropped for nothing."""
    members = trained(arena_root, slots=3)
    on_all(members, lambda member: fill(member.have, 2, 3, hashed=True))
    on_all(members, lambda member: member.have.control.mark_protected(SnapshotId(LINEAGE, 3)))

    def full(path: Path, need_bytes: int) -> None:
        raise MemoryBudgetError("no room")

    before = arenas.used_bytes(arena_root, "dp0")
    monkeypatch.setattr(ledger, "check_budget", full)
    with pytest.raises(MemoryBudgetError):
        on_all(members, replace)
    assert arenas.used_bytes(arena_root, "dp0") == before and [files(member) for member in members] == [[3]] * 2
    for member in members:
        path = list_arenas(member.arenas.path)[member.rank]
        with closing(Arena.open(path, writable=True)) as arena:
            assert {3, 4} <= {snapshot.iteration for snapshot in arena.snapshots()}
            arena.lock(0)  # it was unlocked
        member.arena = None
    end(members)
    assert list(arena_root.iterdir()) == []


def test_an_old_arena_that_resists_is_removed_at_a_later_boundary(
    arena_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An SMP may make a file there in this moment. The order to remove comes once: ``complete`` remembers it."""
    members = trained(arena_root)
    on_all(members, replace)
    with monkeypatch.context() as patch:
        patch.setattr("ftckpt.session.arenas.remove_arena", os.rmdir)
        on_all(members, lambda member: member.arenas.remove_old())
    assert [files(member) for member in members] == [[1, 1]] * 2
    assert on_all(members, complete) == [[1]] * 2
    assert [files(member) for member in members] == [[2]] * 2
    end(members)


def test_changing_twice_before_a_new_snapshot_is_whole(arena_root: Path, peaks: dict[str, int]) -> None:
    members = trained(arena_root)
    on_all(members, replace)
    on_all(members, lambda member: write(member.have, 0, 6))
    peaks.clear()
    on_all(members, lambda member: replace(member, share=MORE + 4096))
    assert [files(member) for member in members] == [[1, 1]] * 2
    assert max(peaks.values()) <= 2 * members[0].have.image.file_bytes
    assert chosen(arena_root) == 4
    end(members)
