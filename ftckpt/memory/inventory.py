"""The inventory of a node's memory, arenas and protection, as data that is gathered by all nodes.

A node's report is short: its arenas, and the names of its packages, without which nothing can be reconstructed. Only
if a snapshot is incomplete in the arenas do nodes read its packages and parity files (``read_protection``): in large
jobs the groups of all snapshots are far more data than the slots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from ftckpt.errors import ArenaError, FtckptError, MismatchError
from ftckpt.memory.arena import Arena
from ftckpt.memory.directory import arena_path, list_arenas
from ftckpt.memory.image import SlotImage
from ftckpt.memory.lineage_file import read_lineage
from ftckpt.memory.locations import OpenArenas, PackageAt, SlotAt
from ftckpt.memory.package import list_packages, load
from ftckpt.memory.parity_file import ParityFile, list_parity, snapshot_of
from ftckpt.model.lineage import UNKNOWN, Lineage, Selection
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import layouts_differ
from ftckpt.parity.groups import ParityGroup
from ftckpt.parity.holding import ArenaLayout

Layout = Mapping[str, int | str | bool]


@dataclass(frozen=True)
class SlotReport:
    index: int
    snapshot: SnapshotId


@dataclass(frozen=True)
class ArenaReport:
    """One arena: its node and directory name, its shard, and its sealed slots.

    ``whole``: the newest snapshot that is marked as committed. ``problems``: texts about unreadable parts; ``layout``
    is empty if nothing is readable. ``num_slots``: the number of all slots, 0 if unknown.
    """

    node: str
    name: str
    shard: str
    layout: Layout = field(default_factory=dict)
    slots: tuple[SlotReport, ...] = ()
    whole: SnapshotId | None = None
    problems: tuple[str, ...] = ()
    num_slots: int = 0


def place_of(report: ArenaReport) -> tuple[str, str]:
    """The order of arenas, the same on all ranks."""
    return report.node, report.name


@dataclass(frozen=True, order=True)
class PackageReport:
    """A package file of a node, by its name."""

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
    """The contents of the memory of one node, with its ``lineage``, or of all nodes."""

    arenas: tuple[ArenaReport, ...] = ()
    packages: tuple[PackageReport, ...] = ()
    lineage: Lineage = UNKNOWN

    @classmethod
    def join(cls, reports: Iterable[Inventory]) -> Inventory:
        """All nodes' reports as one."""
        every = list(reports)
        arenas = tuple(sorted((arena for report in every for arena in report.arenas), key=place_of))
        return cls(arenas, tuple(sorted(package for report in every for package in report.packages)))

    def protects(self, snapshot: SnapshotId) -> bool:
        """Whether there is a package of ``snapshot``."""
        return any(package.snapshot == snapshot for package in self.packages)

    def good_shards(self, snapshot: SnapshotId, bad: Collection[SlotAt]) -> set[str]:
        """Shards of ``snapshot`` that are in a slot not among the ``bad`` ones."""
        return {
            report.shard
            for report in self.arenas
            for slot in report.slots
            if slot.snapshot == snapshot and SlotAt(report.node, report.name, slot.index) not in bad
        }

    def selected(self, selection: Selection) -> Inventory:
        """This node's inventory without the snapshots that a restart must not restore."""

        def takes(snapshot: SnapshotId | None) -> bool:
            return snapshot is not None and selection.takes(self.lineage, snapshot)

        def reduced(report: ArenaReport) -> ArenaReport:
            slots = tuple(slot for slot in report.slots if takes(slot.snapshot))
            return replace(report, slots=slots, whole=report.whole if takes(report.whole) else None)

        packages = tuple(package for package in self.packages if takes(package.snapshot))
        return Inventory(tuple(map(reduced, self.arenas)), packages, self.lineage)

    def of_shards(self, shards: Collection[str]) -> tuple[Inventory, tuple[Problem, ...]]:
        """The inventory without packages of other shards, and a problem for each of those."""
        own = tuple(package for package in self.packages if package.shard in shards)
        strange = (package for package in self.packages if package.shard not in shards)
        problems = tuple(Problem(p.file, f"{p.shard} is no shard of this layout") for p in strange)
        return Inventory(self.arenas, own), problems


def take_inventory(arenas: OpenArenas, node: str, turn: int = 0, turns: int = 1) -> Inventory:
    """Every arena of this node, readable or not, and every package by its name. Read-only.

    ``turns`` ranks share the work, of which this is number ``turn``: a large arena takes a tenth of a second.

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
        # A directory is named SHARD.DIGEST: its shard is known even if nothing in it can be read.
        return ArenaReport(node, path.name, path.name.rpartition(".")[0], problems=(str(error),))


def report_arena(arena: Arena, node: str) -> ArenaReport:
    """The sealed slots of an open arena of ``node``, and its problems."""
    slots, problems = [], []
    for index in range(arena.control.slots):
        record, error = arena.control.record(index), arena.slot_error(index)
        if not arena.allocated(index):
            continue  # its record is EMPTY: nothing is lost
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
    """A package that was read and verified, ``nbytes`` long, and the chunk layout of its shard's arena."""

    at: PackageAt
    nbytes: int
    holding: ArenaLayout


@dataclass(frozen=True)
class NodeProtection:
    """One node's part of the protection of one snapshot.

    ``groups``: the groups of its parity files. ``packages``: those requested. ``holdings``: the chunk layouts of its
    arenas that have blocks of other shards in their slots.
    """

    groups: tuple[ParityGroup, ...] = ()
    parity: tuple[ParityReport, ...] = ()
    packages: tuple[VerifiedPackage, ...] = ()
    holdings: tuple[ArenaLayout, ...] = ()
    problems: tuple[Problem, ...] = ()


def read_protection(
    arenas: OpenArenas, node: str, snapshot: SnapshotId, shards: Collection[str], layout: Layout
) -> NodeProtection:
    """This node's part of the protection of ``snapshot``, with the packages of ``shards``."""
    groups, parity, problems = _read_parity(arenas.node_dir, node, snapshot)
    packages = []
    for name in list_packages(arenas.node_dir):
        # By name: packages of other shards and snapshots are not read.
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
    """Groups and parity files of ``snapshot``, and files that could not be read."""
    groups: dict[str, ParityGroup] = {}
    parity: list[ParityReport] = []
    problems: list[Problem] = []
    for name in list_parity(node_dir):
        try:
            if snapshot_of(name.path) != snapshot:  # None: it is incomplete
                continue
            file = ParityFile.open(name.path)
        except FtckptError as error:
            problems.append(Problem(f"{name.arena}/{name.path.name}", str(error)))
            continue
        with closing(file):
            if file.snapshot() == snapshot:  # it may have been replaced before it was opened
                groups[file.group.name] = file.group
                parity.append(ParityReport(node, name.arena, name.path.name, file.group.name, file.holder))
    return groups, parity, problems


def _holdings(arenas: OpenArenas, node: str, snapshot: SnapshotId) -> Iterator[ArenaLayout]:
    for path in list_arenas(arenas.node_dir):
        try:
            arena = arenas.get(path.name)
        except FtckptError:
            continue  # ``take_inventory`` reports it
        if arena.find(snapshot) is not None:
            holding = arena.image.holding(node, "", path.name)
            if has_slot_groups(holding):
                yield holding


def has_slot_groups(holding: ArenaLayout) -> bool:
    """Whether some section is a member of a group whose blocks are in slots."""
    return any(section.group for section in holding.sections)
