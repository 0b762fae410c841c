"""Charts as inline SVG without script; the style of ``page`` gives their colours by class."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TypeVar

from ftckpt.commands.page import ms, share, size
from ftckpt.commands.tracks import PLACES, IterationTracks, Track, TrackCopy, TrackSpan

_T = TypeVar("_T")

WIDTH, HEIGHT = 960, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 34, 40
_MOST_POINTS = 480
"""More could not be told apart at this width, and the page is to stay below 1 MB however long the run was."""
# Beyond these, dots become the line and labels cover each other.
_MOST_DOTS = 120
_MOST_MARKERS = 24


@dataclass(frozen=True)
class Marker:
    """A vertical line with a label."""

    at: float
    text: str


@dataclass(frozen=True)
class Curve:
    """Points (x, y) of a line of this class, cut where x goes back; ``dotted``: a few points are shown too."""

    name: str
    points: Sequence[tuple[float, float]]
    dotted: bool = False


@dataclass(frozen=True)
class Column:
    """A column of a chart: the heights of its stacked parts, and what a thin line above it reaches up to."""

    at: int
    parts: Mapping[str, float]
    reach: float


@dataclass(frozen=True)
class _Frame:
    """Maps data to the plotting area."""

    x_min: float
    x_max: float
    y_min: float
    y_max: float

    def x(self, value: float) -> float:
        span = self.x_max - self.x_min or 1.0
        return _LEFT + (value - self.x_min) / span * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        span = self.y_max - self.y_min or 1.0
        return HEIGHT - _BOTTOM - (value - self.y_min) / span * (HEIGHT - _TOP - _BOTTOM)


def curve_chart(
    title: str, unit: str, curves: Sequence[Curve], markers: Sequence[Marker], low: float = math.inf
) -> str:
    """Curves over iterations, the first lowest; the axis begins at ``low`` if the data does not begin below it."""
    values = [y for curve in curves for _, y in curve.points]
    ticks = ticks_of(min([*values, low]), max(values))
    frame = _Frame(*_ends(x for curve in curves for x, _ in curve.points), ticks[0], ticks[-1])
    parts = [_grid(frame, ticks, unit), _x_axis(frame), *_markers(frame, markers)]
    for curve in curves:
        for piece in pieces(curve.points):
            thinned = thin(piece, _MOST_POINTS)
            path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in thinned)
            parts.append(f'<polyline class="{curve.name}" points="{path}"/>')
        if curve.dotted and len(curve.points) <= _MOST_DOTS:
            parts += [
                f'<circle class="{curve.name}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3">'
                f"<title>iteration {x:g}: {unit} {y:.6g}</title></circle>"
                for x, y in curve.points
            ]
    return _svg(parts, title)


def column_chart(title: str, unit: str, columns: Sequence[Column], markers: Sequence[Marker]) -> str:
    """Stacked columns over iterations; of more than can be drawn the tallest of each few."""
    drawn = thin(columns, _MOST_POINTS, lambda column: column.reach)
    ticks = ticks_of(0.0, max(max(column.reach, sum(column.parts.values())) for column in drawn))
    first, last = columns[0].at, columns[-1].at
    frame = _Frame(first - 0.6, last + 0.6, 0.0, ticks[-1])
    parts = [_grid(frame, ticks, unit), _x_axis(frame), *_markers(frame, markers)]
    width = min(26.0, 0.72 * (WIDTH - _LEFT - _RIGHT) / max(len(drawn), last - first + 1 if len(drawn) < 200 else 1))
    for column in drawn:
        center, height = frame.x(column.at), 0.0
        texts = [f"{name} {value:.2f}" for name, value in {**column.parts, "slowest rank": column.reach}.items()]
        rects = []
        for name, value in column.parts.items():
            top, bottom = frame.y(height + value), frame.y(height)
            height += value
            rects.append(
                f'<rect class="{name}" x="{center - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{bottom - top:.1f}"/>'
            )
        parts.append(
            f'<line class="slowest" x1="{center:.1f}" x2="{center:.1f}" y1="{frame.y(column.reach):.1f}" '
            f'y2="{frame.y(height):.1f}"/><g><title>iteration {column.at}: {", ".join(texts)} {unit}</title>'
            f"{''.join(rects)}</g>"
        )
    return _svg(parts, title)


def bar_chart(title: str, rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """One horizontal bar a row, stacked from seconds by class."""
    longest = max(sum(parts.values()) for _, parts in rows)
    ticks = ticks_of(0.0, longest)
    row_height, top, label = 46, 8, 104
    height = top + row_height * len(rows) + 34
    scale = (WIDTH - label - 76) / max(ticks[-1], longest)
    drawn = []
    for tick in ticks:
        x = label + tick * scale
        drawn.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - 30}"/>')
        drawn.append(_tick(x, height - 12, f"{tick:g} s"))
    for index, (name, parts) in enumerate(rows):
        y, x = top + index * row_height + 8, float(label)
        drawn.append(f'<text class="name" x="{label - 12}" y="{y + 20}" text-anchor="end">{escape(name)}</text>')
        for kind, secs in parts.items():
            width = secs * scale
            drawn.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{row_height - 16}">'
                f"<title>{kind.replace('-', ' ')}: {secs:.2f} s</title></rect>"
            )
            x += width
        drawn.append(f'<text class="name" x="{x + 8:.1f}" y="{y + 20}">{sum(parts.values()):.1f} s</text>')
    return _svg(drawn, title, height)


def ticks_of(low: float, high: float, num: int = 5) -> list[float]:
    """Round numbers from at most ``low`` to at least ``high``."""
    # A flat curve has no span, and ticks closer than a float can tell apart would be one.
    span = max(high - low, 1e-9, 1e-6 * abs(high))
    power = 10.0 ** math.floor(math.log10(span / num))
    # Steps that people read without counting; the one that gives nearest to ``num`` intervals.
    step = min((power * factor for factor in (1, 2, 2.5, 5, 10)), key=lambda value: abs(span / value - num))
    first, last = math.floor(low / step), max(math.ceil(high / step), math.floor(low / step) + 1)
    # Multiples of the step, rounded: sums of steps would show as 0.30000000000000004.
    return [round(number * step, 10) for number in range(first, last + 1)]


def pieces(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """The points of a curve, cut where training went back."""
    cut: list[list[tuple[float, float]]] = []
    for point in points:
        if not cut or point[0] <= cut[-1][-1][0]:
            cut.append([])
        cut[-1].append(point)
    return cut


def thin(items: Sequence[_T], most: int, key: Callable[[_T], float] | None = None) -> list[_T]:
    """At most ``most`` of them, in order: of each few that stand together the greatest by ``key``, or the last."""
    if len(items) <= most:
        return list(items)
    # In whole numbers: no item falls between two groups or into both.
    cuts = [len(items) * number // most for number in range(most + 1)]
    groups = (items[begin:end] for begin, end in pairwise(cuts))
    return [max(group, key=key) if key is not None else group[-1] for group in groups]


def _ends(values: Iterable[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[0], ordered[-1]


def _grid(frame: _Frame, ticks: Sequence[float], unit: str) -> str:
    parts = [f'<text class="tick" x="8" y="16">{escape(unit)}</text>']
    for tick in ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_tick(_LEFT - 8, y + 4, f"{tick:g}", "end"))
    return "".join(parts)


def _x_axis(frame: _Frame) -> str:
    first, last = math.ceil(frame.x_min), math.floor(frame.x_max)
    whole = {int(tick) for tick in ticks_of(first, last, 8) if tick == int(tick) and first < tick <= last}
    parts = [_tick(frame.x(tick), HEIGHT - _BOTTOM + 18, f"{tick}") for tick in sorted({first, *whole})]
    parts.append(_tick((WIDTH + _LEFT - _RIGHT) / 2, HEIGHT - 4, "iteration"))
    return "".join(parts)


def _tick(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _markers(frame: _Frame, markers: Sequence[Marker]) -> Iterator[str]:
    for marker in markers:
        x = frame.x(min(max(marker.at, frame.x_min), frame.x_max))
        anchor, shift = ("end", -6) if x > WIDTH * 0.8 else ("start", 6)
        yield f'<line class="fault" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 18}" y2="{HEIGHT - _BOTTOM}"/>'
        if len(markers) <= _MOST_MARKERS:
            yield (
                f'<text class="fault" x="{x + shift:.1f}" y="{_TOP - 8}" text-anchor="{anchor}">'
                f"{escape(marker.text)}</text>"
            )


def _svg(parts: Iterable[str], title: str, height: int = HEIGHT) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


# --- The tracks of one iteration: a row of compute and lanes of copies per rank, and a bar of its bytes by place.

MOST_RANKS = 64
"""Ranks beyond this are shown by one replica of each stage."""

_TRACKS_WIDTH, _TRACKS_LEFT, _PLOT, _BAR_LEFT, _BAR = 1180, 168, 780, 974, 130
_KINDS = {"boundary", "start", "window", "tail", "forward", "backward", "fence", "optimizer"}
_MEANINGS = {
    "boundary": "boundary: the snapshot begins",
    "start": "from the boundary to the schedule",
    "tail": "after the last backward",
}
# A fence of microseconds is what a reader looks for: it is drawn, however thin.
_LEAST_PX = {"fence": 2.0, "copy": 1.5, "parity": 1.5}
# Chunks with less between them would run together anyway; a bar each would fill the page.
_GAP_PX = 0.5
_FEW_RANKS = 24
_MOST_LABEL = 20


@dataclass(frozen=True)
class _RowShape:
    """Heights of a rank's row, in units of the picture."""

    compute: int
    lane: int
    gap: int
    num_lanes: int

    @property
    def height(self) -> int:
        return self.compute + self.num_lanes * (self.lane + 1) + self.gap


