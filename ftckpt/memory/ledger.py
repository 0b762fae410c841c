"""The ledger: the account of a node's memory, in bytes: in use, needed now, needed later, and what can be freed.

Whoever wants memory makes a ledger and asks whether it fits: slots at a start, parity and packages beside them,
shards that are to be rebuilt. What is needed later takes the place of what is freed until then.

The rule on freeing is ``Ledger.spare``: nothing goes that a restart may need. Which snapshots those are says the
caller: at a start the one that is whole and what the arenas say is protected (``Ledger.needed``), at a rebuild all
that may be taken in place of the one that is rebuilt (``ftckpt.restore.decide.worth_keeping``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from ftckpt.config import Config
from ftckpt.errors import FtckptError, MemoryBudgetError
from ftckpt.memory.arena import Arena
from ftckpt.memory.directory import SMP_LOCK_NAME, list_arenas, remove_arena
from ftckpt.memory.locks import JOB_LOCK_NAME, holder_of
from ftckpt.memory.memory_limits import check_budget, used_bytes
from ftckpt.memory.package import list_packages
from ftckpt.memory.parity_file import parity_of, snapshot_of
from ftckpt.memory.slots import slot_name
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import human
from ftckpt.setting_checks import is_name

T = TypeVar("T")

PATIENCE_SECS = 5.0
"""An SMP unmaps what trainers have deleted within moments, not at once."""

_RETRY_SECS = 0.1


class MemoryState(Enum):
    """What becomes of an entry's bytes."""

    IN_USE = auto()
    NOW = auto()
    LATER = auto()
    FREE = auto()


class FileKind(Enum):
    """What an entry's file is; a slot that is ``DAMAGED`` cannot be read, not even its header."""

    SLOT = auto()
    DAMAGED = auto()
    PARITY = auto()
    OTHER = auto()


@dataclass(frozen=True)
class LedgerEntry:
    """Bytes in one state: a file ``arena/name``, or what ``name`` says is to be allocated.

    ``snapshot`` is the one that a slot holds or whose parity the file is; None: it holds none, or is being written.
    ``lent`` memory comes back only when the SMP looks at the file again.
    """

    name: str
    nbytes: int
    state: MemoryState = MemoryState.IN_USE
    arena: str = ""
    kind: FileKind = FileKind.OTHER
    snapshot: SnapshotId | None = None
    lent: bool = False


