"""Whether a node has room for the shards that it is to rebuild, and what it gives up for them where it has not."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from ftckpt.errors import MemoryBudgetError
from ftckpt.events import Events
from ftckpt.group import Group, together
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import human
from ftckpt.model.topology import Topology
from ftckpt.restore.locations import SlotAt
from ftckpt.store.directory import list_arenas
from ftckpt.store.ledger import Ledger, for_rebuild, give_up, in_use, refusal, require

_PATIENCE_SECS = 5.0
"""Nothing is given up for what the SMP has yet to unmap."""


def make_room(
    group: Group,
    topology: Topology,
    node_dir: Path,
    events: Events,
    *,
    chosen: SnapshotId,
    sites: Sequence[SlotAt],
    need_bytes: int,
    keep: Sequence[Collection[SnapshotId]],
) -> None:
    """Make sure that every node can hold what is rebuilt on it. Collective.

    Where memory is short what no restart can use any more is given up: first what is of no use even if nodes come
    back, then newer snapshots, which this restart would void a moment later. Nothing is given up anywhere unless
    that suffices on every node. No rank may have an arena mapped.

    Args:
        chosen: the snapshot that is rebuilt; ``need_bytes``: that this rank will allocate for it.
        sites: where its shards are rebuilt, on all nodes; those arenas are left alone.
        keep: what ``choice.worth_keeping`` says, of which the first that leaves enough is kept.

    Raises:
        MemoryBudgetError: a node has no room; on all ranks together.
    """
    needs = [int(data) for data in group.gather(str(need_bytes).encode())]
    node = topology.me.node
    total = for_rebuild(sum(needs[rank] for rank in topology.ranks_on(node)) if topology.is_node_leader else 0)
    why = together(group, lambda: refusal(node_dir, total.now_bytes, _PATIENCE_SECS))
    if not any(group.gather(why.encode())):
        return
    rebuilt = {site.arena for site in sites if site.node == node}
    arenas = [path for path in list_arenas(node_dir) if path.name not in rebuilt]
    needed = together(group, lambda: _enough(node_dir, total, keep, arenas, why) if why else None)

    def free(snapshots: Collection[SnapshotId]) -> None:
        freed_bytes, iteration = give_up(arenas, snapshots), chosen.iteration
        events.emit("spare_given_up", iteration=iteration, bytes=freed_bytes, newer=snapshots != keep[0])
        events.tell(f"{human(freed_bytes)} that no restart needs were given up to rebuild iteration {iteration}")
        require(node_dir, total.now_bytes)

    # All ranks have been asked by here: where one node has no room whatever it gives up, none gives anything up.
    together(group, lambda: free(needed) if needed is not None else None)


def _enough(
    node_dir: Path, total: Ledger, keep: Sequence[Collection[SnapshotId]], arenas: Sequence[Path], why: str
) -> Collection[SnapshotId]:
    """The first of ``keep`` that leaves room for ``total`` when all that it does not need is given up.

    Raises:
        MemoryBudgetError: none does.
    """
    there, spare = in_use(arenas), Ledger()
    for needed in keep:
        spare = there.spare(needed)
        if not refusal(node_dir, (spare + total).later_bytes):
            return needed
    raise MemoryBudgetError(
        f"no room to rebuild what this node lacks of the snapshot, although {human(spare.free_bytes)} of what it "
        f"holds could be given up: {why}"
    )
