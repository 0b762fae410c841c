"""Forecast of a restart: the same decision, made from the reports of nodes without reading snapshot bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ftckpt.errors import LostError, MismatchError
from ftckpt.memory.inventory import Inventory, NodeProtection
from ftckpt.model.layouts import layout_name
from ftckpt.model.topology import RankPlace, Topology, axes_of, coordinates_of, shard_names
from ftckpt.restore.candidates import SnapshotProtection, known_shards
from ftckpt.restore.decide import Decision, Findings, Query, decide

GONE = "(gone)"
"""Placeholder for the node of a shard whose arena no node reports."""


@dataclass(frozen=True)
class RestartForecast:
    """The outcome of a restart on the layout of the newest snapshots, if all nodes that reported take part.

    ``iteration``: where training resumes; -1: from the beginning, or, with a ``problem``, not at all. ``source``:
    ``memory``, ``storage`` or ``nothing``. ``rebuilt``: shards without a slot, each with the sources of parity that
    it comes from. ``passed_over``: the reasons why newer snapshots are skipped.
    """

    iteration: int = -1
    source: str = "nothing"
    layout: str = ""
    rebuilt: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    passed_over: tuple[str, ...] = ()
    problem: str = ""


def forecast(
    inventory: Inventory, stored: Collection[int], protection: Callable[[Query], Sequence[NodeProtection]]
) -> RestartForecast:
    """The forecast of a restart.

    Args:
        inventory: the joined inventory of all nodes that reported.
        stored: iterations of committed snapshots on storage.
        protection: queries those nodes for the protection of a snapshot that is incomplete in slots.
    """
    newest_stored = max(stored, default=-1)
    try:
        topology = topology_of(inventory)
        decision = _decided(inventory, topology, protection) if topology is not None else None
        problem = ""
    except (LostError, MismatchError) as error:
        decision, problem = None, str(error)
    if decision is not None and decision.snapshot.iteration >= newest_stored:
        return RestartForecast(
            decision.snapshot.iteration, "memory", layout_name(decision.layout), _rebuilt(decision),
            decision.passed_over,
        )  # fmt: skip
    if newest_stored >= 0:
        passed_over = (problem,) if problem else () if decision is None else decision.passed_over
        return RestartForecast(newest_stored, "storage", passed_over=passed_over)
    return RestartForecast(problem=problem)


def topology_of(inventory: Inventory) -> Topology | None:
    """The topology of the job that took the newest snapshots, from its arenas; None if there are none.

    Raises:
        MismatchError: its shards cannot be derived.
    """
    reports = [report for report in inventory.arenas if report.layout]
    if not reports:
        return None
    newest = max(reports, key=lambda report: max((slot.snapshot.iteration for slot in report.slots), default=-1))
    layout = newest.layout
    nodes = {report.shard: report.node for report in reports if dict(report.layout) == dict(layout)}
    shards = shard_names(layout, axes_of(newest.shard))
    return Topology(0, tuple(RankPlace(coordinates_of(shard), nodes.get(shard, GONE)) for shard in shards), layout)


def unseen_shards(inventory: Inventory) -> list[str]:
    """Shards of that job whose arena no node reports. Raises MismatchError."""
    topology = topology_of(inventory)
    return [] if topology is None else [member.shard for member in topology.members if member.node == GONE]


def _decided(
    inventory: Inventory, topology: Topology, protection: Callable[[Query], Sequence[NodeProtection]]
) -> Decision | None:
    inventory, _ = inventory.of_shards(known_shards(inventory.arenas, topology))
    findings = Findings()
    # As in ``Search``, without corruption: only a restart reads the bytes.
    while isinstance(answer := decide(inventory, topology, findings), Query):
        findings.protections[answer.snapshot] = SnapshotProtection.of(protection(answer), answer.shards)
    return answer


def _rebuilt(decision: Decision) -> dict[str, tuple[str, ...]]:
    """Each reconstructed shard, with the sources of its chunks as in events."""
    if decision.rebuild is None:
        return {}
    sources: dict[str, set[str]] = {shard: set() for shard in decision.rebuild.fixes}
    for repair in decision.rebuild.repairs:
        for shard, _ in repair.lost:
            if shard in sources:
                sources[shard].add(repair.group.traits.source)
    return {shard: tuple(sorted(of)) for shard, of in sorted(sources.items())}
