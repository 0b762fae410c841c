"""What a run went through, from the events that its ranks and SMPs left: attempts, restarts, what snapshots cost,
how old they were, and what protected them.

Files are read line by line, each of them once; what is remembered grows with the iterations of the run and not
with its ranks.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from ftckpt.commands.attempts import Attempt
from ftckpt.commands.charts import pieces
from ftckpt.commands.event_log import (
    MOST_LINE_BYTES,
    EventLog,
    event_logs,
    is_log,
    note_of_choice,
    parse_line,
    whole_number,
)
from ftckpt.events import EVENTS

PARTS = ("detect", "rejoin", "rebuild", "load", "first-step")
"""What the time from a fault to the first boundary after it is made of."""

Line = Mapping[str, Any]

_REMEDY = "run with --ftckpt-events DIR"
_MOST_RANKS = 64
"""BlockedTime time is remembered of so many ranks: a median does not need them all."""
_MOST_DETAIL = 240
_MOST_NUMBER = 1e15
"""No time or duration comes near; what does would make a chart without end."""
_WHO = ("time", "event", "rank", "process", "pid")


@dataclass(frozen=True)
class FaultNote:
    """What somebody who injected a fault wrote beside the events: an event ``fault``."""

    time: float
    name: str
    label: str
    iteration: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Recovery:
    """From one attempt to the next.

    ``struck_at``: when the fault was noted, or else when the first rank fell silent. ``detect``: from then until the
    last process of that attempt was gone (or fell silent). ``rejoin``: until the last rank had joined. ``rebuild``:
    how long lost shards were made anew from parity, on the slowest rank; ``load``: the rest, until all had restored.
    ``first-step``: until all ranks had passed a boundary. ``starts``: attempts it took, those that did not come to
    train included. ``source``: ``memory``, or what lost shards were rebuilt from, joined by ``+``, or ``nothing``.
    ``layout``: from which to which, where it changed.
    """

    name: str
    label: str
    ranks: tuple[int, ...]
    iteration: int
    struck_at: float
    noted: bool
    restored_iteration: int
    iterations_lost: int
    parts: Mapping[str, float]
    trained: bool
    source: str
    starts: int
    rebuilt_shards: tuple[str, ...] = ()
    rebuilt_bytes: int = 0
    layout: str = ""
    nodes: str = ""

    @property
    def total_secs(self) -> float:
        """From the fault to the first boundary after it."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class BlockedTime:
    """Seconds that training stood still in one iteration: the median rank's two parts, the slowest's sum."""

    boundary: float
    fence: float
    slowest: float


@dataclass
class Alarm:
    """A kind of loud event: how often it came, from whom, and the fields of the first."""

    num: int = 0
    first_at: float = math.inf
    who: set[str] = field(default_factory=set)
    detail: str = ""


@dataclass
class RunHistory:
    """All of it. ``losses``: (iteration, loss) in the order in which they were logged, or none."""

    directory: Path
    began_at: float
    job: str
    attempts: list[Attempt]
    restarts: list[Recovery]
    blocked: dict[int, BlockedTime]
    iteration_secs: float
    protection: Line | None
    alarms: dict[str, Alarm]
    losses: list[tuple[int, float]]
    conditions: list[Line]
    notes: list[str]


def read_history(run: Path) -> RunHistory:
    """The history of the run whose event logs are at or below ``run``; of several the one that began last.

    Raises:
        EventLogError: no such directory, or no event logs in it.
    """
    logs = event_logs(run, _REMEDY)
    log = max(logs, key=_began_at)
    reader = _Reader(log)
    for number, path in enumerate(log.rank_files):
        reader.read_rank(path, sampled=number % math.ceil(len(log.rank_files) / _MOST_RANKS) == 0)
    attempts = reader.sorted_attempts()
    for path in log.other_files:
        reader.read_other(path, attempts)
    notes = note_of_choice(log, {str(other.directory) for other in logs})
    restarts_end = attempts[-1].joined_at if attempts else 0.0
    notes += [
        f"fault {note.name} was noted and no attempt followed" for note in reader.faults if note.time > restarts_end
    ]
    losses, num_left_out = read_losses([log.directory, log.directory.parent, run])
    if num_left_out:
        notes.append(f"{num_left_out} logged losses are no finite numbers and not drawn")
    return RunHistory(
        directory=log.directory,
        began_at=_began_at(log),
        job=reader.job,
        attempts=attempts,
        restarts=list(reader.restarts(attempts, losses)),
        blocked=reader.blocked_by_iteration(),
        iteration_secs=median(reader.iteration_secs) if reader.iteration_secs else 0.0,
        protection=reader.protection,
        alarms=reader.alarms,
        losses=losses,
        conditions=list(reader.conditions.values()),
        notes=notes + log.notes,
    )


