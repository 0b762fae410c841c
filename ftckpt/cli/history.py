"""The history of a run, from the events of its ranks and SMPs: attempts, restarts and their causes, the cost of
snapshots, their ages and protection.

Each file is read once, line by line. Memory grows with the run's iterations, not with its ranks.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ftckpt.cli.attempts import Age, Attempt
from ftckpt.cli.event_log import (
    MOST_LINE_BYTES,
    EventLog,
    count,
    event_logs,
    is_log,
    note_of_choice,
    parse_line,
    whole_number,
)
from ftckpt.cli.recovery import Evidence, FaultNote, Losses, Recovery, recoveries
from ftckpt.events import EVENTS

Line = Mapping[str, Any]

_REMEDY = "run with --ftckpt-events DIR"
_MAX_RANKS = 64
"""Ranks whose blocked times are stored: enough for a median."""
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
    """The history of a run. ``losses``: (iteration, loss) in the order of the log."""

    directory: Path
    began_at: float
    job: str
    attempts: list[Attempt]
    restarts: list[Recovery]
    blocked: dict[int, BlockedTime]
    iteration_secs: float
    protection: Line | None
    alarms: dict[str, Alarm]
    losses: Losses
    conditions: list[Line]
    notes: list[str]

    @property
    def failures(self) -> list[Recovery]:
        """The restarts after failures, without new launches of the job."""
        return [restart for restart in self.restarts if restart.is_failure]

    def ages(self) -> Iterator[Age]:
        """The ages of snapshots at each boundary."""
        on_storage: set[int] = set()
        for attempt in self.attempts:
            # Checkpoints newer than the attempt's start were rolled back.
            on_storage = {one for one in on_storage if one <= (attempt.start or 0)}
            if attempt.source == "storage" and attempt.start is not None:
                on_storage.add(attempt.start)
            yield from attempt.ages(max(on_storage, default=None))
            on_storage.update(attempt.persisted)


def read_history(run: Path, on_bytes: Callable[[int], object] = int) -> RunHistory:
    """The history of the run whose event logs are at or below ``run``; of several, the run that started last.

    Raises:
        EventLogError: no such directory, or no event logs in it.
    """
    logs = event_logs(run, _REMEDY, on_bytes)
    log = max(logs, key=_began_at)
    reader = _Reader(log)
    for number, path in enumerate(log.rank_files):
        reader.read_rank(path, is_sampled=number % math.ceil(len(log.rank_files) / _MAX_RANKS) == 0)
    attempts = reader.sorted_attempts()
    for path in log.other_files:
        reader.read_other(path, attempts)
    losses, num_odd = read_losses([log.directory, log.directory.parent, run])
    restarts = list(recoveries(attempts, losses, reader.evidence))
    notes = note_of_choice(log, {str(other.directory) for other in logs})
    return RunHistory(
        directory=log.directory,
        began_at=_began_at(log),
        job=reader.job,
        attempts=attempts,
        restarts=restarts,
        blocked=reader.blocked_by_iteration(),
        iteration_secs=median(reader.iteration_secs) if reader.iteration_secs else 0.0,
        protection=reader.protection,
        alarms=reader.alarms,
        losses=losses,
        conditions=list(reader.conditions.values()),
        notes=[*notes, *reader.notes(attempts, num_odd), *log.notes],
    )


def read_losses(directories: Iterable[Path]) -> tuple[Losses, int]:
    """(iteration, loss) from the first of ``directories`` that has a file of JSON lines with both, as the example
    scripts write; and the number of losses that are not finite."""
    for directory in directories:
        for path in sorted(directory.glob("*.jsonl")):
            rows = list(_loss_lines(path)) if is_log(path) else []
            if rows:
                finite = [(iteration, loss) for iteration, loss in rows if loss is not None]
                return finite, len(rows) - len(finite)
    return [], 0


def _loss_lines(path: Path) -> Iterator[tuple[int, float | None]]:
    with open(path, "rb") as file:
        while line := file.readline(MOST_LINE_BYTES):
            fields = parse_line(line) if line.endswith(b"\n") else None
            if fields is not None and "event" in fields:  # an event log
                return
            match fields:
                case {"iteration": int(iteration), "loss": int() | float() | None as loss}:
                    yield iteration, loss


def _began_at(log: EventLog) -> float:
    times = (line.get("time") for _, line in log.lines(log.rank_files[0]))
    return next((float(time) for time in times if isinstance(time, int | float)), 0.0)


class _Reader:
    """Reads the files of one log into attempts and other facts."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.attempts: dict[str, Attempt] = defaultdict(Attempt)
        self.blocked: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
        self.evidence = Evidence()
        self._shards: dict[str, int] = {}
        self.job = ""
        self.iteration_secs: list[float] = []
        self.protection: Line | None = None
        self.alarms: dict[str, Alarm] = defaultdict(Alarm)
        self.conditions: dict[str, Line] = {}

    def sorted_attempts(self) -> list[Attempt]:
        # By time: lineages are random, and a rank's file may lack some attempts.
        return sorted(self.attempts.values(), key=lambda attempt: attempt.restored_at)

    def read_rank(self, path: Path, is_sampled: bool) -> None:
        """Reads a rank's file; ``is_sampled``: including blocked times."""
        rank = _RankFile(self, int(path.stem.removeprefix("rank")), is_sampled)
        self._read(path, rank.take)
        self.evidence.fruitless += rank.fruitless()

    def read_other(self, path: Path, attempts: Sequence[Attempt]) -> None:
        """Reads the file of an SMP, or faults and ends noted by another program."""
        begins = [attempt.joined_at for attempt in attempts]

        def take(line: Line) -> None:
            # An SMP outlives attempts and does not know their lineages: its events are assigned by time.
            place = bisect_right(begins, line["time"]) - 1
            if line["event"] == "fault":
                self.evidence.faults.append(_fault_note(line))
            elif line["event"] == "ended":
                self.evidence.gone_at[whole_number(line["pid"])] = line["time"]
            elif line["event"] == "checked" and place >= 0:
                snapshot = attempts[place].snapshots[whole_number(line["iteration"])]
                # A bit per shard: sets would take memory for ranks times iterations.
                snapshot.checked |= 1 << self._shards.setdefault(str(line["shard"]), len(self._shards))
                snapshot.checked_at = max(snapshot.checked_at, line["time"])

        self._read(path, take)

    def _read(self, path: Path, take: Callable[[Line], None]) -> None:
        for _, line in self._log.lines(path):
            try:
                time = line["time"] + 0.0
                take(line)
                if (kind := EVENTS.get(line["event"])) is not None and kind.loud:
                    self._alarm(line, time)
            except (KeyError, TypeError, ValueError, AttributeError):
                self._log.num_broken += 1

    def _alarm(self, line: Line, time: float) -> None:
        alarm = self.alarms[str(line["event"])]
        alarm.num += 1
        alarm.who.add(str(line.get("process", f"rank {line.get('rank')}")))
        if time < alarm.first_at:
            text = json.dumps({name: value for name, value in line.items() if name not in _WHO}, ensure_ascii=False)
            alarm.first_at, alarm.detail = time, text if len(text) <= _MAX_DETAIL else f"{text[:_MAX_DETAIL]}…"

    def notes(self, attempts: Sequence[Attempt], num_odd_losses: int) -> Iterator[str]:
        """Notes about facts that the other fields of a history do not have."""
        last_start = attempts[-1].joined_at if attempts else 0.0
        for note in self.evidence.faults:
            if note.time > last_start:
                yield f"no attempt followed fault {note.name}"
        refused = {
            rank
            for rank, time in self.evidence.fruitless
            if any(one.joined_at < time < one.last_signs.get(rank, 0.0) for one in attempts)
        }
        if refused:
            yield f"a launch during an attempt was refused on {count(len(refused), 'rank')}"
        if num_odd_losses:
            yield f"{num_odd_losses} logged losses are not finite and not drawn"

    def blocked_by_iteration(self) -> dict[int, BlockedTime]:
        """The cost of snapshots by iteration; for an iteration trained again, that of the last attempt."""
        return {
            iteration: BlockedTime(
                median(boundary for boundary, _ in ranks.values()),
                median(fence for _, fence in ranks.values()),
                max(map(sum, ranks.values())),
            )
            for iteration, ranks in sorted(self.blocked.items())
        }


