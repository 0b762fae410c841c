"""The arenas of this node as the SMP maps them, with their checks and parity files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ftckpt.errors import ArenaError, FtckptError, MemoryBudgetError, MismatchError
from ftckpt.memory.arena import Arena
from ftckpt.memory.checks import Check, Checks
from ftckpt.memory.control_block import CONTROL_NAME, MAX_SLOTS, ControlBlock, SlotRecord
from ftckpt.memory.mapping import FileId, file_id
from ftckpt.memory.parity_file import ParityFile
from ftckpt.memory.slots import slot_name
from ftckpt.model.snapshot import SnapshotId


class ParityFiles:
    """Open parity files by path, all writable: only the SMP writes them. Callers do not close them."""

    def __init__(self) -> None:
        self._files: dict[Path, tuple[FileId, ParityFile]] = {}

    def get(self, path: Path) -> ParityFile | None:
        """The file, or None if there is no usable one."""
        # By device and inode: an earlier SMP, or another layout, may have created a new file of that name.
        identity = file_id(path)
        known = self._files.get(path)
        if known is not None and known[0] == identity:
            return known[1]
        self.drop(path)
        if identity is None:
            return None
        try:
            file = ParityFile.open(path, writable=True)
        except (ArenaError, MismatchError, MemoryBudgetError):
            return None
        self._files[path] = (identity, file)
        return file

    def add(self, file: ParityFile) -> ParityFile:
        """Register a new file."""
        identity = file_id(file.path)
        if identity is not None:
            self.drop(file.path)
            self._files[file.path] = (identity, file)
        return file

    def drop(self, path: Path) -> None:
        """Close the file, before or after its deletion."""
        known = self._files.pop(path, None)
        if known is not None:
            known[1].close()

    def keep(self, wanted: Callable[[Path], bool]) -> None:
        """Close the files of arenas whose directory is not ``wanted``."""
        for path in [path for path in self._files if not wanted(path.parent)]:
            self.drop(path)


_OPEN_AGAIN_SECS = 1.0
"""Interval between attempts to open an arena."""
_LOOK_AGAIN_SECS = 0.2
"""Interval between checks for replaced files: each is a stat of every slot."""


@dataclass(frozen=True)
class SealedSlot:
    """A slot of ``arena`` that held ``snapshot`` when ``record`` was read. Any thread may call all methods, which
    raise ValueError or ArenaError if another thread closes the arena."""

    arena: MonitoredArena
    slot: int
    snapshot: SnapshotId
    record: SlotRecord

    def still_holds(self) -> bool:
        """Whether the slot still has this seal, in the file that is mapped."""
        now = self.arena.mapped.control.record(self.slot)
        return now.sealed and now.seal_id == self.record.seal_id and self.arena.is_current(self.slot)


@dataclass(frozen=True)
class CheckedSlot(SealedSlot):
    """A sealed slot with checksums."""

    check: Check

    @property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """xxh3-64 of each chunk, computed by the check."""
        return self.check.chunk_hashes


class MonitoredArena:
    """One arena. Any thread may call ``find``, ``identity``, ``is_current`` and ``behind``.

    These raise ValueError or ArenaError if another thread closes the arena; memory with a view on it stays mapped.

    Raises:
        FtckptError: the arena cannot be opened, or its checks file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Before anything is mapped: a file replaced in between then counts as another one.
        identities = _identities(path, MAX_SLOTS)
        self.mapped = Arena.open(path)
        self._identities = identities[: self.mapped.control.slots + 1]
        try:
            control = self.mapped.control
            self.checks = Checks.create_or_open(
                path, control.slots, control.num_chunks, control.digest, writable=True
            )
        except BaseException:  # nobody else would unmap it
            self.mapped.close()
            raise

    @property
    def name(self) -> str:
        """Name of the arena's directory."""
        return self.path.name

    @property
    def shard(self) -> str:
        """The shard in the arena."""
        return self.mapped.control.shard

    @property
    def behind(self) -> bool:
        """Whether slots were allocated that ``grow`` has not mapped yet: their snapshots are not visible."""
        now = _identities(self.path, self.mapped.control.slots)
        return any(known is None and new is not None for known, new in zip(self._identities, now, strict=True))

    def grow(self) -> None:
        """Map newly allocated slots; other threads can keep reading the others."""
        known, now = self._identities, _identities(self.path, self.mapped.control.slots)
        for slot, identity in enumerate(now[1:]):
            if known[1 + slot] is None and identity is not None:
                self.mapped.map(slot)
                # After the mapping: a reader that sees the identity sees the slot. If the file was replaced in
                # between, this is the identity of the old one, and the arena is stale.
                known = (*known[: 1 + slot], identity, *known[2 + slot :])
                self._identities = known

    @property
    def stale(self) -> bool:
        """Whether a file of the arena was replaced or deleted since it was mapped: reopen the arena."""
        return self.checks.replaced or self._identities != _identities(self.path, self.mapped.control.slots)

    @property
    def vanished(self) -> bool:
        """Whether the arena was deleted."""
        return not self.path.exists()

    def identity(self, slot: int) -> FileId | None:
        """The identity of the mapped file of ``slot``."""
        return self._identities[1 + slot]

    def is_current(self, slot: int) -> bool:
        """Whether the mapped file of ``slot`` is the one of that name now."""
        return self.identity(slot) == file_id(self.path / slot_name(slot))

    def sealed(self) -> Iterator[SealedSlot]:
        """All sealed slots."""
        for slot in range(self.mapped.control.slots):
            record = self.mapped.control.record(slot)
            if record.snapshot is not None:
                yield SealedSlot(self, slot, record.snapshot, record)

    def checked(self) -> Iterator[CheckedSlot]:
        """The slot of each checked snapshot, newest first."""
        yield from filter(None, map(self.find, self.mapped.snapshots()))

    def find(self, snapshot: SnapshotId) -> CheckedSlot | None:
        """The slot that holds ``snapshot`` and is CHECKED, or None."""
        slot = self.mapped.find(snapshot)
        if slot is None or not self.is_current(slot):
            return None
        record, check = self.mapped.control.record(slot), self.checks.read(slot)
        # The slot may have been reused since it was found.
        matches = check is not None and check.snapshot == snapshot and check.seal_id == record.seal_id
        return CheckedSlot(self, slot, snapshot, record, check) if check is not None and matches else None

    def close(self) -> None:
        """Unmap the arena."""
        self.checks.close()
        self.mapped.close()


