"""The end of a job: its last snapshot comes to storage before memory goes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from ftckpt.events import Events
from ftckpt.group import Group
from ftckpt.job.protection import Protection
from ftckpt.model import codec
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import listed
from ftckpt.store.pulse import FlushState

_TURN_SECS = 1.0
"""Ranks compare what their nodes have done so often: none waits for a node that another knows to have failed."""
_POLL_SECS = 0.02
_TELL_SECS = 10.0
_ASK_SECS = 5.0
_MOST_PROBLEMS = 3
_UNREADY_SECS = 60.0
"""An SMP that ended is replaced within seconds; one that never knew what to do stays so."""


class _Turn(NamedTuple):
    """How far a node is, and what keeps it."""

    state: int
    problem: str


def flush_last(
    group: Group, events: Events, last: SnapshotId, protection: Protection, *, timeout_secs: float, trying: str
) -> bool:
    """Wait until all nodes have brought ``last``, which is marked for that, to storage; whether it is there.
    Collective. ``trying``: what becomes of one that does not come there, for people.

    Raises:
        RuntimeError: a rank is gone.
    """
    begun = time.monotonic()
    events.announce(f"iteration {last.iteration} goes to storage before the job ends")
    state, told, watch = FlushState.WORKING, begun, _NodeWatch(last, protection, begun + timeout_secs)
    while state == FlushState.WORKING:
        turns = codec.gather(group, _Turn(int(watch.turn()), watch.problem), _Turn)
        state = _of_all([turn.state for turn in turns])
        if state == FlushState.WORKING and time.monotonic() - told > _TELL_SECS:
            told = time.monotonic()
            problems = sorted({turn.problem for turn in turns} - {""})
            events.announce(
                f"iteration {last.iteration} is on its way to storage since {told - begun:.0f} s"
                + (f": {listed(problems, _MOST_PROBLEMS)}; {trying}" if problems else "")
            )
    secs = time.monotonic() - begun
    if state == FlushState.DONE:
        events.emit("persisted", iteration=last.iteration, secs=secs)
        events.announce(f"iteration {last.iteration} is on storage, after {secs:.1f} s")
    else:
        events.emit("flush_failed", iteration=last.iteration, secs=secs)
    return state == FlushState.DONE


class _NodeWatch:
    """What this rank's node does for the last snapshot, until a deadline."""

    def __init__(self, last: SnapshotId, protection: Protection, deadline: float) -> None:
        self._last, self._protection, self._deadline = last, protection, deadline
        self._ready_secs = self._asked = time.monotonic()  # when its SMP was last seen to be able to
        self.problem = ""
        """What it met last, where this rank leads the node."""

    def turn(self) -> FlushState:
        """How far it is, after a turn at most."""
        end = time.monotonic() + _TURN_SECS
        while True:
            guard, now = self._protection.observe_flush(self._last), time.monotonic()
            if guard.state in (FlushState.DONE, FlushState.CANNOT):
                return guard.state
            if guard.ready:
                self._ready_secs = now
            is_silent = now - self._ready_secs > _UNREADY_SECS
            if not guard.sealed or is_silent or now >= self._deadline:
                return FlushState.CANNOT
            if now >= end:
                if now - self._asked > _ASK_SECS:
                    self._asked, self.problem = now, self._protection.smp.problem_now()
                return FlushState.WORKING
            time.sleep(_POLL_SECS)


def _of_all(states: Sequence[int]) -> FlushState:
    if FlushState.CANNOT in states:
        return FlushState.CANNOT
    return FlushState.DONE if set(states) == {FlushState.DONE} else FlushState.WORKING
