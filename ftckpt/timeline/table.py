"""The numbers of a recording: a table in text, and the ranks that a picture can show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ftckpt.timeline.model import IDLE, PLACES, Recording, Timeline

MOST_SHOWN = 64
"""Ranks beyond this are shown by one replica of each stage."""

NUM_NAMES = 3
"""Columns that hold names and not numbers; they come first."""


def shown(recording: Recording) -> tuple[Timeline, ...]:
    """All ranks, or, where they are more than ``MOST_SHOWN``, the first of each stage by its other coordinates."""
    if len(recording.timelines) <= MOST_SHOWN:
        return recording.timelines
    first: dict[int, Timeline] = {}
    for timeline in sorted(recording.timelines, key=_replica):
        first.setdefault(timeline.stage, timeline)
    return tuple(first[stage] for stage in sorted(first))


def left_out(recording: Recording) -> str:
    """What the picture and the table do not show, or nothing."""
    num, total = len(shown(recording)), len(recording.timelines)
    return f"{num} of {total} ranks shown, one for each stage; the trace holds all" if num < total else ""


def notes_of(recording: Recording) -> list[str]:
    """Remarks for whoever looks at the picture or the table."""
    return [*([note] if (note := left_out(recording)) else []), *recording.notes]


def heads(recording: Recording) -> tuple[str, ...]:
    """Names of the columns of ``rows``; "elsewhere" is one only where bytes were copied there."""
    where = (f"in {'windows' if place == 'window' else place}" for place in PLACES)
    times = ("stage", "rank", "coordinates", "forward", "backward", "idle", "idle share")
    return (*times, *where, *(["elsewhere"] if _elsewhere(recording) else []), "windows' share", "fence")


def rows(recording: Recording) -> Iterator[tuple[str, ...]]:
    """A row of ``heads`` for each rank that is shown: times of one iteration and where its copies fell."""
    places = [*PLACES, *(["elsewhere"] if _elsewhere(recording) else [])]
    for timeline in shown(recording):
        idle = timeline.secs_of(*IDLE)
        others = " ".join(f"{name}{at}" for name, at in timeline.coords.items() if name != "pp")
        yield (
            str(timeline.stage),
            str(timeline.rank),
            others or "-",
            *(ms(timeline.secs_of(kind)) for kind in ("forward", "backward")),
            ms(idle),
            share(idle, timeline.secs),
            *(size(timeline.bytes_of(place)) for place in places),
            share(timeline.bytes_of("window"), timeline.total_bytes),
            ms(timeline.fence_secs),
        )


def text_table(recording: Recording) -> str:
    """The rows as text, numbers to the right."""
    table: Sequence[tuple[str, ...]] = [tuple(head.upper() for head in heads(recording)), *rows(recording)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [
            cell.ljust(width) if column < NUM_NAMES else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def summary(recording: Recording) -> str:
    """One sentence: how much was copied in windows, and what the fence cost."""
    total = sum(timeline.total_bytes for timeline in recording.timelines)
    hidden = sum(timeline.bytes_of("window") for timeline in recording.timelines)
    slowest = max(recording.timelines, key=lambda timeline: timeline.fence_secs)
    cost = f"{ms(slowest.fence_secs)} ({share(slowest.fence_secs, slowest.secs)} of its iteration)"
    copied = f"{share(hidden, total)} of {size(total)} were copied in windows" if total else "nothing was copied"
    return f"{copied}; the longest fence was {cost}, on rank {slowest.rank}"


def ms(secs: float) -> str:
    """Seconds as milliseconds, three digits where they are few."""
    value = secs * 1e3
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def size(num: float) -> str:
    """Bytes in decimal units: 1 MB is 10**6."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num >= factor:
            value = num / factor
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{num:.0f} B"


def share(part: float, whole: float) -> str:
    """A part of a whole in percent."""
    return f"{part / whole:.1%}" if whole > 0 else "-"


def _elsewhere(recording: Recording) -> bool:
    return any(timeline.bytes_of("elsewhere") for timeline in recording.timelines)


def _replica(timeline: Timeline) -> tuple[list[tuple[int, str]], int]:
    others = [(at, name) for name, at in sorted(timeline.coords.items()) if name != "pp"]
    return others, timeline.rank
