"""Reconstruction of one shard in this node's memory: its slot, and the verification of its bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from ftckpt.array_types import Bytes
from ftckpt.config import PAGE_BYTES
from ftckpt.errors import ArenaError, CorruptError
from ftckpt.memory.arena import Arena, clear_arena
from ftckpt.memory.control_block import control_bytes
from ftckpt.memory.corruption import OBJECTS, Corruption
from ftckpt.memory.directory import arena_path
from ftckpt.memory.image import SlotImage
from ftckpt.memory.locations import SlotAt
from ftckpt.memory.mapping import reserve, write_at
from ftckpt.memory.package import Package
from ftckpt.memory.slots import slot_name
from ftckpt.model.snapshot import SnapshotId
from ftckpt.restore.reconstruction_plan import ShardRepair

# Deadline for another writer of the arena, for example an exiting trainer, to release its lock.
# A killed rank of the previous attempt may still free its memory; the start has waited for it before.
_LOCK_SECS = 5.0


class ShardReconstruction:
    """A slot being reconstructed: ``open``, ``put`` and ``check`` chunk by chunk, ``finish``, ``close``.

    A new slot is WRITING until ``finish``, so that a kill never leaves a valid one. A slot repaired in place stays
    sealed, and fails verification until its last chunk is correct.

    ``open`` overwrites the new slot's old content, whether the reconstruction succeeds or not: if possible a slot
    that nothing in ``keep`` needs.

    Args:
        package: None only if nothing but chunks is repaired in place.
        num_slots: the number of slots of an arena that must be created.
        keep: the result of ``decide.worth_keeping``.
    """

    def __init__(
        self,
        node_dir: Path,
        fix: ShardRepair,
        package: Package | None,
        num_slots: int,
        keep: Sequence[Collection[SnapshotId]],
    ) -> None:
        self.fix = fix
        self._node_dir = node_dir
        self._package = package
        self._num_slots = num_slots
        self._keep = keep
        self._arena: Arena | None = None
        self._slot = fix.at.slot
        self._file = -1  # the slot's file: written by calls, as each page of a mapping would fault
        self._path = node_dir
        self._writing = threading.Lock()  # the kernel admits one writer at a time, and the others would spin
        # Checksums from before the loss, by trainer or SMP: only these verify reconstructed bytes.
        self._hashes: npt.NDArray[np.uint64] = np.empty(0, np.uint64)

    @property
    def arena(self) -> Arena:
        """The arena, locked and writable."""
        if self._arena is None:
            raise ArenaError(f"{self.fix.shard}: not open")
        return self._arena

    @property
    def at(self) -> SlotAt:
        """The slot of the shard, after ``open``."""
        return SlotAt(self.fix.at.node, self.arena.path.name, self._slot)

    @property
    def file_bytes(self) -> int:
        """Size of the new slot's file, 0 for a repair in place."""
        return SlotImage.of(self._whole.manifest).file_bytes if not self.fix.in_place else 0

    def new_bytes(self) -> int:
        """Memory of the node that ``open`` will allocate."""
        if self.fix.in_place:
            return 0
        slot_bytes = _in_pages(self.file_bytes)
        try:
            arena = Arena.open(arena_path(self._node_dir, self._whole.manifest))
        except ArenaError:
            image = SlotImage.of(self._whole.manifest)
            about = control_bytes(self._num_slots, len(image.chunks)), len(image.header)
            return slot_bytes + sum(map(_in_pages, about))
        try:
            return 0 if arena.slot_error(_pick(arena, self._whole.snapshot, self._keep)) is None else slot_bytes
        finally:
            arena.close()

    def open(self) -> None:
        """Open or create the slot, and write everything that parity does not give.

        Raises:
            ArenaError: another process writes the arena, or it cannot be created.
            MemoryBudgetError: no free memory.
        """
        if self.fix.in_place:
            self._arena = Arena.open(self._node_dir / self.fix.at.arena, writable=True)
            self._arena.lock(_LOCK_SECS)
            self._mend()
            return
        path = arena_path(self._node_dir, self._whole.manifest)
        # Only this slot: the others are allocated when training starts, and might exceed this node's memory now.
        self._arena = self._existing(path) or Arena.create(self._node_dir, self._whole.manifest, self._num_slots, 0)
        self._arena.lock(_LOCK_SECS)
        self._slot = _pick(self._arena, self._whole.snapshot, self._keep)
        self._begin()

    def put(self, chunk: int, begin: int, data: Bytes) -> None:
        """Write ``data`` at byte ``begin`` of ``chunk``, from any thread; bytes past the chunk's end, padding of the
        stripe, are dropped.

        Raises:
            MemoryBudgetError: no free memory.
        """
        span = self.arena.image.chunks[chunk]
        self._write(span.begin + begin, data[: max(0, span.nbytes - begin)].data)

    def clear_behind(self, chunk: int, nbytes: int) -> None:
        """Write zeros after the first ``nbytes`` of ``chunk``: a block in a slot may be shorter than its chunk."""
        span = self.arena.image.chunks[chunk]
        self._write(span.begin + nbytes, bytes(max(0, span.nbytes - nbytes)))

    def check(self, chunk: int) -> bool:
        """Whether the bytes of ``chunk`` match the original checksum."""
        return self.arena.hash_chunk(self._slot, chunk) == int(self._hashes[chunk])

    def length(self, chunk: int) -> int:
        return self.arena.image.chunks[chunk].nbytes

    def finish(self) -> Corruption:
        """Seal a new slot, or return its corruption; the caller has checked the chunks that it ``put``."""
        arena, package = self.arena, self._package
        # Chunks from parity and storage were checked when they were written; bytes from the package were not.
        if self.fix.parts:
            damage = arena.verify(self._slot)
        else:
            damage = arena.damage(self._slot, arena.control.record(self._slot), self._bad_volatile().chunks)
        if damage or self.fix.in_place:
            return damage
        whole = arena.control.whole()
        # Seal before the mark: a mark without its slot would be taken as a lost snapshot.
        arena.control.seal(self._slot, self._whole.snapshot)
        if package is not None and (whole is None or whole.iteration < package.snapshot.iteration):
            arena.control.mark_whole(package.snapshot)
        return Corruption()

    def close(self) -> None:
        """Release the arena; an unfinished slot stays invalid."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    @property
    def _whole(self) -> Package:
        if self._package is None:
            raise ArenaError(f"{self.fix.shard}: no package to reconstruct it from")
        return self._package

    def _existing(self, path: Path) -> Arena | None:
        """The arena at ``path``, None if there is none; an unreadable one is cleared."""
        if not path.exists():
            return None
        try:
            return Arena.open(path, writable=True)
        except CorruptError:
            # The new arena must have its name. Its parity stays: this reconstruction may read it.
            clear_arena(path)
            return None

    def _begin(self) -> None:
        """Make the slot WRITING, and write everything but the optimizer-updated chunks."""
        arena, package, slot = self.arena, self._whole, self._slot
        if not arena.allocated(slot):
            arena.allocate(slot, reserves=False)
        elif arena.slot_error(slot) is not None:
            arena.renew(slot)
        # Before the first byte: a kill between here and ``finish`` leaves WRITING, which is never restored.
        arena.control.begin(slot)
        self._open_slot()
        self._put_volatile()
        self._put_objects()
        self._hashes = package.chunk_hashes
        for chunk, value in enumerate(package.chunk_hashes.tolist()):
            arena.control.set_chunk_hash(slot, chunk, value)
        arena.control.set_objects(slot, len(package.objects), xxhash.xxh3_64_intdigest(package.objects))

    def _mend(self) -> None:
        """Repair everything that parity does not give, in place."""
        arena, package, slot = self.arena, self._package, self._slot
        hashes = arena.hashes(slot)
        # Without own checksums, those of the package have shown which chunks are bad.
        if hashes is None and package is not None:
            hashes = package.chunk_hashes
        if hashes is None and self.fix.chunks:
            raise CorruptError(f"{self.fix.shard}: slot {slot} has no checksums to verify a repair with")
        self._hashes = hashes if hashes is not None else self._hashes
        self._open_slot()
        if package is not None and package.manifest.digest == arena.manifest.digest:
            self._put_volatile()
            if OBJECTS in self.fix.parts:
                self._put_objects()

    def _bad_volatile(self) -> Corruption:
        image = self.arena.image
        chunks = range(image.num_stepped_chunks, len(image.chunks)) if self._package is not None else ()
        return Corruption(tuple(chunk for chunk in chunks if not self.check(chunk)))

    def _write(self, begin: int, data: bytes | memoryview) -> None:
        with self._writing:
            write_at(self._file, self._path, begin, data)

    def _open_slot(self) -> None:
        """Open the slot's file, and write the header, and zeros between the regions."""
        image = self.arena.image
        self._path = self.arena.path / slot_name(self._slot)
        self._file = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._write(0, image.header)
        for pad in image.pads:
            self._write(pad.begin, bytes(pad.nbytes))

    def _put_volatile(self) -> None:
        self._write(self.arena.image.volatile.begin, self._whole.volatile)

    def _put_objects(self) -> None:
        span, data = self.arena.image.objects, self._whole.objects
        self._write(span.begin, data)
        reserve(self._file, self._path, span.begin, span.end)  # later snapshots may have larger objects


def _in_pages(nbytes: int) -> int:
    """The memory that a file of ``nbytes`` takes in a tmpfs."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _pick(arena: Arena, chosen: SnapshotId, keep: Sequence[Collection[SnapshotId]]) -> int:
    """The slot to reconstruct ``chosen`` in: an empty one, or the one needed least.

    In order: an unusable slot of ``chosen`` itself, damaged ones, those without a snapshot, those of snapshots that
    nothing in ``keep`` needs, unallocated ones. Only then one that a restart may need: a newer one, which restoring
    ``chosen`` invalidates anyway, or else the oldest, the last fallback should this reconstruction fail.
    """

    def key(slot: int) -> tuple[int, int]:
        snapshot = arena.control.record(slot).snapshot
        if snapshot == chosen:
            return 0, 0
        if not arena.allocated(slot):
            return 4, 0  # after useless ones: memory is short after a loss of nodes
        if arena.slot_error(slot) is not None:
            return 1, 0
        if snapshot is None:
            return 2, 0
        needed = sum(snapshot in snapshots for snapshots in keep)
        if not needed:
            return 3, snapshot.iteration
        return (6, snapshot.iteration) if needed == len(keep) else (5, -snapshot.iteration)

    return min(range(arena.control.slots), key=key)
