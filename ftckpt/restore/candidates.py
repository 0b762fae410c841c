"""Candidates of a restart: the snapshots in the inventory of all nodes, the places of their shards, the nodes that
need them, and the protection of those that are incomplete in slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ftckpt.errors import MismatchError
from ftckpt.memory.inventory import (
    ArenaReport,
    Layout,
    NodeProtection,
    ParityReport,
    Problem,
    VerifiedPackage,
    has_slot_groups,
    place_of,
)
from ftckpt.memory.locations import SlotAt
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import Topology, axes_of, layouts_differ, shard_names
from ftckpt.parity.groups import ParityGroup, slot_groups
from ftckpt.parity.holding import ArenaLayout


@dataclass(frozen=True)
class SnapshotProtection:
    """The protection of one snapshot on all nodes.

    ``groups``: by name, including those whose blocks are in slots. ``parity``: the file of each holder (group, member
    index). ``packages``: by shard, of the shards requested.
    """

    groups: Mapping[str, ParityGroup] = field(default_factory=dict)
    parity: Mapping[tuple[str, int], ParityReport] = field(default_factory=dict)
    packages: Mapping[str, tuple[VerifiedPackage, ...]] = field(default_factory=dict)
    holdings: Mapping[str, ArenaLayout] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, nodes: Sequence[NodeProtection], shards: Collection[str]) -> SnapshotProtection:
        """The joined reports of all nodes; a group with a shard that is not in ``shards`` is a problem."""
        groups: dict[str, ParityGroup] = {}
        packages: dict[str, list[VerifiedPackage]] = {}
        problems: list[Problem] = []
        for node in nodes:
            for group in node.groups:
                strange = sorted(group.places.keys() - set(shards))
                if strange:
                    problems.append(Problem(f"group {group.name}", f"{strange[0]} is no shard of this layout"))
                else:
                    groups[group.name] = group
            for package in node.packages:
                packages.setdefault(package.holding.shard, []).append(package)
            problems += node.problems
        # The chunk layout of a shard is its arena's; packages have it for arenas that are lost.
        holdings = {holding.shard: holding for node in nodes for holding in node.holdings}
        for shard, sound in packages.items():
            holdings.setdefault(shard, sound[0].holding)
        grouped = [holdings[shard] for shard in sorted(holdings) if has_slot_groups(holdings[shard])]
        # Groups in slots are in no file: they follow from the chunk layouts.
        groups.update({group.name: group for group in slot_groups(grouped)})
        # Reversed: of two files for one holder the first by name wins, on all ranks alike.
        files = {(p.group, p.holder): p for p in sorted((p for node in nodes for p in node.parity), reverse=True)}
        return cls(groups, files, {s: tuple(p) for s, p in packages.items()}, holdings, tuple(problems))


REMEDY = "start with the layout they were taken in, or remove them with 'ftckpt clean JOB'"


@dataclass(frozen=True)
class Candidate:
    """One snapshot that has at least one slot.

    ``slots``: the slots of each shard, damaged ones included. ``arenas``: the shards of its ``layout`` that have an
    arena; ``nodes``: all nodes with arenas. ``homes``: the node of each shard: that of the rank that continues it or,
    in another layout than the job's, the one that has it or is to reconstruct it. ``ranks``: the rank that continues
    each shard; empty in another layout.
    """

    snapshot: SnapshotId
    layout: Layout
    slots: Mapping[str, Sequence[SlotAt]]
    homes: Mapping[str, str]
    ranks: Mapping[str, int] = field(default_factory=dict)
    arenas: Collection[str] = ()
    nodes: Collection[str] = ()

    def nearest(self, shard: str, damaged: Collection[SlotAt]) -> SlotAt | None:
        """The good slot to read ``shard`` from, preferably on its home node; None if there is none."""
        good = [slot for slot in self.slots.get(shard, ()) if slot not in damaged]
        return min(good, key=lambda slot: (slot.node != self.homes[shard], slot), default=None)

    def missing(self, damaged: Collection[SlotAt]) -> list[str]:
        """Shards without a good slot, sorted."""
        return sorted(shard for shard in self.homes if self.nearest(shard, damaged) is None)


def candidates(
    reports: Sequence[ArenaReport], topology: Topology | None, damaged: Collection[SlotAt] = ()
) -> dict[SnapshotId, Candidate]:
    """Every snapshot that has at least one slot, for a job of this ``topology`` (None: for no job).

    Raises:
        MismatchError: two arenas have one lineage in different layouts; the shards of a layout cannot be derived.
    """
    layouts = _lineages(reports)
    slots: dict[SnapshotId, dict[str, list[SlotAt]]] = {}
    for report in reports:
        for slot in report.slots:
            shards = slots.setdefault(slot.snapshot, {})
            shards.setdefault(report.shard, []).append(SlotAt(report.node, report.name, slot.index))
    nodes = {report.node for report in reports}
    workers = nodes if topology is None else {member.node for member in topology.members}
    # By lineage, not by snapshot: a pass over all arenas takes long in large jobs.
    arenas = {
        # Reversed: of two arenas of one shard the first by node and name wins, on all ranks alike.
        lineage: {r.shard: r.node for r in sorted(_arenas_of(reports, layout), key=place_of, reverse=True)}
        for lineage, layout in layouts.items()
    }
    own = {member.shard: member.node for member in topology.members} if topology is not None else {}
    by_snapshot: dict[SnapshotId, Candidate] = {}
    for snapshot, shards in slots.items():
        layout, there = layouts[snapshot.lineage], arenas[snapshot.lineage]
        if topology is not None and not layouts_differ(topology.layout, layout):
            # The node of the rank that continues the shard, even if the arena is on another: local slots are read in
            # place.
            homes, ranks = own, topology.rank_of
        else:
            homes, ranks = _spread(_shards_of(reports, layout), shards, damaged, there, sorted(workers)), {}
        by_snapshot[snapshot] = Candidate(snapshot, layout, shards, homes, ranks, there.keys(), nodes)
    return by_snapshot


def known_shards(reports: Sequence[ArenaReport], topology: Topology) -> set[str]:
    """The shards of the job's layout and of every layout that an arena has."""
    others: dict[tuple[tuple[str, int | str | bool], ...], Layout] = {}
    for report in reports:
        if report.layout and layouts_differ(topology.layout, report.layout):
            others[tuple(sorted(report.layout.items()))] = report.layout
    return set(topology.rank_of).union(*(_shards_of(reports, other) for other in others.values()))


