"""The charts of the demo's report: inline SVG without script; the page's style gives the colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 960, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 34, 40


@dataclass(frozen=True)
class Marker:
    """A vertical line with a label."""

    at: float
    text: str


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


def loss_chart(
    reference: Sequence[tuple[int, float]], faulted: Sequence[tuple[int, float]], markers: Sequence[Marker]
) -> str:
    """Both runs' losses over iterations; the reference is drawn wide, so that it shows below the other."""
    points = [*reference, *faulted]
    losses = [loss for _, loss in points]
    ticks = ticks_of(min(losses), max(losses))
    last = max(iteration for iteration, _ in points)
    frame = _Frame(1, last, ticks[0], ticks[-1])
    parts = [_grid(frame, ticks, "loss", lambda value: f"{value:g}"), _x_axis(frame, last)]
    parts += [_marker(frame, marker) for marker in markers]
    parts.append(_line(frame, reference, "reference"))
    parts += [_line(frame, piece, "faulted") for piece in attempts_of(faulted)]
    for iteration, loss in faulted:
        parts.append(
            f'<circle class="faulted" cx="{frame.x(iteration):.1f}" cy="{frame.y(loss):.1f}" r="3">'
            f"<title>iteration {iteration}: loss {loss:.6f}</title></circle>"
        )
    return _svg(parts, "Training loss of both runs over iterations")


def attempts_of(points: Sequence[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """The curve cut where training went back."""
    pieces: list[list[tuple[int, float]]] = []
    for point in points:
        if not pieces or point[0] <= pieces[-1][-1][0]:
            pieces.append([])
        pieces[-1].append(point)
    return pieces


def blocked_chart(blocked: Mapping[int, tuple[float, float, float]], markers: Sequence[Marker]) -> str:
    """Milliseconds blocked in each iteration, from (boundary, fence, slowest rank) in seconds.

    Bars have the boundary below and the fence on top; a line reaches up to the slowest rank.
    """
    if not blocked:
        return "<p>No snapshot was taken.</p>"
    last = max(blocked)
    highest = max(slowest for _, _, slowest in blocked.values()) * 1e3
    ticks = ticks_of(0.0, highest)
    frame = _Frame(0.4, last + 0.6, 0.0, ticks[-1])
    parts = [_grid(frame, ticks, "milliseconds", lambda value: f"{value:g}"), _x_axis(frame, last)]
    parts += [_marker(frame, marker) for marker in markers]
    width = max(2.0, (frame.x(1) - frame.x(0)) * 0.66)
    for iteration, (boundary, fence, slowest) in blocked.items():
        center = frame.x(iteration)
        left = center - width / 2
        middle, top = frame.y(boundary * 1e3), frame.y((boundary + fence) * 1e3)
        times = {"boundary": boundary, "fence": fence, "slowest rank": slowest}
        text = f"iteration {iteration}: " + ", ".join(f"{k} {secs * 1e3:.2f} ms" for k, secs in times.items())
        parts.append(
            f'<line class="slowest" x1="{center:.1f}" x2="{center:.1f}" y1="{frame.y(slowest * 1e3):.1f}" '
            f'y2="{top:.1f}"/>'
            f"<g><title>{text}</title>"
            f'<rect class="boundary" x="{left:.1f}" y="{middle:.1f}" width="{width:.1f}" '
            f'height="{frame.y(0) - middle:.1f}"/>'
            f'<rect class="fence" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{max(0.0, middle - top):.1f}"/></g>'
        )
    return _svg(parts, "Time that training was blocked by snapshots, per iteration")


def restart_chart(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """One horizontal bar per fault, stacked from (kind, seconds)."""
    longest = max(sum(secs for _, secs in parts) for _, parts in rows)
    ticks = ticks_of(0.0, longest)
    row_height, top, label = 46, 8, 84
    height = top + row_height * len(rows) + 34
    scale = (WIDTH - label - 76) / max(ticks[-1], longest)
    parts = []
    for tick in ticks:
        x = label + tick * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - 30}"/>')
        parts.append(_tick(x, height - 12, f"{tick:g} s"))
    for index, (name, stack) in enumerate(rows):
        y, x = top + index * row_height + 8, float(label)
        parts.append(f'<text class="name" x="{label - 12}" y="{y + 20}" text-anchor="end">{escape(name)}</text>')
        for kind, secs in stack:
            width = secs * scale
            parts.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{row_height - 16}">'
                f"<title>{kind.replace('-', ' ')}: {secs:.2f} s</title></rect>"
            )
            x += width
        total = sum(secs for _, secs in stack)
        parts.append(f'<text class="name" x="{x + 8:.1f}" y="{y + 20}">{total:.1f} s</text>')
    return _svg(parts, "Seconds from each fault to the first boundary after it", height)


def ticks_of(low: float, high: float, num: int = 5) -> list[float]:
    """Round numbers from at most ``low`` to at least ``high``."""
    span = max(high - low, 1e-9)
    power = 10.0 ** math.floor(math.log10(span / num))
    step = min((power * factor for factor in (1, 2, 2.5, 5, 10)), key=lambda value: abs(span / value - num))
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 10) for number in range(first, last + 1)]


def _grid(frame: _Frame, ticks: Sequence[float], unit: str, show: Callable[[float], str]) -> str:
    parts = [f'<text class="tick" x="8" y="16">{unit}</text>']
    for tick in ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_tick(_LEFT - 8, y + 4, show(tick), "end"))
    return "".join(parts)


def _x_axis(frame: _Frame, last: int) -> str:
    shown = [int(tick) for tick in ticks_of(0, last, 8) if tick == int(tick) and 1 <= tick <= last]
    parts = [_tick(frame.x(tick), HEIGHT - _BOTTOM + 18, str(tick)) for tick in sorted({1, *shown})]
    parts.append(_tick((WIDTH + _LEFT - _RIGHT) / 2, HEIGHT - 4, "iteration"))
    return "".join(parts)


def _tick(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _marker(frame: _Frame, marker: Marker) -> str:
    x = frame.x(marker.at)
    end = "end" if x > WIDTH * 0.8 else "start"
    shift = -6 if end == "end" else 6
    return (
        f'<line class="fault" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 18}" y2="{HEIGHT - _BOTTOM}"/>'
        f'<text class="fault" x="{x + shift:.1f}" y="{_TOP - 8}" text-anchor="{end}">'
        f"{escape(marker.text)}</text>"
    )


def _line(frame: _Frame, points: Sequence[tuple[int, float]], kind: str) -> str:
    path = " ".join(f"{frame.x(iteration):.1f},{frame.y(loss):.1f}" for iteration, loss in points)
    return f'<polyline class="{kind}" points="{path}"/>'


def _svg(parts: Sequence[str], title: str, height: int = HEIGHT) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