@dataclass(frozen=True)
class _Row:
    """One rank in the plotting area; ``top`` is that of its compute."""

    tracks: IterationTracks
    track: Track
    shape: _RowShape
    top: float
    px_per_sec: float

    def x(self, secs: float) -> float:
        return _TRACKS_LEFT + self.tracks.at(self.track, secs) * self.px_per_sec

    def lane(self, number: int) -> tuple[float, int]:
        """Top and height of the compute (0), the copies (1) or the parity (2)."""
        if number == 0:
            return self.top, self.shape.compute
        return self.top + self.shape.compute + 1 + (number - 1) * (self.shape.lane + 1), self.shape.lane

    def text(self, x: float, text: str, anchor: str, title: str = "") -> str:
        kind = "" if self.shape.compute >= 16 else ' class="small"'
        about = f"<title>{escape(title)}</title>" if title else ""
        y = self.top + self.shape.compute * 0.72
        return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}{about}</text>'


def shown_tracks(tracks: IterationTracks) -> tuple[Track, ...]:
    """All ranks, or, where they are more than ``MOST_RANKS``, the first of each stage by its other coordinates."""
    if len(tracks.tracks) <= MOST_RANKS:
        return tracks.tracks
    first: dict[int, Track] = {}
    for track in sorted(tracks.tracks, key=lambda track: (track.replica, track.rank)):
        first.setdefault(track.stage, track)
    return tuple(first[stage] for stage in sorted(first))