def read_losses(directories: Sequence[Path]) -> tuple[list[tuple[int, float]], int]:
    """(iteration, loss) from the first of these directories with a file of JSON lines that have both, as the example
    scripts write them; and how many were no finite numbers."""
    for directory in directories:
        for path in sorted(directory.glob("*.jsonl")):
            rows = list(_loss_lines(path)) if is_log(path) else []
            if rows:
                finite = [row for row in rows if math.isfinite(row[1])]
                return finite, len(rows) - len(finite)
    return [], 0


def _loss_lines(path: Path) -> Iterator[tuple[int, float]]:
    with open(path, "rb") as file:
        while line := file.readline(MOST_LINE_BYTES):
            fields = parse_line(line) if line.endswith(b"\n") else None
            if fields is None:
                continue
            if "event" in fields:  # an event log
                return
            with suppress(KeyError, ValueError):
                loss = fields["loss"]
                # A loss may be NaN or infinite; that one is counted, and not drawn.
                odd = isinstance(loss, float) and not abs(loss) < _MOST_NUMBER
                yield whole_number(fields["iteration"]), math.nan if odd else _number(loss)


def _began_at(log: EventLog) -> float:
    for _, line in log.lines(log.rank_files[0]):
        with suppress(KeyError, ValueError):
            return _number(line["time"])
    return 0.0


