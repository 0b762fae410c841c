"""Slots in which shards are reconstructed or fetched: room for them on every node, and their opening on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ftckpt.errors import MemoryBudgetError
from ftckpt.events import Events
from ftckpt.group import gather_all, together
from ftckpt.memory.directory import list_arenas
from ftckpt.memory.ledger import Ledger, give_up, in_use, refusal, require
from ftckpt.memory.locations import SlotAt
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import human
from ftckpt.model.topology import Topology
from ftckpt.restore.context import RestoreContext
from ftckpt.restore.shard_reconstruction import ShardReconstruction

_PATIENCE_SECS = 5.0
"""Wait for the SMP to unmap freed files before snapshots are evicted."""

Keep = Sequence[Collection[SnapshotId]]
"""The result of ``decide.worth_keeping``."""


class Need(NamedTuple):
    """The memory that one rank needs for reconstruction: new bytes, and the slots."""

    nbytes: int
    sites: tuple[SlotAt, ...]

    @classmethod
    def of(cls, builds: Collection[ShardReconstruction]) -> Need:
        """The sum over ``builds``."""
        return cls(sum(build.new_bytes() for build in builds), tuple(build.fix.at for build in builds))


def make_room(context: RestoreContext, chosen: SnapshotId, need: Callable[[], Need], keep: Keep) -> None:
    """Make room on every node for the reconstructed slots. Collective; no rank may have an arena mapped.

    If memory is short, unusable snapshots are evicted: first those that are useless even if nodes come back, then
    newer ones, which this restart invalidates anyway. None is evicted unless that suffices on every node.

    Args:
        chosen: the snapshot to reconstruct; ``need``: the memory of this rank for it. Arenas with a slot to
            reconstruct are not touched.
        keep: the result of ``decide.worth_keeping``; the first set that leaves enough memory is retained.

    Raises:
        MemoryBudgetError: a node has no room; on all ranks together.
    """
    group, topology, events, node_dir = *context[:3], context.arenas.node_dir
    needs = gather_all(group, need, Need)
    total_bytes = _of_node(topology, [one.nbytes for one in needs])
    refusals = gather_all(group, lambda: refusal(node_dir, total_bytes, _PATIENCE_SECS), str)
    # All ranks return here, or none does: the rest is collective.
    if not any(refusals):
        return
    why = refusals[group.rank]
    rebuilt = {site.arena for one in needs for site in one.sites if site.node == topology.me.node}
    arenas = [path for path in list_arenas(node_dir) if path.name not in rebuilt]
    needed = together(group, lambda: _enough(node_dir, total_bytes, keep, arenas, why) if why else None)

    # Here every node can make room: otherwise all ranks have raised above, and none evicts anything.
    # Only the first set of ``keep`` has the newer snapshots: with another one they are evicted.
    free = partial(_free, events=events, iteration=chosen.iteration, newer=needed != keep[0])
    together(group, lambda: free(node_dir, arenas, total_bytes, needed) if needed is not None else None)


def _free(
    node_dir: Path,
    arenas: Sequence[Path],
    total_bytes: int,
    snapshots: Collection[SnapshotId],
    *,
    events: Events,
    iteration: int,
    newer: bool,
) -> None:
    freed_bytes = give_up(arenas, snapshots)
    events.emit("spare_given_up", iteration=iteration, bytes=freed_bytes, newer=newer)
    events.announce(f"evicted {human(freed_bytes)} of unneeded snapshots to reconstruct iteration {iteration}")
    # Deleted files count as free only once nothing maps them: an error is better now than during reconstruction.
    require(node_dir, total_bytes)


def _of_node(topology: Topology, needs: Sequence[int]) -> int:
    """The memory that all ranks of this node need, on its leader; 0 on others, so that it is requested once."""
    return sum(needs[rank] for rank in topology.ranks_on(topology.me.node)) if topology.is_node_leader else 0


def _enough(node_dir: Path, total_bytes: int, keep: Keep, arenas: Sequence[Path], why: str) -> Collection[SnapshotId]:
    """The first set of ``keep`` that leaves room for ``total_bytes`` if all other snapshots are evicted.

    Raises:
        MemoryBudgetError: none does.
    """
    there, spare = in_use(arenas), Ledger()
    for needed in keep:
        spare = there.spare(needed)
        if not refusal(node_dir, total_bytes - spare.free_bytes):
            return needed
    raise MemoryBudgetError(
        f"no room to reconstruct this node's shards, even if {human(spare.free_bytes)} of snapshots are evicted: "
        f"{why}"
    )


def open_slots(
    context: RestoreContext, chosen: SnapshotId, keep: Keep, make: Callable[[], Mapping[str, ShardReconstruction]],
    undo: ExitStack,
) -> dict[str, SlotAt]:  # fmt: skip
    """Open or create the slots of the reconstructions that ``make`` gives for this rank, and return those of all
    ranks, by shard. Collective. ``undo`` closes them, and the arenas: the next reader opens the current files.

    Raises:
        MemoryBudgetError, ArenaError: a node has no room, or another process writes the arena.
    """
    builds: Mapping[str, ShardReconstruction] = {}
    undo.callback(context.arenas.close)
    context.arenas.close()  # files may be freed or replaced from here on, by any rank of the node

    def need() -> Need:
        nonlocal builds
        builds = make()
        for build in builds.values():
            undo.callback(build.close)
        return Need.of(builds.values())

    def open_all() -> dict[str, SlotAt]:
        for build in builds.values():
            build.open()
        return {shard: build.at for shard, build in builds.items()}

    make_room(context, chosen, need, keep)
    return {
        shard: at for opened in gather_all(context.group, open_all, dict[str, SlotAt]) for shard, at in opened.items()
    }
