"""What the memory of a node holds, arenas and what protects them, as data that is sent to all other nodes.

A node's report is short: its arenas, and the names of its packages, since what can be rebuilt has some. Only if a
snapshot cannot be taken as it lies in the arenas do nodes look into packages and parity files, of that one alone
(``read_protection``): in large jobs all groups of all snapshots would be far more than all slots.

A ``Candidate`` is a snapshot that the inventory of all nodes shows, in its own layout: where its shards lie, and
where they belong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from ftckpt.errors import ArenaError, FtckptError, MismatchError
from ftckpt.memory.arena import Arena
from ftckpt.memory.directory import arena_path, list_arenas
from ftckpt.memory.image import SlotImage
from ftckpt.memory.lineage_file import read_lineage
from ftckpt.memory.package import list_packages, load
from ftckpt.memory.parity_file import ParityFile, list_parity, snapshot_of
from ftckpt.model.lineage import UNKNOWN, Lineage, Selection
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import Topology, axes_of, layouts_differ, shard_names
from ftckpt.parity.groups import ParityGroup, slot_groups
from ftckpt.parity.holding import ArenaLayout
from ftckpt.restore.locations import OpenArenas, PackageAt, SlotAt

Layout = Mapping[str, int | str | bool]


@dataclass(frozen=True)
class SlotReport:
    index: int
    snapshot: SnapshotId


@dataclass(frozen=True)
class ArenaReport:
    """One arena: where it lies, which shard it holds, what is sealed in it.

    ``whole`` is the newest snapshot that all ranks were known to have sealed. ``problems`` are texts about what could
    not be read; the ``layout`` is empty where that is all of it. ``num_slots`` counts all slots, 0 where unknown.
    """

    node: str
    name: str
    shard: str
    layout: Layout = field(default_factory=dict)
    slots: tuple[SlotReport, ...] = ()
    whole: SnapshotId | None = None
    problems: tuple[str, ...] = ()
    num_slots: int = 0


@dataclass(frozen=True, order=True)
class PackageReport:
    """A package that a node keeps, by its name."""

    node: str
    file: str
    shard: str
    snapshot: SnapshotId


@dataclass(frozen=True)
class Problem:
    """A file that is not used, and why."""

    file: str
    text: str


@dataclass(frozen=True)
class Inventory:
    """The contents of the memory of one node, which belong to its ``lineage``, or of all nodes."""

    arenas: tuple[ArenaReport, ...] = ()
    packages: tuple[PackageReport, ...] = ()
    lineage: Lineage = UNKNOWN

    @classmethod
    def join(cls, reports: Iterable[Inventory]) -> Inventory:
        """All nodes' reports as one."""
        every = list(reports)
        arenas = tuple(sorted((arena for report in every for arena in report.arenas), key=_place))
        return cls(arenas, tuple(sorted(package for report in every for package in report.packages)))

    def protects(self, snapshot: SnapshotId) -> bool:
        """Whether there is a package of ``snapshot``."""
        return any(package.snapshot == snapshot for package in self.packages)

    def good_shards(self, snapshot: SnapshotId, bad: Collection[SlotAt]) -> set[str]:
        """Shards of ``snapshot`` that lie in slots, ``bad`` ones left out."""
        return {
            report.shard
            for report in self.arenas
            for slot in report.slots
            if slot.snapshot == snapshot and SlotAt(report.node, report.name, slot.index) not in bad
        }

    def selected(self, selection: Selection) -> Inventory:
        """Without the snapshots of this node that a restart may not take, as if there never were any."""

        def takes(snapshot: SnapshotId | None) -> bool:
            return snapshot is not None and selection.takes(self.lineage, snapshot)

        def reduced(report: ArenaReport) -> ArenaReport:
            slots = tuple(slot for slot in report.slots if takes(slot.snapshot))
            return replace(report, slots=slots, whole=report.whole if takes(report.whole) else None)

        packages = tuple(package for package in self.packages if takes(package.snapshot))
        return Inventory(tuple(map(reduced, self.arenas)), packages, self.lineage)

    def of_shards(self, shards: Collection[str]) -> tuple[Inventory, tuple[Problem, ...]]:
        """Without packages of other shards than these, each of which is a problem."""
        own = tuple(package for package in self.packages if package.shard in shards)
        strange = (package for package in self.packages if package.shard not in shards)
        problems = tuple(Problem(p.file, f"{p.shard} is no shard of this layout") for p in strange)
        return Inventory(self.arenas, own), problems


