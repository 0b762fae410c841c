"""Finds the timelines below a directory and reads those of one iteration."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftckpt.errors import FtckptError
from ftckpt.timeline.model import Recording, Timeline, parse_timeline

_EVENT_FILE = re.compile(r"rank\d+\.jsonl")
_HOW = "run with --ftckpt-events DIR and a --ftckpt-timeline-interval above 0"
_MOST_NAMED = 20


class TimelineError(FtckptError):
    """There is nothing to draw; the text says what is missing and how to get it."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a timeline is; ``warm``: the attempt had taken a snapshot before this one."""

    rank: int
    begin: float
    end: float
    warm: bool
    path: Path
    offset: int


@dataclass
class _Attempt:
    """What the ranks of one attempt left; one attempt is what has one lineage."""

    ranks: set[int] = field(default_factory=set)
    entries: dict[int, dict[int, _Entry]] = field(default_factory=lambda: defaultdict(dict))


@dataclass
class _Log:
    """The event files of one directory."""

    directory: Path
    attempts: dict[str | None, _Attempt] = field(default_factory=lambda: defaultdict(_Attempt))
    num_broken: int = 0


@dataclass(frozen=True)
class _Candidate:
    """The timelines of one iteration in one attempt."""

    log: _Log
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


def read_recording(run: Path, iteration: int | None = None) -> Recording:
    """The timelines of one iteration from the event logs at or below ``run``.

    Where several directories hold some, the one with the newest is taken and the others are named in the notes.
    Without ``iteration``: the newest that every rank of its attempt left, if possible not the first after a start.

    Raises:
        TimelineError: no such directory, no event logs, no timelines in them, or none of this iteration.
    """
    candidates = [candidate for log in _logs(run) for candidate in _candidates(log)]
    if not candidates:
        raise TimelineError(f"{run}: no timelines in the event logs here; {_HOW}")
    wanted = [found for found in candidates if iteration in (None, found.iteration)]
    if not wanted:
        raise TimelineError(f"{run}: iteration {iteration} left no timeline; {_named(candidates)}")
    log = max(wanted, key=lambda found: found.begin).log
    chosen = max((found for found in wanted if found.log is log), key=lambda found: found.preference)
    timelines = [_load(entry) for entry in chosen.entries]
    missing = sorted(chosen.ranks - {timeline.rank for timeline in timelines})
    notes = []
    if others := sorted({str(found.log.directory) for found in wanted} - {str(log.directory)}):
        notes.append(f"taken from {log.directory}, the newest; there are also {', '.join(others)}")
    if missing:
        notes.append(f"no timeline of rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}")
    if log.num_broken:
        notes.append(f"{log.num_broken} broken line{'s' * (log.num_broken > 1)} of the event logs left out")
    ordered = sorted(timelines, key=lambda timeline: (timeline.stage, timeline.rank))
    return Recording(log.directory, chosen.iteration, tuple(ordered), tuple(missing), tuple(notes))


def _named(candidates: Sequence[_Candidate]) -> str:
    found = sorted({candidate.iteration for candidate in candidates})
    names = ", ".join(map(str, found[-_MOST_NAMED:]))
    return f"the last that did are {names}" if len(found) > _MOST_NAMED else f"those that did are {names}"


def _logs(run: Path) -> list[_Log]:
    if not run.is_dir():
        raise TimelineError(f"{run}: no such directory")
    logs = []
    for directory, _, names in os.walk(run):
        if files := sorted(name for name in names if _EVENT_FILE.fullmatch(name)):
            logs.append(_Log(Path(directory)))
            for name in files:
                _index(logs[-1], Path(directory) / name)
    if not logs:
        raise TimelineError(f"{run}: no event logs (rank0.jsonl and so on) here; {_HOW}")
    return logs


def _candidates(log: _Log) -> Iterator[_Candidate]:
    for lineage, attempt in log.attempts.items():
        for iteration, by_rank in attempt.entries.items():
            newest = max(entry.begin for entry in by_rank.values())
            # Without a lineage only time tells attempts apart: one that trained the iteration earlier is left out.
            entries = tuple(e for e in by_rank.values() if lineage is not None or e.end >= newest)
            yield _Candidate(log, iteration, entries, frozenset(attempt.ranks))


def _index(log: _Log, path: Path) -> None:
    """Note where the timelines of a file are, by attempt; the timelines of a long run do not fit in memory."""
    pid: Any = None
    lineage: str | None = None
    earliest: int | None = None
    for offset, line in _lines(path, log):
        if line.get("event") == "joined" or line.get("pid") != pid:
            pid, lineage, earliest = line.get("pid"), None, None
        told = line.get("lineage")
        if line.get("event") == "restored" and isinstance(told, str):
            lineage = told
        iteration, rank = line.get("iteration"), line.get("rank")
        if lineage is not None and isinstance(rank, int):
            log.attempts[lineage].ranks.add(rank)
        if line.get("event") not in ("snapshot", "timeline") or not isinstance(iteration, int):
            continue
        earliest = iteration if earliest is None else min(earliest, iteration)
        if line["event"] == "timeline":
            try:
                found = parse_timeline(line)
            except ValueError:
                log.num_broken += 1
                continue
            attempt = log.attempts[lineage]
            attempt.ranks.add(found.rank)
            entry = _Entry(found.rank, found.begin, found.begin + found.secs, iteration > earliest, path, offset)
            attempt.entries[iteration][found.rank] = entry


def _lines(path: Path, log: _Log) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Offset and content of every whole line; one without an end may still be in the writing."""
    offset = 0
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n") and line.strip():
                fields = _fields(line)
                if fields is None:
                    log.num_broken += 1
                else:
                    yield offset, fields
            offset += len(line)


def _fields(line: bytes) -> Mapping[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _load(entry: _Entry) -> Timeline:
    with open(entry.path, "rb") as file:
        file.seek(entry.offset)
        return parse_timeline(json.loads(file.readline()))
