"""Tracks of one iteration: what each rank did from one boundary to the next, and what was copied meanwhile.

One iteration of one attempt is chosen from the event logs; the tracks of a long run do not fit in memory, so that
an index of their places is made first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ftckpt.commands.event_log import (
    EventLog,
    EventLogError,
    LinePlace,
    event_logs,
    note_of_choice,
    parse_line,
    whole_number,
)

IDLE = ("start", "window", "tail")
"""Spans in which a rank neither computes nor waits in the fence."""

PLACES: Mapping[str, tuple[str, ...]] = {
    "window": IDLE,
    "forward": ("forward",),
    "backward": ("backward",),
    "fence": ("boundary", "fence"),
}
"""Where bytes are counted; what is in none of these was copied elsewhere."""

# What lies beyond is no time of a run, and would make a picture without end.
_MAX_EPOCH_SECS = 1e11
_MAX_SECS = 1e6

_REMEDY = "run with --ftckpt-events DIR"
_MOST_NAMED = 20


@dataclass(frozen=True)
class TrackSpan:
    """What training did from ``begin`` to ``end``, in seconds from the boundary."""

    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class TrackCopy:
    """``nbytes`` that were copied or encoded from ``begin`` to ``end``, in seconds from the boundary."""

    begin: float
    end: float
    nbytes: int


@dataclass(frozen=True)
class Track:
    """One rank from the boundary of ``iteration`` to the next; its snapshot is copied in that time.

    ``begin`` is the boundary in seconds since the epoch, by the clock of the rank's machine.
    """

    rank: int
    iteration: int
    coords: Mapping[str, int]
    schedule: str
    begin: float
    secs: float
    spans: tuple[TrackSpan, ...]
    copies: tuple[TrackCopy, ...]
    parity: tuple[TrackCopy, ...]
    moved_bytes: Mapping[str, int]
    window_capacity_bytes: int | None
    fence_secs: float

    @property
    def stage(self) -> int:
        """The rank's place in the pipeline."""
        return self.coords.get("pp", 0)

    @property
    def replica(self) -> list[tuple[int, str]]:
        """The other coordinates, to sort by: equal stages are told apart by them."""
        return [(at, name) for name, at in sorted(self.coords.items()) if name != "pp"]

    @property
    def label(self) -> str:
        """The coordinates as a name, the stage first: ``pp1 tp0 dp0``."""
        names = sorted(self.coords, key=lambda name: name != "pp")
        return " ".join(f"{name}{self.coords[name]}" for name in names)

    @property
    def _items(self) -> list[TrackSpan | TrackCopy]:
        return [*self.spans, *self.copies, *self.parity]

    @property
    def first(self) -> float:
        """Seconds from the boundary to the earliest thing recorded; below 0 where a copy began before it."""
        return min([0.0, *(item.begin for item in self._items)])

    @property
    def last(self) -> float:
        """Seconds from the boundary to the end of the last thing recorded."""
        return max([self.secs, *(item.end for item in self._items)])

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
class IterationTracks:
    """The tracks of one iteration, by stage and rank; ``missing``: ranks of the attempt that left none."""

    directory: Path
    iteration: int
    tracks: tuple[Track, ...]
    missing: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def origin(self) -> float:
        """Second 0 of the picture, in seconds since the epoch: the earliest boundary."""
        return min(track.begin + track.first for track in self.tracks)

    @cached_property
    def secs(self) -> float:
        """From second 0 to the end of the last rank."""
        return max(track.begin + track.last for track in self.tracks) - self.origin

    def at(self, track: Track, secs: float) -> float:
        """Seconds from second 0 of the picture, for seconds from the boundary of one rank; never below 0."""
        return max(0.0, track.begin - self.origin + secs)


def parse_track(line: Mapping[str, Any]) -> Track:
    """One line of an event log as a track; unknown fields and kinds of span are let pass.

    Raises:
        ValueError: a field is missing or is not what it should be.
    """
    try:
        spans = tuple(TrackSpan(_text(kind), *_interval(begin, end)) for kind, begin, end in line["spans"])
        fence = line.get("fence_secs")
        capacity = line.get("window_capacity_bytes")
        return Track(
            rank=whole_number(line["rank"]),
            iteration=whole_number(line["iteration"]),
            coords={_name(name): whole_number(at) for name, at in line.get("coords", {}).items()},
            schedule=_text(line.get("schedule", "")),
            begin=_number(line["begin"], 0.0, _MAX_EPOCH_SECS),
            secs=_number(line["secs"], 0.0, _MAX_SECS),
            spans=spans,
            copies=_copies(line.get("copies")),
            parity=_copies(line.get("parity")),
            moved_bytes={_text(kind): whole_number(num) for kind, num in line.get("moved_bytes", {}).items()},
            window_capacity_bytes=None if capacity is None else whole_number(capacity),
            fence_secs=_fence_secs(spans) if fence is None else _number(fence, 0.0, _MAX_SECS),
        )
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"not a timeline: {error!r}") from error


def _fence_secs(spans: tuple[TrackSpan, ...]) -> float:
    return sum(span.end - span.begin for span in spans if span.kind == "fence")


def _copies(items: Any) -> tuple[TrackCopy, ...]:
    return tuple(TrackCopy(*_interval(begin, end), whole_number(num)) for begin, end, num in items or ())