def tracks_chart(tracks: IterationTracks) -> str:
    """The picture of one iteration."""
    drawn = shown_tracks(tracks)
    num_lanes = 2 if any(track.parity for track in drawn) else 1
    shape = _RowShape(20, 7, 10, num_lanes) if len(drawn) <= _FEW_RANKS else _RowShape(12, 5, 5, num_lanes)
    px_per_sec = _PLOT / (tracks.secs or 1.0)
    bottom = _TOP + shape.height * len(drawn)
    most_bytes = max(track.total_bytes for track in drawn) or 1
    # Coordinates that tell no two ranks apart, and the stage, which stands beside them, are left out of labels.
    names = {name for track in drawn for name in track.coords}
    distinguishing = {name for name in names if len({track.coords.get(name) for track in drawn}) > 1} - {"pp"}
    parts = [_HATCHING, *_bands(drawn, shape), *_time_axis(tracks.secs, px_per_sec, bottom)]
    for place, track in enumerate(drawn):
        row = _Row(tracks, track, shape, _TOP + place * shape.height + shape.gap / 2, px_per_sec)
        parts += [_label(row, distinguishing), *_compute(row)]
        parts += [*_copies(row, track.copies, "copy"), *_copies(row, track.parity, "parity")]
        parts += _byte_bar(row, most_bytes)
    title = f"Iteration {tracks.iteration + 1} of {len(drawn)} ranks over time, with copies and their places"
    return (
        f'<div class="scroll"><svg class="tracks" viewBox="0 0 {_TRACKS_WIDTH} {bottom + 26}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg></div>'
    )


def merged(copies: Iterable[TrackCopy], gap_secs: float) -> Iterator[tuple[TrackCopy, int]]:
    """Copies with less than ``gap_secs`` between them as one, and how many each stands for."""
    current: TrackCopy | None = None
    num = 0
    for item in sorted(copies, key=lambda item: item.begin):
        if current is not None and item.begin - current.end < gap_secs:
            current = TrackCopy(current.begin, max(current.end, item.end), current.nbytes + item.nbytes)
            num += 1
            continue
        if current is not None:
            yield current, num
        current, num = item, 1
    if current is not None:
        yield current, num


_HATCHING = (
    '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="idle-ground" width="6" height="6"/><line class="idle-stroke" x1="0" y1="0" x2="0" y2="6"/>'
    "</pattern></defs>"
)


