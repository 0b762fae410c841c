"""The snapshots that an inventory shows, each in its own layout: where its shards lie, and where they belong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ftckpt.errors import MismatchError
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import Topology, axes_of, layouts_differ, shard_names
from ftckpt.restore.inventory import ArenaReport, Layout
from ftckpt.restore.locations import SlotAt

REMEDY = "start with the layout they were taken in, or remove them with 'ftckpt clean JOB'"


@dataclass(frozen=True)
class Candidate:
    """One snapshot of which some slot is there.

    ``slots`` are where each shard lies, damaged ones among them; ``arenas`` the shards of its ``layout`` that have an
    arena, on any of the ``nodes`` that have one. ``homes`` maps each of its shards to the node that needs it: whose
    rank continues it or, in another layout than the job's, that holds it or is to rebuild it. ``ranks`` maps each
    shard to the rank that continues it; in another layout nobody does, and it is empty.
    """

    snapshot: SnapshotId
    layout: Layout
    slots: Mapping[str, Sequence[SlotAt]]
    homes: Mapping[str, str]
    ranks: Mapping[str, int] = field(default_factory=dict)
    arenas: Collection[str] = ()
    nodes: Collection[str] = ()

    def nearest(self, shard: str, damaged: Collection[SlotAt]) -> SlotAt | None:
        """The slot to take ``shard`` from: its home's where that is good."""
        good = [slot for slot in self.slots.get(shard, ()) if slot not in damaged]
        return min(good, key=lambda slot: (slot.node != self.homes[shard], slot), default=None)

    def missing(self, damaged: Collection[SlotAt]) -> list[str]:
        """Shards that lie in no good slot, sorted."""
        return sorted(shard for shard in self.homes if self.nearest(shard, damaged) is None)


def candidates(
    reports: Sequence[ArenaReport], topology: Topology | None = None, damaged: Collection[SlotAt] = ()
) -> dict[SnapshotId, Candidate]:
    """Every snapshot of which some slot is there, for the job as ``topology`` has it; None: for no job.

    Raises:
        MismatchError: two arenas hold the same lineage in different layouts; the shards of a layout cannot be known.
    """
    layouts = _lineages(reports)
    slots: dict[SnapshotId, dict[str, list[SlotAt]]] = {}
    for report in reports:
        for slot in report.slots:
            shards = slots.setdefault(slot.snapshot, {})
            shards.setdefault(report.shard, []).append(SlotAt(report.node, report.name, slot.index))
    nodes = {report.node for report in reports}
    workers = nodes if topology is None else {member.node for member in topology.members}
    # By lineage, not by snapshot: looking through all arenas takes long in large jobs.
    arenas = {
        lineage: {r.shard: r.node for r in sorted(_arenas_of(reports, layout), key=_place, reverse=True)}
        for lineage, layout in layouts.items()
    }
    own = {member.shard: member.node for member in topology.members} if topology is not None else {}
    by_snapshot: dict[SnapshotId, Candidate] = {}
    for snapshot, shards in slots.items():
        layout, there = layouts[snapshot.lineage], arenas[snapshot.lineage]
        if topology is not None and not layouts_differ(topology.layout, layout):
            homes, ranks = own, topology.rank_of
        else:
            homes, ranks = _spread(_shards_of(reports, layout), shards, damaged, there, sorted(workers)), {}
        by_snapshot[snapshot] = Candidate(snapshot, layout, shards, homes, ranks, there.keys(), nodes)
    return by_snapshot


def known_shards(reports: Sequence[ArenaReport], topology: Topology) -> set[str]:
    """The shards of every layout that arenas are of, and of the job's own."""
    others: dict[tuple[tuple[str, int | str | bool], ...], Layout] = {}
    for report in reports:
        if report.layout and layouts_differ(topology.layout, report.layout):
            others[tuple(sorted(report.layout.items()))] = report.layout
    return set(topology.rank_of).union(*(_shards_of(reports, other) for other in others.values()))


def _shards_of(reports: Sequence[ArenaReport], layout: Layout) -> tuple[str, ...]:
    """The shards of a layout of which there is an arena at least."""
    shard = min(report.shard for report in _arenas_of(reports, layout))
    try:
        return shard_names(layout, axes_of(shard))
    except MismatchError as error:
        raise MismatchError(f"the snapshots in memory have another layout: {error}; {REMEDY}") from None


def _arenas_of(reports: Iterable[ArenaReport], layout: Layout) -> Iterator[ArenaReport]:
    return (report for report in reports if not layouts_differ(layout, report.layout))


def _place(report: ArenaReport) -> tuple[str, str]:
    return report.node, report.name


def _lineages(reports: Sequence[ArenaReport]) -> dict[bytes, Layout]:
    """The layout of each lineage: it belongs to one attempt of the job, and that had one layout."""
    first: dict[bytes, ArenaReport] = {}
    for report in sorted(reports, key=_place):
        for slot in report.slots:
            other = first.setdefault(slot.snapshot.lineage, report)
            differing = layouts_differ(other.layout, report.layout)
            if differing:
                raise MismatchError(
                    f"arenas {other.name} of node {other.node} and {report.name} of node {report.node} hold "
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
    """The node of each shard: the one that has it, or its arena at least; what has neither is spread evenly.

    ``nodes`` are those of the job as it is now, ``arenas`` says on which of them a shard's arena lies.
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
