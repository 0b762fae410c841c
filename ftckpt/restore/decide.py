"""Choice of the snapshot to restore, and of the slot that each shard is read from: pure functions of the inventory.

``decide`` is for restarts and takes parity into account. ``newest_whole`` is for
conversions of arenas: it accepts only snapshots every shard of which is in a slot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ftckpt.errors import LostError
from ftckpt.memory.corruption import Corruption
from ftckpt.memory.inventory import ArenaReport, Inventory, Layout
from ftckpt.memory.locations import SlotAt
from ftckpt.model.layouts import layout_name
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import listed
from ftckpt.model.topology import Topology, layouts_differ
from ftckpt.parity.survive import BlockId
from ftckpt.restore.candidates import Candidate, SnapshotProtection, candidates
from ftckpt.restore.reconstruction_plan import Rebuild, assess


@dataclass(frozen=True)
class Decision:
    """The snapshot to restore, and the slot of each shard (``sources``).

    ``passed_over``: one text for each newer snapshot that is skipped. Shards in ``rebuild`` have no source yet.
    ``layout`` and ``ranks`` are the candidate's; ``ranks`` is empty in another layout than the job's, where no rank
    continues a shard.
    """

    snapshot: SnapshotId
    sources: Mapping[str, SlotAt]
    passed_over: tuple[str, ...] = ()
    rebuild: Rebuild | None = None
    layout: Layout = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, candidate: Candidate, damaged: Collection[SlotAt]) -> Decision:
        """A decision that reads each shard of ``candidate`` from its nearest good slot."""
        nearest = {shard: candidate.nearest(shard, damaged) for shard in candidate.homes}
        sources = {shard: slot for shard, slot in nearest.items() if slot is not None}
        return cls(candidate.snapshot, sources, layout=candidate.layout, ranks=candidate.ranks)


@dataclass(frozen=True)
class Query:
    """A request for the protection of ``snapshot`` on all nodes, without which ``decide`` cannot answer."""

    snapshot: SnapshotId
    layout: Layout
    shards: tuple[str, ...]

    def lacking(self, inventory: Inventory, damaged: Collection[SlotAt]) -> set[str]:
        """The shards without a good slot, whose packages are requested."""
        return set(self.shards) - inventory.good_shards(self.snapshot, damaged)


@dataclass
class Findings:
    """Results of a search so far, in addition to the inventory.

    ``damage``: slots that failed verification. ``protections``: protection that was queried. ``bad_blocks``: parity
    blocks that failed verification or gave wrong bytes. ``given_up``: snapshots that could not be reconstructed
    although parity was complete, with the reason.
    """

    damage: dict[SlotAt, Corruption] = field(default_factory=dict)
    protections: dict[SnapshotId, SnapshotProtection] = field(default_factory=dict)
    bad_blocks: dict[SnapshotId, set[BlockId]] = field(default_factory=dict)
    given_up: dict[SnapshotId, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rejection:
    """The cause why a snapshot cannot be restored; ``spoilt``: it seems to have been committed once."""

    cause: str
    spoilt: bool


def decide(inventory: Inventory, topology: Topology, findings: Findings) -> Decision | Query | None:
    """The newest snapshot whose every shard is in a good slot or can be reconstructed, whatever its layout.

    Of two snapshots of one iteration the one that needs no parity is preferred, then the one in the job's layout.
    Of two copies of a shard the one on the node that needs it is preferred. Returns a Query where the protection of
    a snapshot must be known first, and None if no snapshot was ever committed: training starts from the beginning.

    Raises:
        MismatchError: arenas contradict each other.
        LostError: snapshots were committed, and none can be restored; the text names what is missing.
    """
    reports = inventory.arenas
    known = candidates(reports, topology, findings.damage)
    passed_over: list[str] = []
    # A slot is sealed only after every rank has its arena: a missing arena, like a corrupt slot, existed once.
    unreadable = {report.shard for report in reports if not report.layout}
    spoilt = any(not one.homes.keys() <= unreadable | set(one.arenas) for one in known.values())
    # Only committed snapshots have packages, and a node's arenas are marked before its SMP makes or fetches any. So
    # packages next to unmarked arenas are of an invalidated snapshot: the SMP stored them after that. On a node
    # without arenas packages alone are evidence of a commit.
    spoilt = spoilt or not {package.node for package in inventory.packages} <= {report.node for report in reports}
    for candidate in _by_age(known, findings.damage):
        answer = _weigh(candidate, inventory, findings)
        if isinstance(answer, Query):
            return answer
        if isinstance(answer, Decision):
            return replace(answer, passed_over=tuple(passed_over))
        passed_over.append(f"{_title(candidate)}: {answer.cause}")
        spoilt = spoilt or answer.spoilt
    _refuse_lost(reports, topology, known, passed_over, spoilt)
    return None


def newest_whole(reports: Sequence[ArenaReport], iteration: int | None = None) -> Decision:
    """The newest snapshot, or that of ``iteration``, every shard of which is in some slot; parity is not used.

    Raises:
        LostError: none is complete; the text names missing shards, or the iterations that exist.
        MismatchError: arenas contradict each other, or the shards of a layout cannot be derived.
    """
    known = candidates(reports, None)
    passed_over: list[str] = []
    for candidate in _by_age(known, ()):
        if iteration is not None and candidate.snapshot.iteration != iteration:
            continue
        missing = candidate.missing(())
        if not missing:
            return replace(Decision.of(candidate, ()), passed_over=tuple(passed_over))
        lacking = f"lacks {listed(missing)} of {len(candidate.homes)} shards"
        passed_over.append(f"iteration {candidate.snapshot.iteration} {lacking}")
    problems = [f"{report.name}: {text}" for report in reports for text in report.problems]
    there = sorted({snapshot.iteration for snapshot in known})
    causes = [*passed_over[:3], *problems[:3]] or [f"memory has iterations {listed(list(map(str, there))) or 'none'}"]
    raise LostError("; ".join(causes))


def worth_keeping(
    inventory: Inventory, topology: Topology, chosen: SnapshotId
) -> tuple[frozenset[SnapshotId], frozenset[SnapshotId]]:
    """Two sets of snapshots to retain while ``chosen`` is reconstructed: the preferred one, and the minimum.

    The minimum is ``chosen`` and its fallbacks, older snapshots that are complete or have packages (slots that failed
    verification count as good). The first set adds newer snapshots: they cannot be restored now, but a later start
    with more nodes may complete them. Restoring ``chosen`` invalidates them, so they may be evicted.
    """
    known = candidates(inventory.arenas, topology)
    newer = {snapshot for snapshot in known if snapshot.iteration > chosen.iteration}
    fallbacks = {s for s, one in known.items() if s not in newer and (not one.missing(()) or inventory.protects(s))}
    least = frozenset(fallbacks | {chosen})
    return least | newer, least


def readers_of(topology: Topology, decision: Decision) -> dict[str, int]:
    """The rank that reads or reconstructs each shard; a rank of the node that has the slot.

    That is the rank that continues the shard if it runs on this node. Other shards are dealt to the node's ranks in
    turn.
    """
    places = dict(decision.sources)
    if decision.rebuild is not None:
        places.update({shard: fix.at for shard, fix in decision.rebuild.fixes.items()})
    local: dict[str, list[int]] = {}
    for rank, member in enumerate(topology.members):
        local.setdefault(member.node, []).append(rank)
    turns = dict.fromkeys(local, 0)
    readers: dict[str, int] = {}
    # Sorted: all ranks must compute the same turns without communication.
    for shard in sorted(places):
        node = places[shard].node
        if decision.ranks.get(shard) in local[node]:
            readers[shard] = decision.ranks[shard]
        else:
            readers[shard] = local[node][turns[node] % len(local[node])]
            turns[node] += 1
    return readers


def _weigh(candidate: Candidate, inventory: Inventory, findings: Findings) -> Decision | Query | Rejection:
    snapshot = candidate.snapshot
    decision = Decision.of(candidate, findings.damage)
    missing = candidate.missing(findings.damage)
    if not missing:
        return decision
    corrupt = [shard for shard in missing if shard in candidate.slots]
    cause = f"corrupt in {listed(corrupt)}" if corrupt else f"not sealed by {listed(missing)}"
    # A shard without a slot needs a package: if there are none, no query can help.
    if len(corrupt) < len(missing) and not inventory.protects(snapshot):
        return Rejection(cause, bool(corrupt))
    # Queried only now: in the usual restart nothing is missing, and parity files stay unread.
    if snapshot not in findings.protections:
        return Query(snapshot, candidate.layout, tuple(candidate.homes))
    if snapshot in findings.given_up:
        return Rejection(f"{cause}; {findings.given_up[snapshot]}", spoilt=True)
    protection, bad_blocks = findings.protections[snapshot], findings.bad_blocks.get(snapshot, ())
    rebuild = assess(candidate, findings.damage, protection, bad_blocks)
    if isinstance(rebuild, Rebuild):
        return replace(decision, rebuild=rebuild)
    return Rejection(f"{cause}; {'; '.join(rebuild[:3])}", spoilt=True)


def _by_age(known: Mapping[SnapshotId, Candidate], damaged: Collection[SlotAt]) -> list[Candidate]:
    """Newest first; within an iteration those that need no parity, then those in the job's layout."""

    def key(one: Candidate) -> tuple[int, bool, bool, bytes]:
        # The lineage is random: it only orders ties alike on all ranks.
        return one.snapshot.iteration, not one.missing(damaged), bool(one.ranks), one.snapshot.lineage

    return sorted(known.values(), key=key, reverse=True)


