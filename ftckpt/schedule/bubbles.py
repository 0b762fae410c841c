"""When a chunk may be copied: the seam between the copier and the pipeline schedule.

How many bytes may be copied where follows one rule: windows first, then forward, then backward, at last the fence. It
needs no schedule of copies made in advance. At each place of the iteration it looks at how much is left and at how
much the later windows can still take; only what they cannot take is spilled, and into backward steps only what later
forward steps cannot take either. So a window that turned out shorter is made up for by the next ones as long as they
have capacity left.
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
"""How late a dropped snapshot may be noticed; a place that opens wakes the copier at once."""

_STEPS = frozenset({"forward", "backward"})
"""Places whose capacity goes over to the next one: the fence takes all that is left, whatever was owed."""


@dataclass(frozen=True)
class WindowPlan:
    """What each place of an iteration can take, in bytes: its length times the rate of copies."""

    timeline: IterationForecast
    bytes_per_sec: float
    capacity: tuple[int, ...]
    later_windows: tuple[int, ...]
    """Of all windows after a place, the sum."""
    later_forwards: tuple[int, ...]

    @classmethod
    def of(cls, timeline: IterationForecast, bytes_per_sec: float, unit_bytes: int) -> WindowPlan:
        """``unit_bytes`` is the size of a copy: a window takes whole ones."""
        capacity = []
        for kind, secs in zip(timeline.kinds, timeline.secs, strict=True):
            nbytes = secs * bytes_per_sec
            # Rounded as turns are given: a copy goes where most of it fits.
            capacity.append(round(nbytes / unit_bytes) * unit_bytes if kind in IDLE else int(nbytes))
        windows = [nbytes if kind in IDLE else 0 for kind, nbytes in zip(timeline.kinds, capacity, strict=True)]
        forwards = [n if kind == "forward" else 0 for kind, n in zip(timeline.kinds, capacity, strict=True)]
        return cls(timeline, bytes_per_sec, tuple(capacity), _later(windows), _later(forwards))

    @property
    def window_bytes(self) -> int:
        """What all windows together can take."""
        return self.later_windows[0] + (self.capacity[0] if self.timeline.kinds[0] in IDLE else 0)

    def knows(self, place: int, kind: str) -> bool:
        """Whether the iteration under way goes as planned, as far as this place shows."""
        return place < len(self.capacity) and self.timeline.kinds[place] == kind

    def allowed(self, place: int, left_bytes: int) -> int:
        """Bytes that may be copied at ``place`` when ``left_bytes`` are left."""
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
    """For each place the sum of the values behind it."""
    total, sums = 0, []
    for value in reversed(values):
        sums.append(total)
        total += value
    return tuple(reversed(sums))


@dataclass(frozen=True)
class Turn:
    """Leave to copy the next ``count`` chunks: on a device not before ``gate``, a moment of its clock."""

    gate: Moment = None
    count: int = 1


class Windows(Protocol):
    """Asked by the copier, on its own thread, before it copies."""

    def wait_turn(self, sizes: Sequence[int], hurry: threading.Event) -> Turn:
        """Return when the first of the next chunks, of ``sizes`` bytes, may be copied, with how many of them may; at
        once when ``hurry`` is set: the trainer stands at the fence."""


class Always:
    """Copy at once, without knowledge of the schedule."""

    def wait_turn(self, sizes: Sequence[int], hurry: threading.Event) -> Turn:
        return Turn(count=len(sizes))


@dataclass
class _Place:
    index: int
    kind: str
    gate: Moment
    credit: int | None = None
    """Bytes that may still be copied here; None until the copier comes to it."""


class Bubbles:
    """Gives turns where the plan has capacity.

    The trainer's thread says where it is (``enter``), the copier's thread asks for turns. Where the host runs
    ahead of a device (``queued``), places that the host has left are still to come and keep their capacity; their
    copies are gated on the device. Otherwise a place that was left is over.
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
        """A snapshot of ``total_bytes`` begins; without a plan its chunks are copied as soon as training moves on."""
        if self._plan is None and self._left == total_bytes == 0:  # there was none before either: nobody waits
            return
        with self._changed:
            # Not moving: copies that begin at the boundary would run beside what training still waits for there.
            self._plan, self._left, self._carried, self._moving = plan, total_bytes, 0, False
            self._places.clear()

    def enter(self, index: int, kind: str, gate: Moment) -> None:
        """The trainer comes to place ``index`` of the iteration. Never waits for longer than a turn is counted."""
        # Without the lock: nobody waits for a turn then, nor is one left, before the trainer's next ``begin``.
        if self._moving and (self._plan is None or self._left <= 0):
            return
        with self._changed:
            self._moving = True
            if self._plan is None or self._left <= 0:
                self._changed.notify()
                return
            if kind == "optimizer":  # every turn was given or hurried: places would pile up until the next snapshot
                self._left = 0
                self._places.clear()
                return
            if not self._queued:
                self._places.clear()
            if not self._plan.knows(index, kind):
                self._plan = None  # another schedule than the one that was planned for
            self._places.append(_Place(index, kind, gate))
            # Not at a place that takes nothing: a thread that is woken takes the interpreter's lock from training.
            if self._plan is None or self._plan.allowed(index, self._left):
                self._changed.notify()

    def wait_turn(self, sizes: Sequence[int], hurry: threading.Event) -> Turn:
        with self._changed:
            while not hurry.is_set():
                turn = self._turn(sizes)
                if turn is not None:
                    return turn
                self._changed.wait(_POLL_SECS)
            # Not counted: a dropped snapshot may still ask when the next one has begun.
            return Turn(count=len(sizes))

    def _turn(self, sizes: Sequence[int]) -> Turn | None:
        if self._plan is None or sizes[0] == 0:
            count = len(sizes) if self._plan is None else 1
            return Turn(count=count) if self._moving else None
        while self._places:
            place = self._places[0]
            if place.credit is None:
                place.credit = self._plan.allowed(place.index, self._left)
                if place.kind in _STEPS and place.credit:
                    # A step too short for a whole chunk adds its capacity to that of the next.
                    place.credit, self._carried = place.credit + self._carried, 0
            count = _fitting(sizes, place.credit)
            if count:
                nbytes = sum(sizes[:count])
                place.credit -= nbytes
                self._left -= nbytes
                return Turn(place.gate, count)
            if place.kind in _STEPS and place.credit:
                self._carried = place.credit
            if len(self._places) == 1:  # training is there still: some may be left when the next one is known
                return None
            self._places.popleft()
        return None


def _fitting(sizes: Sequence[int], credit: int) -> int:
    """How many of the first chunks go where ``credit`` bytes may: half a chunk too much here is as good as half too
    little, so each goes where most of it fits."""
    count = 0
    for size in sizes:
        if credit == 0 or 2 * credit < size:
            break
        credit -= size
        count += 1
    return count
