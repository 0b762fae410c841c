"""What protects the snapshots: parity files and packages of every node, as data that can be sent to other nodes.

First each node tells the names of its packages (``take_protection``): what can be rebuilt has some. Only if a
snapshot cannot be taken as it lies in the arenas do nodes look into packages and parity files of it
(``read_shield``), and ``Shield`` puts together what all told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ftckpt.arena.directory import arena_path
from ftckpt.arena.image import SlotImage
from ftckpt.arena.package import list_packages, load
from ftckpt.arena.segment import Arena, list_arenas
from ftckpt.errors import FtckptError
from ftckpt.layout.topology import layouts_differ
from ftckpt.protect.groups import ParityGroup, pack_lengths, slot_groups, unpack_lengths
from ftckpt.protect.holding import HeldSection, Holding
from ftckpt.protect.parity_file import ParityFile, list_parity

Snapshot = tuple[int, str]
"""Iteration and lineage (hex): snapshots sort by age."""


@dataclass(frozen=True, order=True)
class ParityReport:
    """A parity file of one node, in the directory ``arena``: the blocks of member ``holder`` of ``group``."""

    node: str
    arena: str
    file: str
    group: str
    holder: int


@dataclass(frozen=True, order=True)
class PackageReport:
    """A package that a node keeps, by its name; ``lineage8`` are the first 8 hex digits."""

    node: str
    file: str
    shard: str
    lineage8: str
    iteration: int


@dataclass(frozen=True)
class ProtectionReport:
    """The packages of one node or of all. ``problems``: (name of the file, why it is not used)."""

    packages: tuple[PackageReport, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON value for ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ProtectionReport:
        """Inverse of ``to_json``."""
        packages = tuple(PackageReport(**package) for package in value["packages"])
        return cls(packages, tuple((name, text) for name, text in value["problems"]))

    def protects(self, snapshot: Snapshot) -> bool:
        """Whether there is a package of ``snapshot``."""
        iteration, lineage = snapshot
        return any((package.iteration, package.lineage8) == (iteration, lineage[:8]) for package in self.packages)


def join(reports: Iterable[ProtectionReport], shards: Collection[str]) -> ProtectionReport:
    """All nodes' reports as one; packages of shards that are not of this job's layout are problems."""
    packages: list[PackageReport] = []
    problems: list[tuple[str, str]] = []
    for report in reports:
        packages += [package for package in report.packages if package.shard in shards]
        foreign = [package for package in report.packages if package.shard not in shards]
        problems += [(package.file, f"{package.shard} is no shard of this layout") for package in foreign]
        problems += report.problems
    return ProtectionReport(tuple(sorted(packages)), tuple(problems))


def take_protection(node_dir: Path, node: str) -> ProtectionReport:
    """Report every package of this node, by its name."""
    return ProtectionReport(
        tuple(
            PackageReport(node, name.path.name, name.shard, name.lineage8, name.iteration)
            for name in list_packages(node_dir)
        )
    )


@dataclass(frozen=True)
class Kept:
    """A sound package: ``file`` of ``node``, ``nbytes`` long, and what the shard's arena was."""

    node: str
    file: str
    nbytes: int
    holding: Holding


@dataclass(frozen=True)
class Shield:
    """All that protects one snapshot, told by all nodes.

    ``groups`` by name, those whose blocks lie in slots among them; ``parity`` says where the blocks of a holder
    (group, member index) lie; ``kept`` has the packages of each shard that was asked for.
    """

    groups: Mapping[str, ParityGroup] = field(default_factory=dict)
    parity: Mapping[tuple[str, int], ParityReport] = field(default_factory=dict)
    kept: Mapping[str, tuple[Kept, ...]] = field(default_factory=dict)
    holdings: Mapping[str, Holding] = field(default_factory=dict)
    problems: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, told: Iterable[Mapping[str, Any]], shards: Collection[str]) -> Shield:
        """Put together what ``read_shield`` gave on every node; groups of others than ``shards`` are problems."""
        groups: dict[str, ParityGroup] = {}
        parity: list[ParityReport] = []
        kept: dict[str, list[Kept]] = {}
        holdings: dict[str, Holding] = {}
        problems: list[tuple[str, str]] = []
        for node in told:
            for value in node["groups"]:
                group = ParityGroup.from_json(value)
                foreign = sorted(group.places.keys() - set(shards))
                if foreign:
                    problems.append((f"group {group.name}", f"{foreign[0]} is no shard of this layout"))
                else:
                    groups[group.name] = group
            parity += [ParityReport(**value) for value in node["parity"]]
            for where, file, nbytes, value in node["kept"]:
                holding = holding_of_json(value)
                kept.setdefault(holding.shard, []).append(Kept(where, file, nbytes, holding))
            holdings.update({value["shard"]: holding_of_json(value) for value in node["holdings"]})
            problems += [(name, text) for name, text in node["problems"]]
        for shard, packages in kept.items():
            holdings.setdefault(shard, packages[0].holding)
        grouped = [holdings[shard] for shard in sorted(holdings) if _in_slots(holdings[shard])]
        groups.update({group.name: group for group in slot_groups(grouped)})
        files = {(p.group, p.holder): p for p in sorted(parity, reverse=True)}
        return cls(groups, files, {s: tuple(p) for s, p in kept.items()}, holdings, tuple(problems))


