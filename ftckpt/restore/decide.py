"""Which snapshot to restore, and where each shard of it comes from: one pure function."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ftckpt.errors import LostError, MismatchError
from ftckpt.layout.topology import layouts_differ
from ftckpt.restore.inventory import ArenaReport


@dataclass(frozen=True, order=True)
class Source:
    """One slot of one arena of one node."""

    node: str
    arena: str
    slot: int


@dataclass(frozen=True)
class Decision:
    """Restore ``iteration`` of ``lineage`` (hex), shard by shard from ``sources``.

    ``passed_over`` tells why newer snapshots were not taken, one text each.
    """

    lineage: str
    iteration: int
    sources: Mapping[str, Source]
    passed_over: tuple[str, ...]


def decide(
    reports: Sequence[ArenaReport],
    homes: Mapping[str, str],
    layout: Mapping[str, int | str | bool],
    bad: Collection[Source] = (),
) -> Decision | None:
    """The newest snapshot of one lineage that is whole on every shard of ``homes``, or None.

    ``homes`` maps each shard to the node whose rank needs it; a copy on that node is preferred. ``bad``
    slots are left out. None means that no snapshot was ever whole: the job starts from the beginning.

    Raises:
        MismatchError: the arenas belong to another layout.
        LostError: a snapshot was whole once and none can be made whole now; names what is missing.
    """
    _check_layout(reports, layout)
    found: dict[tuple[int, str], dict[str, list[Source]]] = {}
    for report in reports:
        for slot in report.slots:
            source = Source(report.node, report.name, slot.index)
            snapshot = found.setdefault((slot.iteration, slot.lineage), {})
            snapshot.setdefault(report.shard, [])
            if source not in bad:
                snapshot[report.shard].append(source)
    passed_over: list[str] = []
    # A slot is sealed only after every rank has its arena: a missing arena, like a corrupt slot, was there once.
    spoilt = bool(found) and not set(homes) <= {report.shard for report in reports}
    for iteration, lineage in sorted(found, reverse=True):
        shards = found[iteration, lineage]
        missing = sorted(shard for shard in homes if not shards.get(shard))
        if not missing:
            chosen = {shard: _nearest(shards[shard], home) for shard, home in homes.items()}
            return Decision(lineage, iteration, chosen, tuple(passed_over))
        corrupt = [shard for shard in missing if shard in shards]
        cause = f"corrupt in {_some(corrupt)}" if corrupt else f"not sealed by {_some(missing)}"
        passed_over.append(f"iteration {iteration}: {cause}")
        spoilt = spoilt or bool(corrupt)
    _refuse_lost(reports, homes, passed_over, spoilt)
    return None


def _nearest(sources: Sequence[Source], home: str) -> Source:
    return min(sources, key=lambda source: (source.node != home, source))


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
