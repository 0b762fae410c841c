"""The SVG of one iteration: a row of compute and lanes of copies per rank, and a bar of its bytes by place."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from ftckpt.timeline.model import PLACES, Recording, Span, Timeline, Transfer
from ftckpt.timeline.table import ms, share, shown, size

WIDTH = 1180
_LEFT, _PLOT, _BAR_LEFT, _BAR = 168, 780, 974, 130
_TOP = 34
_KINDS = {"boundary", "start", "window", "tail", "forward", "backward", "fence", "optimizer"}
_MEANINGS = {
    "boundary": "boundary: the snapshot begins",
    "start": "from the boundary to the schedule",
    "window": "window",
    "tail": "after the last backward",
}
_LEAST_PX = {"fence": 2.0, "copy": 1.5, "parity": 1.5}
_GAP_PX = 0.5
_FEW_RANKS = 24
_MOST_LABEL = 20


@dataclass(frozen=True)
class _Rows:
    """Heights of a rank's row, in units of the picture."""

    compute: int
    lane: int
    gap: int
    num_lanes: int

    @property
    def height(self) -> int:
        return self.compute + self.num_lanes * (self.lane + 1) + self.gap

    @property
    def text(self) -> str:
        """Class of the text beside the row."""
        return "tl-beside" if self.compute >= 16 else "tl-small"


@dataclass(frozen=True)
class _Row:
    """One rank in the plotting area; ``top`` is that of its compute."""

    recording: Recording
    timeline: Timeline
    rows: _Rows
    top: float
    px_per_sec: float

    def x(self, secs: float) -> float:
        """Where seconds from the boundary of the rank are."""
        return _LEFT + self.recording.at(self.timeline, secs) * self.px_per_sec

    def lane(self, number: int) -> tuple[float, int]:
        """Top and height of the compute (0), the copies (1) or the parity (2)."""
        if number == 0:
            return self.top, self.rows.compute
        return self.top + self.rows.compute + 1 + (number - 1) * (self.rows.lane + 1), self.rows.lane


def draw(recording: Recording) -> str:
    """The SVG, at most ``MOST_SHOWN`` ranks or one for each stage; its classes are those of ``STYLE``."""
    timelines = shown(recording)
    num_lanes = 2 if any(timeline.parity for timeline in timelines) else 1
    rows = _Rows(20, 7, 10, num_lanes) if len(timelines) <= _FEW_RANKS else _Rows(12, 5, 5, num_lanes)
    px_per_sec = _PLOT / (recording.secs or 1.0)
    bottom = _TOP + rows.height * len(timelines)
    most = max(timeline.total_bytes for timeline in timelines) or 1
    constant = _constant_coords(timelines)
    parts = [_hatching(), *_bands(timelines, rows), *_axis(recording.secs, px_per_sec, bottom)]
    for place, timeline in enumerate(timelines):
        row = _Row(recording, timeline, rows, _TOP + place * rows.height + rows.gap / 2, px_per_sec)
        parts.append(_label(row, constant))
        parts += [
            *_compute(row),
            *_transfers(row, timeline.copies, "copy"),
            *_transfers(row, timeline.parity, "parity"),
        ]
        parts += _bytes(row, most)
    title = f"Iteration {recording.iteration + 1} of {len(timelines)} ranks over time, with copies and their places"
    return (
        f'<div class="tl-scroll"><svg viewBox="0 0 {WIDTH} {bottom + 26}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg></div>'
    )


def ticks_of(secs: float, num: int = 8) -> list[float]:
    """Round times from 0 to at most ``secs``, in seconds."""
    if secs <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(secs / num))
    step = min((power * factor for factor in (1, 2, 5, 10)), key=lambda value: abs(secs / value - num))
    return [number * step for number in range(int(secs / step + 1e-9) + 1)]


def merged(transfers: Iterable[Transfer], gap_secs: float) -> Iterator[tuple[Transfer, int]]:
    """Transfers with less than ``gap_secs`` between them as one, and how many each stands for."""
    current: Transfer | None = None
    num = 0
    for item in sorted(transfers, key=lambda item: item.begin):
        if current is not None and item.begin - current.end < gap_secs:
            current = Transfer(current.begin, max(current.end, item.end), current.nbytes + item.nbytes)
            num += 1
            continue
        if current is not None:
            yield current, num
        current, num = item, 1
    if current is not None:
        yield current, num


def _hatching() -> str:
    return (
        '<defs><pattern id="tl-hatched" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect class="tl-ground" width="6" height="6"/>'
        '<line class="tl-stroke" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>'
    )


