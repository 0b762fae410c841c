"""A job by its shards and their nodes, what protects it, and what a restart would choose; replica sets."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from ftckpt.memory.corruption import Corruption
from ftckpt.memory.inventory import ArenaReport, Inventory, ParityReport, VerifiedPackage, take_inventory
from ftckpt.memory.locations import OpenArenas, PackageAt, SlotAt
from ftckpt.model.fragment import Fragment
from ftckpt.model.replicas import Gather, Holdings, ReplicaSets, find_sharing
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.parity.groups import Member
from ftckpt.parity.holding import ArenaLayout
from ftckpt.parity.modes import Modes
from ftckpt.restore.candidates import SnapshotProtection
from ftckpt.restore.decide import Decision, Findings, Query, decide
from tests.support.snapshots import holding_groups


def job(homes: Mapping[str, str], layout: Mapping[str, int | str | bool]) -> Topology:
    """A job of one rank for each shard, on the node that ``homes`` gives."""
    coords = [{axis: int(index) for axis, index in re.findall(r"([a-z]+)([0-9]+)", shard)} for shard in homes]
    return Topology(0, tuple(RankPlace(*both) for both in zip(coords, homes.values(), strict=True)), layout)


def shield_of(
    holdings: Sequence[ArenaLayout],
    modes: Modes,
    packages: Mapping[str, PackageAt],
    has_parity: Callable[[Member], bool],
) -> SnapshotProtection:
    """Protection of a snapshot of these shards: parity of the members that have any, and a package of a shard."""
    groups = holding_groups(holdings, modes)
    parity = [
        ParityReport(member.node, member.arena, f"parity.{group.mode}.0", group.name, index)
        for group in groups
        for index, member in enumerate(group.members)
        if has_parity(member)
    ]
    sound = {h.shard: (VerifiedPackage(packages[h.shard], 100, h),) for h in holdings if h.shard in packages}
    return SnapshotProtection({g.name: g for g in groups}, {(p.group, p.holder): p for p in parity}, sound)


def decided(reports: Sequence[ArenaReport], topology: Topology, damaged: Collection[SlotAt] = ()) -> Decision | None:
    """The decision where no node has anything that protects a snapshot."""
    findings = Findings(dict.fromkeys(damaged, Corruption(reason="corrupt")))
    while True:
        answer = decide(Inventory(tuple(reports)), topology, findings)
        if not isinstance(answer, Query):
            return answer
        findings.protections[answer.snapshot] = SnapshotProtection()


def inventory_of(*folders: Path) -> Inventory:
    """The inventory of some nodes' directories, which have the names of the nodes."""
    found = []
    for folder in folders:
        with closing(OpenArenas(folder)) as arenas:
            found.append(take_inventory(arenas, folder.name))
    return Inventory.join(found)


def replica_sets(
    gather: Gather,
    rank: int,
    num_ranks: int,
    fragments: Sequence[Fragment],
    contents: Callable[[Sequence[int]], Sequence[int]],
) -> ReplicaSets:
    """Find out together which ranks hold the same bits of the same fragments. Collective.

    ``contents`` is called once on every rank, with indices into ``fragments``, and answers a 64-bit hash of the
    bytes of each: only of fragments that several ranks hold. Messages per rank: that of ``find_sharing``; bytes and a
    digest per group; what ``ReplicaMap.sets`` needs.
    """
    sharing = find_sharing(gather, rank, num_ranks, fragments)
    holdings: Holdings | None = None

    def summary() -> bytes:
        nonlocal holdings
        holdings = sharing.look(contents)
        return holdings.summary()

    summaries = gather(summary)
    assert holdings is not None, "``gather`` raises where it failed"
    return sharing.sets(gather, holdings, summaries)
