"""The history of a run, from the events of its ranks and SMPs: attempts, restarts and their causes, the cost of
snapshots and their protection.

Each file is read once, line by line. Memory grows with the run's iterations, not with its ranks.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ftckpt.cli.attempts import Attempt, TimelinePlace
from ftckpt.cli.event_log import EventLog, LinePlace, event_logs, whole_number
from ftckpt.cli.recovery import Recovery, recoveries
from ftckpt.cli.timeline import parse_rank
from ftckpt.events import EVENTS
from ftckpt.model.text import listed

Line = Mapping[str, Any]

_MAX_RANKS = 64
"""Ranks whose blocked times are stored: enough for a median."""
# A line of the report; the log has the complete event.
_MAX_DETAIL = 240
_WHO = ("time", "event", "rank", "process", "pid")


@dataclass(frozen=True)
class BlockedTime:
    """Seconds for which snapshots blocked training in one iteration: both parts for the median rank, and the slowest
    rank's sum."""

    boundary: float
    fence: float
    slowest: float


@dataclass
class Alarm:
    """A kind of loud event: how often it occurred, from which processes, and the fields of the first."""

    num: int = 0
    first_at: float = math.inf
    who: set[str] = field(default_factory=set)
    detail: str = ""


@dataclass
class RunHistory:
    """The history of a run. ``blocked``: the cost of snapshots by iteration; of one that was trained again, that of
    the last attempt."""

    directory: Path
    began_at: float
    job: str = ""
    attempts: list[Attempt] = field(default_factory=list)
    restarts: list[Recovery] = field(default_factory=list)
    blocked: dict[int, BlockedTime] = field(default_factory=dict)
    iteration_secs: float = 0.0
    protection: Line | None = None
    alarms: dict[str, Alarm] = field(default_factory=lambda: defaultdict(Alarm))
    notes: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[Recovery]:
        """The restarts after failures, without new launches of the job."""
        return [restart for restart in self.restarts if restart.is_failure]


def read_history(run: Path, on_bytes: Callable[[int], object] = int) -> RunHistory:
    """The history of the run whose event logs are at or below ``run``; of several, the run that started last.

    Raises:
        EventLogError: no such directory, or no event logs in it.
    """
    logs = {log: _began_at(log) for log in event_logs(run, "run with --ftckpt-events DIR", on_bytes)}
    log = max(logs, key=logs.__getitem__)
    history = RunHistory(log.directory, logs[log])
    if others := sorted(str(other.directory) for other in logs if other is not log):
        history.notes.append(f"taken from {log.directory}, the newest; there are also {listed(others)}")
    _Reader(log, history).read()
    history.notes += log.notes
    return history


def _began_at(log: EventLog) -> float:
    times = (line.get("time") for _, line in log.lines(log.rank_files[0]))
    return next((float(time) for time in times if isinstance(time, int | float)), 0.0)


@dataclass
class _Start:
    """One call of restore() in one process of a rank, and the attempt that it belongs to."""

    joined: Line
    attempt: Attempt | None = None
    rebuilt: list[Line] = field(default_factory=list)
    layout: str = ""
    has_passed: bool = False
    first_snapshot: int | None = None
    fence_secs: float = 0.0