def _title(candidate: Candidate) -> str:
    of = "" if candidate.ranks else f" of {layout_name(candidate.layout)}"
    return f"iteration {candidate.snapshot.iteration}{of}"


def _refuse_lost(
    reports: Sequence[ArenaReport],
    topology: Topology,
    known: Mapping[SnapshotId, Candidate],
    passed_over: Sequence[str],
    spoilt: bool,
) -> None:
    # Without any trace of a commit this is a first start, not a loss.
    whole = max((r.whole.iteration for r in reports if r.whole is not None), default=None)
    unreadable = [report for report in reports if report.problems and not report.layout]
    if whole is None and not unreadable and not spoilt:
        return
    newest = known[max(known)] if known else None
    layout = newest.layout if newest is not None and not newest.ranks else None
    needed = newest.homes if newest is not None else topology.rank_of
    present = {r.shard for r in reports if r.slots and (layout is None or not layouts_differ(layout, r.layout))}
    absent = sorted(set(needed) - present)
    of = f" of layout {layout_name(layout)}" if layout is not None else ""
    causes = [f"no arena of {listed(absent)}{of}"] if absent else []
    causes += [f"{r.shard}: {text}" for r in reports for text in r.problems][:3]
    causes += list(passed_over)[:3]
    what = "an earlier snapshot"
    if whole is not None:
        what = f"iteration {whole} was committed and"
    elif unreadable:
        what = "the content of an unreadable arena"
    raise LostError(f"{what} cannot be restored: {'; '.join(causes)}")
