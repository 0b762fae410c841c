"""Which snapshot to take, and where each shard of it comes from: pure functions of what all nodes hold.

One choice for all who read snapshots from memory: a restart (``decide``, which knows parity), a save from inside the
job and a conversion of its arenas (``newest_whole``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ftckpt.errors import LostError
from ftckpt.memory.corruption import Corruption
from ftckpt.model.layouts import layout_name
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import listed
from ftckpt.model.topology import Topology, layouts_differ
from ftckpt.parity.survive import BlockId
from ftckpt.restore.inventory import ArenaReport, Candidate, Inventory, Layout, SnapshotProtection, candidates
from ftckpt.restore.locations import SlotAt
from ftckpt.restore.reconstruction_plan import Rebuild, assess


@dataclass(frozen=True)
class Decision:
    """Restore ``snapshot``, shard by shard from the slots ``sources``.

    ``passed_over`` says why newer snapshots were not taken, one text each. Shards that are in ``rebuild`` are in no
    source yet. ``layout`` and ``ranks`` are those of the candidate: in another layout than the job's no rank
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
        """To take each shard of ``candidate`` that lies in a good slot from the nearest."""
        nearest = {shard: candidate.nearest(shard, damaged) for shard in candidate.homes}
        sources = {shard: slot for shard, slot in nearest.items() if slot is not None}
        return cls(candidate.snapshot, sources, layout=candidate.layout, ranks=candidate.ranks)


@dataclass(frozen=True)
class Query:
    """Nothing can be decided before all nodes have reported what protects the ``shards`` of ``snapshot``."""

    snapshot: SnapshotId
    layout: Layout
    shards: tuple[str, ...]

    def lacking(self, inventory: Inventory, damaged: Collection[SlotAt]) -> set[str]:
        """Those of the shards that lie in no good slot: whose packages are wanted."""
        return set(self.shards) - inventory.good_shards(self.snapshot, damaged)


