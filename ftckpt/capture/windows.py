"""When a chunk may be copied: the seam between the copier and the pipeline schedule."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from ftckpt.capture.clock import Mark
from ftckpt.capture.pacing import Plan

_POLL_SECS = 0.05
"""How late a dropped snapshot may be noticed; a place that opens wakes the copier at once."""

_STEPS = frozenset({"forward", "backward"})
"""Places whose room goes over to the next one: the fence takes all that is left, whatever was owed."""


@dataclass(frozen=True)
class Turn:
    """Leave to copy: on a device not before ``gate``, a moment of its clock."""

    gate: Mark = None


class Windows(Protocol):
    """Asked by the copier, on its own thread, before each chunk."""

    def wait_turn(self, nbytes: int, hurry: threading.Event) -> Turn:
        """Return when ``nbytes`` may be copied; at once when ``hurry`` is set: the trainer stands at the fence."""


class Always:
    """Copy at once, without knowledge of the schedule."""

    def wait_turn(self, nbytes: int, hurry: threading.Event) -> Turn:
        """Return at once."""
        return Turn()


@dataclass
class _Place:
    index: int
    kind: str
    gate: Mark
    credit: int | None = None
    """Bytes that may still be copied here; None until the copier comes to it."""


class Bubbles:
    """Gives turns where the plan has room.

    The trainer's thread says where it is (``enter``), the copier's thread asks for turns. Where the host runs
    ahead of a device (``queued``), places that the host has left are still to come and keep their room; their
    copies are gated on the device. Otherwise a place that was left is over.
    """

    def __init__(self, queued: bool) -> None:
        self._queued = queued
        self._changed = threading.Condition()
        self._places: deque[_Place] = deque()
        self._plan: Plan | None = None
        self._left = 0
        self._carried = 0
        self._moving = True

    def begin(self, total_bytes: int, plan: Plan | None) -> None:
        """A snapshot of ``total_bytes`` begins; without a plan its chunks are copied as soon as training moves on."""
        with self._changed:
            self._plan, self._left, self._carried, self._moving = plan, total_bytes, 0, False
            self._places.clear()

    def enter(self, index: int, kind: str, gate: Mark) -> None:
        """The trainer comes to place ``index`` of the iteration. Never waits for longer than a turn is counted."""
        with self._changed:
            self._moving = True
            self._changed.notify()
            if self._plan is None or self._left <= 0:
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

    def wait_turn(self, nbytes: int, hurry: threading.Event) -> Turn:
        """See Windows."""
        with self._changed:
            while not hurry.is_set():
                turn = self._turn(nbytes)
                if turn is not None:
                    return turn
                self._changed.wait(_POLL_SECS)
            return Turn()  # not counted: a dropped snapshot may still ask when the next one has begun

    def _turn(self, nbytes: int) -> Turn | None:
        if self._plan is None or nbytes == 0:
            return Turn() if self._moving else None
        while self._places:
            place = self._places[0]
            if place.credit is None:
                place.credit = self._plan.allowed(place.index, self._left)
                if place.kind in _STEPS and place.credit:
                    # A step too short for a whole chunk adds its room to that of the next.
                    place.credit, self._carried = place.credit + self._carried, 0
            if place.credit and 2 * place.credit >= nbytes:
                place.credit -= nbytes
                self._left -= nbytes
                return Turn(place.gate)
            if place.kind in _STEPS and place.credit:
                self._carried = place.credit
            if len(self._places) == 1:
                return None
            self._places.popleft()
        return None