class MonitoredArenas:
    """The arenas of a node's trainers. Any thread may use ``by_shard`` and ``find``, one all else."""

    def __init__(self, node_dir: Path) -> None:
        self.node_dir = node_dir
        self.by_shard: Mapping[str, MonitoredArena] = {}
        self.parity = ParityFiles()
        self.problems: dict[str, str] = {}
        """Reasons why arenas are unusable, by name."""
        self.gone: set[str] = set()
        """Names of arenas that were open and have been deleted since."""
        self._wanted: tuple[str, ...] = ()
        self._try_again = self._look_again = 0.0

    @property
    def all(self) -> list[MonitoredArena]:
        """The open arenas, in no particular order."""
        return list(self.by_shard.values())

    def find(self, shard: str, snapshot: SnapshotId) -> CheckedSlot | None:
        """The slot of ``shard`` with ``snapshot``; None if it is missing or not checked."""
        arena = self.by_shard.get(shard)
        return arena.find(snapshot) if arena is not None else None

    def find_all(self, snapshot: SnapshotId) -> list[CheckedSlot] | None:
        """The slots of all wanted arenas with ``snapshot``; None until every one is open, sealed and checked."""
        found = [slot for arena in self.all if (slot := arena.find(snapshot)) is not None]
        return found if len(found) == len(self._wanted) else None

    def common_mark(self, mark: Callable[[ControlBlock], SnapshotId | None]) -> SnapshotId | None:
        """The snapshot that all wanted arenas ``mark``, or None."""
        marks = self._marks(mark)
        return marks[0] if marks and self.complete and marks.count(marks[0]) == len(marks) else None

    def oldest_mark(self, mark: Callable[[ControlBlock], SnapshotId | None]) -> SnapshotId | None:
        """The oldest snapshot that arenas ``mark``, which all ranks have reached: ranks pass a boundary one after
        another. None if an arena has none, or the lineages differ."""
        named = [snapshot for snapshot in self._marks(mark) if snapshot is not None]
        if len(named) < len(self.by_shard) or len({snapshot.lineage for snapshot in named}) != 1:
            return None
        return min(named)

    def _marks(self, mark: Callable[[ControlBlock], SnapshotId | None]) -> list[SnapshotId | None]:
        return [mark(arena.mapped.control) for arena in self.all]

    @property
    def complete(self) -> bool:
        """Whether all wanted arenas are open."""
        return len(self.by_shard) == len(self._wanted)

    def want(self, names: Iterator[str] | list[str]) -> None:
        """Set the directory names of the arenas to open; ``refresh`` opens them."""
        self._wanted = tuple(dict.fromkeys(names))
        self.gone.clear()
        self._try_again = 0.0

    @property
    def changed(self) -> bool:
        """Whether ``refresh`` has something to do. Also maps newly allocated slots."""
        names = {arena.name for arena in self.all}
        missing = set(self._wanted) - names
        if names - set(self._wanted) or (missing and time.monotonic() >= self._try_again):
            return True
        if time.monotonic() < self._look_again:
            return False
        self._look_again = time.monotonic() + _LOOK_AGAIN_SECS
        for arena in self.all:
            arena.grow()
        return any(arena.stale for arena in self.all)

    def refresh(self) -> None:
        """Open wanted arenas, reopen replaced ones, and close the rest."""
        self._try_again = time.monotonic() + _OPEN_AGAIN_SECS
        for arena in self.all:
            arena.grow()
        keep = {arena.name: arena for arena in self.all if arena.name in self._wanted and not arena.stale}
        gone = [arena for arena in self.all if arena.name not in keep]
        self.gone |= {arena.name for arena in gone if arena.name in self._wanted and arena.vanished}
        self.problems.clear()
        for name in self._wanted:
            # A deleted arena is not retried: a job that ends removes its arenas one by one.
            if name in keep or (name in self.gone and not (self.node_dir / name).exists()):
                continue
            try:
                keep[name] = MonitoredArena(self.node_dir / name)
            except (FtckptError, OSError) as error:
                self.problems[name] = str(error)
        self.gone -= keep.keys()
        # Other threads look arenas up by shard: the new table is set before an arena that is not in it is closed.
        self.by_shard = {arena.shard: arena for arena in keep.values()}
        self.parity.keep(lambda directory: directory.name in keep)
        for arena in gone:
            arena.close()

    def close(self) -> None:
        """Unmap all arenas and close their parity files."""
        arenas, self.by_shard = self.all, {}
        self.parity.keep(lambda directory: False)
        for arena in arenas:
            arena.close()


def _identities(path: Path, slots: int) -> tuple[FileId | None, ...]:
    """The identities of the control block and of each slot."""
    return tuple(map(file_id, (path / CONTROL_NAME, *(path / slot_name(slot) for slot in range(slots)))))
