"""Formatting of names, sizes, times and tables for messages."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str], most: int = 3) -> str:
    """``a, b and 12 more``: at most ``most`` of them by name."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def with_article(name: str) -> str:
    """``a Linear``, ``an AdamW``."""
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def human(nbytes: int) -> str:
    """``nbytes`` in the largest unit that is not larger, such as ``1.5 GiB``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}" if unit != "B" else f"{nbytes} B"
        size /= 1024
    return f"{size:.1f} TiB"


def human_secs(secs: float) -> str:
    """A time in hours, minutes or seconds, in the largest unit that is not larger."""
    for unit, length in (("h", 3600), ("min", 60)):
        if secs >= length:
            return f"{secs / length:.3g} {unit}"
    return f"{secs:.3g} s"


def aligned(rows: Sequence[Sequence[str]], num_names: int) -> str:
    """A table as text; the first ``num_names`` columns are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < num_names else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
