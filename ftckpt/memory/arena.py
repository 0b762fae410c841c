"""An arena: the files of one shard, mapped; ``FORMAT.md`` has the byte maps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import xxhash

from ftckpt.array_types import Hashes
from ftckpt.errors import ArenaError, ConfigError, CorruptError, MismatchError
from ftckpt.memory.checks import Check, Checks, CheckState
from ftckpt.memory.control_block import ControlBlock, SlotRecord, SlotState, control_bytes
from ftckpt.memory.corruption import HEADER, OBJECTS, PADDING, Corruption
from ftckpt.memory.directory import (
    LOCK_NAME,
    arena_path,
    fresh_name,
    lock_arena,
    remove_arena,
    remove_half_made,
    remove_stale,
    remove_tree,
    require_own,
)
from ftckpt.memory.image import SlotImage
from ftckpt.memory.locks import FileLock
from ftckpt.memory.mapping import FileId, Mapping, create_mapping, open_mapping
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

Progress = Callable[[int, int], None]
"""Called with the bytes done and their total."""
HashesOf = Callable[[Iterable[int]], Iterable[int]]
"""Computes the hashes of chunks, given by their numbers."""


CONTROL_NAME = "control"


def clear_arena(path: Path) -> None:
    """Delete all of an arena that cannot be read but its parity, which rebuilds others; ``create`` makes it anew.

    After a kill at any point it cannot be read either, or is cleared.
    """
    kept = {LOCK_NAME, *(name.path.name for name in parity_of(path))}
    # First: without a control block nobody takes what else is there for an arena.
    (path / CONTROL_NAME).unlink(missing_ok=True)
    for entry in list(path.iterdir()):
        if entry.name not in kept:
            entry.unlink(missing_ok=True)


@contextmanager
def open_control(path: Path, writable: bool = False) -> Iterator[ControlBlock]:
    """The control block of the arena at ``path`` alone, whatever becomes of its slots.

    Raises:
        ArenaError: missing, or owned by another user.
        CorruptError, MismatchError: bad, or of another format version.
    """
    require_own(path)
    with (
        closing(open_mapping(path / CONTROL_NAME, None, writable)) as mapping,
        closing(ControlBlock(mapping.data)) as block,
    ):
        yield block


def _make_control(directory: Path, slots: int, image: SlotImage) -> Mapping:
    with fresh_name(directory / CONTROL_NAME) as fresh:
        control = create_mapping(fresh, control_bytes(slots, len(image.chunks)))
        ControlBlock.format_into(control.data, image, slots).close()
        fresh.rename(directory / CONTROL_NAME)
    return control


def _unmap(slot: SlotMapping) -> None:
    if isinstance(slot, Mapping):
        slot.close()


class Arena:
    """The mapped files of one shard.

    Made by ``create`` or ``open``; the caller closes it. ``slot`` views stay usable after ``close`` and
    ``free``: the memory is unmapped when the last of them is gone. Who writes holds the lock (``lock``).
    A slot may be without memory, not allocated: its record is EMPTY, its file is missing.

    The checksums of a snapshot's chunks are in the control block, or, where it was sealed without any, in the
    file ``checks`` as soon as the node's SMP has computed them. What is in ``checks`` counts for a slot only if it
    names the sealing (``seal_id``) of the slot's record.
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
        """Create an arena whose slots are all EMPTY; every page of the first ``allocate`` is allocated and mapped.

        It is built under a temporary name and renamed when complete, or in place where ``clear_arena`` was. What
        killed processes left under temporary names for the same shard is removed first. The arena comes back
        unlocked. The others of its ``slots`` get their memory by the method ``allocate``; None means all at once.

        Raises:
            ArenaError: there is an arena for this manifest already, or another process is creating it.
            ConfigError: ``allocate`` is not 0 to ``slots``.
            MemoryBudgetError: the file system has no room; nothing is left behind.
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
                # The lock tells it from what a killed process left half made, which ``remove_stale`` deletes.
                with FileLock(directory / LOCK_NAME, 0, f"new arena {final.name}", "end that process first"):
                    write_header(directory, image)
                    for slot in range(slots if allocate is None else allocate):
                        files[slot] = mapping = FreshSlot(directory / slot_name(slot), image).take()
                        undo.callback(mapping.close)
                    # Last of all files: without a control block nobody takes what else is there for an arena.
                    control = undo.enter_context(closing(_make_control(directory, slots, image)))
                    # One system call: whoever lists sees all of it, or nothing. Nothing happens to a cleared one.
                    directory.rename(final)
                undo.pop_all()
        except OSError as error:
            raise ArenaError(f"{final}: cannot be created: {error.strerror}") from None
        return cls(final, image, control, files)

    @classmethod
    def open(cls, path: Path, writable: bool = False) -> Arena:
        """Map an existing arena. A bad slot is reported by ``slot_error``, it does not spoil the others.

        Raises:
            CorruptError: the control block is bad, or there is no header to know the arena by.
            MismatchError: written by another format version.
            ArenaError: missing, or owned by another user.
            MemoryBudgetError: a slot to be written has holes and there is no room to fill them.
        """
        if not path.exists():
            raise ArenaError(f"{path}: no such arena")
        require_own(path)
        try:
            control = open_mapping(path / CONTROL_NAME, None, writable)
        except ArenaError as error:
            # The directory is there: without a control block it is a damaged arena, not a missing one.
            raise CorruptError(str(error)) from None
        try:
            # Views of its own, released on an error too: one that is left would keep the control block mapped.
            with memoryview(control.data) as view, closing(ControlBlock(view)) as block:
                image = image_of_files(path, block.slots, block.digest)
                if len(image.chunks) != block.num_chunks:
                    raise CorruptError(
                        f"{path}: {block.num_chunks} chunks in the control block, {len(image.chunks)} in a slot"
                    )
                files = [open_slot(path, image.file_bytes, block, slot, writable) for slot in range(block.slots)]
        except BaseException:  # nobody else would unmap it
            control.close()
            raise
        return cls(path, image, control, files)

    def allocate(self, slot: int, reserves: bool = True) -> None:
        """Give ``slot`` memory if it has none; it can be written at once, without opening the arena again. Where it
        ``reserves`` none all that the slot holds, its header too, must be brought by ``write_at``: a store to a page
        that is not there could end the process. Who opens the arena to write it fills what holes are left.

        Raises:
            MemoryBudgetError: the file system has no room; nothing has changed.
            ArenaError: the file cannot be created.
        """
        if not self.allocated(slot):
            self._make(slot, reserves)

    def build(self, slot: int, halted: Callable[[], bool] = bool) -> FreshSlot:
        """The memory that ``slot`` will have by ``put``; any thread may wait for it, and nothing has changed by then.

        Raises:
            MemoryBudgetError: the file system has no room.
            ArenaError: the file cannot be created, or ``halted``, asked every some 100 MB, said so.
        """
        return FreshSlot(self.path / slot_name(slot), self.image, halted)

    def put(self, slot: int, fresh: FreshSlot) -> None:
        """Have ``fresh`` as ``slot``, in place of a damaged one; it can be written at once. Takes no time.

        Raises:
            ArenaError: the arena's directory has gone.
        """
        old, self._slots[slot] = self._slots[slot], fresh.take()
        _unmap(old)

    def map(self, slot: int) -> None:
        """Map ``slot``, to be read, which its writer has given memory since the arena was opened. What others read of
        the arena stays as it is."""
        self._slots[slot] = open_slot(self.path, self.image.file_bytes, self.control, slot, False)

    def free(self, slot: int) -> None:
        """Give up what ``slot`` holds, and its memory, until ``allocate``.

        The file is deleted at once; the memory comes back when the last view of the slot is gone.

        Raises:
            ArenaError: no other header can be read, and an arena is known by one.
        """
        if not self._known_beside(slot):
            raise ArenaError(f"{self.path}: slot {slot} has the last header; remove the arena instead")
        # Readers take a missing file for damage unless the record is EMPTY.
        self.control.void(slot)
        self._delete(slot)

    def lock(self, deadline_secs: float) -> None:
        """Become the one process that writes this arena, until ``unlock`` or ``close``.

        Raises:
            ArenaError: another process (named by pid) still has the lock after ``deadline_secs``.
        """
        self._lock = lock_arena(self.path, deadline_secs)
        # Under the lock: only its owner makes slots, so what is half made now is of a process that was killed.
        remove_half_made(self.path, "slot*")

    def unlock(self) -> None:
        """Give the lock up; does nothing without one."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def renew(self, slot: int) -> None:
        """Give ``slot`` a new, empty file in place of a damaged one.

        Raises:
            MemoryBudgetError: the file system has no room; the slot is damaged yet, or not allocated.
            ArenaError: the file cannot be created.
        """
        if self._known_beside(slot):
            # Freed first: the node may have no room for both files at once.
            self.free(slot)
            self.allocate(slot)
        else:
            # In one step: nothing else shows whose arena this is.
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
        """The whole file of ``slot``; raises CorruptError if it is damaged, ArenaError if not allocated."""
        mapping = self._slots[slot]
        if isinstance(mapping, Mapping):
            return mapping.data[:]
        raise (ArenaError if mapping is None else CorruptError)(str(self.slot_error(slot)))

    def slot_id(self, slot: int) -> FileId | None:
        """Of the file of ``slot`` that is mapped; None where none is."""
        mapping = self._slots[slot]
        return mapping.file_id if isinstance(mapping, Mapping) else None

    def slot_error(self, slot: int) -> str | None:
        """Why ``slot`` cannot be used, or None."""
        mapping = self._slots[slot]
        if mapping is None:
            return f"{self.path / slot_name(slot)}: not allocated"
        return mapping if isinstance(mapping, str) else None

    def allocated(self, slot: int) -> bool:
        """Whether ``slot`` has memory; one that has none is no damage."""
        return self._slots[slot] is not None

    def snapshots(self) -> dict[SnapshotId, int]:
        """The slot of each snapshot in the arena, newest first; slots that cannot be read are left out."""
        records = [(self.control.record(slot), slot) for slot in range(self.control.slots)]
        # Where two slots hold one snapshot, the one that was sealed last counts.
        records.sort(key=lambda pair: pair[0].sequence)
        sealed = {r.snapshot: slot for r, slot in records if r.snapshot is not None and self.slot_error(slot) is None}
        return dict(sorted(sealed.items(), reverse=True))

    def find(self, snapshot: SnapshotId | None) -> int | None:
        """The slot that holds ``snapshot``, or None."""
        return None if snapshot is None else self.snapshots().get(snapshot)

    @property
    def checks(self) -> Checks | None:
        """What the node's SMP knows of the slots, read-only; None while there is no file, or none to be believed."""
        if self._checks is None or self._checks.replaced:
            block = self.control
            try:
                self._checks = Checks.create_or_open(
                    self.path, block.slots, block.num_chunks, block.digest, writable=False
                )
            except (ArenaError, MismatchError):  # missing or bad: the SMP makes it anew, nothing is lost
                self._checks = None
        return self._checks

    def check(self, slot: int) -> Check | None:
        """What the SMP knows of the snapshot that ``slot`` holds now."""
        return self._check(slot, self.control.record(slot))

    def state(self, slot: int) -> SlotState:
        """How far the snapshot in ``slot`` has come.

        CHECKED: the SMP has checksums of it. PROTECTED: this node has done its part and the control block
        says that all nodes have.
        """
        record = self.control.record(slot)
        check = self._check(slot, record)
        if check is None:
            return record.state
        # COVERED is this node's part alone. That all nodes have done theirs says the mark, set after an all-reduce.
        covered = check.state == CheckState.COVERED
        if covered and self.control.protected() == record.snapshot:
            return SlotState.PROTECTED
        return max(record.state, SlotState.CHECKED)

    def hashes(self, slot: int) -> Hashes | None:
        """xxh3-64 of each chunk of the snapshot in ``slot``; None if there is no snapshot, or no hashes yet."""
        return self._hashes(slot, self.control.record(slot))

    def gap_secs(self, slot: int) -> float:
        """Seconds from the seal of the snapshot in ``slot`` until its checksums were taken, in which damage to memory
        goes unnoticed; until now where it has none yet."""
        record = self.control.record(slot)
        if not record.sealed or record.hashed:
            return 0.0
        check = self._check(slot, record)
        return check.gap_secs if check is not None else max(0.0, time.monotonic() - record.sealed_secs)

    def unchecked(self, slot: int) -> bool:
        """Whether ``slot`` holds a snapshot without hashes: ``verify`` knows nothing of its chunks."""
        record = self.control.record(slot)
        return record.sealed and self._hashes(slot, record) is None

    def hash_chunk(self, slot: int, chunk: int) -> int:
        """xxh3-64 of the bytes of ``chunk``, read in place; other threads run meanwhile."""
        span = self.image.chunks[chunk]
        with self.slot(slot) as data, data[span.begin : span.end] as piece:
            return xxhash.xxh3_64_intdigest(piece)

    def read_objects(self, slot: int) -> memoryview:
        """The objects in use, not verified; raises CorruptError if their length passes the capacity."""
        return self._objects(slot, self.control.record(slot))

    def verify(self, slot: int, on_progress: Progress | None = None, hashes_of: HashesOf | None = None) -> Corruption:
        """What is bad in ``slot``; nothing means that every byte with a checksum is verified.

        Those are all bytes of the snapshot, or, of one that is ``unchecked``, all but its chunks. A slot without a
        snapshot, or with a torn record, is useless. Room for objects behind those in use holds nothing and is not
        looked at. ``hashes_of`` gives the checksums of chunks, in another way than one ``hash_chunk`` after another.
        """
        error = self.slot_error(slot)
        if error is not None:
            return Corruption(reason=error)
        record = self.control.record(slot)
        if not record.sealed:
            return Corruption(reason="record")
        hashes, bad_chunks = self._hashes(slot, record), []
        expected = [] if hashes is None else hashes.tolist()
        hashes_of = hashes_of or partial(map, partial(self.hash_chunk, slot))
        for chunk, value in enumerate(hashes_of(range(len(expected)))):
            if value != expected[chunk]:
                bad_chunks.append(chunk)
            if on_progress is not None:
                on_progress(self.image.chunks[chunk].end, self.image.file_bytes)
        damage = self.damage(slot, record, bad_chunks)
        if on_progress is not None:
            on_progress(self.image.file_bytes, self.image.file_bytes)
        return damage

    def damage(self, slot: int, record: SlotRecord, bad_chunks: Iterable[int]) -> Corruption:
        """As ``verify``, of a slot with ``record``; the caller has hashed the chunks; ``bad_chunks`` are bad."""
        parts = [] if self.header_good(slot) else [HEADER]
        with self.slot(slot) as data:
            # Padding is in no chunk, so no checksum covers it: that it is zeros is a rule of the format.
            if any(bytes(data[pad.begin : pad.end]).strip(b"\0") for pad in self.image.pads):
                parts.append(PADDING)
        if not self._objects_good(slot, record):
            parts.append(OBJECTS)
        return Corruption(tuple(bad_chunks), tuple(parts))

    def header_good(self, slot: int) -> bool:
        """Whether ``slot`` is mapped and begins with the header that its manifest gives."""
        if self.slot_error(slot) is not None:
            return False
        with self.slot(slot) as data:
            return bytes(data[: len(self.image.header)]) == self.image.header

    def close(self) -> None:
        """Give the lock up and unmap; never raises because of views that still exist."""
        self.unlock()
        self._checks = None
        # Views before their mapping, which stays mapped as long as one of them lives.
        self.control.close()
        self._control_map.close()
        for mapping in self._slots:
            _unmap(mapping)

    def _make(self, slot: int, reserves: bool = True) -> None:
        self.put(slot, FreshSlot(self.path / slot_name(slot), self.image, reserves=reserves))

    def _delete(self, slot: int) -> None:
        # Views that others have stay valid: the pages live until the last mapping of the file is gone.
        (self.path / slot_name(slot)).unlink(missing_ok=True)
        mapping, self._slots[slot] = self._slots[slot], None
        _unmap(mapping)

    def _known_beside(self, slot: int) -> bool:
        others = (other for other in range(self.control.slots) if other != slot)
        return header_file_good(self.path, self.image) or any(self.slot_error(other) is None for other in others)

    def _check(self, slot: int, record: SlotRecord) -> Check | None:
        """None, too, where ``checks`` speaks of another snapshot than ``record``: the slot was written since."""
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
        # The length in a record that is not sealed is not proven: it must not lead out of the region.
        if record.objects_used > span.nbytes:
            raise CorruptError(f"slot {slot}: {record.objects_used} bytes of objects, room for {span.nbytes}")
        return self.slot(slot)[span.begin : span.begin + record.objects_used]

    def _objects_good(self, slot: int, record: SlotRecord) -> bool:
        try:
            with self._objects(slot, record) as objects:
                return xxhash.xxh3_64_intdigest(objects) == record.objects_hash
        except CorruptError:
            return False
