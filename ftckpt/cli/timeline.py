"""The timeline of one iteration: each rank's activities and copies from one step boundary to the next.

The iteration is chosen from the event logs. The timelines of a long run do not fit in memory, so an index of their
file offsets is built first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ftckpt.cli.event_log import EventLog, LinePlace, event_logs, note_of_choice, parse_line, whole_number
from ftckpt.errors import EventLogError
from ftckpt.model.text import human, listed

IDLE = ("start", "window", "tail")
"""Kinds of span in which a rank neither computes nor waits in the fence."""

PLACES: Mapping[str, tuple[str, ...]] = {
    "windows": IDLE,
    "forward": ("forward",),
    "backward": ("backward",),
    "fence": ("boundary", "fence"),
}
"""Parts of an iteration for which copied bytes are summed, as kinds of span."""

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
    schedule: str
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

    def secs_of(self, *kinds: str) -> float:
        """Seconds spent in spans of these kinds."""
        return sum(span.end - span.begin for span in self.spans if span.kind in kinds)

    def bytes_of(self, place: str) -> int:
        """Bytes copied at one of ``PLACES``."""
        return sum(self.moved_bytes.get(kind, 0) for kind in PLACES[place])

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
        hidden = sum(rank.bytes_of("windows") for rank in self.ranks)
        copied = f"{hidden / total:.1%} of {human(total)} were copied in windows" if total else "nothing was copied"
        slowest = max(self.ranks, key=lambda rank: rank.secs_of("fence"))
        return f"{copied}; the longest fence took {slowest.secs_of('fence') * 1e3:.2f} ms, on rank {slowest.rank}"


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
            schedule=str(line.get("schedule", "")),
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


class _Entry(NamedTuple):
    """The place of a rank's timeline; ``is_warm``: it is not of the process's first snapshot."""

    begin: float
    is_warm: bool
    node: str
    place: LinePlace


@dataclass
class _Attempt:
    """The timelines of the ranks of one attempt, by iteration and rank."""

    ranks: set[int] = field(default_factory=set)
    entries: dict[int, dict[int, _Entry]] = field(default_factory=lambda: defaultdict(dict))


class _Candidate(NamedTuple):
    """The timelines of one iteration in one attempt; ``ranks``: all ranks of the attempt."""

    log: EventLog
    iteration: int
    entries: Mapping[int, _Entry]
    ranks: set[int]

    @property
    def begin(self) -> float:
        return max(entry.begin for entry in self.entries.values())

    @property
    def preference(self) -> tuple[float, bool, float]:
        """A sort key: most ranks, then not the first snapshot after a start, then the newest."""
        is_warm = all(entry.is_warm for entry in self.entries.values())
        return len(self.entries) / len(self.ranks), is_warm, self.begin


def read_timeline(run: Path, iteration: int | None = None) -> Timeline:
    """The timeline of one iteration from the event logs at or below ``run``.

    If several directories have timelines, that with the newest is used and the notes name the others. Without
    ``iteration``: the newest iteration that all ranks have, if possible not of the first snapshot after a start.

    Raises:
        EventLogError: no such directory, no event logs, no timelines, or none of this iteration.
    """
    candidates = [candidate for log in event_logs(run, REMEDY) for candidate in _candidates(log)]
    if not candidates:
        raise EventLogError(f"{run}: no timelines in the event logs; {REMEDY}")
    matching = [candidate for candidate in candidates if iteration in (None, candidate.iteration)]
    if not matching:
        known = [str(one) for one in sorted({candidate.iteration for candidate in candidates}, reverse=True)]
        raise EventLogError(f"{run}: iteration {iteration} has no timeline; these have: {listed(known, _MAX_NAMED)}")
    log = max(matching, key=lambda candidate: candidate.begin).log
    chosen = max((one for one in matching if one.log is log), key=lambda candidate: candidate.preference)
    ranks = sorted(map(_load, chosen.entries.values()), key=lambda rank: (rank.stage, rank.rank))
    notes = note_of_choice(log, {str(candidate.log.directory) for candidate in matching})
    if missing := sorted(chosen.ranks - chosen.entries.keys()):
        notes.append(f"no timeline of rank{'s' * (len(missing) > 1)} {listed([*map(str, missing)], _MAX_NAMED)}")
    return Timeline(log.directory, chosen.iteration, tuple(ranks), (*notes, *log.notes))


def _candidates(log: EventLog) -> Iterator[_Candidate]:
    attempts: dict[str, _Attempt] = defaultdict(_Attempt)
    for path in log.rank_files:
        _index(log, path, attempts)
    for attempt in attempts.values():
        for iteration, entries in attempt.entries.items():
            yield _Candidate(log, iteration, entries, attempt.ranks)


def _index(log: EventLog, path: Path, attempts: dict[str, _Attempt]) -> None:
    """Adds the timelines of a file to their attempts. A process that has not restored belongs to no attempt."""
    lineages: dict[Any, str] = {}
    nodes: dict[Any, str] = {}
    earliest: dict[Any, int] = {}
    for place, line in log.lines(path):
        try:
            event, pid = line["event"], whole_number(line["pid"])
            if event == "joined":
                nodes[pid] = str(line.get("node", ""))
            elif event == "restored":
                lineages[pid] = str(line["lineage"])
                attempts[lineages[pid]].ranks.add(whole_number(line["rank"]))
            elif event == "snapshot":
                earliest.setdefault(pid, whole_number(line["iteration"]))
            elif event == "timeline" and pid in lineages:
                rank = parse_rank(line)
                is_warm = rank.iteration > earliest.get(pid, rank.iteration)
                entry = _Entry(rank.begin, is_warm, nodes.get(pid, ""), place)
                attempts[lineages[pid]].ranks.add(rank.rank)
                attempts[lineages[pid]].entries[rank.iteration][rank.rank] = entry
        except (KeyError, ValueError):
            log.num_broken += 1


def _load(entry: _Entry) -> RankTimeline:
    # Read again, so that only the timelines of one iteration are in memory.
    with open(entry.place.path, "rb") as file:
        file.seek(entry.place.offset)
        line = parse_line(file.readline())
    if line is None or line.get("event") != "timeline":
        raise EventLogError(f"{entry.place.path} was rotated while it was read; try again")
    return parse_rank(line, entry.node)


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
