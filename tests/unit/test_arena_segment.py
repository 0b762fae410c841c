"""Arenas on a tmpfs: create, reopen, damage, remove; and nothing left behind."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open

from ftckpt.errors import ArenaError, ConfigError, CorruptError, MemoryBudgetError, MismatchError
from ftckpt.memory import slots
from ftckpt.memory.arena import Arena, clear_arena
from ftckpt.memory.control_block import FORMAT, SlotState
from ftckpt.memory.directory import LOCK_NAME, arena_path, list_arenas, node_directory
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.model.snapshot import SnapshotId
from ftckpt.smp.arenas import MonitoredArena
from tests.support.choosing import inventory_of
from tests.support.errors import lacks, raises
from tests.support.flips import flip
from tests.support.smp_nodes import LINEAGE, fill

pytestmark = pytest.mark.usefixtures("as_flags")

WEIGHTS = Fragment.whole("w", "F32", (64, 100), Box((0, 0), (64, 100)))
FLAT = Fragment("m", "BF16", (64, 100), Box((0, 0), (64, 100)), 100, 2100)
RNG = Fragment.whole("rng", "U8", (816,), Box((0,), (816,)))
MANIFEST = Manifest({"tp": 0, "pp": 0}, {"tp": 1}, (WEIGHTS, FLAT), (RNG,), 5000, 8192)
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
    """What a job has as it ends may lie in one that has just got its memory."""
    with closing(Arena.create(node_dir, MANIFEST, 2, allocate=0)) as arena:
        guarded = MonitoredArena(arena.path)
        assert not guarded.behind
        arena.allocate(1)
        write(arena, 1, 7)
        assert guarded.behind and not guarded.mapped.snapshots()
        guarded.grow()
        assert not guarded.behind and list(guarded.mapped.snapshots()) == [SnapshotId(LINEAGE, 7)]
        guarded.close()


def test_a_slot_opens_in_safetensors(arena: Arena) -> None:
    write(arena, 0, 3)
    with safe_open(arena.path / "slot0.safetensors", "pt") as file:
        assert file.metadata()["format"] == "ftckpt-slot"
        weights, flat = file.get_tensor(WEIGHTS.name), file.get_tensor(FLAT.name)
    assert weights.shape == (64, 100) and weights.dtype == torch.float32
    assert flat.shape == (2000,) and flat.dtype == torch.bfloat16
    begin = arena.image.stepped.begin
    assert weights.numpy().tobytes() == arena.slot(0)[begin : begin + WEIGHTS.nbytes]


def test_the_last_slot_of_an_arena_is_renewed_in_one_step(node_dir: Path, reopened: Reopened) -> None:
    """Nothing else shows whose arena it is."""
    Arena.create(node_dir, MANIFEST, 2, allocate=1).close()
    path = arena_path(node_dir, MANIFEST)
    (path / "header").unlink()
    os.truncate(path / slots.slot_name(0), 8192)
    arena = Arena.open(path, writable=True)
    assert arena.slot_error(0) is not None
    arena.renew(0)
    write(arena, 0, 7)
    again = reopened(arena)
    assert again.find(SnapshotId(LINEAGE, 7)) == 0 and not again.verify(0)


def test_a_cleared_arena_keeps_its_parity_and_is_made_anew(node_dir: Path, arena: Arena, reopened: Reopened) -> None:
    path = arena.path
    for name in ("parity.peer.0", "checks", ".slot1.0123abcd.new"):
        (path / name).write_text(name)
    clear_arena(path)
    assert {entry.name for entry in path.iterdir()} <= {"parity.peer.0", LOCK_NAME}
    with pytest.raises(CorruptError):
        Arena.open(path)
    anew = Arena.create(node_dir, MANIFEST, 2)
    write(anew, 0, 7)
    assert (path / "parity.peer.0").read_text() == "parity.peer.0"
    assert reopened(anew).find(SnapshotId(LINEAGE, 7)) == 0


def test_no_room_for_an_arena_made_anew_leaves_its_parity(
    node_dir: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = arena.path
    (path / "parity.peer.0").write_text("parity")
    clear_arena(path)

    def full(*_: object, **__: object) -> None:
        raise MemoryBudgetError("no room")

    monkeypatch.setattr(slots, "create_mapping", full)
    with pytest.raises(MemoryBudgetError):
        Arena.create(node_dir, MANIFEST, 2)
    assert (path / "parity.peer.0").exists() and not list(path.glob("slot*"))


def test_create_refuses_to_replace(node_dir: Path, arena: Arena) -> None:
    write(arena, 0, 3)
    with raises(ArenaError, "exists", "open", "remove"):
        Arena.create(node_dir, MANIFEST, 2)
    assert not arena.verify(0)
    arena.remove()
    assert list(node_dir.iterdir()) == []
    Arena.create(node_dir, MANIFEST, 2).close()


def test_stale_temporaries_of_the_same_shard_go_away(node_dir: Path) -> None:
    name = arena_path(node_dir, MANIFEST).name
    stale = [node_dir / f".{name}.new-1", node_dir / f".{MANIFEST.shard}.00000000.gone-22"]
    other = node_dir / ".tp1-pp0.00000000.new-1"
    for directory in (*stale, other):
        directory.mkdir()
        (directory / "slot0.safetensors").write_bytes(b"half")
    assert list_arenas(node_dir) == []
    Arena.create(node_dir, MANIFEST, 2).close()
    assert not any(directory.exists() for directory in stale)
    assert other.exists()


def test_no_room_is_an_error_and_leaves_nothing(node_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    reserve = os.posix_fallocate

    def full(fd: int, offset: int, length: int) -> None:
        calls.append(length)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with raises(MemoryBudgetError, "bytes", "--ftckpt-arena") as caught:
        Arena.create(node_dir, MANIFEST, 2)
    assert len(calls) == 2 and list(node_dir.iterdir()) == []
    assert caught.tb is not None and not _mapped(node_dir)  # although the traceback holds the frames


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


def test_verify_names_what_is_bad_and_reports_progress(arena: Arena) -> None:
    write(arena, 0, 3)
    path, image = arena.path / "slot0.safetensors", arena.image
    for at in (9, image.chunks[2].begin, image.chunks[-1].end - 1, image.objects.begin, image.volatile.end):
        flip(path, at)
    seen: list[tuple[int, int]] = []
    bad = arena.verify(0, lambda done, whole: seen.append((done, whole))).names
    assert bad == ["header", "padding", "chunk 2", f"chunk {len(image.chunks) - 1}", "objects"]
    assert seen[-1] == (image.file_bytes, image.file_bytes) and seen == sorted(seen)
    flip(arena.path / "control", FORMAT.records_offset + 40)
    assert arena.verify(0).names == ["record"]


def test_objects_longer_than_their_room_are_bad(arena: Arena) -> None:
    arena.control.begin(0)
    arena.control.set_objects(0, 5001, 0)
    arena.control.seal(0, SnapshotId(LINEAGE, 1))
    with raises(CorruptError, "5000"):
        arena.read_objects(0)
    assert "objects" in arena.verify(0).names


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


def test_a_slot_with_holes_is_filled_before_it_is_written(arena: Arena, reopened: Reopened) -> None:
    slot = arena.path / "slot1.safetensors"
    os.truncate(slot, 4096)
    os.truncate(slot, arena.image.file_bytes)
    again = reopened(arena, writable=True)
    assert slot.stat().st_blocks * 512 >= again.image.file_bytes


def test_an_arena_is_known_by_any_sound_header(arena: Arena, reopened: Reopened) -> None:
    write(arena, 0, 3)
    write(arena, 1, 4)
    for name in ("slot0.safetensors", "header", "slot1.safetensors"):
        again = reopened(arena)
        assert again.verify(0).names == ([] if name.startswith("slot0") else ["header"]) and not again.verify(1)
        flip(arena.path / name, 3)
    with raises(CorruptError, "slot0", "slot1", "header"):
        Arena.open(arena.path)


def test_an_arena_is_one_before_a_slot_has_memory(node_dir: Path) -> None:
    arena = Arena.create(node_dir, MANIFEST, 2, allocate=0)
    with closing(Arena.open(arena.path)) as seen:
        assert seen.manifest == MANIFEST and not any(map(seen.allocated, range(2)))
        arena.allocate(1)
        write(arena, 1, 7)
        seen.map(1)
        assert seen.find(SnapshotId(LINEAGE, 7)) == 1 and not seen.verify(1)
    arena.free(1)
    arena.close()
    with closing(Arena.open(arena.path, writable=True)) as again:
        assert not again.snapshots()


def test_slots_of_another_manifest_are_corrupt(node_dir: Path) -> None:
    other = Manifest({"tp": 1, "pp": 0}, {"tp": 1}, (WEIGHTS, FLAT), (RNG,), 5000, 8192)
    arenas = [Arena.create(node_dir, manifest, 1) for manifest in (MANIFEST, other)]
    for arena in arenas:
        arena.close()
    for name in ("slot0.safetensors", "header"):
        shutil.copy(arenas[1].path / name, arenas[0].path / name)
    with raises(CorruptError):
        Arena.open(arenas[0].path)


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "flipped"])
def test_a_bad_control_block_is_corrupt(arena: Arena, damage: str) -> None:
    arena.close()
    control = arena.path / "control"
    match damage:
        case "missing":
            control.unlink()
        case "empty":
            os.truncate(control, 0)
        case "truncated":
            os.truncate(control, 1100)
        case "flipped":
            flip(control, 33)
    with pytest.raises(CorruptError, match="control"):
        Arena.open(arena.path)


def test_a_control_block_of_another_version_is_a_mismatch(arena: Arena) -> None:
    header = bytearray((arena.path / "control").read_bytes()[:504])
    header[8] = 9
    with open(arena.path / "control", "r+b") as file:
        file.write(header + xxhash.xxh3_64_intdigest(bytes(header)).to_bytes(8, "little"))
    with pytest.raises(MismatchError, match="version 9"):
        Arena.open(arena.path)


def test_a_link_in_place_of_a_slot_is_not_followed(node_dir: Path, arena: Arena, reopened: Reopened) -> None:
    slot = arena.path / "slot1.safetensors"
    slot.rename(node_dir / "elsewhere")
    slot.symlink_to(node_dir / "elsewhere")
    again = reopened(arena, writable=True)
    assert again.slot_error(1) is not None and again.slot_error(0) is None


def test_a_missing_arena(node_dir: Path) -> None:
    with pytest.raises(ArenaError):
        Arena.open(node_dir / "tp9.00000000")


def used_bytes(arena: Arena) -> int:
    return sum(path.stat().st_blocks * 512 for path in arena.path.iterdir() if "slot" in path.name)


def test_slots_without_memory(node_dir: Path, reopened: Reopened) -> None:
    arena = Arena.create(node_dir, MANIFEST, 3, allocate=1)
    assert [arena.allocated(slot) for slot in range(3)] == [True, False, False] and arena.control.slots == 3
    assert used_bytes(arena) == arena.image.file_bytes
    error = arena.slot_error(2)
    assert error is not None and not lacks(error, "slot2.safetensors")
    assert arena.verify(2).names == [error]
    with pytest.raises(ArenaError) as caught:
        arena.slot(2)
    assert not isinstance(caught.value, CorruptError)
    assert not arena.header_good(2)
    arena.allocate(2)
    write(arena, 2, 7)
    arena.allocate(2)
    assert not arena.verify(2), "allocating what is there must not touch it"
    again = reopened(arena, writable=True)
    assert [again.allocated(slot) for slot in range(3)] == [True, False, True] and not again.verify(2)
    again.allocate(1)
    write(again, 1, 8)
    assert not again.verify(1) and used_bytes(again) == 3 * again.image.file_bytes
    again.remove()
    assert list(node_dir.iterdir()) == []


@pytest.mark.parametrize("allocate", [3, -1])
def test_impossible_numbers_of_slots_to_allocate(node_dir: Path, allocate: int) -> None:
    with raises(ConfigError, "0", "2"):
        Arena.create(node_dir, MANIFEST, 2, allocate)
    assert list(node_dir.iterdir()) == []


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


def test_memory_of_a_freed_slot_comes_back_with_its_last_view(arena: Arena) -> None:
    first, second = np.frombuffer(arena.slot(0), np.uint8), torch.frombuffer(arena.slot(0), dtype=torch.uint8)
    arena.free(0)
    assert _mapped(arena.path / "slot0")
    arena.allocate(0)  # another file: what the old view writes does not reach it
    second[-1] = 7
    assert arena.slot(0)[-1] == 0
    arena.close()
    del first
    assert _mapped(arena.path / "slot0")
    del second
    assert not _mapped(arena.path)


@pytest.mark.parametrize("state", ["WRITING", "SEALED", "torn"])
def test_a_missing_file_is_damage_unless_the_record_is_empty(
    node_dir: Path, arena: Arena, reopened: Reopened, state: str
) -> None:
    write(arena, 0, 3)
    if state == "WRITING":
        arena.control.begin(0)
    if state == "torn":
        flip(arena.path / "control", FORMAT.records_offset + 30)
    (arena.path / "slot0.safetensors").unlink()
    again = reopened(arena)
    assert again.allocated(0)
    with pytest.raises(CorruptError, match="slot0"):
        again.slot(0)
    (report,) = inventory_of(node_dir).arenas
    assert len(report.problems) == 1 and "slot 0" in report.problems[0]
    again = reopened(again, writable=True)
    again.renew(0)
    write(again, 0, 5)
    assert not again.verify(0)


def test_a_slot_that_is_not_allocated_is_no_problem_of_the_inventory(node_dir: Path) -> None:
    arena = Arena.create(node_dir, MANIFEST, 2, allocate=1)
    write(arena, 0, 3)
    (report,) = inventory_of(node_dir).arenas
    assert report.problems == () and [slot.index for slot in report.slots] == [0]
    arena.close()


def test_a_slot_freed_or_allocated_while_a_reader_opens(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    write(arena, 1, 4)
    opened = slots.open_mapping

    def allocated_after(path: Path, *args: Any, **options: Any) -> Any:
        try:
            return opened(path, *args, **options)
        finally:
            if args[0] and path.name == "slot0.safetensors" and not arena.allocated(0):
                arena.allocate(0)
                write(arena, 0, 5)

    def freed_before(path: Path, *args: Any, **options: Any) -> Any:
        if args[0] and path.name == "slot0.safetensors" and arena.allocated(0):
            arena.free(0)
        return opened(path, *args, **options)

    arena.free(0)
    with monkeypatch.context() as patch:
        patch.setattr(slots, "open_mapping", allocated_after)
        reader = Arena.open(arena.path)
    assert not reader.verify(0)
    reader.close()
    with monkeypatch.context() as patch:
        patch.setattr(slots, "open_mapping", freed_before)
        reader = Arena.open(arena.path)
    assert not reader.allocated(0)
    reader.close()


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


def test_what_a_killed_allocation_left_goes_with_the_next_lock(node_dir: Path) -> None:
    arena = Arena.create(node_dir, MANIFEST, 2, allocate=1)
    (arena.path / ".slot1.safetensors.0123abcd.new").write_bytes(bytes(9000))
    arena.lock(0)
    assert used_bytes(arena) == arena.image.file_bytes
    arena.allocate(1)
    assert arena.slot_error(1) is None
    arena.remove()


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


def test_close_gives_the_memory_back(arena: Arena) -> None:
    assert _mapped(arena.path.parent)
    arena.close()
    assert not _mapped(arena.path.parent)
