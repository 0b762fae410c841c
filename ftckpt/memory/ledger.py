"""The ledger: the account of a node's memory in bytes: in use, reclaimable, needed now and later.

Code that needs memory checks whether it fits: for the slots at a start, for parity and packages, for shards to
reconstruct. Memory that is needed later reuses memory that is freed until then.

``Ledger.spare`` is the rule on freeing: no file that a restart may need is freed. The caller names the snapshots that
it may need: at a start the committed one and those that the arenas mark as protected (``Ledger.needed``), at a
reconstruction every alternative to the reconstructed snapshot (``ftckpt.restore.decide.worth_keeping``).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from ftckpt.config import Config
from ftckpt.errors import FtckptError, MemoryBudgetError
from ftckpt.memory.arena import Arena
from ftckpt.memory.directory import SMP_LOCK_NAME, list_arenas, remove_arena
from ftckpt.memory.locks import holder_of
from ftckpt.memory.memory_limits import check_budget
from ftckpt.memory.package import list_packages
from ftckpt.memory.parity_file import parity_of, snapshot_of
from ftckpt.memory.slots import slot_name
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import human

PATIENCE_SECS = 5.0
"""Maximum wait for an SMP to unmap files that trainers have deleted."""

# Half of the interval at which an SMP looks for deleted files (``smp.arenas``).
_RETRY_SECS = 0.1


class FileKind(Enum):
    """Kind of an entry's file. A ``DAMAGED`` slot cannot be read, not even its header."""

    SLOT = auto()
    DAMAGED = auto()
    PARITY = auto()
    OTHER = auto()


_SLOTS = frozenset({FileKind.SLOT, FileKind.DAMAGED})


@dataclass(frozen=True)
class LedgerEntry:
    """The file ``arena/name``.

    ``snapshot``: the one in the slot or parity file; None if there is none or it is being written. ``lent``: the SMP
    has the file mapped, and its memory is freed only when the SMP next checks the file. ``is_spare``: it is
    reclaimable.
    """

    name: str
    nbytes: int
    arena: str = ""
    kind: FileKind = FileKind.OTHER
    snapshot: SnapshotId | None = None
    lent: bool = False
    is_spare: bool = False


class MemoryNeeds(NamedTuple):
    """Bytes needed in addition to those in use: now, and after all that is reclaimable by then is freed, which may
    be negative."""

    now_bytes: int
    later_bytes: int


@dataclass(frozen=True)
class Ledger:
    """The files of arenas, and the snapshots that the arenas mark as protected on all nodes."""

    entries: tuple[LedgerEntry, ...] = ()
    protected: frozenset[SnapshotId] = frozenset()

    @property
    def free_bytes(self) -> int:
        """Reclaimable bytes that are available as soon as their files are deleted."""
        # The time at which the SMP unmaps lent files is unknown: they are not counted.
        return sum(entry.nbytes for entry in self.entries if entry.is_spare and not entry.lent)

    @property
    def given_back_bytes(self) -> int:
        """All reclaimable bytes, including ``lent`` ones, which become available after a wait."""
        return sum(entry.nbytes for entry in self.entries if entry.is_spare)

    @property
    def free_slots(self) -> int:
        """Number of reclaimable slots."""
        return sum(entry.is_spare and entry.kind in _SLOTS for entry in self.entries)

    def protecting(self, others: frozenset[SnapshotId]) -> Ledger:
        """This ledger with ``others`` counted as protected too."""
        return Ledger(self.entries, self.protected | others)

    def without(self, arena: str, keep: SnapshotId | None) -> Ledger:
        """This ledger as if the slots of ``arena`` had no snapshot but ``keep``."""
        entries = (
            replace(entry, snapshot=None)
            if entry.arena == arena and entry.kind == FileKind.SLOT and entry.snapshot != keep
            else entry
            for entry in self.entries
        )
        return Ledger(tuple(entries), self.protected)

    def needed(self, whole: SnapshotId) -> frozenset[SnapshotId]:
        """Snapshots that a start which resumes from ``whole`` may still need.

        Protected ones are among them: if a node is lost before a snapshot in the new arenas is protected, ``whole``
        may be unrecoverable.
        """
        return self.protected | {whole}

    def spare(self, needed: Collection[SnapshotId]) -> Ledger:
        """This ledger with the entries marked as spare that no snapshot of ``needed`` uses.

        An arena without any of these snapshots is freed entirely. In any other arena, slots and parity of other
        snapshots are freed, but one readable slot stays: its header identifies the arena. A parity file without a
        snapshot stays too: the SMP may be writing it.
        """
        files = sorted(self.entries, key=lambda entry: entry.arena)
        arenas = [list(entries) for _, entries in groupby(files, key=lambda entry: entry.arena)]
        return Ledger(tuple(entry for arena in arenas for entry in _spare(arena, needed)), self.protected)


