"""Which snapshot to restore, and where each shard of it comes from: one pure function."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ftckpt.errors import LostError, MismatchError
from ftckpt.layout.topology import layouts_differ
from ftckpt.protect.survive import BlockId
from ftckpt.restore.inventory import ArenaReport
from ftckpt.restore.protection import ProtectionReport, Shield, Snapshot
from ftckpt.restore.rebuild import Rebuild, Snapshots, assess
from ftckpt.restore.source import Damage, Source

__all__ = ["Ask", "Decision", "Known", "Source", "decide"]


@dataclass(frozen=True)
class Decision:
    """Restore ``iteration`` of ``lineage`` (hex), shard by shard from ``sources``.

    ``passed_over`` tells why newer snapshots were not taken, one text each. Shards that are in ``rebuild`` are
    in no source yet.
    """

    lineage: str
    iteration: int
    sources: Mapping[str, Source]
    passed_over: tuple[str, ...]
    rebuild: Rebuild | None = None


@dataclass(frozen=True)
class Ask:
    """Nothing can be said before all nodes have told what protects ``snapshot``."""

    snapshot: Snapshot


@dataclass(frozen=True)
class Known:
    """What is known of parity: which snapshots have packages, and all about those that were asked for.

    ``bad_blocks`` did not verify, or gave wrong bytes. ``given_up`` are snapshots that could not be rebuilt though
    parity was there, with the reason.
    """

    protection: ProtectionReport = field(default_factory=ProtectionReport)
    shields: Mapping[Snapshot, Shield] = field(default_factory=dict)
    bad_blocks: Mapping[Snapshot, Collection[BlockId]] = field(default_factory=dict)
    given_up: Mapping[Snapshot, str] = field(default_factory=dict)


def decide(
    reports: Sequence[ArenaReport],
    homes: Mapping[str, str],
    layout: Mapping[str, int | str | bool],
    bad: Mapping[Source, Damage] | None = None,
    known: Known | None = None,
) -> Decision | Ask | None:
    """The newest snapshot of one lineage that is whole on every shard of ``homes``, or can be made so, or None.

    ``homes`` maps each shard to the node whose rank needs it; a copy on that node is preferred. ``bad``
    slots did not verify. Without ``known`` parity is left out of account. Of two snapshots of one iteration the
    one that needs no parity is taken. None means that no snapshot was ever whole: the job starts from the
    beginning.

    Raises:
        MismatchError: the arenas belong to another layout.
        LostError: a snapshot was whole once and none can be made whole now; names what is missing.
    """
    _check_layout(reports, layout)
    bad = bad or {}
    passed_over: list[str] = []
    found = _find(reports, homes)
    # A slot is sealed only after every rank has its arena: a missing arena, like a corrupt slot, was there once.
    spoilt = bool(found) and not set(homes) <= {report.shard for report in reports}
    # And only snapshots that were whole have packages.
    spoilt = spoilt or (known is not None and bool(known.protection.packages))
    for snapshot in _by_age(found, homes, bad):
        iteration, lineage = snapshot
        sources = {shard: found[snapshot].nearest(shard, bad) for shard in homes}
        there = {shard: source for shard, source in sources.items() if source is not None}
        if len(there) == len(homes):
            return Decision(lineage, iteration, there, tuple(passed_over))
        missing = sorted(set(homes) - set(there))
        corrupt = [shard for shard in missing if shard in found[snapshot].slots]
        cause = f"corrupt in {_some(corrupt)}" if corrupt else f"not sealed by {_some(missing)}"
        if known is not None and (len(corrupt) == len(missing) or known.protection.protects(snapshot)):
            if snapshot not in known.shields:
                return Ask(snapshot)
            rebuild = _assess(found[snapshot], snapshot, bad, known)
            if isinstance(rebuild, Rebuild):
                return Decision(lineage, iteration, there, tuple(passed_over), rebuild)
            cause = f"{cause}; {'; '.join(rebuild[:3])}"
            spoilt = True
        passed_over.append(f"iteration {iteration}: {cause}")
        spoilt = spoilt or bool(corrupt)
    _refuse_lost(reports, homes, passed_over, spoilt)
    return None


def _assess(
    found: Snapshots, snapshot: Snapshot, bad: Mapping[Source, Damage], known: Known
) -> Rebuild | tuple[str, ...]:
    if snapshot in known.given_up:
        return (known.given_up[snapshot],)
    return assess(found, bad, known.shields[snapshot], known.bad_blocks.get(snapshot, ()))


def _find(reports: Sequence[ArenaReport], homes: Mapping[str, str]) -> dict[Snapshot, Snapshots]:
    slots: dict[Snapshot, dict[str, list[Source]]] = {}
    for report in reports:
        for slot in report.slots:
            snapshot = slots.setdefault((slot.iteration, slot.lineage), {})
            snapshot.setdefault(report.shard, []).append(Source(report.node, report.name, slot.index))
    nodes = {report.node for report in reports}
    return {snapshot: Snapshots(shards, homes, nodes) for snapshot, shards in slots.items()}


def _by_age(
    found: Mapping[Snapshot, Snapshots], homes: Mapping[str, str], bad: Mapping[Source, Damage]
) -> list[Snapshot]:
    """Newest first; of one iteration those first that are there without parity."""

    def key(snapshot: Snapshot) -> tuple[int, bool, str]:
        direct = all(found[snapshot].nearest(shard, bad) is not None for shard in homes)
        return snapshot[0], direct, snapshot[1]

    return sorted(found, key=key, reverse=True)


def _check_layout(reports: Sequence[ArenaReport], layout: Mapping[str, int | str | bool]) -> None:
    for report in reports:
        differing = layouts_differ(layout, report.layout) if report.slots else []
        if differing:
            raise MismatchError(
                f"the snapshots in memory have another layout ({', '.join(differing)}): start with the layout "
                "they were taken in, or remove them with 'ftckpt clean JOB'"
            )


def _refuse_lost(
    reports: Sequence[ArenaReport], homes: Mapping[str, str], passed_over: Sequence[str], spoilt: bool
) -> None:
    whole = max((r.whole[1] for r in reports if r.whole is not None and r.whole[1] >= 0), default=None)
    unreadable = [report for report in reports if report.problems and not report.layout]
    if whole is None and not unreadable and not spoilt:
        return
    present = {report.shard for report in reports if report.slots}
    absent = sorted(set(homes) - present)
    causes = [f"no arena of {_some(absent)}"] if absent else []
    causes += [f"{r.shard}: {text}" for r in reports for text in r.problems][:3]
    causes += list(passed_over)[:3]
    what = "what the arenas held"
    if whole is not None:
        what = f"iteration {whole} was whole and"
    elif unreadable:
        what = "what an unreadable arena held"
    raise LostError(
        f"{what} cannot be restored: {'; '.join(causes)}. Start over with "
        "--ftckpt-on-lost fresh (or from your last checkpoint on storage)"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
