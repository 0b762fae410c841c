"""An arena: the files of one shard, mapped; ``FORMAT.md`` has the byte maps."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from ftckpt.arena.control import ControlBlock, SlotRecord, control_bytes
from ftckpt.arena.directory import (
    LOCK_NAME,
    arena_path,
    clean_job,
    list_arenas,
    node_directory,
    remove_arena,
    remove_job_if_empty,
    remove_stale,
    remove_tree,
    require_own,
)
from ftckpt.arena.image import SlotImage, parse_image
from ftckpt.arena.locks import FileLock, JobLock
from ftckpt.arena.mapping import Mapping, create_mapping, open_mapping
from ftckpt.errors import ArenaError, CorruptError, MismatchError
from ftckpt.state.manifest import Manifest

__all__ = [
    "CONTROL_NAME",
    "Arena",
    "JobLock",
    "arena_path",
    "clean_job",
    "list_arenas",
    "node_directory",
    "remove_arena",
    "remove_job_if_empty",
    "slot_name",
]

CONTROL_NAME = "control"

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def slot_name(slot: int) -> str:
    """File name of a slot."""
    return f"slot{slot}.safetensors"


class Arena:
    """The mapped files of one shard.

    Made by ``create`` or ``open``; the caller closes it. ``slot`` views stay usable after ``close``: the
    memory is unmapped when the last of them is gone. Who writes holds the lock (``lock``).
    """

    def __init__(self, path: Path, image: SlotImage, control: Mapping, slots: Sequence[Mapping | str]) -> None:
        self.path = path
        self.image = image
        self.control = ControlBlock(control.data)
        self._control_map = control
        self._slots = slots
        self._lock: FileLock | None = None

    @classmethod
    def create(cls, node_dir: Path, manifest: Manifest, slots: int) -> Arena:
        """Create an arena whose slots are all EMPTY; every page of it is allocated and mapped.

        It is built under a temporary name and renamed when complete. What killed processes left under
        temporary names for the same shard is removed first. The arena comes back unlocked.

        Raises:
            ArenaError: there is an arena for this manifest already, or another process is creating it.
            MemoryBudgetError: the file system has no room; nothing is left behind.
        """
        final = arena_path(node_dir, manifest)
        if final.exists():
            raise ArenaError(f"{final} exists; open it, or remove it first")
        image = SlotImage.of(manifest)
        remove_stale(node_dir, manifest.shard)
        temporary = node_dir / f".{final.name}.new-{os.getpid()}"
        mappings: list[Mapping] = []
        try:
            temporary.mkdir(mode=0o700)
            with FileLock(temporary / LOCK_NAME, 0, f"new arena {final.name}", "end that process first"):
                for slot in range(slots):
                    mappings.append(create_mapping(temporary / slot_name(slot), image.file_bytes))
                    mappings[-1].data[: len(image.header)] = image.header
                nbytes = control_bytes(slots, len(image.chunks))
                mappings.append(create_mapping(temporary / CONTROL_NAME, nbytes))
                ControlBlock.format_into(mappings[-1].data, manifest, slots).close()
                temporary.rename(final)
        except BaseException as error:
            for mapping in mappings:
                mapping.close()
            remove_tree(temporary)
            if isinstance(error, OSError):
                raise ArenaError(f"{final}: cannot be created: {error.strerror}") from None
            raise
        *made, control = mappings
        return cls(final, image, control, made)

    @classmethod
    def open(cls, path: Path, writable: bool = False) -> Arena:
        """Map an existing arena. A bad slot is reported by ``slot_error``, it does not spoil the others.

        Raises:
            CorruptError: the control block is bad, or no slot tells what the arena holds.
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
            raise CorruptError(str(error)) from None
        try:
            with memoryview(control.data) as view:
                block = ControlBlock(view)
                slots, digest, chunks = block.slots, block.digest, block.num_chunks
                block.close()
            image = _image_of_slots(path, slots, digest)
            if len(image.chunks) != chunks:
                raise CorruptError(f"{path}: {chunks} chunks in the control block, {len(image.chunks)} in a slot")
        except BaseException:
            control.close()
            raise
        return cls(path, image, control, [_open_slot(path, image, slot, writable) for slot in range(slots)])

    @property
    def manifest(self) -> Manifest:
        """What every slot holds."""
        return self.image.manifest

    def slot(self, slot: int) -> memoryview:
        """The whole file of ``slot``; raises CorruptError if it could not be mapped."""
        mapping = self._slots[slot]
        if isinstance(mapping, str):
            raise CorruptError(mapping)
        return mapping.data[:]

    def slot_error(self, slot: int) -> str | None:
        """Why ``slot`` cannot be used, or None."""
        mapping = self._slots[slot]
        return mapping if isinstance(mapping, str) else None

    def lock(self, deadline_secs: float) -> None:
        """Become the one process that writes this arena, until ``unlock`` or ``close``.

        Raises:
            ArenaError: still held by another process (named by pid) after ``deadline_secs``.
        """
        remedy = "wait for it or end it; two ranks of one job must not share an arena"
        self._lock = FileLock(self.path / LOCK_NAME, deadline_secs, f"arena {self.path.name}", remedy)

    def unlock(self) -> None:
        """Give the lock up; does nothing if it is not held."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def hash_chunk(self, slot: int, chunk: int) -> int:
        """xxh3-64 of the bytes of ``chunk``, read in place; other threads run meanwhile."""
        span = self.image.chunks[chunk]
        with self.slot(slot) as data, data[span.begin : span.end] as piece:
            return xxhash.xxh3_64_intdigest(piece)

    def read_objects(self, slot: int) -> memoryview:
        """The objects in use, not verified; raises CorruptError if their length passes the capacity."""
        return self._objects(slot, self.control.record(slot))

    def verify(self, slot: int, on_progress: Progress | None = None) -> list[str]:
        """Names of what is bad in ``slot``; an empty list means that every byte of the snapshot is verified.

        Names are ``header``, ``chunk N``, ``objects``, ``padding``, ``record`` (no snapshot, or a torn
        record), or the slot's error. Room for objects behind those in use holds nothing and is not looked at.
        """
        error = self.slot_error(slot)
        if error is not None:
            return [error]
        record = self.control.record(slot)
        if not record.sealed:
            return ["record"]
        bad = [] if self.header_good(slot) else ["header"]
        with self.slot(slot) as data:
            if any(bytes(data[pad.begin : pad.end]).strip(b"\0") for pad in self.image.pads):
                bad.append("padding")
        for chunk, expected in enumerate(record.chunk_hashes.tolist()):
            if self.hash_chunk(slot, chunk) != expected:
                bad.append(f"chunk {chunk}")
            if on_progress is not None:
                on_progress(self.image.chunks[chunk].end, self.image.file_bytes)
        if not self._objects_good(slot, record):
            bad.append("objects")
        if on_progress is not None:
            on_progress(self.image.file_bytes, self.image.file_bytes)
        return bad

    def header_good(self, slot: int) -> bool:
        """Whether ``slot`` is mapped and begins with the header that its manifest gives."""
        if self.slot_error(slot) is not None:
            return False
        with self.slot(slot) as data:
            return bytes(data[: len(self.image.header)]) == self.image.header

    def renew(self, slot: int) -> Arena:
        """Give ``slot`` a new, empty file in place of a damaged one; returns the arena, opened again.

        Raises:
            MemoryBudgetError: the file system has no room.
        """
        self.control.void(slot)
        self.close()
        fresh = self.path / f".{slot_name(slot)}.new"
        fresh.unlink(missing_ok=True)
        mapping = create_mapping(fresh, self.image.file_bytes)
        mapping.data[: len(self.image.header)] = self.image.header
        mapping.close()
        fresh.rename(self.path / slot_name(slot))
        return Arena.open(self.path, writable=True)

    def remove(self) -> None:
        """Close the arena and delete its files."""
        remove_arena(self.path)
        self.close()

    def close(self) -> None:
        """Give the lock up and unmap; never raises because of views that still exist."""
        self.unlock()
        self.control.close()
        self._control_map.close()
        for mapping in self._slots:
            if not isinstance(mapping, str):
                mapping.close()

    def _objects(self, slot: int, record: SlotRecord) -> memoryview:
        span = self.image.objects
        if record.objects_used > span.nbytes:
            raise CorruptError(f"slot {slot}: {record.objects_used} bytes of objects, room for {span.nbytes}")
        return self.slot(slot)[span.begin : span.begin + record.objects_used]

    def _objects_good(self, slot: int, record: SlotRecord) -> bool:
        try:
            with self._objects(slot, record) as objects:
                return xxhash.xxh3_64_intdigest(objects) == record.objects_hash
        except CorruptError:
            return False


def _open_slot(path: Path, image: SlotImage, slot: int, writable: bool) -> Mapping | str:
    try:
        return open_mapping(path / slot_name(slot), image.file_bytes, writable)
    except ArenaError as error:
        return str(error)


def _image_of_slots(path: Path, slots: int, digest: bytes) -> SlotImage:
    """The image that the first sound header gives, if the control block was made for its manifest."""
    errors = []
    for slot in range(slots):
        try:
            mapping = open_mapping(path / slot_name(slot), None, writable=False)
        except ArenaError as error:
            errors.append(str(error))
            continue
        try:
            image = parse_image(mapping.data)
            if image.manifest.digest == digest:
                return image
            errors.append(f"slot {slot}: its manifest is not the one of the control block")
        except (CorruptError, MismatchError) as error:
            errors.append(f"slot {slot}: {error}")
        finally:
            mapping.close()
    raise CorruptError(f"{path}: no slot has a usable header: {'; '.join(errors)}")