def _spare(arena: Sequence[LedgerEntry], needed: Collection[SnapshotId]) -> list[LedgerEntry]:
    if not any(entry.snapshot in needed for entry in arena):
        return [replace(entry, is_spare=True, lent=False) for entry in arena]
    others = [entry for entry in arena if entry.snapshot not in needed]
    going = [entry for entry in others if entry.kind in _SLOTS]
    # The needed entries may be only parity or damaged slots: then one other slot stays for its header.
    if not any(entry.kind == FileKind.SLOT and entry not in going for entry in arena):
        last = next((entry for entry in going if entry.kind == FileKind.SLOT), None)
        going = [entry for entry in going if entry is not last]
    going += [entry for entry in others if entry.kind == FileKind.PARITY and entry.snapshot is not None]
    return [replace(entry, is_spare=True) if entry in going else entry for entry in arena]


def in_use(paths: Iterable[Path]) -> Ledger:
    """The files of the arenas at ``paths``; unreadable arenas are omitted."""
    entries: list[LedgerEntry] = []
    protected: set[SnapshotId] = set()
    for path in paths:
        with suppress(FtckptError, OSError), closing(Arena.open(path)) as arena:
            contents = _contents(arena)
            entries += contents.entries
            protected |= contents.protected
    return Ledger(tuple(entries), frozenset(protected))


def give_up(paths: Iterable[Path], needed: Collection[SnapshotId]) -> int:
    """Free the entries that ``Ledger.spare`` selects in the arenas at ``paths``; returns the number of bytes.

    Arenas that are unreadable or locked by a writer are skipped. A kill at any point leaves the snapshots of
    ``needed`` intact.
    """
    freed = 0
    for path in paths:
        with suppress(FtckptError, OSError), closing(Arena.open(path, writable=True)) as arena:
            arena.lock(0)
            # Selected again under the lock: a writer may have changed slots since the caller's ledger.
            freed += _free(arena, _contents(arena).spare(needed))
    return freed


def _contents(arena: Arena) -> Ledger:
    slots = {slot_name(slot): slot for slot in range(arena.control.slots)}
    # Lists this arena only: others may be deleted concurrently, and a failed listing must not block this one.
    parity = {name.path.name for name in parity_of(arena.path)}
    # An SMP keeps a deleted parity file mapped until it next looks for the file.
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
        entries.append(LedgerEntry(path.name, size_of(path), arena.path.name, kind, snapshot, lent))
    protected = arena.control.protected()
    return Ledger(tuple(entries), frozenset() if protected is None else frozenset({protected}))


def _guarded(path: Path) -> SnapshotId | None:
    """The snapshot of a parity file; None if it has none or cannot be read."""
    try:
        return snapshot_of(path)
    except FtckptError:
        return None


def _free(arena: Arena, ledger: Ledger) -> int:
    free = [entry for entry in ledger.entries if entry.is_spare]
    # All files are free: the arena is renamed before it is deleted, and is never seen half removed.
    if len(free) == len(ledger.entries):
        remove_arena(arena.path)
        return ledger.free_bytes
    names = {entry.name for entry in free}
    # ``free`` invalidates each record before it deletes the file: a kill leaves fewer slots, none damaged.
    for slot in range(arena.control.slots):
        if slot_name(slot) in names:
            arena.free(slot)
    for entry in free:
        if entry.kind == FileKind.PARITY:
            (arena.path / entry.name).unlink(missing_ok=True)
    return ledger.free_bytes


