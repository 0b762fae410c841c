"""Slots that come while training runs: nobody waits for their memory, and a rank that ends leaves none half made."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftckpt.memory import mapping
from ftckpt.model.snapshot import SnapshotId
from tests.support.arenas import SHARE, Rank, complete, ranks, settle, start, stop
from tests.support.snapshots import LINEAGE, fill
from tests.support.waiting import until

SECS = 20.0
KEEP = SnapshotId(LINEAGE, 4)


class SlowMemory:
    """The kernel takes its time for each step of an allocation."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()
        self.steps = 0
        self.threads: set[str] = set()
        self._fallocate = os.posix_fallocate

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.steps += 1
        self.asked.set()
        assert self.go.wait(SECS)
        self._fallocate(fd, offset, length)


@pytest.fixture
def member(arena_root: Path) -> Iterator[Rank]:
    """A rank whose arena lacks two of three slots, and whose old arena is deleted."""
    (member,) = members = ranks(arena_root, 1, slots=3)
    start(member)
    for slot in range(3):
        fill(member.have, slot, 2 + slot, hashed=True)
    member.arena = member.arenas.replace(member.have, KEEP, member.manifest(SHARE + 8192))
    settle(member)
    fill(member.have, 0, 5, hashed=True)
    member.arenas.remove_old()
    for slot in (1, 2):
        if member.have.allocated(slot):
            member.have.free(slot)
    member.events.all.clear()
    yield member
    stop(members)


@pytest.fixture
def slow(member: Rank, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowMemory]:
    memory = SlowMemory()
    monkeypatch.setattr(os, "posix_fallocate", memory.fallocate)
    monkeypatch.setattr(mapping, "_RESERVE_STEP_BYTES", 8192)
    yield memory
    memory.go.set()


def slot_files(member: Rank) -> list[str]:
    """All files of slots, with a name and without."""
    return sorted(path.name for path in member.have.path.iterdir() if "slot" in path.name)


def test_training_waits_for_no_memory(member: Rank, slow: SlowMemory) -> None:
    begin = time.monotonic()
    assert member.arenas.complete(member.have) == []
    assert slow.asked.wait(SECS)
    assert member.arenas.complete(member.have) == [] and not member.have.allocated(1)
    assert time.monotonic() - begin < SECS / 4
    fill(member.have, 0, 6, hashed=True)  # training goes on meanwhile
    slow.go.set()
    assert complete(member) == [1, 2]
    assert slow.threads == {"ftckpt-slots"}
    fill(member.have, 2, 7, hashed=True)
    assert not member.have.verify(2) and len(slot_files(member)) == 3


def test_memory_of_an_old_arena_is_used_at_the_boundary_where_it_is_free(arena_root: Path) -> None:
    (member,) = members = ranks(arena_root, 1, slots=3)
    start(member)
    for slot in range(3):
        fill(member.have, slot, 2 + slot, hashed=True)
    member.arena = member.arenas.replace(member.have, KEEP, member.manifest(SHARE + 8192))
    member.arenas.supply(member.have)
    first = member.arenas.allocator
    assert first is not None
    until(lambda: first.ended, "memory", SECS)
    member.arenas.remove_old()
    taken = member.arenas.complete(member.have)
    assert 0 < len(taken) < 3 and member.arenas.allocator not in (None, first)
    assert sorted([*taken, *complete(member)]) == [0, 1, 2]
    stop(members)


def test_only_what_a_start_has_left_is_waited_for(member: Rank, slow: SlowMemory) -> None:
    slow.go.set()
    member.arena = member.arenas.replace(member.have, None, member.manifest())
    assert not member.have.allocated(0), "a start waits for no memory"
    slow.asked.clear()
    slow.go.clear()
    member.arenas.supply(member.have)
    assert slow.asked.wait(SECS)
    assert member.arenas.complete(member.have) == []
    threading.Timer(0.2, slow.go.set).start()
    taken = member.arenas.complete(member.have, waits=True)
    assert taken[:1] == [0], "the first snapshot would have been skipped"
    assert sorted([*taken, *complete(member)]) == [0, 1, 2]
    member.have.free(1)
    slow.asked.clear()
    slow.go.clear()
    assert member.arenas.complete(member.have, waits=True) == []
    assert slow.asked.wait(SECS)
    assert member.arenas.complete(member.have, waits=True) == []
    slow.go.set()
    assert complete(member) == [1]
