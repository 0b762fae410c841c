"""Arenas on a tmpfs: created, opened again, damaged, removed; and how far a snapshot in one has come."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
import torch

from ftckpt.errors import ArenaError, CorruptError, MemoryBudgetError
from ftckpt.memory.arena import Arena
from ftckpt.memory.checks import Checks
from ftckpt.memory.control_block import SealId, SlotState
from ftckpt.memory.directory import arena_path, list_arenas, node_directory
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest, Section, parity_fragment
from ftckpt.model.snapshot import SnapshotId
from ftckpt.smp.arenas import MonitoredArena
from tests.support.errors import raises
from tests.support.flips import flip
from tests.support.snapshots import LINEAGE, fill

pytestmark = pytest.mark.usefixtures("as_flags")

GROUP = "0123456789abcdef"
WEIGHTS = Fragment.whole("w", "F32", (3000,), Box((0,), (3000,)))
SHARE = Fragment.whole("s", "U8", (9000,), Box((0,), (9000,)))
RNG = Fragment.whole("rng", "U8", (816,), Box((0,), (816,)))
SECTIONS = (Section("private", 1), Section("shared", 1, GROUP), Section("parity", 1, GROUP))
STEPPED = (WEIGHTS, SHARE, parity_fragment(GROUP, 5000))
MANIFEST = Manifest({"tp": 0, "pp": 0}, {"tp": 1}, STEPPED, (RNG,), 5000, 8192, SECTIONS)
OTHER = b"o" * 16
Reopened = Callable[..., Arena]


@pytest.fixture
def node_dir(arena_root: Path) -> Path:
    return node_directory(arena_root, "job", "node")


@pytest.fixture
def arena(node_dir: Path) -> Iterator[Arena]:
    with closing(Arena.create(node_dir, MANIFEST, 2)) as made:
        yield made


@pytest.fixture
def reopened() -> Iterator[Reopened]:
    """Closes an arena, and opens it as another process finds it."""
    with ExitStack() as stack:

        def reopen(arena: Arena, writable: bool = False) -> Arena:
            arena.close()
            return stack.enter_context(closing(Arena.open(arena.path, writable)))

        yield reopen


def write(arena: Arena, slot: int, iteration: int) -> None:
    fill(arena, slot, iteration, hashed=True)


def test_create_write_reopen(node_dir: Path, arena: Arena, reopened: Reopened) -> None:
    assert list_arenas(node_dir) == [arena.path] == [arena_path(node_dir, MANIFEST)]
    write(arena, 1, 7)
    written = bytes(arena.read_objects(1))
    for writable in (False, True):
        again = reopened(arena, writable)
        assert again.manifest == MANIFEST
        assert [again.control.record(slot).state for slot in range(2)] == [SlotState.EMPTY, SlotState.SEALED]
        assert not again.verify(1) and again.verify(0).names == ["record"]
        assert bytes(again.read_objects(1)) == written
        assert again.slot(1).readonly is not writable


def test_modes_and_sizes(node_dir: Path) -> None:
    before = os.umask(0)
    try:
        arena = Arena.create(node_dir, MANIFEST, 2)
    finally:
        os.umask(before)
    for directory in (node_dir.parent, node_dir, arena.path):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    files = {file.name: file.stat() for file in arena.path.iterdir()}
    assert sorted(files) == ["control", "header", "lock", "slot0.safetensors", "slot1.safetensors"]
    assert all(stat.S_IMODE(status.st_mode) == 0o600 for status in files.values())
    slot = files["slot0.safetensors"]
    assert slot.st_size == arena.image.file_bytes and slot.st_blocks * 512 >= slot.st_size
    arena.close()


def test_an_smp_knows_of_slots_that_it_has_not_mapped_yet(node_dir: Path) -> None:
    """The last snapshot of a job may be in a slot that was just allocated."""
    with closing(Arena.create(node_dir, MANIFEST, 2, allocate=0)) as arena:
        guarded = MonitoredArena(arena.path)
        assert not guarded.behind
        arena.allocate(1)
        write(arena, 1, 7)
        assert guarded.behind and not guarded.mapped.snapshots()
        guarded.grow()
        assert not guarded.behind and list(guarded.mapped.snapshots()) == [SnapshotId(LINEAGE, 7)]
        guarded.close()


def test_create_refuses_to_replace(node_dir: Path, arena: Arena) -> None:
    write(arena, 0, 3)
    with raises(ArenaError, "exists", "open", "remove"):
        Arena.create(node_dir, MANIFEST, 2)
    assert not arena.verify(0)
    arena.remove()
    assert list(node_dir.iterdir()) == []
    Arena.create(node_dir, MANIFEST, 2).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_tmpfs_is_an_error_not_a_sigbus(tmp_path: Path) -> None:
    if os.system(f"mount -t tmpfs -o size=1m ftckpt-test {tmp_path} 2>/dev/null"):
        pytest.skip("mounting is not allowed here")
    try:
        node_dir = node_directory(tmp_path, "job", "node")
        big = Fragment.whole("w", "U8", (700_000,), Box((0,), (700_000,)))
        manifest = Manifest({"tp": 0}, {}, (big,), (), 100, 8192)
        Arena.create(node_dir, manifest, 1).remove()
        with pytest.raises(MemoryBudgetError):
            Arena.create(node_dir, manifest, 2)
        assert list(node_dir.iterdir()) == []
        arena = Arena.create(node_dir, manifest, 1)
        arena.close()
        slot = arena.path / "slot0.safetensors"
        os.truncate(slot, 8192)
        os.truncate(slot, arena.image.file_bytes)
        with open(tmp_path / "filler", "wb", buffering=0) as filler, pytest.raises(OSError):
            while True:
                filler.write(bytes(4096))
        Arena.open(arena.path).close()
        with pytest.raises(MemoryBudgetError):
            Arena.open(arena.path, writable=True)
    finally:
        os.system(f"umount {tmp_path}")


def test_a_removal_cut_short_leaves_nothing_that_looks_whole(
    node_dir: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ftckpt.memory.directory.remove_tree", lambda path: None)
        arena.remove()
    assert list_arenas(node_dir) == [] and len(list(node_dir.iterdir())) == 1
    again = Arena.create(node_dir, MANIFEST, 2)
    assert list(node_dir.iterdir()) == [again.path]
    again.close()


@pytest.mark.parametrize("length", [0, 100, 4096, -1, None])
def test_a_truncated_slot_spoils_only_itself(arena: Arena, reopened: Reopened, length: int | None) -> None:
    write(arena, 0, 3)
    write(arena, 1, 4)
    slot = arena.path / "slot0.safetensors"
    if length is None:
        slot.unlink()
    else:
        os.truncate(slot, length % arena.image.file_bytes)
    again = reopened(arena, writable=True)
    error = again.slot_error(0)
    assert error is not None and "slot0.safetensors" in error
    assert again.verify(0).names == [error] and not again.verify(1)
    with pytest.raises(CorruptError, match="slot0"):
        again.slot(0)


def test_an_arena_is_known_by_any_sound_header(arena: Arena, reopened: Reopened) -> None:
    write(arena, 0, 3)
    write(arena, 1, 4)
    for name in ("slot0.safetensors", "header", "slot1.safetensors"):
        again = reopened(arena)
        assert again.verify(0).names == ([] if name.startswith("slot0") else ["header"]) and not again.verify(1)
        flip(arena.path / name, 3)
    with raises(CorruptError, "slot0", "slot1", "header"):
        Arena.open(arena.path)


def test_a_link_in_place_of_a_slot_is_not_followed(node_dir: Path, arena: Arena, reopened: Reopened) -> None:
    slot = arena.path / "slot1.safetensors"
    slot.rename(node_dir / "elsewhere")
    slot.symlink_to(node_dir / "elsewhere")
    again = reopened(arena, writable=True)
    assert again.slot_error(1) is not None and again.slot_error(0) is None


def used_bytes(arena: Arena) -> int:
    return sum(path.stat().st_blocks * 512 for path in arena.path.iterdir() if "slot" in path.name)


def test_a_freed_slot_gives_its_memory_back(arena: Arena) -> None:
    write(arena, 0, 3)
    write(arena, 1, 4)
    arena.free(0)
    assert used_bytes(arena) == arena.image.file_bytes and not _mapped(arena.path / "slot0")
    assert not arena.allocated(0) and arena.control.record(0).state == SlotState.EMPTY and not arena.verify(1)
    (arena.path / "header").unlink()
    with raises(ArenaError, "slot 1", "remove"):
        arena.free(1)
    assert not arena.verify(1)
    arena.allocate(0)
    write(arena, 0, 5)
    assert not arena.verify(0)


def test_no_room_for_a_slot_changes_nothing(node_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena.create(node_dir, MANIFEST, 2, allocate=1)
    write(arena, 0, 3)
    before = used_bytes(arena)

    def full(fd: int, offset: int, length: int) -> None:
        os.ftruncate(fd, 8192)
        os.pwrite(fd, bytes(8192), 0)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryBudgetError):
        arena.allocate(1)
    assert not arena.allocated(1) and used_bytes(arena) == before and not arena.verify(0)
    arena.close()


def _mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_close_with_views_alive(node_dir: Path, arena: Arena) -> None:
    write(arena, 0, 3)
    array = np.frombuffer(arena.slot(0), dtype=np.uint8)
    tensor = torch.frombuffer(arena.slot(1), dtype=torch.uint8)
    arena.close()
    arena.close()
    assert array[: arena.image.stepped.begin].tobytes() == arena.image.header
    tensor[-1] = 1
    with pytest.raises(ValueError, match="released"):
        arena.slot(0)
    arena.remove()
    assert _mapped(node_dir)
    del array, tensor
    assert not _mapped(node_dir)


def taken(arena: Arena, slot: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.array([arena.hash_chunk(slot, chunk) for chunk in range(len(arena.image.chunks))], np.uint64)


def checks_of(arena: Arena) -> Checks:
    """As the SMP opens it."""
    return Checks.create_or_open(arena.path, 2, len(arena.image.chunks), MANIFEST.digest, writable=True)


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


def test_an_unchecked_slot_is_verified_as_far_as_it_can_be(arena: Arena) -> None:
    image = arena.image
    fill(arena, 0, 3, hashed=False)
    assert not arena.verify(0)
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


"""The byte of the header; its checksum is wrong where it was flipped."""