def take_inventory(arenas: OpenArenas, node: str, turn: int = 0, turns: int = 1) -> Inventory:
    """Every arena of this node, readable or not, and every package by its name; nothing is written.

    Of ``turns`` ranks that share the work this one has a ``turn``: a large arena takes a tenth of a second.

    Raises:
        MismatchError: an arena was written by another format version.
    """
    packages = list_packages(arenas.node_dir) if turn == 0 else ()
    reports = (_report_at(arenas, path, node) for path in list_arenas(arenas.node_dir)[turn::turns])
    named = (PackageReport(node, name.path.name, name.shard, name.snapshot) for name in packages)
    return Inventory(tuple(reports), tuple(named), read_lineage(arenas.node_dir))


def _report_at(arenas: OpenArenas, path: Path, node: str) -> ArenaReport:
    try:
        return report_arena(arenas.get(path.name), node)
    except MismatchError as error:
        raise MismatchError(f"{path}: {error}; start the version that wrote it, or clean the job") from None
    except ArenaError as error:
        # A directory is named SHARD.DIGEST: whose arena it was shows even where nothing in it can be read.
        return ArenaReport(node, path.name, path.name.rpartition(".")[0], problems=(str(error),))


def report_arena(arena: Arena, node: str) -> ArenaReport:
    """What lies in the slots of an open arena of ``node``."""
    slots, problems = [], []
    for index in range(arena.control.slots):
        record, error = arena.control.record(index), arena.slot_error(index)
        if not arena.allocated(index):
            continue  # its record is EMPTY: nothing was lost
        if error is not None:
            problems.append(f"slot {index}: {error}")
        elif record.torn:
            problems.append(f"slot {index}: torn control record")
        elif record.snapshot is not None:
            slots.append(SlotReport(index, record.snapshot))
    return ArenaReport(
        node,
        arena.path.name,
        arena.manifest.shard,
        arena.manifest.layout,
        tuple(slots),
        arena.control.whole(),
        tuple(problems),
        arena.control.slots,
    )


@dataclass(frozen=True, order=True)
class ParityReport:
    """A parity file of one node, in the directory ``arena``: the blocks of member ``holder`` of ``group``."""

    node: str
    arena: str
    file: str
    group: str
    holder: int


@dataclass(frozen=True)
class VerifiedPackage:
    """A package that was read and is whole, ``nbytes`` long, and how the shard's arena was cut."""

    at: PackageAt
    nbytes: int
    holding: ArenaLayout


@dataclass(frozen=True)
class NodeProtection:
    """What one node has of the protection of one snapshot.

    ``groups`` are those of its parity files, ``packages`` those that it was asked for, ``holdings`` what its arenas
    are cut into that have blocks of other shards in their slots.
    """

    groups: tuple[ParityGroup, ...] = ()
    parity: tuple[ParityReport, ...] = ()
    packages: tuple[VerifiedPackage, ...] = ()
    holdings: tuple[ArenaLayout, ...] = ()
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class SnapshotProtection:
    """All that protects one snapshot, on all nodes.

    ``groups`` by name, those whose blocks lie in slots among them; ``parity`` says where the blocks of a holder
    (group, member index) lie; ``packages`` are those of each shard that was asked for.
    """

    groups: Mapping[str, ParityGroup] = field(default_factory=dict)
    parity: Mapping[tuple[str, int], ParityReport] = field(default_factory=dict)
    packages: Mapping[str, tuple[VerifiedPackage, ...]] = field(default_factory=dict)
    holdings: Mapping[str, ArenaLayout] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, nodes: Sequence[NodeProtection], shards: Collection[str]) -> SnapshotProtection:
        """Put together what all nodes have; groups of others than ``shards`` are problems."""
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
        # An arena that is there says best how its slots are cut; packages speak for those that are gone.
        holdings = {holding.shard: holding for node in nodes for holding in node.holdings}
        for shard, sound in packages.items():
            holdings.setdefault(shard, sound[0].holding)
        grouped = [holdings[shard] for shard in sorted(holdings) if _has_slot_groups(holdings[shard])]
        # Groups in slots stand in no file: they follow from how the arenas are cut.
        groups.update({group.name: group for group in slot_groups(grouped)})
        # Reversed, so that of two files for one holder the first by name stays, the same one on all ranks.
        files = {(p.group, p.holder): p for p in sorted((p for node in nodes for p in node.parity), reverse=True)}
        return cls(groups, files, {s: tuple(p) for s, p in packages.items()}, holdings, tuple(problems))


