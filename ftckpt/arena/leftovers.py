"""What earlier attempts and earlier manifests left in a node's directory: wait for it, keep one snapshot, clean."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from ftckpt.arena.directory import remove_stale
from ftckpt.arena.memory import size_of
from ftckpt.arena.segment import Arena, list_arenas, remove_arena
from ftckpt.errors import ArenaError, FtckptError

Snapshot = tuple[bytes, int]
"""Lineage and iteration: with the job's name they name a snapshot."""


def shard_at(path: Path) -> str:
    """The shard whose arena lies at ``path``."""
    return path.name.rpartition(".")[0]


def used_bytes(path: Path) -> int:
    """Memory of the slots and the parity of the arena at ``path``, in bytes; what nobody holds any more has none."""
    return sum(map(size_of, (*path.glob("slot*"), *path.glob("parity.*"))))


def share_of(old: Sequence[Path], shards: Sequence[str], place: int) -> list[Path]:
    """Those of ``old`` that are left to one rank: the arenas of its own shard, ``shards[place]``, and its part of
    those of shards that no rank of the node holds, of another layout or of ranks that are elsewhere now."""
    foreign = [path for path in old if shard_at(path) not in shards]
    return [path for path in old if shard_at(path) == shards[place]] + foreign[place :: len(shards)]


def num_allocated(arena: Arena) -> int:
    """How many slots of ``arena`` have memory."""
    return sum(arena.allocated(slot) for slot in range(arena.control.slots))


def holding(arena: Arena, snapshot: Snapshot | None) -> list[int]:
    """The slots that hold ``snapshot``."""
    usable = [slot for slot in range(arena.control.slots) if arena.slot_error(slot) is None]
    records = {slot: arena.control.record(slot) for slot in usable}
    return [s for s, record in records.items() if record.sealed and (record.lineage, record.iteration) == snapshot]


def void_others(arena: Arena, keep: Snapshot | None) -> None:
    """Void every slot of ``arena`` that does not hold ``keep``."""
    kept = holding(arena, keep)
    for slot in range(arena.control.slots):
        if slot not in kept:
            arena.control.void(slot)


def reclaim(arena: Arena, *keep: Snapshot | None) -> bool:
    """Give back all slots that hold none of ``keep``; False if that was all of them, and the arena is gone."""
    kept = [slot for snapshot in keep for slot in holding(arena, snapshot)]
    if not kept:
        remove_arena(arena.path)
        return False
    for slot in range(arena.control.slots):
        if slot not in kept and arena.allocated(slot):
            arena.free(slot)
    return True


def trim(path: Path, keep: Snapshot) -> bool:
    """As ``reclaim``, by path; an arena that cannot be read stays as it is.

    What the arena says is protected is kept, too: were a node lost before a snapshot in the new arenas is protected,
    ``keep`` could not be brought back.

    Raises:
        ArenaError: another process writes it.
    """
    try:
        arena = Arena.open(path, writable=True)
    except FtckptError:
        return True
    with closing(arena):
        arena.lock(0)
        return reclaim(arena, keep, arena.control.protected())


def remove_temporaries(node_dir: Path) -> None:
    """Delete what killed processes left half created or half removed, of all shards.

    Raises:
        ArenaError: a live process is creating an arena.
    """
    for shard in {path.name[1:].rsplit(".", 2)[0] for path in node_dir.glob(".*") if path.is_dir()}:
        remove_stale(node_dir, shard)


def refuse_renamed(node_dir: Path, nodes: set[str]) -> None:
    """Raise ArenaError for arenas under a node name that no rank has any more: they would be lost without a word."""
    for other in sorted(node_dir.parent.iterdir()):
        if other.name not in nodes and other.is_dir() and list_arenas(other):
            raise ArenaError(
                f"{other} holds snapshots of this job under the node name {other.name!r}, which no rank has now: "
                f"start with --ftckpt-node {other.name}, or remove them with 'ftckpt clean JOB'"
            )


def wait_for_straggler(path: Path, deadline_secs: float) -> None:
    """Raise ArenaError for an arena that a process of an earlier attempt still writes after ``deadline_secs``."""
    try:
        arena = Arena.open(path)
    except FtckptError:
        return  # the inventory reports it
    try:
        arena.lock(deadline_secs)
    finally:
        arena.close()
