"""The ledger: sums of states, what can be freed and what never is, and what slots and protection need."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import MemoryBudgetError
from ftckpt.memory import ledger as ledger_module
from ftckpt.memory.directory import SMP_LOCK_NAME
from ftckpt.memory.ledger import (
    FileKind,
    Ledger,
    LedgerEntry,
    refusal,
    require,
    slots_to_allocate,
)
from ftckpt.memory.locks import FileLock
from ftckpt.model.snapshot import SnapshotId

SNAPSHOTS = [SnapshotId(lineage, iteration) for lineage in (b"a" * 16, b"b" * 16) for iteration in (3, 4, 5)]
_named = st.sampled_from([None, *SNAPSHOTS])
_slot = st.tuples(st.sampled_from([FileKind.SLOT, FileKind.DAMAGED]), _named)
_parity = st.tuples(st.just(FileKind.PARITY), _named)
_other = st.tuples(st.just(FileKind.OTHER), st.none())
_arena = st.lists(st.one_of(_slot, _parity, _other), min_size=1, max_size=8)
_needed = st.sets(st.sampled_from(SNAPSHOTS), max_size=3)


def in_use(arenas: list[list[tuple[FileKind, SnapshotId | None]]]) -> Ledger:
    return Ledger(tuple(
        LedgerEntry(f"file{number}", 1 << number, arena=f"arena{index}", kind=kind, snapshot=snapshot)
        for index, arena in enumerate(arenas)
        for number, (kind, snapshot) in enumerate(arena)
    ))  # fmt: skip


ledgers = st.lists(_arena, max_size=4).map(in_use)


def free(ledger: Ledger) -> set[tuple[str, str]]:
    return {(entry.arena, entry.name) for entry in ledger.entries if entry.is_spare}


def left(ledger: Ledger) -> Ledger:
    return Ledger(tuple(entry for entry in ledger.entries if not entry.is_spare))


def named(entries: Collection[LedgerEntry], needed: Collection[SnapshotId]) -> set[tuple[str, str]]:
    return {(entry.arena, entry.name) for entry in entries if entry.snapshot in needed}


@given(ledgers, _needed)
def test_nothing_that_is_needed_is_freed(ledger: Ledger, needed: set[SnapshotId]) -> None:
    kept = left(ledger.spare(needed))
    assert named(kept.entries, needed) == named(ledger.entries, needed)


@given(ledgers, _needed)
def test_what_stays_can_be_read_by_what_tells_what_it_holds(ledger: Ledger, needed: set[SnapshotId]) -> None:
    kept = left(ledger.spare(needed)).entries
    for arena in {entry.arena for entry in kept}:
        before = [entry for entry in ledger.entries if entry.arena == arena]
        readable = [entry for entry in kept if entry.arena == arena and entry.kind == FileKind.SLOT]
        assert bool(readable) == any(entry.kind == FileKind.SLOT for entry in before)
        others = {entry.name for entry in before if entry.kind == FileKind.OTHER}
        assert others <= {entry.name for entry in kept if entry.arena == arena}, "an arena is whole or gone"


@given(ledgers, _needed)
def test_all_that_is_of_no_use_is_freed(ledger: Ledger, needed: set[SnapshotId]) -> None:
    kept = left(ledger.spare(needed)).entries
    assert {entry.arena for entry in kept} == {entry.arena for entry in ledger.entries if entry.snapshot in needed}
    for arena in {entry.arena for entry in kept}:
        mine = [entry for entry in kept if entry.arena == arena and entry.snapshot not in needed]
        assert sum(entry.kind in {FileKind.SLOT, FileKind.DAMAGED} for entry in mine) <= 1
        assert all(entry.snapshot is None for entry in mine if entry.kind == FileKind.PARITY), (
            "it names another snapshot"
        )


def test_a_start_needs_what_is_whole_and_what_is_protected() -> None:
    whole, protected, other = SNAPSHOTS[2], SNAPSHOTS[1], SNAPSHOTS[0]
    ledger = replace(
        in_use([[(FileKind.SLOT, one) for one in (whole, protected, other)]]), protected=frozenset({protected})
    )
    assert free(ledger.spare(ledger.needed(whole))) == {("arena0", "file2")}


def test_parity_that_an_smp_guards_gives_no_memory_back_unless_its_arena_goes() -> None:
    lent = LedgerEntry("parity", 100, arena="a", kind=FileKind.PARITY, snapshot=SNAPSHOTS[0], lent=True)
    slot = LedgerEntry("slot", 1000, arena="a", kind=FileKind.SLOT, snapshot=SNAPSHOTS[1])
    ledger = Ledger((lent, slot))
    assert ledger.spare({SNAPSHOTS[1]}).free_bytes == 0 and free(ledger.spare({SNAPSHOTS[1]})) == {("a", "parity")}
    assert ledger.spare(set()).free_bytes == 1100


@given(st.integers(0, 6), st.integers(1, 6), st.integers(0, 3), st.integers(-3, 6))
def test_how_many_slots_to_allocate(there: int, slots: int, needed: int, most: int) -> None:
    there = min(there, slots)
    new = slots_to_allocate(there, slots, needed, most)
    assert 0 <= new <= slots - there
    assert there + new >= min(slots, needed + 1), "one can be written"
    assert there + new <= max(there, most, needed + 1), "no more than configured, old ones among them"


# --- whether it fits ---


def test_no_room_is_asked_for_again_while_an_smp_may_give_some_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def check(path: Path, need_bytes: int) -> None:
        calls.append(need_bytes)
        if len(calls) < 3:
            raise MemoryBudgetError("no room")

    monkeypatch.setattr(ledger_module, "check_budget", check)
    monkeypatch.setattr(ledger_module, "_RETRY_SECS", 0.001)
    assert refusal(tmp_path, 7, 5.0) == "no room" and calls == [7], "no SMP: nobody gives anything back"
    with FileLock(tmp_path / SMP_LOCK_NAME, 0, "the SMP", "end it"):
        require(tmp_path, 7, 5.0)
        assert calls == [7] * 3
        calls.clear()
        assert refusal(tmp_path, 7) == "no room" and calls == [7]
    calls.clear()
    require(tmp_path, 0)
    require(tmp_path, -5)
    assert calls == [], "nothing is needed"
