"""What a rank has to do with storage: it sees to the place at the start, and to the last snapshot at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from ftckpt.config import Config
from ftckpt.errors import LaunchError, StorageError
from ftckpt.events import Events
from ftckpt.group import Group
from ftckpt.memory.heartbeat import FlushState
from ftckpt.model import codec
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import human_secs, listed
from ftckpt.notice import Notice
from ftckpt.persist import commit
from ftckpt.persist.exports import prepare
from ftckpt.persist.paths import Place
from ftckpt.session.last_snapshot import JobEnd, RankShutdown, RankShutdownReport
from ftckpt.session.protection import Protection
from ftckpt.session.session import RankState


def save_command(config: Config) -> str:
    """What brings a job's memory to another place, for people."""
    return f"ftckpt save {config.job} DIR{_arena(config)}, on every node at once"


def clean_command(config: Config) -> str:
    """What removes a job's memory, for people."""
    return f"'ftckpt clean {config.job}{_arena(config)}' on every node"


def _arena(config: Config) -> str:
    return "" if config.arena == Config.arena else f" --arena {config.arena}"


_NOBODY = "no SMP says why, and its time is over"


class RankStorage:
    """One rank's part; SMPs write. ``bring_last`` is collective."""

    def __init__(
        self, config: Config, group: Group, events: Events, protection: Protection, state: RankState
    ) -> None:
        self._config = config
        self._group = group
        self._events = events
        self._protection = protection
        self._state = state
        self._told = -1  # the last iteration of which this rank has told
        self._place = Place.of(config.persist, config.persist_format)
        self.snapshots = self._place.snapshots
        """Where snapshots lie; "" without storage."""

    @property
    def wants_last(self) -> bool:
        """Whether the last snapshot of the job is to come there."""
        return bool(self._config.persist) and self._config.persist_at_end == "on"

    def prepare(self) -> None:
        """Make the place ready. Raises StorageError where it cannot be used, and trying again is of no use."""
        try:
            prepare(self._place)
        except StorageError as error:
            if error.lasting:
                raise StorageError(f"--ftckpt-persist: {error}", lasting=True) from None

    def bring_last(self, rank: RankShutdownReport) -> str:
        """Bring the last snapshot, which is taken where it is missing and can be; returns why it did not come, empty
        where it did.

        Raises:
            RuntimeError: a rank is gone.
        """
        ending = JobEnd.of(codec.gather(self._group, rank.find(), RankShutdown))
        last = self._take_missing(ending, rank) or ending.newest
        if last is None or last in ending.persisted:
            return ""
        self._protection.mark(replace(self._state.marks, flush=last))
        trying = (
            f"it is tried again until {human_secs(commit.FLUSH_SECS)} are over; who cannot wait ends the job, whose "
            f"memory stays then, and brings that to another place by {save_command(self._config)}"
        )
        came = flush_last(
            self._group, self._events, last, self._protection, timeout_secs=commit.FLUSH_SECS, trying=trying
        )
        return "" if came else self._problem_at_end(last)

    def tell_problem(self, iteration: int) -> None:
        """This node cannot bring that iteration there: all ranks will raise, and are to know why. They read of it at
        different times, when none may wait for another, so that this comes before the round which says so."""
        if self._config.on_error == "raise" and self._told != iteration:
            self._told = iteration
            if cause := self._protection.smp.flush_problem():
                self._notice(iteration).post(cause)

    def problem(self, iteration: int) -> str:
        """What a node has told of it."""
        return self._notice(iteration).read() or _NOBODY

    def _take_missing(self, ending: JobEnd, rank: RankShutdownReport) -> SnapshotId | None:
        """The snapshot of the last iteration, once all ranks have it; None where none is missing or can be had."""
        if ending.lacking < 0:
            return None
        last, reason = SnapshotId(self._state.lineage, ending.lacking), ending.objection or rank.prove()
        if not reason:
            problems = codec.gather(self._group, rank.take(last, ending.keep), str)
            reason = next((f"rank {number}: {text}" for number, text in enumerate(problems) if text), "")
        if not reason:
            rank.agree(last)
            return last
        before = f"iteration {ending.newest.iteration}" if ending.newest is not None else "none before it, either"
        self._events.emit(
            "last_not_taken", iteration=last.iteration, reason=reason,
            newest=ending.newest.iteration if ending.newest is not None else None,
        )  # fmt: skip
        self._events.announce(
            f"of iteration {last.iteration}, the last one, there is no snapshot ({reason}); to storage goes {before}"
        )
        return None

    def _problem_at_end(self, lacking: SnapshotId) -> str:
        """What the SMPs say of the last flush, that of ``lacking``. Collective; a rank that cannot reach the others
        knows its own node's reason."""
        causes = [self._protection.smp.flush_problem(lambda: self._protection.observe_flush(lacking).goes_on)]
        with suppress(RuntimeError, LaunchError):
            causes = codec.gather(self._group, causes[0], str)
        return "; ".join(sorted(set(filter(None, causes)))) or _NOBODY

    def _notice(self, iteration: int) -> Notice:
        return Notice(f"{self._group.name}/not-persisted/{iteration}")


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
