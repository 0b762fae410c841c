"""Whether a node has room for the shards that it is to rebuild, and what it gives up for them where it has not."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

from ftckpt.arena.memory import check_budget, human, once_given_back
from ftckpt.comm import Group, together
from ftckpt.errors import MemoryBudgetError
from ftckpt.events import Events
from ftckpt.layout.topology import Topology
from ftckpt.restore.inventory import ArenaReport, take_inventory
from ftckpt.restore.protection import ProtectionReport, Snapshot, take_protection
from ftckpt.restore.source import Source
from ftckpt.restore.spare import give_up, needed, spare_bytes

_PATIENCE_SECS = 5.0


def make_room(
    group: Group,
    topology: Topology,
    node_dir: Path,
    events: Events,
    *,
    chosen: Snapshot,
    sites: Sequence[Source],
    need: int,
) -> None:
    """Make sure that every node can hold what is rebuilt on it. Collective.

    Where memory is short what no restart can use any more is given up: first what is of no use even if nodes come
    back, then newer snapshots, which this restart would void a moment later. Nothing is given up anywhere unless
    that suffices on every node. No rank may have an arena mapped.

    Args:
        chosen: the snapshot that is rebuilt.
        sites: where its shards are rebuilt, on all nodes; those arenas are left alone.
        need: bytes that this rank will allocate.

    Raises:
        MemoryBudgetError: a node has no room; on all ranks together.
    """
    needs = [int(data) for data in group.gather(str(need).encode())]
    node = topology.me.node
    total = sum(needs[rank] for rank in topology.ranks_on(node)) if topology.is_node_leader else 0
    # Nothing is given up for what the SMP has yet to unmap.
    refusal = together(group, lambda: _refusal(node_dir, total, secs=_PATIENCE_SECS))
    if not any(group.gather(refusal.encode())):
        return
    snapshots = _needed(group, topology, node_dir, chosen)
    leave = {site.arena for site in sites if site.node == node}
    keep = together(group, lambda: _least(node_dir, total, refusal, snapshots, leave))

    def free() -> None:
        if keep is None:
            return
        freed = give_up(node_dir, keep, leave)
        events.emit("spare_given_up", iteration=chosen[0], bytes=freed, newer=keep != snapshots[0])
        events.tell(f"{human(freed)} that no restart needs were given up to rebuild iteration {chosen[0]}")
        once_given_back(node_dir, lambda: check_budget(node_dir, total))

    together(group, free)


def _refusal(node_dir: Path, total: int, secs: float = 0.0) -> str:
    """Why there is no room for ``total`` bytes, after some ``secs`` at most; empty where there is."""
    try:
        if total > 0:
            once_given_back(node_dir, lambda: check_budget(node_dir, total), secs)
    except MemoryBudgetError as error:
        return str(error)
    return ""


def _needed(group: Group, topology: Topology, node_dir: Path, chosen: Snapshot) -> Sequence[Collection[Snapshot]]:
    """The answers of ``spare.needed``, from what all nodes hold now."""
    leads, node = topology.is_node_leader, topology.me.node
    reports = together(group, lambda: take_inventory(node_dir, node) if leads else [])
    kept = together(group, lambda: take_protection(node_dir, node) if leads else ProtectionReport())
    mine = {"arenas": [report.to_json() for report in reports], "protection": kept.to_json()}
    told = [json.loads(data) for data in group.gather(json.dumps(mine).encode())]
    arenas = [ArenaReport.from_json(value) for one in told for value in one["arenas"]]
    parts = [ProtectionReport.from_json(one["protection"]) for one in told]
    protection = ProtectionReport(tuple(package for part in parts for package in part.packages))
    homes = {member.shard: member.node for member in topology.members}
    return together(group, lambda: needed(arenas, protection, homes, topology.layout, chosen))


def _least(
    node_dir: Path, total: int, refusal: str, snapshots: Sequence[Collection[Snapshot]], leave: Collection[str]
) -> Collection[Snapshot] | None:
    """The first of ``snapshots`` that it suffices to keep; None where nothing needs to go.

    Raises:
        MemoryBudgetError: none suffices.
    """
    if not refusal:
        return None
    spare = 0
    for keep in snapshots:
        spare = spare_bytes(node_dir, keep, leave)
        if not _refusal(node_dir, total - spare):
            return keep
    raise MemoryBudgetError(
        f"no room to rebuild what this node lacks of the snapshot, although {human(spare)} of what it holds could be "
        f"given up: {refusal}"
    )
