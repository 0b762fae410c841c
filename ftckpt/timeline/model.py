"""One rank's timeline of one iteration, and the timelines of all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

IDLE = ("start", "window", "tail")
"""Spans in which a rank neither computes nor waits in the fence."""

PLACES: Mapping[str, tuple[str, ...]] = {
    "window": IDLE,
    "forward": ("forward",),
    "backward": ("backward",),
    "fence": ("boundary", "fence"),
}
"""Where bytes are counted; what is in none of these was copied elsewhere."""

_MAX_EPOCH_SECS = 1e11
_MAX_SECS = 1e6


@dataclass(frozen=True)
class Span:
    """What training did from ``begin`` to ``end``, in seconds from the boundary."""

    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class Transfer:
    """``nbytes`` that were copied or encoded from ``begin`` to ``end``, in seconds from the boundary."""

    begin: float
    end: float
    nbytes: int


@dataclass(frozen=True)
class Timeline:
    """One rank from the boundary of ``iteration`` to the next; its snapshot is copied in that time.

    ``begin`` is the boundary in seconds since the epoch, by the clock of the rank's machine.
    """

    rank: int
    iteration: int
    coords: Mapping[str, int]
    schedule: str
    begin: float
    secs: float
    spans: tuple[Span, ...]
    copies: tuple[Transfer, ...]
    parity: tuple[Transfer, ...]
    moved_bytes: Mapping[str, int]
    window_capacity_bytes: int | None
    fence_secs: float

    @property
    def stage(self) -> int:
        """The rank's place in the pipeline."""
        return self.coords.get("pp", 0)

    @property
    def label(self) -> str:
        """The coordinates as a name, the stage first: ``pp1 tp0 dp0``."""
        names = sorted(self.coords, key=lambda name: name != "pp")
        return " ".join(f"{name}{self.coords[name]}" for name in names)

    @property
    def items(self) -> list[Span | Transfer]:
        """Everything recorded."""
        return [*self.spans, *self.copies, *self.parity]

    @property
    def first(self) -> float:
        """Seconds from the boundary to the earliest thing recorded; below 0 where a copy began before it."""
        return min([0.0, *(item.begin for item in self.items)])

    @property
    def last(self) -> float:
        """Seconds from the boundary to the end of the last thing recorded."""
        return max([self.secs, *(item.end for item in self.items)])

    def secs_of(self, *kinds: str) -> float:
        """Seconds spent in spans of these kinds."""
        return sum(span.end - span.begin for span in self.spans if span.kind in kinds)

    def bytes_of(self, place: str) -> int:
        """Bytes copied at one of ``PLACES``, or ``elsewhere``."""
        if place == "elsewhere":
            return self.total_bytes - sum(map(self.bytes_of, PLACES))
        return sum(self.moved_bytes.get(kind, 0) for kind in PLACES[place])

    @property
    def total_bytes(self) -> int:
        """Bytes of the snapshot that were copied in the background or in the fence."""
        return sum(self.moved_bytes.values())


@dataclass(frozen=True)
class Recording:
    """The timelines of one iteration, by stage and rank; ``missing``: ranks of the attempt that left none."""

    directory: Path
    iteration: int
    timelines: tuple[Timeline, ...]
    missing: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def origin(self) -> float:
        """Second 0 of the picture, in seconds since the epoch: the earliest boundary."""
        return min(timeline.begin + timeline.first for timeline in self.timelines)

    @cached_property
    def secs(self) -> float:
        """From second 0 to the end of the last rank."""
        return max(timeline.begin + timeline.last for timeline in self.timelines) - self.origin

    def at(self, timeline: Timeline, secs: float) -> float:
        """Seconds from second 0 of the picture, for seconds from the boundary of one rank; never below 0."""
        return max(0.0, timeline.begin - self.origin + secs)


def parse_timeline(line: Mapping[str, Any]) -> Timeline:
    """One line of an event log as a timeline; unknown fields and kinds of span are let pass.

    Raises:
        ValueError: a field is missing or is not what it should be.
    """
    try:
        spans = tuple(Span(_text(kind), *_interval(begin, end)) for kind, begin, end in line["spans"])
        fence = line.get("fence_secs")
        capacity = line.get("window_capacity_bytes")
        return Timeline(
            rank=_count(line["rank"]),
            iteration=_count(line["iteration"]),
            coords={_name(name): _count(at) for name, at in line.get("coords", {}).items()},
            schedule=_text(line.get("schedule", "")),
            begin=_number(line["begin"], 0.0, _MAX_EPOCH_SECS),
            secs=_number(line["secs"], 0.0, _MAX_SECS),
            spans=spans,
            copies=_transfers(line.get("copies")),
            parity=_transfers(line.get("parity")),
            moved_bytes={_text(kind): _count(num) for kind, num in line.get("moved_bytes", {}).items()},
            window_capacity_bytes=None if capacity is None else _count(capacity),
            fence_secs=_fence_secs(spans) if fence is None else _number(fence, 0.0, _MAX_SECS),
        )
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"not a timeline: {error!r}") from error


def _fence_secs(spans: tuple[Span, ...]) -> float:
    return sum(span.end - span.begin for span in spans if span.kind == "fence")


def _transfers(items: Any) -> tuple[Transfer, ...]:
    return tuple(Transfer(*_interval(begin, end), _count(num)) for begin, end, num in items or ())


def _interval(begin: Any, end: Any) -> tuple[float, float]:
    low = _number(begin, -_MAX_SECS, _MAX_SECS)
    return low, _number(end, low, _MAX_SECS)


def _number(value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{value!r} is not a number from {low} to {high}")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise ValueError(f"{value!r} is not a count")
    return value


def _name(value: Any) -> str:
    if not _text(value).isidentifier():
        raise ValueError(f"{value!r} is not a name")
    return _text(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value
