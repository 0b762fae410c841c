"""An arena: the files of one shard, mapped; ``FORMAT.md`` has the byte maps."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from ftckpt.arena.contents import Contents
from ftckpt.arena.control import ControlBlock, control_bytes
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
from ftckpt.arena.image import SlotImage
from ftckpt.arena.locks import FileLock, JobLock
from ftckpt.arena.mapping import Mapping, create_mapping, open_mapping
from ftckpt.arena.slots import SlotFiles, image_of_slots, slot_name
from ftckpt.errors import ArenaError, ConfigError, CorruptError
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


class Arena(Contents):
    """The mapped files of one shard.

    Made by ``create`` or ``open``; the caller closes it. ``slot`` views stay usable after ``close`` and
    ``free``: the memory is unmapped when the last of them is gone. Who writes holds the lock (``lock``).
    A slot may be without memory, not allocated: its record is EMPTY, its file is missing.
    """

    def __init__(self, path: Path, image: SlotImage, control: Mapping, slots: SlotFiles) -> None:
        super().__init__(path, image, control, slots)
        self._lock: FileLock | None = None

    @classmethod
    def create(cls, node_dir: Path, manifest: Manifest, slots: int, allocate: int | None = None) -> Arena:
        """Create an arena whose slots are all EMPTY; every page of the first ``allocate`` is allocated and mapped.

        It is built under a temporary name and renamed when complete. What killed processes left under
        temporary names for the same shard is removed first. The arena comes back unlocked. The others of its
        ``slots`` get their memory by the method ``allocate``; None means all at once.

        Raises:
            ArenaError: there is an arena for this manifest already, or another process is creating it.
            ConfigError: ``allocate`` is not 1 to ``slots``: a slot's header tells what an arena holds.
            MemoryBudgetError: the file system has no room; nothing is left behind.
        """
        final = arena_path(node_dir, manifest)
        if final.exists():
            raise ArenaError(f"{final} exists; open it, or remove it first")
        if allocate is not None and not 1 <= allocate <= slots:
            raise ConfigError(f"{final}: allocate {allocate} is not 1 to {slots}, the number of slots")
        image = SlotImage.of(manifest)
        remove_stale(node_dir, manifest.shard)
        temporary = node_dir / f".{final.name}.new-{os.getpid()}"
        files = SlotFiles(temporary, image, slots)
        control = None
        try:
            temporary.mkdir(mode=0o700)
            with FileLock(temporary / LOCK_NAME, 0, f"new arena {final.name}", "end that process first"):
                for slot in range(slots if allocate is None else allocate):
                    files.make(slot)
                control = create_mapping(temporary / CONTROL_NAME, control_bytes(slots, len(image.chunks)))
                ControlBlock.format_into(control.data, manifest, slots).close()
                temporary.rename(final)
        except BaseException as error:
            files.close()
            if control is not None:
                control.close()
            remove_tree(temporary)
            if isinstance(error, OSError):
                raise ArenaError(f"{final}: cannot be created: {error.strerror}") from None
            raise
        files.path = final
        return cls(final, image, control, files)

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
            with memoryview(control.data) as view, closing(ControlBlock(view)) as block:
                image = image_of_slots(path, block.slots, block.digest)
                if len(image.chunks) != block.num_chunks:
                    raise CorruptError(
                        f"{path}: {block.num_chunks} chunks in the control block, {len(image.chunks)} in a slot"
                    )
                files = SlotFiles.open(path, image, block, writable)
        except BaseException:
            control.close()
            raise
        return cls(path, image, control, files)

    @property
    def lingering(self) -> int:
        """How many slots were freed or closed while views of them exist, so that their memory is still used."""
        return self._slots.lingering

    def allocate(self, slot: int) -> None:
        """Give ``slot`` memory if it has none; it can be written at once, without opening the arena again.

        Raises:
            MemoryBudgetError: the file system has no room; nothing has changed.
            ArenaError: the file cannot be created.
        """
        if not self.allocated(slot):
            self._slots.make(slot)

    def free(self, slot: int) -> None:
        """Give up what ``slot`` holds, and its memory, until ``allocate``.

        The file is deleted at once; the memory comes back when the last view of the slot is gone
        (``lingering`` counts those that wait for it).

        Raises:
            ArenaError: no other slot can be read: without one nothing tells what the arena holds.
        """
        if all(self.slot_error(other) for other in range(self.control.slots) if other != slot):
            raise ArenaError(f"{self.path}: slot {slot} is the last one; remove the arena instead")
        # Readers take a missing file for damage unless the record is EMPTY.
        self.control.void(slot)
        self._slots.free(slot)

    def lock(self, deadline_secs: float) -> None:
        """Become the one process that writes this arena, until ``unlock`` or ``close``.

        Raises:
            ArenaError: still held by another process (named by pid) after ``deadline_secs``.
        """
        remedy = "wait for it or end it; two ranks of one job must not share an arena"
        self._lock = FileLock(self.path / LOCK_NAME, deadline_secs, f"arena {self.path.name}", remedy)
        self._slots.remove_half_made()

    def unlock(self) -> None:
        """Give the lock up; does nothing if it is not held."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def renew(self, slot: int) -> None:
        """Give ``slot`` a new, empty file in place of a damaged one, which is deleted first.

        Raises:
            MemoryBudgetError: the file system has no room; the slot is not allocated then.
            ArenaError: as ``free``.
        """
        self.free(slot)
        self.allocate(slot)

    def remove(self) -> None:
        """Close the arena and delete its files."""
        remove_arena(self.path)
        self.close()

    def close(self) -> None:
        """Give the lock up and unmap; never raises because of views that still exist."""
        self.unlock()
        self._checks = None
        self.control.close()
        self._control_map.close()
        self._slots.close()
