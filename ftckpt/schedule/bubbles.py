"""Turns to copy chunks: the interface between the copier and the pipeline schedule.

Copies fill windows first, then forward steps, then backward steps, at last the fence. None is scheduled in advance:
in each span (place) of the iteration the bytes left are compared with the capacity of the later windows. Only the
excess spills into compute steps, and into backward steps only what exceeds later forward steps as well. So later
windows compensate for one that turned out shorter, as long as they have capacity left.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ftckpt.schedule.clock import Moment
from ftckpt.schedule.iteration import IDLE, IterationForecast

_POLL_SECS = 0.05
"""Maximum delay until the copier notices a dropped snapshot; a place that opens wakes it at once."""

_STEPS = frozenset({"forward", "backward"})
"""Places whose unused capacity carries over to the next one."""


@dataclass(frozen=True)
class WindowPlan:
    """The capacity of each place of an iteration, in bytes: its length times the copy rate."""

    timeline: IterationForecast
    bytes_per_sec: float
    capacity: tuple[int, ...]
    later_windows: tuple[int, ...]
    """For each place, the total capacity of the windows after it."""
    later_forwards: tuple[int, ...]

    @classmethod
    def of(cls, timeline: IterationForecast, bytes_per_sec: float, unit_bytes: int) -> WindowPlan:
        """Plan for copies of ``unit_bytes``: a window takes whole ones."""
        capacity = []
        for kind, secs in zip(timeline.kinds, timeline.secs, strict=True):
            nbytes = secs * bytes_per_sec
            # Rounded to nearest, as ``_fitting`` does: a copy goes where most of it fits.
            capacity.append(round(nbytes / unit_bytes) * unit_bytes if kind in IDLE else int(nbytes))
        windows = [nbytes if kind in IDLE else 0 for kind, nbytes in zip(timeline.kinds, capacity, strict=True)]
        forwards = [n if kind == "forward" else 0 for kind, n in zip(timeline.kinds, capacity, strict=True)]
        return cls(timeline, bytes_per_sec, tuple(capacity), _later(windows), _later(forwards))

    @property
    def window_bytes(self) -> int:
        """The total capacity of all windows."""
        return self.later_windows[0] + (self.capacity[0] if self.timeline.kinds[0] in IDLE else 0)

    def knows(self, place: int, kind: str) -> bool:
        """Whether the current iteration matches the plan at this place."""
        return place < len(self.capacity) and self.timeline.kinds[place] == kind

    def allowed(self, place: int, left_bytes: int) -> int:
        """Bytes that may be copied at ``place`` if ``left_bytes`` are left."""
        kind, capacity = self.timeline.kinds[place], self.capacity[place]
        if kind == "boundary":
            return 0  # the trainer waits
        if kind in IDLE:
            return min(capacity, left_bytes)
        spill = left_bytes - self.later_windows[place]
        if kind == "forward":
            return max(0, min(capacity, spill))
        if kind == "backward":
            return max(0, min(capacity, spill - self.later_forwards[place]))
        return left_bytes


def _later(values: Sequence[int]) -> tuple[int, ...]:
    """For each place, the sum of the values after it."""
    total, sums = 0, []
    for value in reversed(values):
        sums.append(total)
        total += value
    return tuple(reversed(sums))


@dataclass(frozen=True)
class Turn:
    """Permission to copy the next ``count`` chunks; on a device not before ``gate``, a moment of its clock."""

    gate: Moment = None
    count: int = 1


class Windows(Protocol):
    """The source of turns; called by the copier's thread."""

    def wait_turn(self, sizes: Sequence[int], hurry: threading.Event) -> Turn:
        """Wait until the first of the next chunks, of ``sizes`` bytes, may be copied; returns how many may. Does not
        wait if ``hurry`` is set: the trainer is at the fence."""


class Always:
    """Turns without delay, regardless of the schedule."""

    def wait_turn(self, sizes: Sequence[int], hurry: threading.Event) -> Turn:
        return Turn(count=len(sizes))


