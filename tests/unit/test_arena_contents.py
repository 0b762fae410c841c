"""How far a snapshot has come, whose checksums count for it, and what a slot without any tells of itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import xxhash

from ftckpt.memory.arena import Arena
from ftckpt.memory.checks import CHECKS_NAME, FORMAT, Checks
from ftckpt.memory.control_block import SealId, SlotState
from ftckpt.memory.directory import node_directory
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest, Section, parity_fragment
from ftckpt.model.snapshot import SnapshotId
from tests.support.flips import flip
from tests.support.smp_nodes import LINEAGE, fill

GROUP = "0123456789abcdef"
WEIGHTS = Fragment.whole("w", "F32", (3000,), Box((0,), (3000,)))
SHARE = Fragment.whole("s", "U8", (9000,), Box((0,), (9000,)))
RNG = Fragment.whole("rng", "U8", (816,), Box((0,), (816,)))
SECTIONS = (Section("private", 1), Section("shared", 1, GROUP), Section("parity", 1, GROUP))
STEPPED = (WEIGHTS, SHARE, parity_fragment(GROUP, 5000))
MANIFEST = Manifest({"tp": 0}, {"tp": 1}, STEPPED, (RNG,), 5000, 8192, 0, SECTIONS)
OTHER = b"o" * 16


@pytest.fixture
def arena(arena_root: Path) -> Iterator[Arena]:
    with closing(Arena.create(node_directory(arena_root, "job", "node"), MANIFEST, 3)) as made:
        yield made


def taken(arena: Arena, slot: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.array([arena.hash_chunk(slot, chunk) for chunk in range(len(arena.image.chunks))], np.uint64)


def checks_of(arena: Arena) -> Checks:
    """As the SMP opens it."""
    return Checks.create_or_open(arena.path, 3, len(arena.image.chunks), MANIFEST.digest, writable=True)


def named(arena: Arena, slot: int) -> SealId:
    seal_id = arena.control.record(slot).seal_id
    assert seal_id is not None
    return seal_id


def flip_slot(arena: Arena, at: int, bit: int = 0) -> None:
    flip(arena.path / "slot0.safetensors", at, bit)


def test_a_snapshot_comes_further_step_by_step(arena: Arena) -> None:
    assert arena.state(0) == SlotState.EMPTY and arena.hashes(0) is None and not arena.unchecked(0)
    arena.control.begin(0)
    assert arena.state(0) == SlotState.WRITING and not arena.unchecked(0)
    fill(arena, 0, 3, hashed=False)
    assert arena.state(0) == SlotState.SEALED and arena.unchecked(0)
    assert arena.checks is None and arena.check(0) is None and arena.hashes(0) is None
    checks = checks_of(arena)
    assert arena.checks is not None and arena.check(0) is None and arena.unchecked(0)
    hashes = taken(arena, 0)
    checks.store_checked(0, named(arena, 0), hashes, 0.5)
    check, found = arena.check(0), arena.hashes(0)
    assert arena.state(0) == SlotState.CHECKED and not arena.unchecked(0)
    assert check is not None and check.gap_secs == 0.5
    assert found is not None and found.tolist() == hashes.tolist()
    checks.store_encoded(0, named(arena, 0))
    assert arena.state(0) == SlotState.CHECKED, "this node alone has done its part"
    arena.control.mark_protected(SnapshotId(LINEAGE, 2))
    assert arena.state(0) == SlotState.CHECKED
    arena.control.mark_protected(SnapshotId(OTHER, 3))
    assert arena.state(0) == SlotState.CHECKED
    arena.control.mark_protected(SnapshotId(LINEAGE, 3))
    assert arena.state(0) == SlotState.PROTECTED
    again = Arena.open(arena.path)
    assert again.state(0) == SlotState.PROTECTED and not again.verify(0) and not again.unchecked(0)
    again.close()
    arena.control.void(0)
    assert arena.state(0) == SlotState.EMPTY and arena.hashes(0) is None and not arena.unchecked(0)


def test_protected_needs_this_nodes_part(arena: Arena) -> None:
    fill(arena, 0, 3, hashed=True)
    arena.control.mark_protected(SnapshotId(LINEAGE, 3))
    assert arena.state(0) == SlotState.SEALED
    checks_of(arena).store_checked(0, named(arena, 0), taken(arena, 0), 0.0)
    assert arena.state(0) == SlotState.CHECKED


def test_the_trainers_hashes_count_before_the_smps(arena: Arena) -> None:
    fill(arena, 0, 3, hashed=True)
    checks_of(arena).store_checked(0, named(arena, 0), np.zeros(len(arena.image.chunks), np.uint64), 0.0)
    found = arena.hashes(0)
    assert found is not None and found.tolist() == taken(arena, 0).tolist() and not arena.verify(0)


@pytest.mark.parametrize("lineage", [LINEAGE, OTHER])
@pytest.mark.parametrize("iteration", [3, 4])
def test_checks_of_a_slots_earlier_snapshot_do_not_count(arena: Arena, lineage: bytes, iteration: int) -> None:
    fill(arena, 0, 3, hashed=False)
    checks = checks_of(arena)
    checks.store_checked(0, named(arena, 0), taken(arena, 0), 0.5)
    checks.store_encoded(0, named(arena, 0))
    arena.control.mark_protected(SnapshotId(LINEAGE, 3))
    assert arena.state(0) == SlotState.PROTECTED
    arena.control.void(0)
    fill(arena, 0, iteration, hashed=False, lineage=lineage)
    assert arena.check(0) is None and arena.hashes(0) is None and arena.unchecked(0)
    assert arena.state(0) == SlotState.SEALED, "the same iteration, written anew, is another snapshot"
    assert not arena.verify(0)


def test_checks_of_another_slot_do_not_count(arena: Arena) -> None:
    fill(arena, 0, 3, hashed=False)
    fill(arena, 1, 4, hashed=False)
    checks_of(arena).store_checked(0, named(arena, 1), taken(arena, 1), 0.5)
    assert arena.unchecked(0) and arena.unchecked(1)


def test_an_unchecked_slot_is_verified_as_far_as_it_can_be(arena: Arena) -> None:
    image = arena.image
    fill(arena, 0, 3, hashed=False)
    seen: list[tuple[int, int]] = []
    assert not arena.verify(0, lambda *progress: seen.append(progress))
    assert seen[-1] == (image.file_bytes, image.file_bytes)
    flip_slot(arena, image.chunks[1].begin)
    assert not arena.verify(0) and arena.unchecked(0), "a chunk without a hash is neither good nor bad"
    pads = [pad.begin for pad in image.pads if pad.nbytes]
    assert len(pads) == len(image.sections) + 2
    for at, name in [(9, "header"), (image.objects.begin, "objects"), *((pad, "padding") for pad in pads)]:
        flip_slot(arena, at)
        assert arena.verify(0).names == [name]
        flip_slot(arena, at)
    checks = checks_of(arena)
    flip_slot(arena, image.chunks[1].begin)
    checks.store_checked(0, named(arena, 0), taken(arena, 0), 0.5)
    for chunk, span in enumerate(image.chunks):
        flip_slot(arena, span.end - 1)
        assert arena.verify(0).names == [f"chunk {chunk}"]
        flip_slot(arena, span.end - 1)
    assert not arena.verify(0)


def test_every_byte_of_a_slot_with_sections_is_verified(arena: Arena) -> None:
    fill(arena, 0, 3, hashed=True)
    image, rng = arena.image, np.random.default_rng(5)
    dead = range(image.objects.begin + arena.control.record(0).objects_used, image.objects.end)
    for at in [*rng.integers(0, image.file_bytes, 600).tolist(), 0, image.file_bytes - 1]:
        flip_slot(arena, at, at % 8)
        assert len(arena.verify(0).names) == (0 if at in dead else 1), at
        flip_slot(arena, at, at % 8)
    assert not arena.verify(0)


CHANGED = {"flipped": 40, "of another version": 8, "of another arena": 32}
"""The byte of the header; its checksum is wrong where it was flipped."""


@pytest.mark.parametrize("damage", ["gone", "empty", *CHANGED])
def test_a_bad_checks_file_is_as_good_as_none(arena: Arena, damage: str) -> None:
    fill(arena, 0, 3, hashed=False)
    fill(arena, 1, 4, hashed=True)
    checks_of(arena).store_checked(0, named(arena, 0), taken(arena, 0), 0.5)
    path = arena.path / CHECKS_NAME
    assert arena.state(0) == SlotState.CHECKED
    data = bytearray(path.read_bytes())
    if damage in CHANGED:
        data[CHANGED[damage]] ^= 1
    if damage != "flipped":
        data[504:512] = xxhash.xxh3_64_intdigest(bytes(data[:504])).to_bytes(8, "little")
    path.unlink()
    if damage != "gone":
        path.write_bytes(b"" if damage == "empty" else data)
    for view in (arena, Arena.open(arena.path)):
        assert view.checks is None and view.unchecked(0) and view.state(0) == SlotState.SEALED
        assert not view.verify(0) and not view.verify(1) and not view.unchecked(1)
    again = checks_of(arena)  # an SMP starts and makes a new one
    again.store_checked(0, named(arena, 0), taken(arena, 0), 0.25)
    assert arena.state(0) == SlotState.CHECKED and not arena.unchecked(0)


def test_a_flip_in_the_checks_is_unchecked_not_verified(arena: Arena) -> None:
    fill(arena, 0, 3, hashed=False)
    checks_of(arena).store_checked(0, named(arena, 0), taken(arena, 0), 0.5)
    path = arena.path / CHECKS_NAME
    for at in range(FORMAT.records_offset, FORMAT.records_offset + 64 + 8 * len(arena.image.chunks)):
        flip(path, at, 2)
        assert arena.unchecked(0), at
        flip(path, at, 2)


def test_checks_do_not_keep_a_closed_arena_mapped(arena: Arena) -> None:
    fill(arena, 0, 3, hashed=False)
    checks_of(arena).close()
    other = Arena.open(arena.path)
    assert other.checks is not None
    mapped = Path("/proc/self/maps").read_text().count(str(arena.path / CHECKS_NAME))
    other.close()
    assert Path("/proc/self/maps").read_text().count(str(arena.path / CHECKS_NAME)) == mapped - 1