def _bands(drawn: Sequence[Track], shape: _RowShape) -> Iterator[str]:
    """A ground for every other stage, and its name."""
    top = float(_TOP)
    for place, (stage, num) in enumerate(Counter(track.stage for track in drawn).items()):
        height = shape.height * num
        if place % 2 == 0:
            yield f'<rect class="band" x="0" y="{top:g}" width="{_TRACKS_WIDTH}" height="{height}"/>'
        y = top + shape.gap / 2 + shape.compute * 0.75
        yield f'<text class="stage" x="8" y="{y:.1f}">stage {stage}</text>'
        top += height


def _time_axis(secs: float, px_per_sec: float, bottom: float) -> Iterator[str]:
    yield _tick(_TRACKS_LEFT - 24, 20, "rank", "end")
    yield _tick(_BAR_LEFT, 20, "bytes copied, by place", "start")
    for tick in (tick for tick in ticks_of(0.0, secs * 1e3, 8) if tick <= secs * 1e3):
        x = _TRACKS_LEFT + tick / 1e3 * px_per_sec
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{bottom + 6:g}"/>'
        for y in (20, bottom + 20):
            yield _tick(x, y, f"{tick:g}" if tick else "0 ms")


def _label(row: _Row, distinguishing: set[str]) -> str:
    track = row.track
    names = " ".join(f"{name}{at}" for name, at in track.coords.items() if name in distinguishing)
    text = f"{track.rank} · {names}" if names else str(track.rank)
    text = text if len(text) <= _MOST_LABEL else str(track.rank)
    return row.text(_TRACKS_LEFT - 12, text, "end", f"rank {track.rank}: {track.label}")


def _compute(row: _Row) -> Iterator[str]:
    total = Counter(span.kind for span in row.track.spans)
    seen: Counter[str] = Counter()
    fences = []
    for span in row.track.spans:
        seen[span.kind] += 1
        number = seen[span.kind]
        of = f" {number} of {total[span.kind]}" if total[span.kind] > 1 else ""
        kind = span.kind if span.kind in _KINDS else "other"
        drawn = _bar(row, span, kind, 0, f"{_MEANINGS.get(span.kind, span.kind)}{of}:")
        if kind == "fence":
            fences.append(drawn)
            continue
        yield drawn
        width = (span.end - span.begin) * row.px_per_sec
        if kind in ("forward", "backward") and width >= 18 and row.shape.compute >= 16:
            yield (
                f'<text class="on-{kind}" x="{row.x(span.begin) + width / 2:.1f}" y="{row.top + 14:.1f}" '
                f'text-anchor="middle" pointer-events="none">{number}</text>'
            )
    yield from fences  # above the neighbours that their least width covers


def _copies(row: _Row, copies: Sequence[TrackCopy], kind: str) -> Iterator[str]:
    for item, num in merged(copies, _GAP_PX / row.px_per_sec):
        what = f"{kind}: {size(item.nbytes)} in {num} chunk{'s' * (num != 1)},"
        yield _bar(row, item, kind, 1 if kind == "copy" else 2, what)


def _bar(row: _Row, item: TrackSpan | TrackCopy, kind: str, lane: int, what: str) -> str:
    begin, end = (row.tracks.at(row.track, secs) * 1e3 for secs in (item.begin, item.end))
    text = f"rank {row.track.rank}, {what} {begin:.2f} to {end:.2f} ms ({ms(item.end - item.begin)})"
    width = max(_LEAST_PX.get(kind, 0.0), (item.end - item.begin) * row.px_per_sec)
    top, height = row.lane(lane)
    return (
        f'<rect class="track-{kind}" x="{row.x(item.begin):.2f}" y="{top:.1f}" width="{width:.2f}" '
        f'height="{height}"><title>{escape(text)}</title></rect>'
    )


def _byte_bar(row: _Row, most_bytes: int) -> Iterator[str]:
    x = float(_BAR_LEFT)
    track = row.track
    for place in (*PLACES, "elsewhere"):
        num = track.bytes_of(place)
        width = num / most_bytes * _BAR
        kind = "hidden" if place == "window" else place
        if num > 0:
            text = f"rank {track.rank}, copied in {place}: {size(num)}, {share(num, track.total_bytes)}"
            yield (
                f'<rect class="track-{kind}" x="{x:.2f}" y="{row.top:.1f}" width="{width:.2f}" '
                f'height="{row.shape.compute}"><title>{escape(text)}</title></rect>'
            )
        x += width
    yield row.text(x + 6, size(track.total_bytes), "start")