class _Reader:
    """Reads the files of one log into a history.

    A rank's file has several attempts, and a refused start may write concurrently with a running one: the pid assigns
    lines to starts. ``_on_`` methods take events of a start, ``_in_`` methods those of one that has restored.
    """

    def __init__(self, log: EventLog, history: RunHistory) -> None:
        self._log, self._history = log, history
        self._attempts: dict[str, Attempt] = defaultdict(Attempt)
        self._blocked: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
        self._iteration_secs: list[float] = []
        self._rank, self._is_sampled = 0, True
        self._starts: dict[int, _Start] = {}

    def read(self) -> None:
        """Reads all files."""
        history, files = self._history, self._log.rank_files
        for number, path in enumerate(files):
            self._rank, self._starts = int(path.stem.removeprefix("rank")), {}
            self._is_sampled = number % math.ceil(len(files) / _MAX_RANKS) == 0
            self._read(path, self._take)
        # By time: lineages are random, and a rank's file may lack some attempts.
        history.attempts = sorted(self._attempts.values(), key=lambda attempt: attempt.restored_at)
        for path in self._log.other_files:
            self._read(path, lambda place, line: None)  # only their alarms
        history.restarts = list(recoveries(history.attempts))
        history.iteration_secs = median(self._iteration_secs) if self._iteration_secs else 0.0
        for iteration, ranks in sorted(self._blocked.items()):
            boundary, fence = (median(secs) for secs in zip(*ranks.values(), strict=True))
            history.blocked[iteration] = BlockedTime(boundary, fence, max(map(sum, ranks.values())))

    def _read(self, path: Path, take: Callable[[LinePlace, Line], None]) -> None:
        for place, line in self._log.lines(path):
            try:
                time = line["time"] + 0.0
                take(place, line)
                if (kind := EVENTS.get(line["event"])) is not None and kind.loud:
                    self._alarm(line, time)
            except (KeyError, TypeError, ValueError, AttributeError):
                self._log.num_broken += 1

    def _alarm(self, line: Line, time: float) -> None:
        alarm = self._history.alarms[str(line["event"])]
        alarm.num += 1
        alarm.who.add(str(line.get("process", f"rank {line.get('rank')}")))
        if time < alarm.first_at:
            text = json.dumps({name: value for name, value in line.items() if name not in _WHO}, ensure_ascii=False)
            alarm.first_at, alarm.detail = time, text if len(text) <= _MAX_DETAIL else f"{text[:_MAX_DETAIL]}…"

    def _take(self, place: LinePlace, line: Line) -> None:
        """Takes an event of a rank."""
        pid = whole_number(line["pid"])
        start = self._starts.get(pid)
        if start is None or (line["event"] == "joined" and line["time"] != start.joined["time"]):
            start = self._starts[pid] = _Start(line)
        if (on_start := getattr(self, f"_on_{line['event']}", None)) is not None:
            on_start(start, line)
        if (attempt := start.attempt) is None:
            return
        attempt.last_signs[self._rank] = max(line["time"], attempt.last_signs.get(self._rank, 0.0))
        if line["event"] == "timeline":
            self._add_timeline(attempt, start, place, line)
        elif (in_attempt := getattr(self, f"_in_{line['event']}", None)) is not None:
            in_attempt(attempt, line)

    def _on_joined(self, _: _Start, line: Line) -> None:
        self._history.job = str(line.get("job", self._history.job))

    def _on_rebuilt(self, start: _Start, line: Line) -> None:
        start.rebuilt.append(line)

    def _on_loaded(self, start: _Start, line: Line) -> None:
        if line.get("from"):
            start.layout = f"{line['from']} → {line['to']}"

    def _on_restored(self, start: _Start, line: Line) -> None:
        attempt = start.attempt = self._attempts[str(line["lineage"])]
        attempt.joined_at = max(attempt.joined_at, start.joined["time"])
        attempt.restored_at = max(attempt.restored_at, line["time"])
        attempt.start = None if line["iteration"] is None else whole_number(line["iteration"])
        attempt.source = str(line.get("source") or attempt.source)
        attempt.ends = [*map(str, line.get("ends") or attempt.ends)]
        attempt.layout = start.layout or attempt.layout
        attempt.nodes |= {str(start.joined["node"])} if "node" in start.joined else set()
        attempt.launches |= {str(start.joined["launch"])} if start.joined.get("launch") else set()
        for built in start.rebuilt:
            attempt.rebuild_secs = max(attempt.rebuild_secs, built["secs"])
            attempt.rebuilt_shards |= {*map(str, built["shards"])}
            attempt.rebuilt_bytes += whole_number(built["bytes"])
        start.rebuilt = []

    def _on_fence(self, start: _Start, line: Line) -> None:
        start.fence_secs += line["blocked_secs"]

    def _on_snapshot(self, start: _Start, line: Line) -> None:
        iteration = whole_number(line["iteration"])
        if start.first_snapshot is None:
            start.first_snapshot = iteration
        if start.attempt is not None and self._is_sampled:
            # The fence before this boundary belongs to the previous snapshot; both blocked this iteration.
            self._blocked[iteration][self._rank] = (line["blocked_secs"] + 0.0, start.fence_secs)
        self._on_skipped(start, line)

    def _on_skipped(self, start: _Start, line: Line) -> None:
        """Takes a boundary, with or without a snapshot."""
        iteration, time = whole_number(line["iteration"]), line["time"]
        start.fence_secs = 0.0
        if (attempt := start.attempt) is None:
            return
        attempt.last_iteration = max(attempt.last_iteration, iteration)
        snapshot = attempt.snapshots[iteration]
        snapshot.boundary_at = max(snapshot.boundary_at, time)
        if not start.has_passed:
            attempt.boundary_at = max(attempt.boundary_at, time)
        start.has_passed = True

    def _on_protection(self, _: _Start, line: Line) -> None:
        last = self._history.protection
        if last is None or line["time"] > last["time"]:
            self._history.protection = line

    def _add_timeline(self, attempt: Attempt, start: _Start, place: LinePlace, line: Line) -> None:
        rank = parse_rank(line)
        is_warm = start.first_snapshot is not None and rank.iteration > start.first_snapshot
        entry = TimelinePlace(rank.begin, is_warm, str(start.joined.get("node", "")), place)
        attempt.timelines[rank.iteration][rank.rank] = entry

    def _in_copied(self, _: Attempt, line: Line) -> None:
        if self._is_sampled:
            self._iteration_secs.append(line["secs"] + 0.0)

    def _in_protected(self, attempt: Attempt, line: Line) -> None:
        snapshot = attempt.snapshots[whole_number(line["iteration"])]
        snapshot.protected_at = min(snapshot.protected_at, line["time"])

    def _in_closed(self, attempt: Attempt, line: Line) -> None:
        attempt.closed.add(self._rank)
        # Boundaries without a snapshot have no event: only this event has the rank's last iteration.
        attempt.last_iteration = max(attempt.last_iteration, line["iteration"] + 0)