@dataclass
class _Place:
    index: int
    kind: str
    gate: Moment
    credit: int | None = None
    """Bytes that may still be copied here; None until the copier reaches this place."""


class Bubbles:
    """Turns where the plan has capacity.

    The training thread calls ``begin`` and ``enter``, the copier's thread ``wait_turn``. If the host runs ahead of a
    device (``queued``), places that the host has left are still ahead of the device and keep their capacity; their
    copies are gated on the device. Otherwise a place ends when training leaves it.
    """

    def __init__(self, queued: bool) -> None:
        self._queued = queued
        self._changed = threading.Condition()
        self._places: deque[_Place] = deque()
        self._plan: WindowPlan | None = None
        self._left = 0
        self._carried = 0
        self._moving = True

    def begin(self, total_bytes: int, plan: WindowPlan | None) -> None:
        """Start a snapshot of ``total_bytes``; without a plan its chunks are copied once training has moved on."""
        if self._plan is None and self._left == total_bytes == 0:  # no snapshot before or now: no copier waits
            return
        with self._changed:
            # Not moving: copies at the boundary would delay the work that training waits for there.
            self._plan, self._left, self._carried, self._moving = plan, total_bytes, 0, False
            self._places.clear()

    def enter(self, index: int, kind: str, gate: Moment) -> None:
        """Enter place ``index`` of the iteration. Holds the lock only while ``next_turn`` counts."""
        # Read without the lock: until the training thread's next ``begin``, no turn is awaited or left.
        if self._moving and (self._plan is None or self._left <= 0):
            return
        with self._changed:
            self._moving = True
            if self._plan is None or self._left <= 0:
                self._changed.notify()
                return
            if kind == "optimizer":  # the copies are done: places would pile up until the next snapshot
                self._left = 0
                self._places.clear()
                return
            if not self._queued:
                self._places.clear()
            if not self._plan.knows(index, kind):
                self._plan = None  # the schedule differs from the planned one
            self._places.append(_Place(index, kind, gate))
            # Not at a place without capacity: a woken thread takes the interpreter lock from training.
            if self._plan is None or self._plan.allowed(index, self._left):
                self._changed.notify()

    def wait_turn(self, sizes: Sequence[int], hurry: threading.Event) -> Turn:
        with self._changed:
            while not hurry.is_set():
                turn = self.next_turn(sizes)
                if turn is not None:
                    return turn
                self._changed.wait(_POLL_SECS)
            # Not counted: this may be a dropped snapshot's copier after the next snapshot has started.
            return Turn(count=len(sizes))

    def next_turn(self, sizes: Sequence[int]) -> Turn | None:
        """The turn that can be taken now, None: none. The caller has the lock, or is alone."""
        if self._plan is None or sizes[0] == 0:
            count = len(sizes) if self._plan is None else 1
            return Turn(count=count) if self._moving else None
        while self._places:
            place = self._places[0]
            if place.credit is None:
                place.credit = self._plan.allowed(place.index, self._left)
                if place.kind in _STEPS and place.credit:
                    # A step too short for a chunk passes its capacity on to the next.
                    place.credit, self._carried = place.credit + self._carried, 0
            count = _fitting(sizes, place.credit)
            if count:
                nbytes = sum(sizes[:count])
                place.credit -= nbytes
                self._left -= nbytes
                return Turn(place.gate, count)
            if place.kind in _STEPS and place.credit:
                self._carried = place.credit
            if len(self._places) == 1:  # the current place: it may be credited until training enters the next one
                return None
            self._places.popleft()
        return None


def _fitting(sizes: Sequence[int], credit: int) -> int:
    """The number of chunks that fit into ``credit`` bytes, rounded: half a chunk too many is as good as half too few,
    so each chunk goes where most of it fits."""
    count = 0
    for size in sizes:
        if credit == 0 or 2 * credit < size:
            break
        credit -= size
        count += 1
    return count