def _interval(begin: Any, end: Any) -> tuple[float, float]:
    low = _number(begin, -_MAX_SECS, _MAX_SECS)
    return low, _number(end, low, _MAX_SECS)


def _number(value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{value!r} is not a number from {low} to {high}")
    return float(value)


def _name(value: Any) -> str:
    if not _text(value).isidentifier():
        raise ValueError(f"{value!r} is not a name")
    return _text(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where the line of a track is; ``warm``: the attempt had taken a snapshot before this one."""

    rank: int
    begin: float
    end: float
    warm: bool
    place: LinePlace


@dataclass
class _Attempt:
    """What the ranks of one attempt left; one attempt is what has one lineage."""

    ranks: set[int] = field(default_factory=set)
    entries: dict[int, dict[int, _Entry]] = field(default_factory=lambda: defaultdict(dict))


@dataclass(frozen=True)
class _Candidate:
    """The tracks of one iteration in one attempt."""

    log: EventLog
    iteration: int
    entries: tuple[_Entry, ...]
    ranks: frozenset[int]

    @property
    def begin(self) -> float:
        return max(entry.begin for entry in self.entries)

    @property
    def preference(self) -> tuple[float, bool, float]:
        """Most ranks first, then those that were not the first after a start, then the newest."""
        return len(self.entries) / len(self.ranks), all(entry.warm for entry in self.entries), self.begin


def read_tracks(run: Path, iteration: int | None = None) -> IterationTracks:
    """The tracks of one iteration from the event logs at or below ``run``.

    Where several directories hold some, the one with the newest is taken and the others are named in the notes.
    Without ``iteration``: the newest that every rank of its attempt left, if possible not the first after a start.

    Raises:
        EventLogError: no such directory, no event logs, no timelines in them, or none of this iteration.
    """
    candidates = [candidate for log in event_logs(run, _REMEDY) for candidate in _candidates(log)]
    if not candidates:
        raise EventLogError(f"{run}: no timelines in the event logs here; {_REMEDY}")
    matching = [candidate for candidate in candidates if iteration in (None, candidate.iteration)]
    if not matching:
        raise EventLogError(f"{run}: iteration {iteration} left no timeline; {_named(candidates)}")
    log = max(matching, key=lambda candidate: candidate.begin).log
    chosen = max((one for one in matching if one.log is log), key=lambda candidate: candidate.preference)
    tracks = sorted((_load(entry) for entry in chosen.entries), key=lambda track: (track.stage, track.rank))
    missing = sorted(chosen.ranks - {track.rank for track in tracks})
    notes = note_of_choice(log, {str(candidate.log.directory) for candidate in matching})
    if missing:
        notes.append(f"no timeline of rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}")
    notes += log.notes
    return IterationTracks(log.directory, chosen.iteration, tuple(tracks), tuple(missing), tuple(notes))


def _named(candidates: Sequence[_Candidate]) -> str:
    iterations = sorted({candidate.iteration for candidate in candidates})
    names = ", ".join(map(str, iterations[-_MOST_NAMED:]))
    return f"the last that did are {names}" if len(iterations) > _MOST_NAMED else f"those that did are {names}"


def _candidates(log: EventLog) -> Iterator[_Candidate]:
    attempts: dict[str | None, _Attempt] = defaultdict(_Attempt)
    for path in log.rank_files:
        _index(log, path, attempts)
    for lineage, attempt in attempts.items():
        for iteration, by_rank in attempt.entries.items():
            newest = max(entry.begin for entry in by_rank.values())
            # Without a lineage only time tells attempts apart: one that trained the iteration earlier is left out.
            entries = tuple(e for e in by_rank.values() if lineage is not None or e.end >= newest)
            yield _Candidate(log, iteration, entries, frozenset(attempt.ranks))


def _index(log: EventLog, path: Path, attempts: dict[str | None, _Attempt]) -> None:
    pid: Any = None
    lineage: str | None = None
    earliest: int | None = None
    for place, line in log.lines(path):
        # A new process: until it has restored, its lines belong to no lineage that is known.
        if line.get("event") == "joined" or line.get("pid") != pid:
            pid, lineage, earliest = line.get("pid"), None, None
        if line.get("event") == "restored" and isinstance(line.get("lineage"), str):
            lineage = line["lineage"]
        iteration, rank = line.get("iteration"), line.get("rank")
        if lineage is not None and isinstance(rank, int):
            attempts[lineage].ranks.add(rank)
        if line.get("event") not in ("snapshot", "timeline") or not isinstance(iteration, int):
            continue
        earliest = iteration if earliest is None else min(earliest, iteration)
        if line["event"] == "timeline":
            try:
                track = parse_track(line)
            except ValueError:
                log.num_broken += 1
                continue
            attempt = attempts[lineage]
            attempt.ranks.add(track.rank)
            entry = _Entry(track.rank, track.begin, track.begin + track.secs, iteration > earliest, place)
            attempt.entries[iteration][track.rank] = entry


def _load(entry: _Entry) -> Track:
    # Read again: of all tracks in the log only those of one iteration are in memory.
    with open(entry.place.path, "rb") as file:
        file.seek(entry.place.offset)
        line = parse_line(file.readline())
    if line is None or line.get("event") != "timeline":
        raise EventLogError(f"{entry.place.path} was begun anew while it was read: try again")
    return parse_track(line)
