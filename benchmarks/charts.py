"""Charts of ``benchmarks/results_page.py``: the same text for the same rows, whatever draws it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def svg(title: str, height: int, shapes: Sequence[str]) -> str:
    """A picture with a title."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{height}" font-family="sans-serif"'
    back = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'{head} font-size="12">', back, f'<text x="10" y="18">{title}</text>', *shapes, "</svg>", ""])


def bars(title: str, values: Mapping[str, float]) -> str:
    """A bar per value; those of ftckpt have a colour of their own."""
    shapes = []
    for number, (label, value) in enumerate(values.items()):
        y, width = 30 + 20 * number, 400 * value / max(values.values())
        colour = "#2a6fbb" if "ftckpt" in label else "#b0b0b0"
        shapes.append(f'<text x="290" y="{y + 12}" text-anchor="end">{label}</text>')
        shapes.append(f'<rect x="300" y="{y}" width="{width:.1f}" height="15" fill="{colour}"/>')
        shapes.append(f'<text x="{305 + width:.1f}" y="{y + 12}">{value:.2f}</text>')
    return svg(title, 40 + 20 * len(values), shapes)


def cost_chart(content: Mapping[str, Any]) -> str:
    rows = content["tables"]["plain/idle"]
    ratios = {row: one["ratio"] for row, one in rows.items() if one and row != "off"}
    return bars("Time of an iteration / off, plain job on an idle host", ratios)


def recovery_chart(content: Mapping[str, Any]) -> str:
    tables = content["tables"].items()
    secs = {f"{place}, {row}": one["secs"] for place, rows in tables for row, one in rows.items() if one}
    return bars("Seconds from a kill to the first iteration after it", secs)


def goodput_chart(content: Mapping[str, Any]) -> str:
    """Iterations over time: a restart is a step down."""
    rows = {row: one["steps"] for row, one in content["rows"].items() if one.get("steps")}
    ends = [max(step[part] for steps in rows.values() for step in steps) for part in (0, 1)]
    shapes = []
    for number, (row, steps) in enumerate(rows.items()):
        colour = "#2a6fbb" if "ftckpt" in row else "#808080"
        points = " ".join(f"{20 + 700 * at / ends[0]:.1f},{300 - 260 * done / ends[1]:.1f}" for at, done in steps)
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        shapes.append(f'<text x="30" y="{50 + 16 * number}" fill="{colour}">{row}</text>')
    return svg(f"Iterations in {ends[0]:.0f} s with failures", 310, shapes)


CHARTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "cost": cost_chart,
    "recovery": recovery_chart,
    "goodput": goodput_chart,
}