@dataclass(frozen=True)
class Ledger:
    """``protected`` are the snapshots that the arenas among the entries say are protected on all nodes."""

    entries: tuple[LedgerEntry, ...] = ()
    protected: frozenset[SnapshotId] = frozenset()

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(self.entries + other.entries, self.protected | other.protected)

    @property
    def now_bytes(self) -> int:
        """Bytes that are needed beside those in use."""
        return self._sum(MemoryState.NOW)

    @property
    def later_bytes(self) -> int:
        """Bytes that are needed beside those in use once what can be freed has gone; may be less than 0."""
        return self._sum(MemoryState.NOW) + self._sum(MemoryState.LATER) - self.free_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that come back at once when what can be freed is."""
        return self._sum(MemoryState.FREE)

    @property
    def given_back_bytes(self) -> int:
        """As ``free_bytes``, with what the SMP has lent: that comes back, too, when one waits for it."""
        return sum(entry.nbytes for entry in self.entries if entry.state == MemoryState.FREE)

    @property
    def free_slots(self) -> int:
        """How many slots go when what can be freed is."""
        slots = {FileKind.SLOT, FileKind.DAMAGED}
        return sum(entry.state == MemoryState.FREE and entry.kind in slots for entry in self.entries)

    def protecting(self, others: frozenset[SnapshotId]) -> Ledger:
        """The same entries; ``others``, too, are protected on all nodes."""
        return Ledger(self.entries, self.protected | others)

    def without(self, arena: str, keep: SnapshotId | None) -> Ledger:
        """The same entries when the slots of ``arena`` hold nothing but ``keep``."""
        entries = (
            replace(entry, snapshot=None)
            if entry.arena == arena and entry.kind == FileKind.SLOT and entry.snapshot != keep
            else entry
            for entry in self.entries
        )
        return Ledger(tuple(entries), self.protected)

    def needed(self, whole: SnapshotId) -> frozenset[SnapshotId]:
        """What a start that goes on from ``whole`` may need yet.

        Were a node lost before a snapshot in the new arenas is protected, ``whole`` could not be brought back: what
        is protected stays, too.
        """
        return self.protected | {whole}

    def spare(self, needed: Collection[SnapshotId]) -> Ledger:
        """The same entries, those of them ``FREE`` that are of no use to ``needed``.

        An arena that holds nothing for them goes with all that lies in it. Of another one slots and parity of other
        snapshots go, but one slot that can be read stays: the arena is known by its header. A parity file that
        names no snapshot stays as well: the SMP may be writing it.
        """
        files = sorted(self.entries, key=lambda entry: entry.arena)
        arenas = [list(entries) for _, entries in groupby(files, key=lambda entry: entry.arena)]
        return Ledger(tuple(entry for arena in arenas for entry in _spare(arena, needed)), self.protected)

    def _sum(self, state: MemoryState) -> int:
        # What is lent comes back when the SMP lets go of it, and nobody knows when that is.
        return sum(entry.nbytes for entry in self.entries if entry.state == state and not entry.lent)


def _spare(arena: Sequence[LedgerEntry], needed: Collection[SnapshotId]) -> list[LedgerEntry]:
    if not any(entry.snapshot in needed for entry in arena):
        return [replace(entry, state=MemoryState.FREE, lent=False) for entry in arena]
    others = [entry for entry in arena if entry.snapshot not in needed]
    going = [entry for entry in others if entry.kind in {FileKind.SLOT, FileKind.DAMAGED}]
    # Needed may be parity alone, or a slot that is damaged: then a slot of no other use stays for its header.
    if not any(entry.kind == FileKind.SLOT and entry not in going for entry in arena):
        last = next((entry for entry in going if entry.kind == FileKind.SLOT), None)
        going = [entry for entry in going if entry is not last]
    going += [entry for entry in others if entry.kind == FileKind.PARITY and entry.snapshot is not None]
    return [replace(entry, state=MemoryState.FREE) if entry in going else entry for entry in arena]


def in_use(paths: Iterable[Path]) -> Ledger:
    """What lies in the arenas at ``paths``; those that cannot be read are left out."""
    total = Ledger()
    for path in paths:
        try:
            with closing(Arena.open(path)) as arena:
                total += _contents(arena)
        except (FtckptError, OSError):
            continue
    return total


def give_up(paths: Iterable[Path], needed: Collection[SnapshotId]) -> int:
    """Free what ``spare`` calls free in the arenas at ``paths``; returns the number of bytes.

    What cannot be read, and what a process writes, stays as it is. After a kill at any point everything of ``needed``
    is as it was.
    """
    freed = 0
    for path in paths:
        try:
            with closing(Arena.open(path, writable=True)) as arena:
                arena.lock(0)
                # Decided anew under the lock: what was counted before may have been written since.
                freed += _free(arena, _contents(arena).spare(needed))
        except (FtckptError, OSError):
            continue
    return freed


def _contents(arena: Arena) -> Ledger:
    slots = {slot_name(slot): slot for slot in range(arena.control.slots)}
    # Of this arena alone: others go at this moment, and one that cannot be listed must not keep this one's memory.
    parity = {name.path.name for name in parity_of(arena.path)}
    # An SMP that has a parity file open notices that it is gone only when it looks for that file again.
    guarded = holder_of(arena.path.parent / SMP_LOCK_NAME) is not None
    entries = []
    for path in sorted(arena.path.iterdir()):
        kind, snapshot = FileKind.OTHER, None
        if path.name in slots:
            slot = slots[path.name]
            kind = FileKind.SLOT if arena.slot_error(slot) is None else FileKind.DAMAGED
            snapshot = arena.control.record(slot).snapshot
        elif path.name in parity:
            kind, snapshot = FileKind.PARITY, _guarded(path)
        lent = guarded and kind == FileKind.PARITY
        entries.append(
            LedgerEntry(path.name, size_of(path), MemoryState.IN_USE, arena.path.name, kind, snapshot, lent)
        )
    protected = arena.control.protected()
    return Ledger(tuple(entries), frozenset() if protected is None else frozenset({protected}))


def _guarded(path: Path) -> SnapshotId | None:
    """Of which snapshot a parity file is; None where it is of none, or cannot be read."""
    try:
        return snapshot_of(path)
    except FtckptError:
        return None


def _free(arena: Arena, ledger: Ledger) -> int:
    free = [entry for entry in ledger.entries if entry.state == MemoryState.FREE]
    # All files, the control block among them: the arena goes by one rename, and never looks half removed.
    if len(free) == len(ledger.entries):
        remove_arena(arena.path)
        return ledger.free_bytes
    names = {entry.name for entry in free}
    # One by one, each void before its file goes: a kill in between leaves an arena with fewer slots, none damaged.
    for slot in range(arena.control.slots):
        if slot_name(slot) in names:
            arena.free(slot)
    for entry in free:
        if entry.kind == FileKind.PARITY:
            (arena.path / entry.name).unlink(missing_ok=True)
    return ledger.free_bytes


def slots_to_allocate(there: int, slots: int, needed: int, most: int) -> int:
    """How many slots to allocate now of an arena of ``slots`` that has ``there``: as many as make ``most`` in all.

    One that can be written there must be, beside the ``needed`` ones that hold what must stay.
    """
    return min(slots - there, max(0, max(most, 1 + needed) - there))


def for_slots(new: int, absent: int, slot_bytes: int, old: Iterable[Path]) -> Ledger:
    """``new`` slots of the ``absent`` ones now, the others when the arenas at ``old`` have gone."""
    now, later = new * slot_bytes, (absent - new) * slot_bytes
    return Ledger(
        (LedgerEntry("slots", now, MemoryState.NOW), LedgerEntry("slots", later, MemoryState.LATER), *_leaving(old))
    )


def for_protection(
    node_dir: Path,
    need_bytes: int,
    *,
    arenas: Mapping[str, int],
    slots: int,
    parity: Iterable[Path],
    shards: Collection[str],
) -> Ledger:
    """What protection takes beside what is there already: as long as old arenas stay, and after.

    Args:
        need_bytes: parity files and packages in all.
        arenas: those that are written now, with the size of a slot; all others are old and keep theirs until a
            snapshot in the new ones is protected.
        slots: of an arena that has all.
        parity: the files that the SMP writes over.
        shards: whose packages this node keeps; snapshots with packages of others go with old arenas.
    """
    packages = list_packages(node_dir)
    # The SMP keeps or drops the packages of a snapshot together, so one foreign shard takes the others along.
    foreign = {name.snapshot for name in packages if name.shard not in shards}
    leaving = [name.path for name in packages if name.snapshot in foreign]
    reused = [name.path for name in packages if name.snapshot not in foreign]
    now_bytes = max(0, need_bytes - sum(map(size_of, {*reused, *parity})))
    waiting = sum(_lacking_bytes(node_dir / name, slots, slot_bytes) for name, slot_bytes in arenas.items())
    old = [path for path in list_arenas(node_dir) if path.name not in arenas]
    # Slots wait until old arenas have gone; parity and packages are needed at once.
    return Ledger((
        LedgerEntry("parity and packages", now_bytes, MemoryState.NOW),
        LedgerEntry("slots", waiting, MemoryState.LATER),
        *_leaving(old),
        *(LedgerEntry(path.name, size_of(path), MemoryState.FREE) for path in leaving),
    ))  # fmt: skip


def for_rebuild(need_bytes: int) -> Ledger:
    """Arenas of ``need_bytes`` in all for what is rebuilt."""
    return Ledger((LedgerEntry("shards to be rebuilt", need_bytes, MemoryState.NOW),))


def _leaving(paths: Iterable[Path]) -> list[LedgerEntry]:
    """Slots and parity of old arenas, readable or not: all that is there goes with them."""
    files = [file for path in paths for file in (*path.glob("slot*"), *path.glob("parity.*"))]
    return [LedgerEntry(file.name, size_of(file), MemoryState.FREE, file.parent.name) for file in files]


def _lacking_bytes(arena: Path, slots: int, slot_bytes: int) -> int:
    """What the slots take that an arena does not have yet."""
    begun = sum(map(size_of, arena.glob(".slot*")))  # of slots that are being made
    return max(0, max(0, slots - len(list(arena.glob("slot*")))) * slot_bytes - begun)


def size_of(path: Path) -> int:
    """Bytes that a file occupies; 0 if it has gone."""
    try:
        # The kernel counts in 512 bytes whatever the block size is. Holes are not counted: they take no memory.
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def require(node_dir: Path, need_bytes: int, patience_secs: float = PATIENCE_SECS) -> None:
    """Make sure that the node has ``need_bytes`` beside those in use.

    Raises:
        MemoryBudgetError: it has not; the text prints need, limits and remedies, and what other jobs have left there.
    """
    if need_bytes <= 0:
        return
    try:
        once_given_back(node_dir, lambda: check_budget(node_dir, need_bytes), patience_secs)
    except MemoryBudgetError as error:
        job = node_dir.parent
        others = name_leftovers(job.parent, job.name.removeprefix("ftckpt-"))
        raise MemoryBudgetError(f"{error}; {others}" if others else str(error)) from None


def require_limit(
    limit_bytes: int, node: str, slot_bytes: int, parity_bytes: int = 0, package_bytes: int = 0, *,
    remedies: Sequence[str], is_all: bool = True,
) -> None:  # fmt: skip
    """Make sure that what a job takes of a node in all is within ``memory_limit``; 0: there is none.

    Args:
        remedies: what else helps than a higher limit.
        is_all: whether nothing else comes on top, such as parity before it is known how much that is.

    Raises:
        MemoryBudgetError: it is more; the text names each part.
    """
    need_bytes = slot_bytes + parity_bytes + package_bytes
    if limit_bytes and need_bytes > limit_bytes:
        parts = [f"slots {human(slot_bytes)}"]
        parts += [f"parity {human(parity_bytes)}"] if parity_bytes else []
        parts += [f"packages {human(package_bytes)}"] if package_bytes else []
        *most, last = "raise --ftckpt-memory-limit", *remedies
        more = "" if is_all else " and room for parity and packages"
        raise MemoryBudgetError(
            f"--ftckpt-memory-limit: node {node} needs {human(need_bytes)} ({' + '.join(parts)}){more}, over "
            f"{human(limit_bytes)}: " + (", ".join(most) + " or " if most else "") + last
        )


def refusal(node_dir: Path, need_bytes: int, patience_secs: float = 0.0) -> str:
    """Why the node has no ``need_bytes`` beside those in use; empty where it has."""
    try:
        require(node_dir, need_bytes, patience_secs)
    except MemoryBudgetError as error:
        return str(error)
    return ""


def once_given_back(node_dir: Path, action: Callable[[], T], patience_secs: float = PATIENCE_SECS) -> T:
    """Run ``action``; while it finds no room and the node has an SMP, which may yet unmap what was deleted, again.

    Raises:
        MemoryBudgetError: as ``action`` did the last time.
    """
    deadline = time.monotonic() + patience_secs
    while True:
        try:
            return action()
        except MemoryBudgetError:
            # Without an SMP nothing comes back by itself: no reason to keep training waiting.
            if time.monotonic() >= deadline or holder_of(node_dir / SMP_LOCK_NAME) is None:
                raise
            time.sleep(_RETRY_SECS)


_JOB_PREFIX = "ftckpt-"
_MOST_JOBS = 5
"""Jobs that are named, the largest."""


@dataclass(frozen=True)
class Leftover:
    """What one job has under an arena root on this machine; ``runs``: a live process holds its lock."""

    job: str
    nbytes: int
    runs: bool


def leftovers(root: Path, job: str) -> list[Leftover]:
    """What other jobs than ``job`` of this user have under ``root``, the largest first; those without memory not."""
    found = []
    with suppress(OSError):
        for path in root.iterdir():
            name = path.name.removeprefix(_JOB_PREFIX)
            if name in (path.name, job) or not is_name(name) or not _is_own(path):
                continue
            runs = any(holder_of(node / JOB_LOCK_NAME) is not None for node in path.iterdir())
            found.append(Leftover(name, used_bytes(path), runs))
    return sorted((one for one in found if one.nbytes), key=lambda one: (-one.nbytes, one.job))


def name_leftovers(root: Path, job: str) -> str:
    """``leftovers`` in words, and how they are removed; empty where there are none."""
    there = leftovers(root, job)
    if not there:
        return ""
    arena = "" if str(root) == Config().arena else f" --arena {root}"
    words = [
        f"{one.job} {human(one.nbytes)} ({'it runs' if one.runs else f'ftckpt clean {one.job}{arena}'})"
        for one in there[:_MOST_JOBS]
    ]
    if len(there) > _MOST_JOBS:
        words.append(f"{len(there) - _MOST_JOBS} more {human(sum(one.nbytes for one in there[_MOST_JOBS:]))}")
    return f"other jobs of yours hold memory under {root}: {', '.join(words)}"


def _is_own(path: Path) -> bool:
    with suppress(OSError):
        return path.lstat().st_uid == os.geteuid() and path.is_dir() and not path.is_symlink()
    return False
