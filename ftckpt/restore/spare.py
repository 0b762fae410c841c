"""What the memory of a node holds that no restart can use any more: given up where a rebuild lacks room."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ftckpt.arena.control import SlotRecord
from ftckpt.arena.directory import SMP_LOCK_NAME
from ftckpt.arena.locks import holder_of
from ftckpt.arena.memory import size_of
from ftckpt.arena.segment import Arena, list_arenas, remove_arena, slot_name
from ftckpt.errors import FtckptError
from ftckpt.protect.parity_file import ParityFile, list_parity
from ftckpt.restore.found import Layout, Snapshots, find
from ftckpt.restore.inventory import ArenaReport
from ftckpt.restore.protection import ProtectionReport, Snapshot


def needed(
    reports: Sequence[ArenaReport],
    protection: ProtectionReport,
    homes: Mapping[str, str],
    layout: Layout,
    chosen: Snapshot,
) -> tuple[frozenset[Snapshot], frozenset[Snapshot]]:
    """Snapshots that a restart can use after ``chosen`` was decided on, which is to be rebuilt; two answers.

    In the first are ``chosen``, what is taken in its place should it fail (whole as it lies there, or with packages,
    so that parity may bring it back; slots that did not verify count as good), and newer ones: they could not be
    taken, but may be whole again at a later start that has more nodes than this one. The second is without those:
    restoring ``chosen`` voids them on all nodes. ``reports``, ``protection``: of all nodes; ``homes`` and ``layout``:
    of the job as it is now.
    """
    found = find(reports, homes, layout, ())
    newer = {snapshot for snapshot in found if snapshot[0] > chosen[0]}
    fallbacks = {s for s, one in found.items() if s not in newer and (_direct(one) or protection.protects(s))}
    least = frozenset(fallbacks | {chosen})
    return least | newer, least


def _direct(found: Snapshots) -> bool:
    return all(found.nearest(shard, ()) is not None for shard in found.homes)


@dataclass(frozen=True)
class Spare:
    """What can go of the arena at ``path``: all of it (``entire``), or some slots and parity files."""

    path: Path
    entire: bool
    slots: tuple[int, ...] = ()
    parity: tuple[Path, ...] = ()

    @property
    def nbytes(self) -> int:
        """Memory that this gives back within moments."""
        if self.entire:
            return sum(map(size_of, self.path.iterdir()))
        found = sum(size_of(self.path / slot_name(slot)) for slot in self.slots)
        # An SMP that has a parity file open notices only when it looks for that one again.
        guarded = holder_of(self.path.parent / SMP_LOCK_NAME) is not None
        return found + (0 if guarded else sum(map(size_of, self.parity)))


def spare_bytes(node_dir: Path, needed: Collection[Snapshot], leave: Collection[str]) -> int:
    """What ``give_up`` would give back."""
    total = 0
    for path in _arenas(node_dir, leave):
        try:
            with closing(Arena.open(path)) as arena:
                total += _spare(arena, needed).nbytes
        except (FtckptError, OSError):
            continue
    return total


def give_up(node_dir: Path, needed: Collection[Snapshot], leave: Collection[str]) -> int:
    """Free all that is of no use to ``needed``: slots of other snapshots and of none, their parity, empty arenas.

    Arenas named in ``leave``, what cannot be read, and what a process writes stay as they are. After a kill at any
    point everything of ``needed`` is as it was. Returns the number of bytes.
    """
    freed = 0
    for path in _arenas(node_dir, leave):
        try:
            with closing(Arena.open(path, writable=True)) as arena:
                arena.lock(0)
                freed += _free(arena, _spare(arena, needed))
        except (FtckptError, OSError):
            continue
    return freed


def _arenas(node_dir: Path, leave: Collection[str]) -> list[Path]:
    return [path for path in list_arenas(node_dir) if path.name not in leave]


def _spare(arena: Arena, needed: Collection[Snapshot]) -> Spare:
    names = [name for name in list_parity(arena.path.parent) if name.arena == arena.path.name]
    parity = {name.path: _snapshot(name.path) for name in names}
    slots = range(arena.control.slots)
    kept = [slot for slot in slots if (r := arena.control.record(slot)).sealed and _key(r) in needed]
    if not kept and not any(snapshot in needed for snapshot in parity.values()):
        return Spare(arena.path, entire=True)
    others = [slot for slot in slots if slot not in kept and arena.allocated(slot)]
    if not any(arena.slot_error(slot) is None for slot in kept):
        # Without one readable slot nothing tells what the arena holds.
        readable = [slot for slot in others if arena.slot_error(slot) is None]
        others = [slot for slot in others if slot not in readable[:1]]
    # A file that names no snapshot may be one that the SMP is writing.
    stale = tuple(path for path, snapshot in parity.items() if snapshot is not None and snapshot not in needed)
    return Spare(arena.path, entire=False, slots=tuple(others), parity=stale)


def _free(arena: Arena, spare: Spare) -> int:
    nbytes = spare.nbytes
    if spare.entire:
        remove_arena(spare.path)
        return nbytes
    for slot in spare.slots:
        arena.free(slot)
    for path in spare.parity:
        path.unlink(missing_ok=True)
    return nbytes


def _key(record: SlotRecord) -> Snapshot:
    return record.iteration, record.lineage.hex()


def _snapshot(path: Path) -> Snapshot | None:
    """Of which snapshot a parity file is; None where it is of none, or cannot be read."""
    try:
        with closing(ParityFile.open(path)) as file:
            found = file.snapshot()
    except FtckptError:
        return None
    return (found[1], found[0].hex()) if found is not None else None
