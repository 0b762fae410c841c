"""What a restart would take now: the decision of restarts, made of what nodes tell before a byte of it is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ftckpt.errors import LostError, MismatchError
from ftckpt.model.layouts import layout_name
from ftckpt.model.topology import RankPlace, Topology, axes_of, coordinates_of, shard_names
from ftckpt.restore.decide import Decision, Findings, Query, decide
from ftckpt.restore.inventory import Inventory, NodeProtection, SnapshotProtection, known_shards

GONE = "(gone)"
"""In place of the node of a shard whose arena nobody has told of."""


@dataclass(frozen=True)
class RestartForecast:
    """Of a restart on the layout of the newest snapshots, where all nodes that have told come back.

    ``iteration``: that training goes on from; -1: from the beginning, or, with a ``problem``, not at all.
    ``source``: ``memory``, ``storage`` or ``nothing``. ``rebuilt``: shards that lie in no slot, each with what kinds
    of parity it comes from. ``passed_over``: why newer snapshots are not taken.
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
    """What a restart would take.

    Args:
        inventory: of all nodes that have told.
        stored: iterations of whole snapshots on storage.
        protection: asks those nodes what they have for a snapshot that does not lie in slots.
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
    """The job whose ranks hold the newest snapshots, as far as their arenas tell; None where there are none.

    Raises:
        MismatchError: its shards cannot be known.
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
    """Those of that job of which nobody has told an arena. Raises MismatchError."""
    topology = topology_of(inventory)
    return [] if topology is None else [member.shard for member in topology.members if member.node == GONE]


def _decided(
    inventory: Inventory, topology: Topology, protection: Callable[[Query], Sequence[NodeProtection]]
) -> Decision | None:
    inventory, _ = inventory.of_shards(known_shards(inventory.arenas, topology))
    findings = Findings()
    # As a search does it, with nothing found bad: what a byte is only a restart reads.
    while isinstance(answer := decide(inventory, topology, findings), Query):
        findings.shields[answer.snapshot] = SnapshotProtection.of(protection(answer), answer.shards)
    return answer


def _rebuilt(decision: Decision) -> dict[str, tuple[str, ...]]:
    """Each shard that is rebuilt, with what events call the sources of its chunks."""
    if decision.rebuild is None:
        return {}
    sources: dict[str, set[str]] = {shard: set() for shard in decision.rebuild.fixes}
    for repair in decision.rebuild.repairs:
        for shard, _ in repair.lost:
            if shard in sources:
                sources[shard].add(repair.group.traits.source)
    return {shard: tuple(sorted(of)) for shard, of in sorted(sources.items())}
