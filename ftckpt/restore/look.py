"""The first look of a restart: what all ranks have loaded, and what memory and storage have, in one round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from ftckpt.errors import ArenaError, ConfigError, FtckptError
from ftckpt.events import Events
from ftckpt.group import Group, gather_each
from ftckpt.model.loaded import Checkpoint, counts_until
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import Topology
from ftckpt.restore.inventory import Inventory
from ftckpt.restore.locations import OpenArenas
from ftckpt.restore.search import part_of_inventory
from ftckpt.restore.shelf import Look, Shelf, ShelfLook
from ftckpt.restore.voiding import remove_protection, undo_arena
from ftckpt.store.arena import Arena, open_control
from ftckpt.store.control import ControlBlock
from ftckpt.store.directory import list_arenas


class Seen(NamedTuple):
    """What all ranks have ``loaded``, where all snapshots in memory and on storage come from, the newest iterations
    in memory that are known to be whole, and that any slot has, -1 for none, what storage has, and the inventory of
    all nodes: None where one cannot be taken."""

    loaded: Checkpoint
    origins: Sequence[Checkpoint]
    whole: int
    newest: int
    shelf: Shelf
    reports: Sequence[Inventory] | None


def look(group: Group, topology: Topology, arenas: OpenArenas, shelf_look: ShelfLook, loaded: Checkpoint) -> Seen:
    """What is there, the same on all ranks. Collective.

    Raises:
        ConfigError: ranks have loaded different iterations; on all of them.
        StorageError: storage cannot be seen, and trying again is of no use.
    """

    def read() -> _Memory:
        memory = _Memory(loaded)
        for path in list_arenas(arenas.node_dir) if topology.is_node_leader else ():
            with suppress(FtckptError), open_control(path) as control:  # what is wrong with it the inventory tells
                memory = memory.with_arena(control)
        return memory

    def report() -> Inventory | None:
        with suppress(FtckptError):  # it may be of no importance: a search that needs it takes it again, and raises
            return part_of_inventory(topology, arenas)
        return None

    seen, ranks, reports = gather_each(group, (shelf_look.see, Look), (read, _Memory), (report, Inventory | None))
    shelf = shelf_look.join(seen)
    differing = {one.loaded.iteration: rank for rank, one in enumerate(ranks)}
    if len(differing) > 1:
        found = ", ".join(f"rank {rank} {iteration}" for iteration, rank in sorted(differing.items())[:3])
        raise ConfigError(
            f"restore: ranks have loaded different iterations from storage ({found}): let all of them load one"
        )
    return Seen(
        # One that knows is enough: others may not see what the newest on storage is.
        replace(loaded, named=any(one.loaded.named for one in ranks)),
        [*shelf.origins, *(origin for one in ranks for origin in one.origins)],
        max(one.whole for one in ranks), max(one.newest for one in ranks),
        shelf, reports if None not in reports else None,
    )  # fmt: skip


def drop_undone(arenas: OpenArenas, events: Events, newest: Checkpoint) -> None:
    """What a node that was away has of a history that was undone goes, with its parity and packages, which would
    bring it back; as what a rank has that died before it went back as others did."""
    undone: list[tuple[Arena, int]] = []
    counts: set[SnapshotId] = set()
    for arena in _readable(arenas):
        snapshots, last = set(arena.snapshots()), counts_until(arena.control.origin(), newest)
        never = {one for one in snapshots if last is not None and one.iteration > last}
        counts |= snapshots - never
        if last is not None and never:
            undone.append((arena, last))
    if not undone:
        return
    events.emit("undone", arenas=[arena.path.name for arena, _ in undone], loaded=newest.iteration)
    remove_protection(arenas.node_dir, min(last for _, last in undone), counts)
    for arena, last in undone:
        with suppress(ArenaError):
            undo_arena(arena.path, last)


def _readable(arenas: OpenArenas) -> Iterator[Arena]:
    for path in list_arenas(arenas.node_dir):
        with suppress(FtckptError):  # what is wrong with it the inventory tells
            yield arenas.get(path.name)


class _Memory(NamedTuple):
    """What a rank has loaded and, if it leads its node, what that has in memory: the newest iteration that is
    ``whole``, and the newest of all; -1 for none."""

    loaded: Checkpoint
    origins: tuple[Checkpoint, ...] = ()
    whole: int = -1
    newest: int = -1

    def with_arena(self, control: ControlBlock) -> _Memory:
        """With what the control block of an arena says."""
        records = [control.record(slot).snapshot for slot in range(control.slots)]
        whole = -1 if (snapshot := control.whole()) is None else snapshot.iteration
        newest = max((record.iteration for record in records if record is not None), default=-1)
        return _Memory(
            self.loaded, (*self.origins, control.origin()), max(self.whole, whole), max(self.newest, whole, newest)
        )