@dataclass
class Findings:
    """What a search knows so far, beside the inventory.

    ``damage`` of slots that did not verify; ``shields`` of snapshots that were asked for; ``bad_blocks`` did not
    verify, or gave wrong bytes; ``given_up`` are snapshots that could not be rebuilt though parity was there, with
    the reason.
    """

    damage: dict[SlotAt, Corruption] = field(default_factory=dict)
    shields: dict[SnapshotId, SnapshotProtection] = field(default_factory=dict)
    bad_blocks: dict[SnapshotId, set[BlockId]] = field(default_factory=dict)
    given_up: dict[SnapshotId, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rejection:
    """Why a snapshot cannot be taken; ``spoilt``: it was whole once, as far as can be known."""

    cause: str
    spoilt: bool


def decide(inventory: Inventory, topology: Topology, findings: Findings) -> Decision | Query | None:
    """The newest snapshot of one lineage that is whole on every shard of its layout, or can be made so, or None.

    A copy on the node whose rank needs it is preferred. Snapshots of other layouts than the job's count as much.
    Of two snapshots of one iteration the one that needs no parity is taken, then the one of the job's own layout.
    None means that no snapshot was ever whole: the job starts from the beginning.

    Raises:
        MismatchError: arenas contradict each other.
        LostError: a snapshot was whole once and none can be made whole now; names what is missing.
    """
    reports = inventory.arenas
    known = candidates(reports, topology, findings.damage)
    passed_over: list[str] = []
    # A slot is sealed only after every rank has its arena: a missing arena, like a corrupt slot, was there once.
    unreadable = {report.shard for report in reports if not report.layout}
    spoilt = any(not one.homes.keys() <= unreadable | set(one.arenas) for one in known.values())
    # Only what was whole has packages, and the arenas of a node are marked so before its SMP makes or fetches any. An
    # arena that is there and marks nothing was told that it never happened; its SMP, at work on that, may have stored
    # packages behind the void. Where no arena of the node is left the packages alone tell.
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


def newest_whole(
    reports: Sequence[ArenaReport], topology: Topology | None = None, iteration: int | None = None
) -> Decision:
    """The newest snapshot, or that of ``iteration``, every shard of which lies in some slot; parity does not count.

    Raises:
        LostError: there is none; says what newer ones lack, or which iterations there are.
        MismatchError: arenas contradict each other, or the shards of a layout cannot be known.
    """
    known = candidates(reports, topology)
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
    causes = [*passed_over[:3], *problems[:3]] or [f"there are iterations {listed(list(map(str, there))) or 'none'}"]
    raise LostError("; ".join(causes))


def worth_keeping(
    inventory: Inventory, topology: Topology, chosen: SnapshotId
) -> tuple[frozenset[SnapshotId], frozenset[SnapshotId]]:
    """Snapshots that a restart can use after ``chosen`` was decided on, which is to be rebuilt; two answers.

    In the first are ``chosen``, what is taken in its place should it fail (whole as it lies there, or with packages,
    so that parity may bring it back; slots that did not verify count as good), and newer ones: they could not be
    taken, but may be whole again at a later start that has more nodes than this one. The second is without those:
    restoring ``chosen`` voids them on all nodes.
    """
    known = candidates(inventory.arenas, topology)
    newer = {snapshot for snapshot in known if snapshot.iteration > chosen.iteration}
    fallbacks = {s for s, one in known.items() if s not in newer and (not one.missing(()) or inventory.protects(s))}
    least = frozenset(fallbacks | {chosen})
    return least | newer, least


def readers_of(topology: Topology, decision: Decision) -> dict[str, int]:
    """The rank that reads each shard of a snapshot, or rebuilds it; on the node where that lies.

    The rank that continues the shard where it is there, otherwise the ranks of the node in turn: of shards that
    nobody continues each has as many as the others, give or take one.
    """
    places = dict(decision.sources)
    if decision.rebuild is not None:
        places.update({shard: fix.at for shard, fix in decision.rebuild.fixes.items()})
    local: dict[str, list[int]] = {}
    for rank, member in enumerate(topology.members):
        local.setdefault(member.node, []).append(rank)
    turns = dict.fromkeys(local, 0)
    readers: dict[str, int] = {}
    # Sorted: all ranks must deal the same turns without asking each other.
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
    # A shard that lies in no slot is rebuilt around its package: without any there is no need to ask all nodes.
    if len(corrupt) < len(missing) and not inventory.protects(snapshot):
        return Rejection(cause, bool(corrupt))
    # Asked for only now: in the usual restart nothing is missing, and parity files stay unread.
    if snapshot not in findings.shields:
        return Query(snapshot, candidate.layout, tuple(candidate.homes))
    if snapshot in findings.given_up:
        return Rejection(f"{cause}; {findings.given_up[snapshot]}", spoilt=True)
    shield, bad_blocks = findings.shields[snapshot], findings.bad_blocks.get(snapshot, ())
    rebuild = assess(candidate, findings.damage, shield, bad_blocks)
    if isinstance(rebuild, Rebuild):
        return replace(decision, rebuild=rebuild)
    return Rejection(f"{cause}; {'; '.join(rebuild[:3])}", spoilt=True)


def _by_age(known: Mapping[SnapshotId, Candidate], damaged: Collection[SlotAt]) -> list[Candidate]:
    """Newest first; of one iteration those first that are there without parity, then those that fit the layout."""

    def key(one: Candidate) -> tuple[int, bool, bool, bytes]:
        # The lineage is random: it means nothing, but puts ties in the same order on all ranks.
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
    # Without any trace of an earlier success this is a first start, and not a loss.
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
    what = "what the arenas held"
    if whole is not None:
        what = f"iteration {whole} was whole and"
    elif unreadable:
        what = "what an unreadable arena held"
    raise LostError(f"{what} cannot be restored: {'; '.join(causes)}")
