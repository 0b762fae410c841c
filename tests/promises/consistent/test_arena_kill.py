"""A writer is killed by SIGKILL at random instants; whatever is SEALED afterwards is what was written."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ftckpt.memory.arena import Arena
from ftckpt.memory.control_block import SlotState
from ftckpt.memory.directory import arena_path, list_arenas, node_directory
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.model.snapshot import SnapshotId
from tests.support.choosing import inventory_of
from tests.support.killing import killed_at
from tests.support.snapshots import seal, store
from tests.support.tiers import by_default
from tests.support.waiting import until

pytestmark = pytest.mark.faults

NUMEL = 200_000
WEIGHTS = Fragment.whole("w", "U8", (NUMEL,), Box((0,), (NUMEL,)))
RNG = Fragment.whole("rng", "U8", (816,), Box((0,), (816,)))
MANIFEST = Manifest({"tp": 0}, {"tp": 1}, (WEIGHTS,), (RNG,), 4096, 16384)


@pytest.fixture
def node_dir(arena_root: Path) -> Path:
    return node_directory(arena_root, "job", "node")


def pattern(iteration: int) -> tuple[bytes, bytes]:
    """The contents of a slot of ``iteration``: bytes of the fragments, objects."""
    block = hashlib.sha256(iteration.to_bytes(8, "little")).digest()
    return (block * (NUMEL // 32 + 26))[: NUMEL + 816], block * (1 + iteration % 100)


def hashed(iteration: int) -> bool:
    """Every third snapshot is sealed without hashes."""
    return iteration % 3 > 0


def write(arena: Arena, slot: int, lineage: bytes, iteration: int) -> None:
    data, objects = pattern(iteration)
    store(arena, slot, (data[:NUMEL], data[NUMEL:]), objects)
    seal(arena, slot, iteration, hashed(iteration), lineage)
    arena.control.mark_whole(SnapshotId(lineage, iteration))
    arena.control.mark_target(SnapshotId(lineage, iteration))
    arena.control.mark_protected(SnapshotId(lineage, iteration))


def write_for_ever(path: Path, first: int) -> None:
    """Alternate the slots; after each seal, write the iteration to ``progress`` next to the arena."""
    arena = Arena.open(path, writable=True)
    arena.lock(5)
    progress = np.memmap(path.parent / "progress", np.int64, "r+", shape=(1,))
    for iteration in range(first, first + 10_000_000):
        write(arena, iteration % 2, b"l" * 16, iteration)
        progress[0] = iteration


def start(action: Callable[[], None]) -> int:
    """A child of this process that does ``action`` for ever; its pid."""
    child = os.fork()
    if child:
        return child
    try:
        action()
    finally:
        os._exit(1)  # a child must not come back into the test


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the writer ended by itself: no fault was injected"


def assert_slot_holds(arena: Arena, slot: int, iteration: int) -> None:
    assert not arena.verify(slot) and arena.unchecked(slot) is not hashed(iteration)
    data, objects = pattern(iteration)
    with arena.slot(slot) as view:
        held = b"".join(
            bytes(view[offset : offset + fragment.nbytes])
            for fragment, offset in zip(MANIFEST.fragments, arena.image.offsets, strict=True)
        )
    assert held == data
    assert bytes(arena.read_objects(slot)) == objects


@pytest.mark.parametrize("kills", by_default([15, 40], [15]))
def test_killed_while_writing_snapshots(node_dir: Path, kills: int) -> None:
    (node_dir / "progress").write_bytes((-1).to_bytes(8, "little", signed=True))
    progress = np.memmap(node_dir / "progress", np.int64, "r", shape=(1,))
    Arena.create(node_dir, MANIFEST, 2).close()
    path = arena_path(node_dir, MANIFEST)
    instants = random.Random(20240607)
    seen: set[SlotState] = set()
    unhashed: set[bool] = set()
    told = -1
    for _ in range(kills):
        child = start(partial(write_for_ever, path, told + 1))
        until(lambda: progress[0] >= told + 3, "some are written")  # noqa: B023
        time.sleep(instants.random() * 0.01)  # any instant
        kill(child)
        told = int(progress[0])
        arena = Arena.open(path, writable=True)
        arena.lock(0)  # a killed holder has lost it
        records = [arena.control.record(slot) for slot in range(2)]
        assert not any(record.torn for record in records)
        sealed = {snapshot.iteration: slot for snapshot, slot in arena.snapshots().items()}
        for iteration, slot in sealed.items():
            assert iteration % 2 == slot
            assert_slot_holds(arena, slot, iteration)
        # The writer was in the middle of told + 1 or, at the latest, of telling that it is done.
        assert told in sealed or told + 1 in sealed
        whole = arena.control.whole()
        assert whole is not None and whole.lineage == b"l" * 16 and told <= whole.iteration <= told + 1
        for mark in (arena.control.target(), arena.control.protected()):
            assert mark in (SnapshotId(b"l" * 16, told), SnapshotId(b"l" * 16, told + 1))
        unhashed |= {iteration % 3 == 0 for iteration in sealed}
        seen |= {record.state for record in records}
        told = max(sealed)
        arena.close()
    assert seen == {SlotState.WRITING, SlotState.SEALED} and unhashed == {False, True}


def test_killed_at_each_step_of_freeing_and_allocating(node_dir: Path) -> None:
    lineage = b"l" * 16

    def change() -> None:
        arena = Arena.open(arena_path(node_dir, MANIFEST), writable=True)
        arena.lock(0)
        arena.free(0)
        arena.allocate(0)
        write(arena, 0, lineage, 9)
        arena.free(1)
        arena.allocate(1)

    seen = set()
    for step in itertools.count():
        arena = Arena.create(node_dir, MANIFEST, 2)
        write(arena, 0, lineage, 7)
        write(arena, 1, lineage, 8)
        arena.close()
        killed = killed_at(step, change)
        (report,) = inventory_of(node_dir).arenas
        assert report.problems == ()
        arena = Arena.open(arena.path, writable=True)
        arena.lock(0)
        assert not [path.name for path in arena.path.iterdir() if path.name.startswith(".")]
        sealed = {slot: snapshot.iteration for snapshot, slot in arena.snapshots().items()}
        for slot, iteration in sealed.items():
            assert_slot_holds(arena, slot, iteration)
        assert 1 in sealed or sealed == {0: 9}
        seen.add(tuple(arena.allocated(slot) for slot in range(2)))
        for slot in {0, 1} - set(sealed):
            arena.allocate(slot)
            write(arena, slot, lineage, 10)
            assert_slot_holds(arena, slot, 10)
        arena.remove()
        if not killed:
            break
    assert step > 20 and seen == {(True, True), (False, True), (True, False)}


def test_killed_at_each_step_of_creating_and_removing(node_dir: Path) -> None:
    half = 0
    for step in itertools.count():
        killed = killed_at(step, lambda: Arena.create(node_dir, MANIFEST, 2).remove())
        hidden = [path for path in node_dir.iterdir() if path.name.startswith(".")]
        half += len(hidden)
        for path in list_arenas(node_dir):
            arena = Arena.open(path)
            assert [arena.slot_error(slot) for slot in range(2)] == [None, None] and arena.control.whole() is None
            arena.remove()
        Arena.create(node_dir, MANIFEST, 2).remove()
        assert list(node_dir.iterdir()) == []
        if not killed:
            break
    assert half > 0, "no kill hit the middle: the fault tested nothing"
