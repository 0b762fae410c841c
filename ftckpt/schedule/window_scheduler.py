"""Tracks one rank's iterations, measures their windows, and plans copies into them."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from ftckpt.config import Config
from ftckpt.events import Events
from ftckpt.schedule.bubbles import Always, Bubbles, WindowPlan, Windows
from ftckpt.schedule.clock import Clock, Moment
from ftckpt.schedule.interval_control import IntervalControl
from ftckpt.schedule.iteration import Iteration, Profile, in_windows

_RATES = 5
"""Snapshots over which the median of copy rates is taken."""

TIMELINE_EVERY = 50
"""Snapshots from one timeline to the next: one takes as much of the event log as ten snapshots without."""

_MOVED_SHARE = 0.1
"""Share of an iteration by which windows must move before copies are replanned: they jitter by a few percent."""

_TOGETHER = 4
"""Iterations that are processed in one batch unless events are recorded: code that runs rarely is not in the CPU
cache, and takes as long for one iteration as for four."""

_PENDING = 4 + _TOGETHER
"""Maximum of iterations that wait for a batch, or for the device to finish them."""

_PLACES = 256
"""Spans of an iteration for which moments are allocated before the first one."""


class Copies(Protocol):
    """The copies of one snapshot, which may still run."""

    timed: list[tuple[float, float, int]]
    """(begin, end, bytes) of each copy, in seconds since the boundary."""

    @property
    def ended(self) -> bool:
        """Whether all copies have finished."""


@dataclass
class IterationMarks:
    """An iteration as the host marks it; the device may execute it later.

    ``began``: wall-clock time at its first boundary. ``marks``: kind and start of each span. ``flushing``: a flush
    was under way. ``target``: the iteration of the snapshot that was being protected, -1: none. ``snapshot``: the
    iteration whose state was copied last, ``place``: boundaries since then. ``copies``: those that started in it.
    ``pauses``: start and end of each time span in which training was paused; ``paused``: the start of the current
    one. ``end``: its last boundary.
    """

    began: float
    marks: list[tuple[str, Moment]]
    flushing: bool = False
    target: int = -1
    snapshot: int = -1
    place: int = 0
    copies: Copies | None = None
    pauses: list[tuple[Moment, Moment]] = field(default_factory=list)
    paused: Moment | None = None
    end: Moment = None

    def finish(self, end: Moment) -> bool:
        """Note the last boundary; returns whether the iteration can be timed: marks are missing while a graph is
        captured."""
        self.end = end
        moments = [end, *[mark for _, mark in self.marks], *chain.from_iterable(self.pauses)]
        return bool(self.marks) and None not in moments


def _leaves_timeline(number: int) -> bool:
    """Whether snapshot ``number`` gets a timeline event: 1, 2, 4, 8 …, for short runs, then every
    ``TIMELINE_EVERY``-th."""
    return number % TIMELINE_EVERY == 0 or (number < TIMELINE_EVERY and number & (number - 1) == 0)


class WindowScheduler:
    """Measures windows and plans copies for one rank. Only the training thread calls its methods.

    ``windows`` gives turns to the copier. ``enter`` reports the current span, a kind of
    ``ftckpt.schedule.iteration``. Kinds are optional: a window that is not entered is not used.
    """

    def __init__(
        self, config: Config, clock: Clock, events: Events, coords: Mapping[str, int], speaks: bool = True
    ) -> None:
        self._config, self._coords = config, dict(coords)
        self.clock = clock
        self._events = events
        self._bubbles = Bubbles(clock.on_device) if config.schedule == "bubble" else None
        self._profile = Profile()
        self._plan: WindowPlan | None = None
        self._current = IterationMarks(0.0, [])
        self.intervals = IntervalControl(config, speaks, events.announce)
        """This rank's requests for the intervals; ``speaks``: see there."""
        # On overflow the oldest is dropped: it is too old to matter by the time the device finishes it.
        self._pending: deque[IterationMarks] = deque(maxlen=_PENDING)
        self._rates: deque[float] = deque(maxlen=_RATES)
        self._places = 0
        self._provide(_PLACES)

    @property
    def windows(self) -> Windows:
        """The source of turns to copy chunks."""
        return self._bubbles or Always()

    def enter(self, kind: str) -> None:
        """Enter a span of ``kind``; ignored between the fence and the next boundary."""
        self._resume()
        marks = self._current.marks
        # Integrations may report one span twice. After the fence copies are done: nothing there is a window.
        if not marks or marks[-1][0] in (kind, "optimizer"):
            return
        mark = self.clock.mark()
        marks.append((kind, mark))
        if self._bubbles is not None:
            self._bubbles.enter(len(marks) - 1, kind, mark)

    def pause(self) -> None:
        """Pause until the next span, as for an evaluation or a save: that time must not count as a cost of a snapshot
        at the same boundary."""
        if self._current.paused is None and self._current.marks:
            self._current.paused = self.clock.mark()

    def _resume(self) -> None:
        if self._current.paused is not None:
            self._current.pauses.append((self._current.paused, self.clock.mark()))
            self._current.paused = None

    def boundary(self, flushing: bool = False, target: int = -1) -> None:
        """End an iteration and start the next, ``flushing`` if a flush is under way, ``target`` the iteration of the
        snapshot that is being protected (-1: none)."""
        self._resume()
        last, end = self._current, self.clock.mark()
        self._provide(len(last.marks))  # more than in any iteration so far: for those that follow
        if last.finish(end):
            self._pending.append(last)
        began = [("boundary", end)]
        self._current = IterationMarks(time.time(), began, flushing, target, last.snapshot, last.place + 1)
        if self._bubbles is not None:
            self._bubbles.begin(0, None)

    def begin(self, total_bytes: int, unit_bytes: int) -> Moment:
        """Start a snapshot at this boundary, in copies of ``unit_bytes``; returns the boundary's moment."""
        base = self._current.marks[0][1]  # the common time base of copies and spans
        if self._bubbles is not None:
            self._plan = self._planned(unit_bytes)
            self._bubbles.begin(total_bytes, self._plan)
        return base

    def follow(self, copies: Copies | None, snapshot: int) -> None:
        """Track the copies of the snapshot of iteration ``snapshot``, which has just started."""
        current = self._current
        current.snapshot, current.copies = snapshot, copies
        if copies is not None:
            current.place = 0

    def learn(self) -> None:
        """Process the iterations that the device has finished; the next plan uses them."""
        if self._profile.measured and len(self._pending) < _TOGETHER and not self._events.kept:
            return
        # In order and without waiting: the device may be iterations behind the host.
        while self._pending:
            iteration = self._resolved(self._pending[0])
            if iteration is None:
                break
            self._take_in(iteration, self._pending.popleft())

    def _take_in(self, iteration: Iteration, passed: IterationMarks) -> None:
        self._profile.add(iteration)
        # All moments are known: they precede its end, which is.
        paused_secs = sum(self.clock.secs(begin, end) or 0.0 for begin, end in passed.pauses)
        self.intervals.add(passed.place, iteration.secs - paused_secs, passed.flushing, passed.target)
        if iteration.copies:
            spent = sum(end - begin for begin, end, _ in iteration.copies)
            copied = sum(nbytes for _, _, nbytes in iteration.copies)
            # Excludes waits for turns: the rate of the hardware.
            self._rates.append(copied / max(spent, 1e-9))
            self.intervals.add_fence(iteration.stall_secs / max(iteration.secs, 1e-9))
            self._report(iteration, passed)

    def close(self) -> None:
        """Drop all unprocessed iterations."""
        self._pending.clear()
        self._current = IterationMarks(0.0, [])

    def _provide(self, places: int) -> None:
        """Allocate moments for iterations of that many spans: the pending ones, the last and the current one."""
        if places > self._places:
            self.clock.provide((_PENDING + 2) * (places - self._places))
            self._places = places

    def _resolved(self, passed: IterationMarks) -> Iteration | None:
        """The timed iteration; None while the device or copies are unfinished."""
        base = passed.marks[0][1]
        if passed.copies is not None and not passed.copies.ended:
            return None
        edges = [self.clock.secs(base, mark) for _, mark in passed.marks]
        edges.append(self.clock.secs(base, passed.end))
        known = [edge for edge in edges if edge is not None]
        if len(known) < len(edges):
            return None
        # Sorted: several threads append.
        copies = tuple(sorted(passed.copies.timed)) if passed.copies is not None else ()
        return Iteration(tuple(kind for kind, _ in passed.marks), tuple(known), copies)

    def _report(self, iteration: Iteration, passed: IterationMarks) -> None:
        if not self._events.kept:
            return
        moved = iteration.moved_bytes
        costs: dict[str, Any] = {
            "moved_bytes": moved,
            "window_capacity_bytes": self._plan.window_bytes if self._plan is not None else None,
            "stall_secs": iteration.stall_secs,
            "fence_secs": iteration.secs_of(frozenset({"fence"})),
            "secs": iteration.secs,
        }
        self._events.emit("copied", iteration=passed.snapshot, share_in_windows=in_windows(moved), **costs)
        if _leaves_timeline(passed.snapshot // self._config.least_interval):
            spans = zip(iteration.kinds, iteration.edges, iteration.edges[1:], strict=False)
            self._events.emit(
                "timeline", iteration=passed.snapshot, coords=self._coords, schedule=self._config.schedule,
                begin=passed.began, spans=list(spans), copies=iteration.copies, **costs,
            )  # fmt: skip

    def _planned(self, unit_bytes: int) -> WindowPlan | None:
        """The current plan while its timeline and rate are valid, else a new one; None before a measurement."""
        timeline = self._profile.timeline
        if timeline is None or not self._rates:
            return None
        rate, share = statistics.median(self._rates), _MOVED_SHARE
        old, moved = self._plan, 1.0
        if old is not None:
            moved = old.timeline.distance(timeline)
            if moved <= share and abs(rate - old.bytes_per_sec) <= share * old.bytes_per_sec:
                return old
        plan = WindowPlan.of(timeline, rate, unit_bytes)
        self._events.emit(
            "planned", window_capacity_bytes=plan.window_bytes, bytes_per_sec=rate, moved_share=moved,
            places=len(timeline.kinds), iteration_secs=sum(timeline.secs),
        )  # fmt: skip
        return plan
