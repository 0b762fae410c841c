"""The timeline of one iteration: each rank's activities and copies from one step boundary to the next.

The timelines of a long run do not fit in memory: a ``RunHistory`` has their places in the event logs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.cli.attempts import Attempt, TimelinePlace
from ftckpt.cli.event_log import parse_line, whole_number
from ftckpt.errors import EventLogError
from ftckpt.model.text import human, listed

if TYPE_CHECKING:
    from ftckpt.cli.history import RunHistory

IDLE = ("start", "window", "tail")
"""Kinds of span in which a rank neither computes nor waits in the fence."""

REMEDY = "run with --ftckpt-events DIR and a --ftckpt-timeline-interval above 0"
_MAX_NAMED = 20


class ActivitySpan(NamedTuple):
    """An activity of training; times in seconds since the rank's boundary."""

    kind: str
    begin: float
    end: float


class Copy(NamedTuple):
    """A copy of ``nbytes``; times in seconds since the rank's boundary."""

    begin: float
    end: float
    nbytes: int


@dataclass(frozen=True)
class RankTimeline:
    """One rank from the boundary of ``iteration``, at ``begin`` by its node's clock, to the next boundary."""

    rank: int
    node: str
    iteration: int
    coords: Mapping[str, int]
    begin: float
    secs: float
    spans: tuple[ActivitySpan, ...]
    copies: tuple[Copy, ...]
    moved_bytes: Mapping[str, int]

    @property
    def stage(self) -> int:
        """The rank's pipeline stage."""
        return self.coords.get("pp", 0)

    @property
    def label(self) -> str:
        """The coordinates as a name, the stage first: ``pp1 tp0 dp0``."""
        return " ".join(f"{name}{self.coords[name]}" for name in sorted(self.coords, key=lambda name: name != "pp"))

    @property
    def fence_secs(self) -> float:
        """Seconds spent in fences."""
        return sum(span.end - span.begin for span in self.spans if span.kind == "fence")

    @property
    def hidden_bytes(self) -> int:
        """Bytes copied while the rank was idle."""
        return sum(self.moved_bytes.get(kind, 0) for kind in IDLE)

    @property
    def total_bytes(self) -> int:
        """Bytes of the snapshot that were copied during the iteration."""
        return sum(self.moved_bytes.values())


@dataclass(frozen=True)
class Timeline:
    """The ranks of one iteration, by stage and rank."""

    directory: Path
    iteration: int
    ranks: tuple[RankTimeline, ...]
    notes: tuple[str, ...] = ()

    @property
    def origin(self) -> float:
        """The zero of time: the earliest boundary or copy, in seconds since the epoch."""
        return min(rank.begin + min([0.0, *(copy.begin for copy in rank.copies)]) for rank in self.ranks)

    @property
    def summary(self) -> str:
        """One sentence: the share copied in windows, and the longest fence."""
        total = sum(rank.total_bytes for rank in self.ranks)
        hidden = sum(rank.hidden_bytes for rank in self.ranks)
        copied = f"{hidden / total:.1%} of {human(total)} were copied in windows" if total else "nothing was copied"
        slowest = max(self.ranks, key=lambda rank: rank.fence_secs)
        return f"{copied}; the longest fence took {slowest.fence_secs * 1e3:.2f} ms, on rank {slowest.rank}"