def slots_to_allocate(there: int, slots: int, needed: int, most: int) -> int:
    """The number of slots to allocate now in an arena that has ``there`` of its ``slots``: up to ``most`` in all.

    At least one slot must be writable in addition to the ``needed`` ones, whose snapshots must stay.
    """
    return min(slots - there, max(0, max(most, 1 + needed) - there))


def protection_needs(
    node_dir: Path,
    need_bytes: int,
    *,
    arenas: Mapping[str, int],
    slots: int,
    parity: Iterable[Path],
    shards: Collection[str],
) -> MemoryNeeds:
    """Memory for protection, while old arenas exist and after they are deleted.

    Args:
        need_bytes: total of parity files and packages.
        arenas: those of this layout, with the size of a slot. All others are old and keep their memory until a
            snapshot in the new ones is protected.
        slots: number of slots of a complete arena.
        parity: files that the SMP overwrites.
        shards: those whose packages this node keeps; snapshots with other packages are dropped with old arenas.
    """
    packages = list_packages(node_dir)
    # The SMP keeps or drops all packages of a snapshot: one foreign shard means that all are dropped.
    foreign = {name.snapshot for name in packages if name.shard not in shards}
    leaving = [name.path for name in packages if name.snapshot in foreign]
    reused = [name.path for name in packages if name.snapshot not in foreign]
    now_bytes = max(0, need_bytes - sum(map(size_of, {*reused, *parity})))
    waiting = sum(_lacking_bytes(node_dir / name, slots, slot_bytes) for name, slot_bytes in arenas.items())
    old = [path for path in list_arenas(node_dir) if path.name not in arenas]
    # Slots can wait until old arenas are deleted; parity and packages are needed now.
    return MemoryNeeds(now_bytes, now_bytes + waiting - leaving_bytes(old) - sum(map(size_of, leaving)))


def leaving_bytes(paths: Iterable[Path]) -> int:
    """Size of slots and parity of old arenas, readable or not; they are deleted with their arenas."""
    return sum(size_of(file) for path in paths for file in (*path.glob("slot*"), *path.glob("parity.*")))


def _lacking_bytes(arena: Path, slots: int, slot_bytes: int) -> int:
    """Bytes of the slots that an arena does not have yet."""
    begun = sum(map(size_of, arena.glob(".slot*")))  # slots under construction
    return max(0, max(0, slots - len(list(arena.glob("slot*")))) * slot_bytes - begun)


def size_of(path: Path) -> int:
    """Bytes that a file occupies; 0 if it does not exist."""
    try:
        # st_blocks counts units of 512 bytes, whatever the block size. Holes occupy no memory.
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def require(node_dir: Path, need_bytes: int, patience_secs: float = PATIENCE_SECS) -> None:
    """Check that the node has ``need_bytes`` free, again while its SMP may unmap deleted files.

    Raises:
        MemoryBudgetError: it does not after ``patience_secs``; the text names need, limits and remedies.
    """
    if need_bytes <= 0:
        return
    deadline = time.monotonic() + patience_secs
    while True:
        try:
            return check_budget(node_dir, need_bytes)
        except MemoryBudgetError as error:
            # Without an SMP no memory is freed later, and training would wait in vain.
            if time.monotonic() >= deadline or holder_of(node_dir / SMP_LOCK_NAME) is None:
                root = node_dir.parents[1]
                arena = "" if str(root) == Config().arena else f" --arena {root}"
                raise MemoryBudgetError(f"{error}; 'ftckpt jobs{arena}' lists what other jobs have there") from None
        time.sleep(_RETRY_SECS)


def require_limit(
    limit_bytes: int, node: str, slot_bytes: int, parity_bytes: int = 0, package_bytes: int = 0, *,
    remedies: Sequence[str], is_all: bool = True,
) -> None:  # fmt: skip
    """Check that the job's memory on a node is within ``memory_limit``; 0: no limit.

    Args:
        remedies: alternatives to a higher limit.
        is_all: whether the parts are complete; otherwise parity and packages, of unknown size, come on top.

    Raises:
        MemoryBudgetError: it exceeds the limit; the text names each part.
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
    """The reason why ``require`` fails; empty if it succeeds."""
    try:
        require(node_dir, need_bytes, patience_secs)
    except MemoryBudgetError as error:
        return str(error)
    return ""
