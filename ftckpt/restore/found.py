"""What the inventories of all nodes show, snapshot by snapshot, each in its own layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ftckpt.errors import MismatchError
from ftckpt.layout.shards import axes_of, shard_names
from ftckpt.layout.topology import layouts_differ
from ftckpt.restore.inventory import ArenaReport
from ftckpt.restore.protection import Snapshot
from ftckpt.restore.source import Source

Layout = Mapping[str, int | str | bool]

REMEDY = "start with the layout they were taken in, or remove them with 'ftckpt clean JOB'"


@dataclass(frozen=True)
class Snapshots:
    """One snapshot as it was found: where each shard lies (``slots``, bad ones among them), and who lacks it.

    ``homes`` maps each shard of the snapshot's ``layout`` to the node that needs it or, where ``foreign`` (another
    layout than the job has now), that holds or rebuilds it. ``arenas`` are shards of that layout that have an arena.
    """

    slots: Mapping[str, Sequence[Source]]
    homes: Mapping[str, str]
    nodes: Collection[str]
    """Nodes that have any arena."""
    layout: Layout
    foreign: bool
    arenas: Collection[str]

    def nearest(self, shard: str, bad: Collection[Source]) -> Source | None:
        """The slot to take ``shard`` from: its home's where that is good."""
        good = [source for source in self.slots.get(shard, ()) if source not in bad]
        return min(good, key=lambda source: (source.node != self.homes[shard], source), default=None)


def find(
    reports: Sequence[ArenaReport], homes: Mapping[str, str], layout: Layout, bad: Collection[Source]
) -> dict[Snapshot, Snapshots]:
    """Every snapshot of which some slot is there. ``homes`` and ``layout`` are those of the job as it is now.

    Raises:
        MismatchError: two arenas hold the same lineage in different layouts; the shards of a layout cannot be known.
    """
    layouts = _lineages(reports)
    slots: dict[Snapshot, dict[str, list[Source]]] = {}
    for report in reports:
        for slot in report.slots:
            found = slots.setdefault((slot.iteration, slot.lineage), {})
            found.setdefault(report.shard, []).append(Source(report.node, report.name, slot.index))
    nodes = {report.node for report in reports}
    result: dict[Snapshot, Snapshots] = {}
    for snapshot, held in slots.items():
        its = layouts[snapshot[1]]
        foreign = bool(layouts_differ(layout, its))
        there = {report.shard: report.node for report in sorted(_of(reports, its), key=_place, reverse=True)}
        if foreign:
            needed = _foreign_homes(shards_of(reports, its), held, bad, there, sorted(set(homes.values())))
        result[snapshot] = Snapshots(held, needed if foreign else homes, nodes, its, foreign, there.keys())
    return result


def known_shards(reports: Sequence[ArenaReport], homes: Mapping[str, str], layout: Layout) -> set[str]:
    """The shards of every layout that arenas are of, and of the job's own."""
    others: dict[tuple[tuple[str, int | str | bool], ...], Layout] = {}
    for report in reports:
        if report.layout and layouts_differ(layout, report.layout):
            others[tuple(sorted(report.layout.items()))] = report.layout
    return set(homes).union(*(shards_of(reports, other) for other in others.values()))


def shards_of(reports: Sequence[ArenaReport], layout: Layout) -> tuple[str, ...]:
    """The shards of ``layout``, of which there is an arena at least; raises MismatchError if they cannot be known."""
    shard = min(report.shard for report in _of(reports, layout))
    try:
        return shard_names(layout, axes_of(shard))
    except MismatchError as error:
        raise MismatchError(f"the snapshots in memory have another layout: {error}; {REMEDY}") from None


def _of(reports: Sequence[ArenaReport], layout: Layout) -> Iterator[ArenaReport]:
    return (report for report in reports if not layouts_differ(layout, report.layout))


def _place(report: ArenaReport) -> tuple[str, str]:
    return report.node, report.name


def _lineages(reports: Sequence[ArenaReport]) -> dict[str, Layout]:
    """The layout of each lineage: it belongs to one attempt of the job, and that had one layout."""
    first: dict[str, ArenaReport] = {}
    for report in sorted(reports, key=_place):
        for slot in report.slots:
            other = first.setdefault(slot.lineage, report)
            differing = layouts_differ(other.layout, report.layout)
            if differing:
                raise MismatchError(
                    f"arenas {other.name} of node {other.node} and {report.name} of node {report.node} hold "
                    f"snapshots of one lineage in two layouts ({', '.join(differing)}): one of them is not of this "
                    "job; remove it, or all with 'ftckpt clean JOB'"
                )
    return {lineage: report.layout for lineage, report in first.items()}


def _foreign_homes(
    shards: Sequence[str],
    slots: Mapping[str, Sequence[Source]],
    bad: Collection[Source],
    arenas: Mapping[str, str],
    nodes: Sequence[str],
) -> dict[str, str]:
    """The node of each shard: the one that has it, or its arena at least; what has neither is spread evenly.

    ``nodes`` are those of the job as it is now, ``arenas`` says on which of them a shard's arena lies.
    """
    homes: dict[str, str] = {}
    for shard in shards:
        if slots.get(shard):
            homes[shard] = min(slots[shard], key=lambda source: (source in bad, source)).node
        elif shard in arenas:
            homes[shard] = arenas[shard]
    load = Counter(homes.values())
    for shard in shards:
        if shard not in homes:
            homes[shard] = min(nodes, key=lambda node: (load[node], node))
            load[homes[shard]] += 1
    return {shard: homes[shard] for shard in shards}