class _Reader:
    """Takes in the lines of one log, file by file."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.attempts: dict[str, Attempt] = defaultdict(Attempt)
        self.blocked: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
        self._shards: dict[str, int] = {}
        self.faults: list[FaultNote] = []
        self._ended: dict[int, float] = {}
        self.job = ""
        self.iteration_secs: list[float] = []
        self.protection: Line | None = None
        self.alarms: dict[str, Alarm] = defaultdict(Alarm)
        self.conditions: dict[str, Line] = {}

    def sorted_attempts(self) -> list[Attempt]:
        # By time: lineages are random, and files of ranks show no order between attempts.
        return sorted(self.attempts.values(), key=lambda attempt: attempt.restored_at)

    def read_rank(self, path: Path, sampled: bool) -> None:
        """A rank's file; ``sampled``: blocked times are remembered too."""
        rank = _RankFile(self, int(path.stem.removeprefix("rank")), sampled)
        self._read(path, rank.take)

    def read_other(self, path: Path, attempts: Sequence[Attempt]) -> None:
        """The file of an SMP, or notes of somebody else's."""
        begins = [attempt.joined_at for attempt in attempts]

        def take(line: Line) -> None:
            # An SMP outlives attempts and does not know their lineages: time tells.
            place = bisect_right(begins, _number(line["time"])) - 1
            if line["event"] == "fault":
                self.faults.append(_fault_note(line))
            elif line["event"] == "ended":
                self._ended[whole_number(line["pid"])] = _number(line["time"])
            elif line["event"] == "checked" and place >= 0:
                mark = attempts[place].marks[whole_number(line["iteration"])]
                # A bit for each shard: a set for each iteration would grow with ranks times iterations.
                mark.checked |= 1 << self._shards.setdefault(str(line["shard"]), len(self._shards))
                mark.checked_at = max(mark.checked_at, _number(line["time"]))

        self._read(path, take)

    def _read(self, path: Path, take: Callable[[Line], None]) -> None:
        for _, line in self._log.lines(path):
            try:
                time = _number(line["time"])
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
            fields = {name: value for name, value in line.items() if name not in _WHO}
            text = json.dumps(fields, ensure_ascii=False)
            alarm.first_at, alarm.detail = time, text if len(text) <= _MOST_DETAIL else f"{text[:_MOST_DETAIL]}…"

    def blocked_by_iteration(self) -> dict[int, BlockedTime]:
        """What snapshots cost; of an iteration that was trained again the last attempt counts."""
        return {
            iteration: BlockedTime(
                median(boundary for boundary, _ in ranks.values()),
                median(fence for _, fence in ranks.values()),
                max(map(sum, ranks.values())),
            )
            for iteration, ranks in sorted(self.blocked.items())
        }

    def restarts(self, attempts: Sequence[Attempt], losses: Sequence[tuple[int, float]]) -> Iterator[Recovery]:
        """One between each two attempts, but where a job that had ended well was launched again."""
        logged, pairs = pieces(losses), list(pairwise(attempts))
        for number, (old, new) in enumerate(pairs, 1):
            back = new.start or 0
            later = [before.last_iteration for before, after in pairs[number:] if (after.start or 0) == back]
            finished = _take_finished(logged, back, old.last_iteration, later)
            if old.ended_well:
                continue
            yield self._restart(f"restart {number}", old, new, max(0, finished - back))

    def _restart(self, name: str, old: Attempt, new: Attempt, lost: int) -> Recovery:
        # Every rank leaves events in each iteration: who falls silent first was struck, within an iteration.
        signs = old.last_signs.values()
        notes = sorted(
            (note for note in self.faults if old.joined_at < note.time <= new.joined_at), key=lambda note: note.time
        )
        struck_at = notes[0].time if notes else min(signs)
        gone = [self._ended[pid] for pid in old.pids if pid in self._ended]
        gone_at = max([struck_at, *(gone or signs)])
        # Clocks of nodes differ, and a note may come late: parts are never negative.
        gone_at = min(gone_at, max(struck_at, new.joined_at))
        loading = new.restore_secs - new.rebuild_secs
        secs = (gone_at - struck_at, new.joined_at - gone_at, new.rebuild_secs, loading, new.first_step_secs)
        nodes = [f"{node} lost" for node in sorted(old.nodes - new.nodes)]
        nodes += [f"{node} joined" for node in sorted(new.nodes - old.nodes)]
        return Recovery(
            name="+".join(note.name for note in notes) or name,
            label=", ".join(note.label for note in notes) or name,
            ranks=tuple(sorted({rank for note in notes for rank in note.ranks})),
            iteration=notes[0].iteration if notes else old.last_iteration + 1,
            struck_at=struck_at,
            noted=bool(notes),
            restored_iteration=new.start or 0,
            iterations_lost=lost,
            parts=dict(zip(PARTS, (max(0.0, value) for value in secs), strict=True)),
            trained=bool(new.boundary_at),
            source="+".join(sorted(new.sources)) or new.source or "nothing",
            starts=1 + max(new.abandoned.values(), default=0),
            rebuilt_shards=tuple(sorted(new.rebuilt_shards)),
            rebuilt_bytes=new.rebuilt_bytes,
            layout=new.layout,
            nodes=", ".join(nodes),
        )


