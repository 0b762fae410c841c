"""Which snapshot to restore, and where each shard of it comes from: one pure function."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ftckpt.errors import LostError, MismatchError
from ftckpt.layout.names import layout_name
from ftckpt.layout.topology import layouts_differ
from ftckpt.protect.survive import BlockId
from ftckpt.restore.found import REMEDY, Layout, Snapshots, find
from ftckpt.restore.inventory import ArenaReport
from ftckpt.restore.protection import ProtectionReport, Shield, Snapshot
from ftckpt.restore.rebuild import Rebuild, assess
from ftckpt.restore.source import Damage, Source

__all__ = ["Ask", "Decision", "Known", "Source", "decide"]


@dataclass(frozen=True)
class Decision:
    """Restore ``iteration`` of ``lineage`` (hex), shard by shard from ``sources``.

    ``passed_over`` tells why newer snapshots were not taken, one text each. Shards that are in ``rebuild`` are
    in no source yet. ``layout`` is the one the snapshot was taken in; ``homes`` maps each of its shards to the node
    that needs it or, in another layout than the job's, that holds or rebuilds it.
    """

    lineage: str
    iteration: int
    sources: Mapping[str, Source]
    passed_over: tuple[str, ...]
    rebuild: Rebuild | None = None
    layout: Layout = field(default_factory=dict)
    homes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ask:
    """Nothing can be said before all nodes have told what protects ``snapshot``, the shards of its layout."""

    snapshot: Snapshot
    layout: Layout
    shards: tuple[str, ...]


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
    layout: Layout,
    bad: Mapping[Source, Damage] | None = None,
    known: Known | None = None,
    *,
    reshapes: bool = False,
) -> Decision | Ask | None:
    """The newest snapshot of one lineage that is whole on every shard of its layout, or can be made so, or None.

    ``homes`` maps each shard of the job's own ``layout`` to the node whose rank needs it; a copy on that node is
    preferred. Snapshots of other layouts count as much; ``reshapes`` says whether the job can take one. ``bad``
    slots did not verify. Without ``known`` parity is left out of account. Of two snapshots of one iteration the
    one that needs no parity is taken, then the one of the job's own layout. None means that no snapshot was ever
    whole: the job starts from the beginning.

    Raises:
        MismatchError: the snapshot to take is of another layout and the job does not reshape, or arenas contradict
            each other.
        LostError: a snapshot was whole once and none can be made whole now; names what is missing.
    """
    bad = bad or {}
    passed_over: list[str] = []
    found = find(reports, homes, layout, bad)
    # A slot is sealed only after every rank has its arena: a missing arena, like a corrupt slot, was there once.
    unreadable = {report.shard for report in reports if not report.layout}
    spoilt = any(not one.homes.keys() <= unreadable | set(one.arenas) for one in found.values())
    # And only snapshots that were whole have packages.
    spoilt = spoilt or (known is not None and bool(known.protection.packages))
    for snapshot in _by_age(found, bad):
        one = found[snapshot]
        answer = _weigh(snapshot, one, bad, known)
        if isinstance(answer, Ask):
            return answer
        if isinstance(answer, Decision):
            if one.foreign and not reshapes:
                raise _mismatch(layout, one.layout)
            return replace(answer, passed_over=tuple(passed_over))
        where = f" of {layout_name(one.layout)}" if one.foreign else ""
        passed_over.append(f"iteration {snapshot[0]}{where}: {answer.cause}")
        spoilt = spoilt or answer.spoilt
    foreign = [one.layout for one in found.values() if one.foreign]
    if foreign and not reshapes:
        raise _mismatch(layout, foreign[0])
    _refuse_lost(reports, homes, found, passed_over, spoilt)
    return None


@dataclass(frozen=True)
class _Rejected:
    """Why a snapshot cannot be taken; ``spoilt``: it was whole once, as far as can be known."""

    cause: str
    spoilt: bool


def _weigh(
    snapshot: Snapshot, found: Snapshots, bad: Mapping[Source, Damage], known: Known | None
) -> Decision | Ask | _Rejected:
    (iteration, lineage), homes = snapshot, found.homes
    sources = {shard: found.nearest(shard, bad) for shard in homes}
    there = {shard: source for shard, source in sources.items() if source is not None}
    decision = Decision(lineage, iteration, there, (), None, found.layout, homes)
    missing = sorted(set(homes) - set(there))
    if not missing:
        return decision
    corrupt = [shard for shard in missing if shard in found.slots]
    cause = f"corrupt in {_some(corrupt)}" if corrupt else f"not sealed by {_some(missing)}"
    if known is None or not (len(corrupt) == len(missing) or known.protection.protects(snapshot)):
        return _Rejected(cause, bool(corrupt))
    if snapshot not in known.shields:
        return Ask(snapshot, found.layout, tuple(homes))
    if snapshot in known.given_up:
        return _Rejected(f"{cause}; {known.given_up[snapshot]}", spoilt=True)
    rebuild = assess(found, bad, known.shields[snapshot], known.bad_blocks.get(snapshot, ()))
    if isinstance(rebuild, Rebuild):
        return replace(decision, rebuild=rebuild)
    return _Rejected(f"{cause}; {'; '.join(rebuild[:3])}", spoilt=True)


def _by_age(found: Mapping[Snapshot, Snapshots], bad: Mapping[Source, Damage]) -> list[Snapshot]:
    """Newest first; of one iteration those first that are there without parity, then those that fit the layout."""

    def key(snapshot: Snapshot) -> tuple[int, bool, bool, str]:
        one = found[snapshot]
        direct = all(one.nearest(shard, bad) is not None for shard in one.homes)
        return snapshot[0], direct, not one.foreign, snapshot[1]

    return sorted(found, key=key, reverse=True)


def _mismatch(mine: Layout, theirs: Layout) -> MismatchError:
    differing = ", ".join(layouts_differ(mine, theirs))
    return MismatchError(f"the snapshots in memory have another layout ({differing}): {REMEDY}")


def _refuse_lost(
    reports: Sequence[ArenaReport],
    homes: Mapping[str, str],
    found: Mapping[Snapshot, Snapshots],
    passed_over: Sequence[str],
    spoilt: bool,
) -> None:
    whole = max((r.whole[1] for r in reports if r.whole is not None and r.whole[1] >= 0), default=None)
    unreadable = [report for report in reports if report.problems and not report.layout]
    if whole is None and not unreadable and not spoilt:
        return
    newest = found[max(found)] if found else None
    layout = newest.layout if newest is not None and newest.foreign else None
    needed = newest.homes if newest is not None else homes
    present = {r.shard for r in reports if r.slots and (layout is None or not layouts_differ(layout, r.layout))}
    absent = sorted(set(needed) - present)
    of = f" of layout {layout_name(layout)}" if layout is not None else ""
    causes = [f"no arena of {_some(absent)}{of}"] if absent else []
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
