"""The figures of a report, drawn by matplotlib as PNG, so that their size does not grow with the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.cli.recovery import PARTS, Losses, Recovery, ascending_runs
from ftckpt.cli.timeline import IDLE, Copy, RankTimeline, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

_DPI = 150
_WIDTH = 11.0
_PART_COLORS = dict(zip(PARTS, ("#c2410c", "#93a4bb", "#7c4dbd", "#13795b", "#e0a100"), strict=True))
_SPAN_KINDS = {**dict.fromkeys(IDLE, "idle"), **dict.fromkeys(("boundary", "fence"), "stop")}
_SPANS = """
forward    #8bb8ee  forward
backward   #2d5ca8  backward
idle       #e4efe9  bubble: idle, or waiting for other ranks
optimizer  #a9b3c1  optimizer
stop       #d6133f  training waits for the snapshot
other      #b9a48a  other
copy       #e08a00  copy of the snapshot
"""
_SPAN_COLORS = {line.split()[0]: line.split()[1] for line in _SPANS.strip().splitlines()}
_SPAN_NAMES = {line.split()[0]: line.split(maxsplit=2)[2] for line in _SPANS.strip().splitlines()}
_MAX_RANKS = 64


class Curve(NamedTuple):
    """Points by iteration, with an argument of matplotlib's ``plot`` for their style."""

    label: str
    color: str
    points: Losses
    style: Mapping[str, Any] = {}


def curves(unit: str, found: Sequence[Curve], restarts: Sequence[Recovery], from_zero: bool = True) -> bytes:
    """Curves over iterations; where training rolled back, a curve starts again."""
    figure, axes = _axes(unit, restarts)
    for one in found:
        for number, run in enumerate(ascending_runs(one.points)):
            label = one.label if number == 0 else None
            axes.plot(*zip(*run, strict=True), color=one.color, label=label, **one.style)
    if from_zero:
        axes.set_ylim(bottom=0)
    return _png(figure, axes)


def restart_times(restarts: Sequence[Recovery]) -> bytes:
    """The parts of the time from each fault to the first boundary after it."""
    figure, axes = _figure(1.1 + 0.34 * len(restarts))
    names = [restart.name for restart in restarts]
    left = [0.0] * len(restarts)
    for part in PARTS:
        secs = [restart.parts[part] for restart in restarts]
        axes.barh(names, secs, left=left, color=_PART_COLORS[part], label=part.replace("-", " "), height=0.6)
        left = [done + more for done, more in zip(left, secs, strict=True)]
    for name, total in zip(names, left, strict=True):
        axes.annotate(f" {total:.1f} s", (total, name), va="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlabel("seconds")
    return _png(figure, axes, len(PARTS))


def timeline(found: Timeline) -> bytes:
    """The compute spans and copies of one iteration, two lanes for each rank."""
    from matplotlib.patches import Patch

    ranks = shown(found)
    figure, axes = _figure(1.3 + max(2.0, (0.5 if len(ranks) <= 16 else 0.2) * len(ranks)))
    kinds: Counter[str] = Counter()
    for row, rank in enumerate(ranks):
        for kind, bars in _bars(found, rank).items():
            kinds[kind] += 1
            lane = (row + 0.22, 0.22) if kind == "copy" else (row - 0.4, 0.58)
            # Edges make spans shorter than a pixel visible.
            edge = "white" if kind in ("forward", "backward") else _SPAN_COLORS[kind]
            axes.broken_barh(bars, lane, facecolor=_SPAN_COLORS[kind], edgecolor=edge, linewidth=0.5)
    axes.set_yticks(range(len(ranks)), [f"{rank.rank}  {rank.label}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.set_xlabel("milliseconds since the earliest boundary")
    axes.margins(x=0.01)
    handles = [Patch(color=_SPAN_COLORS[kind], label=text) for kind, text in _SPAN_NAMES.items() if kinds[kind]]
    return _png(figure, axes, 4, handles)


def shown(found: Timeline) -> tuple[RankTimeline, ...]:
    """The ranks of a figure: all, or one per stage if there are too many."""
    if len(found.ranks) <= _MAX_RANKS:
        return found.ranks
    return tuple({rank.stage: rank for rank in reversed(found.ranks)}.values())[:_MAX_RANKS:][::-1]


def merged(copies: Iterable[Copy], gap_secs: float) -> Iterator[Copy]:
    """The copies, with those merged that overlap or are at most ``gap_secs`` apart."""
    current: Copy | None = None
    for copy in sorted(copies):
        if current is not None and copy.begin - current.end <= gap_secs:
            current = Copy(current.begin, max(current.end, copy.end), current.nbytes + copy.nbytes)
            continue
        if current is not None:
            yield current
        current = copy
    if current is not None:
        yield current


def _bars(found: Timeline, rank: RankTimeline) -> dict[str, list[tuple[float, float]]]:
    """Begin and length in milliseconds, by kind; kind ``stop`` last, so that its short bars are drawn on top."""
    bars: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _SPAN_NAMES}
    shift = rank.begin - found.origin
    for span in rank.spans:
        kind = _SPAN_KINDS.get(span.kind, span.kind if span.kind in bars else "other")
        bars[kind].append(((shift + span.begin) * 1e3, (span.end - span.begin) * 1e3))
    for copy in merged(rank.copies, rank.secs / 2000):
        bars["copy"].append(((shift + copy.begin) * 1e3, (copy.end - copy.begin) * 1e3))
    return {kind: found for kind, found in sorted(bars.items(), key=lambda one: one[0] == "stop") if found}


def _figure(height: float) -> tuple[Figure, Axes]:
    # Imported late: matplotlib loads slowly and may not be installed.
    from matplotlib.figure import Figure

    figure = Figure((_WIDTH, height))
    return figure, figure.subplots()


def _count_whole(axis: Axis) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def _axes(unit: str, restarts: Sequence[Recovery]) -> tuple[Figure, Axes]:
    """Axes over iterations; a dashed line and a number mark each restart."""
    figure, axes = _figure(2.6)
    axes.margins(y=0.15)
    axes.set_xlabel("iteration")
    axes.set_ylabel(unit)
    _count_whole(axes.xaxis)
    for restart in restarts:
        axes.axvline(restart.iteration, color="#c2410c", linestyle="--", linewidth=1, zorder=3)
        if len(restarts) <= 24:
            place = (restart.iteration, 1.0)
            axes.annotate(
                f" {restart.name}", place, xycoords=("data", "axes fraction"), va="top", fontsize=7, color="#c2410c"
            )
    return figure, axes


def _png(figure: Figure, axes: Axes, columns: int = 3, handles: Sequence[Patch] | None = None) -> bytes:
    axes.spines[["top", "right"]].set_visible(False)
    options = {"handles": handles} if handles is not None else {}
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.01), ncols=columns, frameon=False, fontsize=8, **options)
    axes.tick_params(labelsize=8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_fontsize(8)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, bbox_inches="tight")
    return buffer.getvalue()