@dataclass
class _Start:
    """One call of restore() in one process of a rank, and the attempt that it belongs to."""

    joined: Line
    attempt: Attempt | None = None
    rebuilt: list[Line] = field(default_factory=list)
    layout: str = ""
    has_passed: bool = False
    fence_secs: float = 0.0


class _RankFile:
    """Reads one rank's file. It has several attempts, and a refused start may write concurrently with a running one:
    the pid assigns lines to starts."""

    def __init__(self, reader: _Reader, rank: int, is_sampled: bool) -> None:
        self._reader, self._rank, self._is_sampled = reader, rank, is_sampled
        self._starts: dict[int, _Start] = {}
        self._all: list[_Start] = []

    def fruitless(self) -> Iterator[tuple[int, float]]:
        """The starts that did not restore, by rank and time."""
        return ((self._rank, start.joined["time"]) for start in self._all if start.attempt is None)

    def take(self, line: Line) -> None:
        pid = whole_number(line["pid"])
        start = self._starts.get(pid)
        if start is None or (line["event"] == "joined" and line["time"] != start.joined["time"]):
            start = self._starts[pid] = _Start(line)
            self._all.append(start)
        handler = getattr(self, f"_on_{line['event']}", None)
        if handler is not None:
            handler(start, line)
        if start.attempt is not None:
            signs = start.attempt.last_signs
            signs[self._rank] = max(line["time"], signs.get(self._rank, 0.0))

    def _on_joined(self, _: _Start, line: Line) -> None:
        self._reader.job = str(line.get("job", self._reader.job))

    def _on_rebuilt(self, start: _Start, line: Line) -> None:
        start.rebuilt.append(line)

    def _on_loaded(self, start: _Start, line: Line) -> None:
        if line.get("from"):
            start.layout = f"{line['from']} → {line['to']}"

    def _on_restored(self, start: _Start, line: Line) -> None:
        attempt = start.attempt = self._reader.attempts[str(line["lineage"])]
        attempt.joined_at = max(attempt.joined_at, start.joined["time"])
        attempt.restored_at = max(attempt.restored_at, line["time"])
        attempt.start = None if line["iteration"] is None else whole_number(line["iteration"])
        attempt.source = str(line.get("source") or attempt.source)
        attempt.ends = [*map(str, line.get("ends") or attempt.ends)]
        attempt.layout = start.layout or attempt.layout
        attempt.nodes |= {str(start.joined["node"])} if "node" in start.joined else set()
        attempt.launches |= {str(start.joined["launch"])} if start.joined.get("launch") else set()
        attempt.pids.add(whole_number(line["pid"]))
        for built in start.rebuilt:
            attempt.rebuild_secs = max(attempt.rebuild_secs, built["secs"])
            attempt.rebuilt_shards |= {*map(str, built["shards"])}
            attempt.rebuilt_bytes += whole_number(built["bytes"])
        start.rebuilt = []

    def _on_fence(self, start: _Start, line: Line) -> None:
        start.fence_secs += line["blocked_secs"]

    def _on_snapshot(self, start: _Start, line: Line) -> None:
        iteration, fence_secs = whole_number(line["iteration"]), start.fence_secs
        self._pass_boundary(start, iteration, line["time"])
        if start.attempt is not None and self._is_sampled:
            # The fence before this boundary belongs to the previous snapshot; both blocked this iteration.
            self._reader.blocked[iteration][self._rank] = (line["blocked_secs"] + 0.0, fence_secs)

    def _on_skipped(self, start: _Start, line: Line) -> None:
        self._pass_boundary(start, whole_number(line["iteration"]), line["time"])

    def _pass_boundary(self, start: _Start, iteration: int, time: float) -> None:
        start.fence_secs = 0.0
        if (attempt := start.attempt) is None:
            return
        attempt.last_iteration = max(attempt.last_iteration, iteration)
        snapshot = attempt.snapshots[iteration]
        snapshot.boundary_at = max(snapshot.boundary_at, time)
        if not start.has_passed:
            attempt.boundary_at = max(attempt.boundary_at, time)
        start.has_passed = True

    def _on_copied(self, start: _Start, line: Line) -> None:
        if start.attempt is None:
            return
        snapshot = start.attempt.snapshots[whole_number(line["iteration"])]
        snapshot.copied |= 1 << self._rank
        snapshot.copied_at = max(snapshot.copied_at, line["time"])
        if self._is_sampled:
            self._reader.iteration_secs.append(line["secs"] + 0.0)

    def _on_protected(self, start: _Start, line: Line) -> None:
        if start.attempt is not None:
            snapshot = start.attempt.snapshots[whole_number(line["iteration"])]
            snapshot.protected_at = min(snapshot.protected_at, line["time"])

    def _on_persisted(self, start: _Start, line: Line) -> None:
        if start.attempt is not None:
            snapshot = start.attempt.snapshots[whole_number(line["iteration"])]
            snapshot.persisted_at = min(snapshot.persisted_at, line["time"])

    def _on_protection(self, _: _Start, line: Line) -> None:
        if self._reader.protection is None or line["time"] > self._reader.protection["time"]:
            self._reader.protection = line

    def _on_conditions(self, _: _Start, line: Line) -> None:
        self._reader.conditions[str(line.get("node", self._rank))] = line

    def _on_closed(self, start: _Start, line: Line) -> None:
        if start.attempt is not None:
            start.attempt.closed.add(self._rank)
            # Boundaries without a snapshot have no event: only this event has the rank's last iteration.
            start.attempt.last_iteration = max(start.attempt.last_iteration, line["iteration"] + 0)


def _fault_note(line: Line) -> FaultNote:
    name = str(line["name"])
    ranks = tuple(map(whole_number, line.get("ranks", ())))
    label = str(line.get("label", name))
    return FaultNote(line["time"] + 0.0, name, label, whole_number(line["iteration"]), ranks)
