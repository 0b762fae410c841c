"""An arena: the shared-memory files of one shard, mapped. ``FORMAT.md`` has the byte maps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from pathlib import Path

import xxhash

from ftckpt.array_types import Hashes
from ftckpt.errors import ArenaError, ConfigError, CorruptError, MismatchError
from ftckpt.memory.atomic_files import remove_unfinished
from ftckpt.memory.checks import Check, Checks, CheckState
from ftckpt.memory.control_block import CONTROL_NAME, ControlBlock, SlotRecord, SlotState, make_control
from ftckpt.memory.corruption import HEADER, OBJECTS, PADDING, Corruption
from ftckpt.memory.directory import (
    LOCK_NAME,
    arena_path,
    lock_arena,
    remove_arena,
    remove_stale,
    remove_tree,
    require_own,
)
from ftckpt.memory.image import SlotImage
from ftckpt.memory.locks import FileLock
from ftckpt.memory.mapping import FileId, Mapping, open_mapping
from ftckpt.memory.parity_file import parity_of
from ftckpt.memory.slots import (
    FreshSlot,
    SlotMapping,
    header_file_good,
    image_of_files,
    open_slot,
    slot_name,
    write_header,
)
from ftckpt.model.manifest import Manifest
from ftckpt.model.snapshot import SnapshotId


def clear_arena(path: Path) -> None:
    """Delete the files of an unreadable arena except its lock and its parity, which reconstructs other arenas.

    ``create`` reuses the directory. A kill at any point leaves an arena that is unreadable or cleared.
    """
    kept = {LOCK_NAME, *(name.path.name for name in parity_of(path))}
    # The control block goes first: no process takes a directory without one for an arena.
    (path / CONTROL_NAME).unlink(missing_ok=True)
    for entry in list(path.iterdir()):
        if entry.name not in kept:
            entry.unlink(missing_ok=True)


def _unmap(slot: SlotMapping) -> None:
    if isinstance(slot, Mapping):
        slot.close()


class Arena:
    """The mapped files of one shard.

    ``create`` or ``open`` returns it; the caller closes it. Views from ``slot`` stay valid after ``close`` and
    ``free``: the memory is unmapped when the last view is gone. A slot that is not allocated has no memory: its
    record is EMPTY and its file is missing.

    One thread of one process writes. It calls ``lock`` once, and for each snapshot ``control.begin``, stores into
    ``slot``, then ``control.set_objects`` and ``control.seal``. Other processes may read at any time.

    The checksums of a snapshot's chunks are in the control block, or, if it was sealed without them, in the file
    ``checks`` once the node's SMP has computed them. An entry of ``checks`` counts only if its ``seal_id`` equals
    that of the slot's record.
    """

    def __init__(self, path: Path, image: SlotImage, control: Mapping, slots: list[SlotMapping]) -> None:
        self.path = path
        self.image = image
        self.control = ControlBlock(control.data)
        self._control_map = control
        self._slots = slots
        self._checks: Checks | None = None
        self._lock: FileLock | None = None

    @classmethod
    def create(cls, node_dir: Path, manifest: Manifest, slots: int, allocate: int | None = None) -> Arena:
        """Create an arena whose slots are all EMPTY, with every page of the first ``allocate`` allocated and mapped.

        The arena is built under a temporary name and renamed when complete, or in place after ``clear_arena``.
        Temporary directories that killed processes left for this shard are removed first. The arena is returned
        unlocked. The method ``allocate`` allocates the other slots later; None allocates all of them now.

        Raises:
            ArenaError: an arena for this manifest exists, or another process is creating it.
            ConfigError: ``allocate`` is not 0 to ``slots``.
            MemoryBudgetError: the file system is full; no file is left.
        """
        final = arena_path(node_dir, manifest)
        if (final / CONTROL_NAME).exists():
            raise ArenaError(f"{final} exists; open it, or remove it first")
        if allocate is not None and not 0 <= allocate <= slots:
            raise ConfigError(f"{final}: allocate {allocate} is not 0 to {slots}, the number of slots")
        image = SlotImage.of(manifest)
        remove_stale(node_dir, manifest.shard)
        temporary = node_dir / f".{final.name}.new-{os.getpid()}"  # the dot hides it from ``list_arenas``
        directory = final if final.exists() else temporary
        files: list[SlotMapping] = [None] * slots
        try:
            with ExitStack() as undo:
                undo.callback(remove_tree if directory == temporary else clear_arena, directory)
                directory.mkdir(mode=0o700, exist_ok=True)
                # ``remove_stale`` deletes temporary directories that no process has locked.
                with FileLock(directory / LOCK_NAME, 0, f"new arena {final.name}", "end that process first"):
                    write_header(directory, image)
                    for slot in range(slots if allocate is None else allocate):
                        files[slot] = mapping = FreshSlot(directory / slot_name(slot), image).take()
                        undo.callback(mapping.close)
                    # The control block comes last: no process takes a directory without one for an arena.
                    control = undo.enter_context(closing(make_control(directory, slots, image)))
                    # Atomic: a listing shows the complete arena or none. For a cleared arena this does nothing.
                    directory.rename(final)
                undo.pop_all()
        except OSError as error:
            raise ArenaError(f"{final}: cannot be created: {error.strerror}") from None
        return cls(final, image, control, files)

    @classmethod
    def open(cls, path: Path, writable: bool = False) -> Arena:
        """Map an existing arena. ``slot_error`` reports a corrupt slot; the others stay usable.

        Raises:
            CorruptError: the control block is corrupt, or no header identifies the arena.
            MismatchError: written by another format version.
            ArenaError: missing, or owned by another user.
            MemoryBudgetError: a slot file opened for writing has holes and the file system is too full to fill them.
        """
        if not path.exists():
            raise ArenaError(f"{path}: no such arena")
        require_own(path)
        try:
            control = open_mapping(path / CONTROL_NAME, None, writable)
        except ArenaError as error:
            # The directory exists: without a control block the arena is corrupt, not missing.
            raise CorruptError(str(error)) from None
        try:
            # A view of its own that is released on errors too: a remaining one would keep the control block mapped.
            with memoryview(control.data) as view, closing(ControlBlock(view)) as block:
                image = image_of_files(path, block.slots, block.digest)
                if len(image.chunks) != block.num_chunks:
                    raise CorruptError(
                        f"{path}: {block.num_chunks} chunks in the control block, {len(image.chunks)} in a slot"
                    )
                files = [open_slot(path, image.file_bytes, block, slot, writable) for slot in range(block.slots)]
        except BaseException:  # no other code unmaps it
            control.close()
            raise
        return cls(path, image, control, files)

    def allocate(self, slot: int, reserves: bool = True) -> None:
        """Allocate ``slot`` if it has no memory; it can be written without opening the arena again.

        Without ``reserves`` the file has holes and the caller writes all of it, the header included, by ``write_at``:
        a store to a missing page can end the process by SIGBUS. Opening the arena for writing fills remaining holes.

        Raises:
            MemoryBudgetError: the file system is full; nothing has changed.
            ArenaError: the file cannot be created.
        """
        if not self.allocated(slot):
            self._make(slot, reserves)

    def build(self, slot: int, halted: Callable[[], bool] = bool) -> FreshSlot:
        """Allocate memory for ``slot`` without changing the arena; ``put`` installs it. Any thread may call this.

        Raises:
            MemoryBudgetError: the file system is full.
            ArenaError: the file cannot be created, or ``halted``, polled every 256 MiB, returned true.
        """
        return FreshSlot(self.path / slot_name(slot), self.image, halted)

    def put(self, slot: int, fresh: FreshSlot) -> None:
        """Install ``fresh`` as ``slot``, replacing a corrupt one. Constant time: the memory is allocated already.

        Raises:
            ArenaError: the file cannot be renamed, for example because the arena was deleted.
        """
        old, self._slots[slot] = self._slots[slot], fresh.take()
        _unmap(old)

    def map(self, slot: int) -> None:
        """Map ``slot`` for reading after its writer has allocated it. Existing views stay valid."""
        self._slots[slot] = open_slot(self.path, self.image.file_bytes, self.control, slot, False)

    def free(self, slot: int) -> None:
        """Invalidate the record of ``slot`` and delete its file, until ``allocate``.

        The memory is freed when the last view of the slot is gone.

        Raises:
            ArenaError: the slot has the last readable header, without which the arena cannot be identified.
        """
        if not self._known_beside(slot):
            raise ArenaError(f"{self.path}: slot {slot} has the last readable header; remove the arena instead")
        # First: readers take a missing file for corruption unless the record is EMPTY.
        self.control.void(slot)
        self._delete(slot)

    def lock(self, deadline_secs: float) -> None:
        """Acquire the arena's writer lock until ``close``.

        Raises:
            ArenaError: another process, named by pid, still has the lock after ``deadline_secs``.
        """
        self._lock = lock_arena(self.path, deadline_secs)
        # Under the lock: only its owner creates slots, so unfinished ones belong to a killed process.
        remove_unfinished(self.path, "slot*")

    def renew(self, slot: int) -> None:
        """Replace the file of a corrupt ``slot`` by an empty one.

        Raises:
            MemoryBudgetError: the file system is full; the slot is still corrupt, or not allocated.
            ArenaError: the file cannot be created.
        """
        if self._known_beside(slot):
            # Freed first: the node may have no room for both files.
            self.free(slot)
            self.allocate(slot)
        else:
            # Replaced by one rename: this file has the only header that identifies the arena.
            self.control.void(slot)
            self._make(slot)

    def remove(self) -> None:
        """Close the arena and delete its files."""
        remove_arena(self.path)
        self.close()

    @property
    def manifest(self) -> Manifest:
        return self.image.manifest

    def slot(self, slot: int) -> memoryview:
        """A view of the file of ``slot``; raises CorruptError if it is corrupt, ArenaError if it is not allocated."""
        mapping = self._slots[slot]
        if isinstance(mapping, Mapping):
            return mapping.data[:]
        raise (ArenaError if mapping is None else CorruptError)(str(self.slot_error(slot)))

    def slot_id(self, slot: int) -> FileId | None:
        """The id of the mapped file of ``slot``; None if none is mapped."""
        mapping = self._slots[slot]
        return mapping.file_id if isinstance(mapping, Mapping) else None

    def slot_error(self, slot: int) -> str | None:
        """Why ``slot`` cannot be used, or None."""
        mapping = self._slots[slot]
        if mapping is None:
            return f"{self.path / slot_name(slot)}: not allocated"
        return mapping if isinstance(mapping, str) else None

    def allocated(self, slot: int) -> bool:
        """Whether ``slot`` is mapped or corrupt."""
        return self._slots[slot] is not None

    def snapshots(self) -> dict[SnapshotId, int]:
        """The slot of each snapshot in the arena, newest first; unreadable slots are omitted."""
        records = [(self.control.record(slot), slot) for slot in range(self.control.slots)]
        # If two slots contain the same snapshot, the one sealed last counts.
        records.sort(key=lambda pair: pair[0].sequence)
        sealed = {r.snapshot: slot for r, slot in records if r.snapshot is not None and self.slot_error(slot) is None}
        return dict(sorted(sealed.items(), reverse=True))

    def find(self, snapshot: SnapshotId | None) -> int | None:
        """The slot of ``snapshot``, or None."""
        return None if snapshot is None else self.snapshots().get(snapshot)

    @property
    def checks(self) -> Checks | None:
        """The SMP's ``checks`` file, read-only; None if it is missing or corrupt."""
        if self._checks is None or self._checks.replaced:
            block = self.control
            try:
                self._checks = Checks.create_or_open(
                    self.path, block.slots, block.num_chunks, block.digest, writable=False
                )
            except (ArenaError, MismatchError):  # missing or corrupt: the SMP creates it again
                self._checks = None
        return self._checks

    def check(self, slot: int) -> Check | None:
        """The SMP's entry for the snapshot that is in ``slot`` now, or None."""
        return self._check(slot, self.control.record(slot))

    def state(self, slot: int) -> SlotState:
        """The state of the snapshot in ``slot``.

        CHECKED: the SMP has checksums of it. PROTECTED: this node has encoded its part and the control block
        marks the snapshot as protected on all nodes.
        """
        record = self.control.record(slot)
        check = self._check(slot, record)
        if check is None:
            return record.state
        # ENCODED is only this node's part. The mark, set after an all-reduce, stands for all nodes.
        is_encoded = check.state == CheckState.ENCODED
        if is_encoded and self.control.protected() == record.snapshot:
            return SlotState.PROTECTED
        return max(record.state, SlotState.CHECKED)

    def hashes(self, slot: int) -> Hashes | None:
        """The xxh3-64 of each chunk of the snapshot in ``slot``; None without a snapshot or without hashes yet."""
        return self._hashes(slot, self.control.record(slot))

    def gap_secs(self, slot: int) -> float:
        """Seconds from the seal of the snapshot in ``slot`` to its checksums, or to now without any: the gap in which
        memory corruption goes undetected."""
        record = self.control.record(slot)
        if not record.sealed or record.hashed:
            return 0.0
        check = self._check(slot, record)
        return check.gap_secs if check is not None else max(0.0, time.monotonic() - record.sealed_secs)

    def unchecked(self, slot: int) -> bool:
        """Whether ``slot`` has a snapshot without hashes, whose chunks ``verify`` cannot check."""
        record = self.control.record(slot)
        return record.sealed and self._hashes(slot, record) is None

    def hash_chunk(self, slot: int, chunk: int) -> int:
        """The xxh3-64 of ``chunk``, read in place; xxhash releases the GIL."""
        span = self.image.chunks[chunk]
        with self.slot(slot) as data, data[span.begin : span.end] as piece:
            return xxhash.xxh3_64_intdigest(piece)

    def read_objects(self, slot: int) -> memoryview:
        """The objects in use, not verified; raises CorruptError if their length exceeds the capacity."""
        return self._objects(slot, self.control.record(slot))

    def verify(self, slot: int) -> Corruption:
        """Check every byte of ``slot`` that has a checksum and return its corruption.

        Every byte of a snapshot has one, except the chunks of an ``unchecked`` snapshot. A slot without a snapshot
        or with a torn record is reported as unusable. Unused object capacity is not read.
        """
        error = self.slot_error(slot)
        if error is not None:
            return Corruption(reason=error)
        record = self.control.record(slot)
        if not record.sealed:
            return Corruption(reason="record")
        hashes = self._hashes(slot, record)
        expected = [] if hashes is None else hashes.tolist()
        return self.damage(slot, record, [n for n, value in enumerate(expected) if self.hash_chunk(slot, n) != value])

    def damage(self, slot: int, record: SlotRecord, bad_chunks: Iterable[int]) -> Corruption:
        """The result of ``verify`` for a slot with ``record`` whose chunks the caller has already checked."""
        parts = [] if self.header_good(slot) else [HEADER]
        with self.slot(slot) as data:
            # Padding is in no chunk and has no checksum; the format requires zeros.
            if any(bytes(data[pad.begin : pad.end]).strip(b"\0") for pad in self.image.pads):
                parts.append(PADDING)
        if not self._objects_good(slot, record):
            parts.append(OBJECTS)
        return Corruption(tuple(bad_chunks), tuple(parts))

    def header_good(self, slot: int) -> bool:
        """Whether ``slot`` is mapped and starts with the header that follows from its manifest."""
        if self.slot_error(slot) is not None:
            return False
        with self.slot(slot) as data:
            return bytes(data[: len(self.image.header)]) == self.image.header

    def close(self) -> None:
        """Release the lock and unmap. Remaining views are no error: they keep their memory mapped."""
        if self._lock is not None:
            self._lock.release()
        self._checks = None
        # Views before their mapping: a live view keeps it mapped.
        self.control.close()
        self._control_map.close()
        for mapping in self._slots:
            _unmap(mapping)

    def _make(self, slot: int, reserves: bool = True) -> None:
        self.put(slot, FreshSlot(self.path / slot_name(slot), self.image, reserves=reserves))

    def _delete(self, slot: int) -> None:
        # Views elsewhere stay valid: the pages live until the last mapping of the file is gone.
        (self.path / slot_name(slot)).unlink(missing_ok=True)
        mapping, self._slots[slot] = self._slots[slot], None
        _unmap(mapping)

    def _known_beside(self, slot: int) -> bool:
        others = (other for other in range(self.control.slots) if other != slot)
        return header_file_good(self.path, self.image) or any(self.slot_error(other) is None for other in others)

    def _check(self, slot: int, record: SlotRecord) -> Check | None:
        """The SMP's entry for ``record``; None if it is for another seal: the slot was rewritten since."""
        checks = self.checks if record.sealed else None
        check = None if checks is None else checks.read(slot)
        return check if check is not None and check.seal_id == record.seal_id else None

    def _hashes(self, slot: int, record: SlotRecord) -> Hashes | None:
        if not record.sealed:
            return None
        if record.hashed:
            return record.chunk_hashes
        check = self._check(slot, record)
        return None if check is None else check.chunk_hashes

    def _objects(self, slot: int, record: SlotRecord) -> memoryview:
        span = self.image.objects
        # Checked here because no checksum covers the length in an unsealed record.
        if record.objects_used > span.nbytes:
            raise CorruptError(f"slot {slot}: {record.objects_used} bytes of objects, room for {span.nbytes}")
        return self.slot(slot)[span.begin : span.begin + record.objects_used]

    def _objects_good(self, slot: int, record: SlotRecord) -> bool:
        try:
            with self._objects(slot, record) as objects:
                return xxhash.xxh3_64_intdigest(objects) == record.objects_hash
        except CorruptError:
            return False