def parse_rank(line: Mapping[str, Any], node: str = "") -> RankTimeline:
    """Parses a ``timeline`` event; unknown fields are ignored.

    Raises:
        ValueError: a field is missing or invalid.
    """
    try:
        copies = line.get("copies") or ()
        return RankTimeline(
            rank=whole_number(line["rank"]),
            node=node,
            iteration=whole_number(line["iteration"]),
            coords={_name(name): whole_number(at) for name, at in (line.get("coords") or {}).items()},
            begin=line["begin"] + 0.0,
            secs=line["secs"] + 0.0,
            spans=tuple(ActivitySpan(str(kind), *_interval(begin, end)) for kind, begin, end in line["spans"]),
            copies=tuple(Copy(*_interval(begin, end), whole_number(num)) for begin, end, num in copies),
            moved_bytes={str(kind): whole_number(num) for kind, num in (line.get("moved_bytes") or {}).items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a timeline: {error!r}") from error


def _interval(begin: Any, end: Any) -> tuple[float, float]:
    return begin + 0.0, max(begin, end) + 0.0


def _name(value: str) -> str:
    if not value.isidentifier():
        raise ValueError(f"{value!r} is not a name")
    return value


def read_timeline(history: RunHistory, iteration: int | None = None) -> Timeline:
    """The timeline of one iteration of a run.

    Without ``iteration``: that which most ranks of an attempt have, if possible not of the first snapshot after a
    start, and of these the newest.

    Raises:
        EventLogError: no timelines, or none of this iteration.
    """
    found = [
        (attempt, number, places) for attempt in history.attempts for number, places in attempt.timelines.items()
    ]
    if not found:
        raise EventLogError(f"{history.directory}: no timelines in the event logs; {REMEDY}")
    matching = [one for one in found if iteration in (None, one[1])]
    if not matching:
        known = [str(number) for number in sorted({number for _, number, _ in found}, reverse=True)]
        having = listed(known, _MAX_NAMED)
        raise EventLogError(f"{history.directory}: iteration {iteration} has no timeline; these have: {having}")

    def preference(one: tuple[Attempt, int, Mapping[int, TimelinePlace]]) -> tuple[float, bool, float]:
        attempt, _, places = one
        share, is_warm = len(places) / len(attempt.last_signs), all(place.is_warm for place in places.values())
        return share, is_warm, max(place.begin for place in places.values())

    attempt, number, places = max(matching, key=preference)
    ranks = sorted(map(_load, places.values()), key=lambda rank: (rank.stage, rank.rank))
    missing = [str(rank) for rank in sorted(attempt.last_signs.keys() - places.keys())]
    notes = [f"no timeline of rank{'s' * (len(missing) > 1)} {listed(missing, _MAX_NAMED)}"] if missing else []
    return Timeline(history.directory, number, tuple(ranks), tuple(notes))


def _load(found: TimelinePlace) -> RankTimeline:
    # Read again, so that only the timelines of one iteration are in memory.
    with open(found.place.path, "rb") as file:
        file.seek(found.place.offset)
        line = parse_line(file.readline())
    if line is None or line.get("event") != "timeline":
        raise EventLogError(f"{found.place.path} was rotated while it was read; try again")
    return parse_rank(line, found.node)


def trace_of(timeline: Timeline) -> dict[str, Any]:
    """The timeline in the Chrome trace format, for https://ui.perfetto.dev: a process per node, a thread per rank,
    times in microseconds since ``origin``. Copies may overlap, so they are asynchronous events."""
    nodes = sorted({rank.node for rank in timeline.ranks})
    events: list[dict[str, Any]] = [
        # From 1: Perfetto takes pid 0 for the idle process.
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"node {node}" if node else "ranks"}}
        for pid, node in enumerate(nodes, 1)
    ]
    for rank in timeline.ranks:
        events += _rank_events(timeline, rank, nodes.index(rank.node) + 1)
    about = {"snapshot of iteration": timeline.iteration, "notes": list(timeline.notes)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _rank_events(timeline: Timeline, rank: RankTimeline, pid: int) -> Iterator[dict[str, Any]]:
    where = {"pid": pid, "tid": rank.rank}
    shift = rank.begin - timeline.origin

    def micros(secs: float) -> float:
        return round(max(0.0, shift + secs) * 1e6, 3)

    yield {"ph": "M", **where, "name": "thread_name", "args": {"name": f"rank {rank.rank} {rank.label}".rstrip()}}
    yield {"ph": "M", **where, "name": "thread_sort_index", "args": {"sort_index": rank.stage}}
    done = 0.0
    for span in rank.spans:
        # Times in event logs are rounded: adjacent spans may seem to overlap.
        begin = max(done, micros(span.begin))
        done = max(begin, micros(span.end))
        kind = "bubble" if span.kind in IDLE else "training"
        yield {"ph": "X", **where, "name": span.kind, "cat": kind, "ts": begin, "dur": done - begin}
    for number, copy in enumerate(rank.copies):
        one = {**where, "cat": "copy", "name": f"rank {rank.rank} copy", "id": f"{rank.rank}.{number}"}
        yield {"ph": "b", **one, "ts": micros(copy.begin), "args": {"bytes": copy.nbytes}}
        yield {"ph": "e", **one, "ts": micros(copy.end)}