def _bands(timelines: Sequence[Timeline], rows: _Rows) -> Iterator[str]:
    """A ground for every other stage, and its name."""
    sizes = Counter(timeline.stage for timeline in timelines)
    top = float(_TOP)
    for place, (stage, num) in enumerate(sizes.items()):
        height = rows.height * num
        if place % 2 == 0:
            yield f'<rect class="tl-band" x="0" y="{top:g}" width="{WIDTH}" height="{height}"/>'
        y = top + rows.gap / 2 + rows.compute * 0.75
        yield f'<text class="tl-stage" x="8" y="{y:.1f}">stage {stage}</text>'
        top += height


def _axis(secs: float, px_per_sec: float, bottom: float) -> Iterator[str]:
    ticks = ticks_of(secs)
    decimals = max(0, -math.floor(math.log10(ticks[1] * 1e3) + 1e-9)) if len(ticks) > 1 else 0
    yield f'<text class="tl-tick" x="{_LEFT - 24}" y="20" text-anchor="end">rank</text>'
    yield f'<text class="tl-tick" x="{_BAR_LEFT}" y="20">bytes copied, by place</text>'
    for tick in ticks:
        x = _LEFT + tick * px_per_sec
        yield f'<line class="tl-grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{bottom + 6:g}"/>'
        for y in (20, bottom + 20):
            text = f"{tick * 1e3:.{decimals}f}" if tick else "0 ms"
            yield f'<text class="tl-tick" x="{x:.1f}" y="{y:g}" text-anchor="middle">{text}</text>'


def _constant_coords(timelines: Sequence[Timeline]) -> set[str]:
    """Coordinates that tell no two of these ranks apart, and the stage, which stands beside them."""
    names = {name for timeline in timelines for name in timeline.coords}
    return {name for name in names if len({timeline.coords.get(name) for timeline in timelines}) == 1} | {"pp"}


def _label(row: _Row, constant: set[str]) -> str:
    timeline = row.timeline
    names = " ".join(f"{name}{at}" for name, at in timeline.coords.items() if name not in constant)
    text = f"{timeline.rank} · {names}" if names else str(timeline.rank)
    text = text if len(text) <= _MOST_LABEL else str(timeline.rank)
    return (
        f'<text class="{row.rows.text}" x="{_LEFT - 12}" y="{row.top + row.rows.compute * 0.72:.1f}" '
        f'text-anchor="end">{escape(text)}<title>{escape(f"rank {timeline.rank}: {timeline.label}")}</title></text>'
    )


def _compute(row: _Row) -> Iterator[str]:
    total = Counter(span.kind for span in row.timeline.spans)
    seen: Counter[str] = Counter()
    fences = []
    for span in row.timeline.spans:
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
        if kind in ("forward", "backward") and width >= 18 and row.rows.compute >= 16:
            yield (
                f'<text class="tl-on-{kind}" x="{row.x(span.begin) + width / 2:.1f}" y="{row.top + 14:.1f}" '
                f'text-anchor="middle" pointer-events="none">{number}</text>'
            )
    yield from fences  # above the neighbours that their least width covers


def _transfers(row: _Row, transfers: Sequence[Transfer], kind: str) -> Iterator[str]:
    for item, num in merged(transfers, _GAP_PX / row.px_per_sec):
        what = f"{kind}: {size(item.nbytes)} in {num} chunk{'s' * (num != 1)},"
        yield _bar(row, item, kind, 1 if kind == "copy" else 2, what)


def _bar(row: _Row, item: Span | Transfer, kind: str, lane: int, what: str) -> str:
    begin, end = (row.recording.at(row.timeline, secs) * 1e3 for secs in (item.begin, item.end))
    text = f"rank {row.timeline.rank}, {what} {begin:.2f} to {end:.2f} ms ({ms(item.end - item.begin)})"
    width = max(_LEAST_PX.get(kind, 0.0), (item.end - item.begin) * row.px_per_sec)
    top, height = row.lane(lane)
    return (
        f'<rect class="tl-{kind}" x="{row.x(item.begin):.2f}" y="{top:.1f}" width="{width:.2f}" height="{height}">'
        f"<title>{escape(text)}</title></rect>"
    )


def _bytes(row: _Row, most: int) -> Iterator[str]:
    x = float(_BAR_LEFT)
    timeline, height = row.timeline, row.rows.compute
    for place in (*PLACES, "elsewhere"):
        num = timeline.bytes_of(place)
        width = num / most * _BAR
        kind = "bytes-window" if place == "window" else place
        if num > 0:
            text = f"rank {timeline.rank}, copied in {place}: {size(num)}, {share(num, timeline.total_bytes)}"
            yield (
                f'<rect class="tl-{kind}" x="{x:.2f}" y="{row.top:.1f}" width="{width:.2f}" height="{height}">'
                f"<title>{escape(text)}</title></rect>"
            )
        x += width
    y = row.top + height * 0.72
    yield f'<text class="{row.rows.text}" x="{x + 6:.1f}" y="{y:.1f}">{size(timeline.total_bytes)}</text>'