def read_shield(
    node_dir: Path,
    node: str,
    snapshot: Snapshot,
    shards: Collection[str],
    layout: Mapping[str, int | str | bool],
) -> dict[str, Any]:
    """What this node has of the protection of ``snapshot``, as a JSON value: the groups of its parity files, the
    packages of ``shards``, and what arenas hold that have blocks of other shards in their slots."""
    iteration, lineage = snapshot
    groups, parity, problems = _read_parity(node_dir, node, snapshot)
    kept = []
    for name in list_packages(node_dir):
        if name.shard not in shards or (name.iteration, name.lineage8) != (iteration, lineage[:8]):
            continue
        try:
            package = load(name.path)
        except FtckptError as error:
            problems.append((name.path.name, str(error)))
            continue
        differing = layouts_differ(layout, package.manifest.layout)
        if package.lineage.hex() != lineage or differing:
            why = f"of another layout ({', '.join(differing)})" if differing else "of another lineage"
            problems.append((name.path.name, f"a package {why}"))
            continue
        image = SlotImage.of(package.manifest)
        holding = Holding.of(image, node, "", arena_path(node_dir, package.manifest).name)
        kept.append([node, name.path.name, name.path.stat().st_size, holding_json(holding)])
    return {
        "groups": [group.to_json() for group in groups.values()],
        "parity": [asdict(report) for report in parity],
        "kept": kept,
        "holdings": [holding_json(holding) for holding in _holdings(node_dir, node, snapshot)],
        "problems": problems,
    }


def _read_parity(
    node_dir: Path, node: str, snapshot: Snapshot
) -> tuple[dict[str, ParityGroup], list[ParityReport], list[tuple[str, str]]]:
    """Groups and parity files of ``snapshot``, and what could not be read."""
    groups: dict[str, ParityGroup] = {}
    parity: list[ParityReport] = []
    problems: list[tuple[str, str]] = []
    for name in list_parity(node_dir):
        try:
            file = ParityFile.open(name.path)
        except FtckptError as error:
            problems.append((f"{name.arena}/{name.path.name}", str(error)))
            continue
        with closing(file):
            found = file.snapshot()  # None: it was being written
            if found is not None and (found[1], found[0].hex()) == snapshot:
                groups[file.group.name] = file.group
                parity.append(ParityReport(node, name.arena, name.path.name, file.group.name, file.holder))
    return groups, parity, problems


def _holdings(node_dir: Path, node: str, snapshot: Snapshot) -> list[Holding]:
    found = []
    for path in list_arenas(node_dir):
        try:
            arena = Arena.open(path)
        except FtckptError:
            continue  # told by take_inventory
        with closing(arena):
            records = [arena.control.record(slot) for slot in range(arena.control.slots)]
            if any(r.sealed and (r.iteration, r.lineage.hex()) == snapshot for r in records):
                holding = Holding.of(arena.image, node, "", path.name)
                found += [holding] if _in_slots(holding) else []
    return found


def _in_slots(holding: Holding) -> bool:
    """Whether some section takes part in a group whose blocks lie in slots."""
    return any(section[1] for section in holding.sections)


def holding_json(holding: Holding) -> dict[str, Any]:
    """A JSON value for ``holding_of_json``; equal lengths are counted."""
    sections = [[*section[:-1], pack_lengths(section.lengths)] for section in holding.sections]
    first, lengths = holding.volatile
    return {**vars(holding), "sections": sections, "volatile": [first, pack_lengths(lengths)]}


def holding_of_json(value: Mapping[str, Any]) -> Holding:
    """Inverse of ``holding_json``."""
    sections = tuple(
        HeldSection(kind, group, of, first, unpack_lengths(lengths))
        for kind, group, of, first, lengths in value["sections"]
    )
    first, lengths = value["volatile"]
    return Holding(**{**value, "sections": sections, "volatile": (first, unpack_lengths(lengths))})


def remove_newer(node_dir: Path, iteration: int) -> None:
    """Delete parity files and packages of snapshots newer than ``iteration``, all of them where it is -1.

    What has no snapshot, because it was being written, stays unless all goes.
    """
    for parity in list_parity(node_dir):
        try:
            with closing(ParityFile.open(parity.path)) as file:
                snapshot = file.snapshot()
        except FtckptError:
            snapshot = None
        if iteration < 0 or (snapshot is not None and snapshot[1] > iteration):
            parity.path.unlink(missing_ok=True)
    for package in list_packages(node_dir):
        if package.iteration > iteration:
            package.path.unlink(missing_ok=True)