def _shards_of(reports: Sequence[ArenaReport], layout: Layout) -> tuple[str, ...]:
    """All shards of a layout of which there is at least one arena."""
    # Its name has the axes; with the layout's sizes they give all shards.
    shard = min(report.shard for report in _arenas_of(reports, layout))
    try:
        return shard_names(layout, axes_of(shard))
    except MismatchError as error:
        raise MismatchError(f"the snapshots in memory have another layout: {error}; {REMEDY}") from None


def _arenas_of(reports: Iterable[ArenaReport], layout: Layout) -> Iterator[ArenaReport]:
    return (report for report in reports if not layouts_differ(layout, report.layout))


def _lineages(reports: Sequence[ArenaReport]) -> dict[bytes, Layout]:
    """The layout of each lineage: one attempt of the job, which has one layout."""
    first: dict[bytes, ArenaReport] = {}
    for report in sorted(reports, key=place_of):
        for slot in report.slots:
            other = first.setdefault(slot.snapshot.lineage, report)
            differing = layouts_differ(other.layout, report.layout)
            if differing:
                raise MismatchError(
                    f"arenas {other.name} of node {other.node} and {report.name} of node {report.node} have "
                    f"snapshots of one lineage in two layouts ({', '.join(differing)}): one of them is not of this "
                    "job; remove it, or all with 'ftckpt clean JOB'"
                )
    return {lineage: report.layout for lineage, report in first.items()}


def _spread(
    shards: Sequence[str],
    slots: Mapping[str, Sequence[SlotAt]],
    damaged: Collection[SlotAt],
    arenas: Mapping[str, str],
    nodes: Sequence[str],
) -> dict[str, str]:
    """The node of each shard: the one with its slot or else its arena; shards without either are spread evenly.

    ``nodes``: the nodes of this start. ``arenas``: the node of each shard's arena.
    """
    homes: dict[str, str] = {}
    for shard in shards:
        if slots.get(shard):
            homes[shard] = min(slots[shard], key=lambda slot: (slot in damaged, slot)).node
        elif shard in arenas:
            homes[shard] = arenas[shard]
    load = Counter(homes.values())
    for shard in shards:
        if shard not in homes:
            homes[shard] = min(nodes, key=lambda node: (load[node], node))
            load[homes[shard]] += 1
    return {shard: homes[shard] for shard in shards}
