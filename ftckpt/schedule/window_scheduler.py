"""Follows one rank's training through each iteration, learns its windows, and plans copies into them."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

from ftckpt.config import Config
from ftckpt.events import Events
from ftckpt.schedule.auto_interval import AutoInterval
from ftckpt.schedule.bubbles import Always, Bubbles, WindowPlan, Windows
from ftckpt.schedule.clock import Clock, Moment
from ftckpt.schedule.cost import CostMeter, IntervalRequest, shortest_interval
from ftckpt.schedule.iteration import Iteration, Profile, in_windows

_JUDGED = 5
"""Snapshots over which rates of copying and costs of fences are judged."""

TIMELINE_EVERY = 50
"""Snapshots between two that leave a timeline, which takes as much of the event log as all else of ten snapshots."""

_MOVED_SHARE = 0.1
"""Of an iteration, by which windows must have moved before copies are planned anew: they move by a few percent from
one iteration to the next."""

_MOST_STRETCH = 10_000
"""However small the budget, snapshots do not become rarer than this."""

_TOGETHER = 4
"""Iterations that are learnt at once where nobody waits to hear of each: code that runs seldom lies in no cache, and
takes as long for one as for all."""

_PENDING = 4 + _TOGETHER
"""Iterations that may wait, for these and for a device to come to their end."""

_PLACES = 256
"""Places of an iteration for which moments are provided before anything is known of its schedule."""


class Copies(Protocol):
    """The copies of one snapshot, as the pacer looks at them while they run."""

    timed: list[tuple[float, float, int]]
    """(begin, end, bytes) of each copy, in seconds since the boundary."""

    @property
    def ended(self) -> bool:
        """Whether none follows."""


class IterationMarks(NamedTuple):
    """An iteration that is over for the host, though a device may still be at it.

    ``began`` is the time of day at its first boundary, ``snapshot`` the iteration whose state was copied, ``place``
    how many boundaries that lies behind. ``flushing``: a snapshot was on its way to storage. ``pauses``: from when to
    when something else went on than training.
    """

    began: float
    marks: Sequence[tuple[str, Moment]]
    end: Moment
    copies: Copies | None
    snapshot: int
    place: int
    flushing: bool
    pauses: Sequence[tuple[Moment, Moment]]


def _leaves_timeline(number: int) -> bool:
    """Whether snapshot ``number`` does: early ones, for runs that are short, at 1, 2, 4, 8 …, and then at each
    ``TIMELINE_EVERY``."""
    return number % TIMELINE_EVERY == 0 or (number < TIMELINE_EVERY and number & (number - 1) == 0)


class WindowScheduler:
    """Owned by the checkpointer; every method is called by the training thread.

    ``speaks``: whether this rank's cost of snapshots decides for all of them with ``interval`` auto.

    ``windows`` is what the copier asks. ``enter`` says where training is, in the kinds of
    ``ftckpt.schedule.iteration``; any of them may be missing: what is not entered is no window.
    """

    def __init__(
        self, config: Config, clock: Clock, events: Events, coords: Mapping[str, int], speaks: bool = True
    ) -> None:
        self._config = config
        self._coords = dict(coords)
        self.clock = clock
        self._events = events
        self._bubbles = Bubbles(clock.on_device) if config.schedule == "bubble" else None
        self._profile = Profile()
        self._plan: WindowPlan | None = None
        self._outdated = True  # the plan: something was learnt since
        self._marks: list[tuple[str, Moment]] = []
        self._began = 0.0
        self._copies: Copies | None = None
        self._snapshot, self._place = -1, 0
        self._flushing = False
        self._paused: Moment | None = None  # since when
        self._pauses: list[tuple[Moment, Moment]] = []
        self._meter = CostMeter()
        self._auto: AutoInterval | None = None
        if config.interval == "auto" and config.overhead_budget and speaks:
            self._auto = AutoInterval(config.overhead_budget, _MOST_STRETCH, self._meter, events.announce)
        # Beyond that the oldest goes unread: a device this far behind has no use for its times.
        self._pending: deque[IterationMarks] = deque(maxlen=_PENDING)
        self._rates: deque[float] = deque(maxlen=_JUDGED)
        self._fences: deque[float] = deque(maxlen=_JUDGED)
        self._replanned = False
        self._capacity = 0
        self._places = 0
        self._provide(_PLACES)
        self.stretch = 1
        """By how much this rank wishes snapshots to be rarer, so that they keep their budget."""
        self._cost = 0.0 if config.interval != "auto" else -1.0
        self._wished: IntervalRequest | None = None

    def resume(self, interval: int) -> None:
        """With ``interval`` auto: begin with what an earlier attempt has found to keep the budget."""
        if self._auto is not None:
            self._auto.resume(interval)
            self._follow_auto(self._auto)
            self._wished = None

    @property
    def wish(self) -> IntervalRequest:
        """What this rank wants of the intervals; found out where a round needs it."""
        if self._wished is None:
            self._wished = IntervalRequest(
                self.stretch, self._cost, self._meter.iteration_secs, self._meter.flush_share
            )
        return self._wished

    @property
    def windows(self) -> Windows:
        """When chunks may be copied."""
        return self._bubbles or Always()

    @property
    def capacity_bytes(self) -> int:
        """What the windows of one iteration can take; 0 until they were measured."""
        return self._capacity

    def expect(self, kinds: Sequence[str], lengths: Sequence[float]) -> None:
        """A model's view of the schedule, see ``Profile.expect``."""
        self._provide(len(kinds))
        self._profile.expect(kinds, lengths)

    def enter(self, kind: str) -> None:
        """Training comes to a span of ``kind``; after the fence nothing counts until the next boundary."""
        self._resume()
        # Doors may announce one place twice. Behind the fence copies are done: what is announced there is no window.
        if not self._marks or self._marks[-1][0] in (kind, "optimizer"):
            return
        mark = self.clock.mark()
        self._marks.append((kind, mark))
        if self._bubbles is not None:
            self._bubbles.enter(len(self._marks) - 1, kind, mark)

    def pause(self) -> None:
        """Until its next span training does not go on, for an evaluation or a save: what comes at the same boundaries
        as snapshots do is none of their cost."""
        if self._paused is None and self._marks:
            self._paused = self.clock.mark()

    def _resume(self) -> None:
        if self._paused is not None:
            self._pauses.append((self._paused, self.clock.mark()))
            self._paused = None

    def boundary(self, flushing: bool = False) -> None:
        """An iteration ends and the next begins; ``flushing``: beside a snapshot that is on its way to storage."""
        self._resume()
        end = self.clock.mark()
        moments = [end, *[mark for _, mark in self._marks], *chain.from_iterable(self._pauses)]
        self._place = 0 if self._copies is not None else self._place + 1
        # A mark is missing where a graph was captured: nothing is known of such an iteration.
        if self._marks and None not in moments:
            self._pending.append(
                IterationMarks(
                    self._began, self._marks, end, self._copies, self._snapshot, self._place, self._flushing,
                    self._pauses,
                )
            )  # fmt: skip
        self._pauses = []
        self._flushing = flushing
        self._began, self._marks, self._copies = time.time(), [("boundary", end)], None
        if self._bubbles is not None:
            self._bubbles.begin(0, None)

    def begin(self, total_bytes: int, unit_bytes: int) -> Moment:
        """A snapshot begins at this boundary, in copies of ``unit_bytes``; returns the boundary's moment."""
        base = self._marks[0][1]  # copies are timed from here, as the spans of the iteration are
        if self._bubbles is not None:
            if self._outdated:
                self._plan, self._outdated = self._planned(unit_bytes), False
            if self._plan is not None and self._profile.measured:
                self._capacity = self._plan.window_bytes
            self._bubbles.begin(total_bytes, self._plan)
        return base

    def follow(self, copies: Copies | None, snapshot: int) -> None:
        """The copies of the snapshot that began, of the state of iteration ``snapshot``."""
        self._copies, self._snapshot = copies, snapshot

    def learn(self) -> None:
        """Take in the iterations of which everything is known by now; the next plan rests on them."""
        if self._profile.measured and len(self._pending) < _TOGETHER and not self._events.kept:
            return
        # In their order, and never waiting: a device may be iterations behind the host.
        while self._pending:
            iteration = self._resolved(self._pending[0])
            if iteration is None:
                break
            self._take_in(iteration, self._pending.popleft())
            self._outdated, self._wished = True, None

    def _take_in(self, iteration: Iteration, passed: IterationMarks) -> None:
        self._profile.add(iteration)
        more = self._meter.add(passed.place, iteration.secs - self._paused_secs(passed), passed.flushing)
        if self._auto is not None:
            if passed.place == 0:
                self._auto.took()
            if more:
                self._auto.judge()
            self._follow_auto(self._auto)
        if iteration.copies:
            spent = sum(end - begin for begin, end, _ in iteration.copies)
            copied = sum(nbytes for _, _, nbytes in iteration.copies)
            # Without waits for turns: what the hardware gives.
            self._rates.append(copied / max(spent, 1e-9))
            self._watch_fence(iteration)
            self._report(iteration, passed)

    def close(self) -> None:
        """Forget what was not learned."""
        self._pending.clear()
        self._marks, self._copies, self._paused = [], None, None

    def _provide(self, places: int) -> None:
        """Moments for iterations of so many places: those that are pending, the last one and the one under way."""
        if places > self._places:
            self.clock.provide((_PENDING + 2) * (places - self._places))
            self._places = places

    def _resolved(self, passed: IterationMarks) -> Iteration | None:
        """What it was; None while the device or copies are still at it."""
        base = passed.marks[0][1]
        if passed.copies is not None and not passed.copies.ended:
            return None
        edges = [self.clock.secs(base, mark) for _, mark in passed.marks]
        edges.append(self.clock.secs(base, passed.end))
        known = [edge for edge in edges if edge is not None]
        if len(known) < len(edges):
            return None
        # Sorted: several threads tell of them.
        copies = tuple(sorted(passed.copies.timed)) if passed.copies is not None else ()
        return Iteration(tuple(kind for kind, _ in passed.marks), tuple(known), copies)

    def _paused_secs(self, passed: IterationMarks) -> float:
        """All are known: they lie before the end of an iteration that is."""
        return sum(self.clock.secs(begin, end) or 0.0 for begin, end in passed.pauses)

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
        """The plan in force while what it rests on holds, otherwise a new one; None while nothing is known."""
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
            measured=self._profile.measured, places=len(timeline.kinds), iteration_secs=sum(timeline.secs),
        )  # fmt: skip
        return plan

    def _watch_fence(self, iteration: Iteration) -> None:
        """Too dear a fence: measure the windows anew, and where that does not help, wish for rarer snapshots.

        With ``interval`` auto the whole cost decides of the wish, and the fence of the windows alone.
        """
        budget = self._config.overhead_budget
        self._fences.append(iteration.stall_secs / max(iteration.secs, 1e-9))
        if not budget or len(self._fences) < _JUDGED:
            return
        share = statistics.median(self._fences)
        # Snapshots n times as rare cost one n-th of the share.
        needed = shortest_interval(share, budget, _MOST_STRETCH)
        if needed > self.stretch and self._bubbles is not None and not self._replanned:
            self._replanned = True
            self._profile.forget()
            self._events.emit("replanned", fence_share=share, overhead_budget=budget)
            self._fences.clear()
        # Back only where half would do: an interval that follows each median would go up and down for ever.
        elif self._config.interval != "auto" and (needed > self.stretch or 2 * needed <= self.stretch):
            self._wish(needed, share)

    def _follow_auto(self, auto: AutoInterval) -> None:
        stretch, cost = auto.wish
        if stretch != self.stretch:
            self._wish(stretch, cost)
        self._cost = cost

    def _wish(self, stretch: int, cost: float) -> None:
        self.stretch, self._cost, self._replanned = stretch, cost, False
        self._fences.clear()