def read_protection(
    arenas: OpenArenas, node: str, snapshot: SnapshotId, shards: Collection[str], layout: Layout
) -> NodeProtection:
    """What this node has of the protection of ``snapshot``, of packages those of ``shards``."""
    groups, parity, problems = _read_parity(arenas.node_dir, node, snapshot)
    packages = []
    for name in list_packages(arenas.node_dir):
        # Names alone decide: packages of other shards and snapshots are not read.
        if name.shard not in shards or name.snapshot != snapshot:
            continue
        try:
            package = load(name.path)
        except FtckptError as error:
            problems.append(Problem(name.path.name, str(error)))
            continue
        differing = layouts_differ(layout, package.manifest.layout)
        if differing:
            problems.append(Problem(name.path.name, f"a package of another layout ({', '.join(differing)})"))
            continue
        image = SlotImage.of(package.manifest)
        holding = image.holding(node, "", arena_path(arenas.node_dir, package.manifest).name)
        packages.append(VerifiedPackage(PackageAt(node, name.path.name), name.path.stat().st_size, holding))
    holdings = tuple(_holdings(arenas, node, snapshot))
    return NodeProtection(tuple(groups.values()), tuple(parity), tuple(packages), holdings, tuple(problems))


def _read_parity(
    node_dir: Path, node: str, snapshot: SnapshotId
) -> tuple[dict[str, ParityGroup], list[ParityReport], list[Problem]]:
    """Groups and parity files of ``snapshot``, and what could not be read."""
    groups: dict[str, ParityGroup] = {}
    parity: list[ParityReport] = []
    problems: list[Problem] = []
    for name in list_parity(node_dir):
        try:
            if snapshot_of(name.path) != snapshot:  # None: it was being written
                continue
            file = ParityFile.open(name.path)
        except FtckptError as error:
            problems.append(Problem(f"{name.arena}/{name.path.name}", str(error)))
            continue
        with closing(file):
            if file.snapshot() == snapshot:  # still
                groups[file.group.name] = file.group
                parity.append(ParityReport(node, name.arena, name.path.name, file.group.name, file.holder))
    return groups, parity, problems


def _holdings(arenas: OpenArenas, node: str, snapshot: SnapshotId) -> Iterator[ArenaLayout]:
    for path in list_arenas(arenas.node_dir):
        try:
            arena = arenas.get(path.name)
        except FtckptError:
            continue  # a problem of take_inventory
        if arena.find(snapshot) is not None:
            holding = arena.image.holding(node, "", path.name)
            if _has_slot_groups(holding):
                yield holding


def _has_slot_groups(holding: ArenaLayout) -> bool:
    """Whether some section takes part in a group whose blocks lie in slots."""
    return any(section.group for section in holding.sections)


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
        # Reversed: of two arenas of one shard the first by node and name stays, the same one on all ranks.
        lineage: {r.shard: r.node for r in sorted(_arenas_of(reports, layout), key=_place, reverse=True)}
        for lineage, layout in layouts.items()
    }
    own = {member.shard: member.node for member in topology.members} if topology is not None else {}
    by_snapshot: dict[SnapshotId, Candidate] = {}
    for snapshot, shards in slots.items():
        layout, there = layouts[snapshot.lineage], arenas[snapshot.lineage]
        if topology is not None and not layouts_differ(topology.layout, layout):
            # The node of the rank that continues the shard, even where the arena lies on another: what is local is
            # read in place.
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
    # Any of them names its axes, and with the layout's sizes that gives all the others.
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