class _RankFile:
    """Where one rank's file has come to; attempts follow each other in it."""

    def __init__(self, reader: _Reader, rank: int, sampled: bool) -> None:
        self._reader, self._rank, self._sampled = reader, rank, sampled
        self._attempt: Attempt | None = None
        self._joined: Line | None = None
        self._abandoned = 0
        self._rebuilt: list[Line] = []
        self._layout = ""
        self._first = True
        self._fence_secs = 0.0

    def take(self, line: Line) -> None:
        handler = getattr(self, f"_on_{line['event']}", None)
        if handler is not None:
            handler(line, _number(line["time"]))
        if self._attempt is not None:
            self._attempt.last_signs[self._rank] = _number(line["time"])

    def _on_joined(self, line: Line, _: float) -> None:
        # A rank that joins twice without a restore between: its attempt did not come to train, and is not hidden.
        self._abandoned += self._joined is not None
        self._joined, self._attempt, self._rebuilt, self._layout, self._fence_secs = line, None, [], "", 0.0
        self._reader.job = str(line.get("job", self._reader.job))

    def _on_rebuilt(self, line: Line, _: float) -> None:
        self._rebuilt.append(line)

    def _on_loaded(self, line: Line, _: float) -> None:
        if line.get("from"):
            self._layout = f"{line['from']} → {line['to']}"

    def _on_restored(self, line: Line, time: float) -> None:
        attempt = self._reader.attempts[str(line["lineage"])]
        joined, self._joined = self._joined or line, None
        attempt.joined_at = max(attempt.joined_at, _number(joined["time"]))
        attempt.restored_at = max(attempt.restored_at, time)
        attempt.start = None if line["iteration"] is None else whole_number(line["iteration"])
        attempt.source = None if line.get("source") is None else str(line["source"])
        attempt.layout = self._layout or attempt.layout
        attempt.nodes |= {str(joined["node"])} if "node" in joined else set()
        attempt.pids.add(whole_number(line["pid"]))
        attempt.abandoned[self._rank], self._abandoned = self._abandoned, 0
        for built in self._rebuilt:
            attempt.rebuild_secs = max(attempt.rebuild_secs, _number(built["secs"]))
            attempt.sources |= built["sources"].keys()
            attempt.rebuilt_shards |= set(built["shards"])
            attempt.rebuilt_bytes += whole_number(built["bytes"])
        self._attempt, self._rebuilt, self._first = attempt, [], True

    def _on_fence(self, line: Line, _: float) -> None:
        self._fence_secs += _number(line["blocked_secs"])

    def _on_snapshot(self, line: Line, time: float) -> None:
        iteration, fence_secs = whole_number(line["iteration"]), self._fence_secs
        self._pass_boundary(iteration, time)
        if self._attempt is not None and self._sampled:
            # The fence before this boundary belongs to the snapshot before it; both blocked this iteration.
            self._reader.blocked[iteration][self._rank] = (_number(line["blocked_secs"]), fence_secs)

    def _on_skipped(self, line: Line, time: float) -> None:
        self._pass_boundary(whole_number(line["iteration"]), time)

    def _pass_boundary(self, iteration: int, time: float) -> None:
        self._fence_secs = 0.0
        if self._attempt is None:
            return
        self._attempt.last_iteration = max(self._attempt.last_iteration, iteration)
        mark = self._attempt.marks[iteration]
        mark.boundary_at = max(mark.boundary_at, time)
        if self._first:
            self._attempt.boundary_at = max(self._attempt.boundary_at, time)
        self._first = False

    def _on_copied(self, line: Line, time: float) -> None:
        if self._attempt is None:
            return
        mark = self._attempt.marks[whole_number(line["iteration"])]
        mark.copied |= 1 << self._rank
        mark.copied_at = max(mark.copied_at, time)
        if self._sampled:
            self._reader.iteration_secs.append(_number(line["secs"]))

    def _on_protected(self, line: Line, time: float) -> None:
        if self._attempt is not None:
            mark = self._attempt.marks[whole_number(line["iteration"])]
            mark.protected_at = min(mark.protected_at, time)

    def _on_protection(self, line: Line, _: float) -> None:
        if self._reader.protection is None or line["time"] > self._reader.protection["time"]:
            self._reader.protection = line

    def _on_conditions(self, line: Line, _: float) -> None:
        self._reader.conditions[str(line.get("node", self._rank))] = line

    def _on_closed(self, line: Line, _: float) -> None:
        if self._attempt is not None:
            self._attempt.closed.add(self._rank)
            # Boundaries between snapshots leave no event: only the end tells how far a rank came.
            if line["iteration"] >= 0:
                self._attempt.last_iteration = max(self._attempt.last_iteration, whole_number(line["iteration"]))


def _take_finished(logged: list[list[tuple[float, float]]], back: int, last: int, later: Sequence[int]) -> int:
    """The last iteration that an attempt finished which restarted behind ``back``; what was logged until then goes.

    Where the log goes back to right behind the restored snapshot, what lies beyond it was trained in vain. Nothing
    was where the log goes on: then the place is that of a ``later`` attempt which restarted behind the same snapshot
    and had come nearer to where it goes back.

    Args:
        last: what events say.
        later: the same of attempts after this one that restarted behind ``back``, too.
    """
    for place in range(1, len(logged)):
        if logged[place][0][0] == back + 1:
            end = int(logged[place - 1][-1][0])
            if any(last < other <= end for other in later):
                return last
            del logged[:place]
            return max(last, end)
    return last


def _fault_note(line: Line) -> FaultNote:
    name = str(line["name"])
    ranks = tuple(map(whole_number, line.get("ranks", ())))
    return FaultNote(
        _number(line["time"]), name, str(line.get("label", name)), whole_number(line["iteration"]), ranks
    )


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MOST_NUMBER:
        raise ValueError(f"{value!r} is not a number of a run")
    return float(value)
