"""One rank's part in storage: prepares the destination at start, and flushes the last snapshot at the end."""

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
from ftckpt.session.session import SessionState


def save_command(config: Config) -> str:
    """The command that saves a job's memory, for messages."""
    return f"ftckpt save {config.job} DIR{_arena(config)}, on every node at once"


def clean_command(config: Config) -> str:
    """The command that removes a job's memory, for messages."""
    return f"'ftckpt clean {config.job}{_arena(config)}' on every node"


def _arena(config: Config) -> str:
    return "" if config.arena == Config.arena else f" --arena {config.arena}"


_NOBODY = "timed out, and no SMP reported a reason"


class RankStorage:
    """One rank's part in storage; SMPs write the files. ``bring_last`` is collective."""

    def __init__(
        self, config: Config, group: Group, events: Events, protection: Protection, state: SessionState
    ) -> None:
        self._config = config
        self._group = group
        self._events = events
        self._protection = protection
        self._state = state
        self._told = -1  # the last iteration whose problem this rank has posted
        self._place = Place.of(config.persist, config.persist_format)
        self.snapshots = self._place.snapshots
        """The path of snapshots; "" without storage."""

    @property
    def wants_last(self) -> bool:
        """Whether the job's last snapshot is flushed at its end."""
        return bool(self._config.persist) and self._config.persist_at_end == "on"

    def prepare(self) -> None:
        """Prepare the destination. Raises StorageError if it is permanently unusable; ignores transient errors."""
        try:
            prepare(self._place)
        except StorageError as error:
            if error.lasting:
                raise StorageError(f"--ftckpt-persist: {error}", lasting=True) from None

    def bring_last(self, rank: RankShutdownReport) -> str:
        """Flush the last snapshot; takes it first if it is missing. Returns why that failed, or "".

        Raises:
            RuntimeError: a rank is unreachable.
        """
        ending = JobEnd.of(codec.gather(self._group, rank.find(), RankShutdown))
        last = self._take_missing(ending, rank) or ending.newest
        if last is None or last in ending.persisted:
            return ""
        self._protection.mark(replace(self._state.marks, flush=last))
        trying = (
            f"the flush is retried for {human_secs(commit.FLUSH_SECS)}; to stop waiting, end the job, which leaves "
            f"its snapshots in memory, and save them with {save_command(self._config)}"
        )
        came = flush_last(
            self._group, self._events, last, self._protection, timeout_secs=commit.FLUSH_SECS, trying=trying
        )
        return "" if came else self._problem_at_end(last)

    def tell_problem(self, iteration: int) -> None:
        """Post why this node cannot flush ``iteration``, for the error that all ranks raise. Call it before the vote
        that says so: ranks read its result at different times and wait for nobody."""
        if self._config.on_error == "raise" and self._told != iteration:
            self._told = iteration
            if cause := self._protection.smp.flush_problem():
                self._notice(iteration).post(cause)

    def problem(self, iteration: int) -> str:
        """The reason that a node has posted for the failed flush of ``iteration``."""
        return self._notice(iteration).read() or _NOBODY

    def _take_missing(self, ending: JobEnd, rank: RankShutdownReport) -> SnapshotId | None:
        """Take the snapshot of the last iteration if it is missing; None if it is not, or cannot be taken."""
        if ending.lacking < 0:
            return None
        last, reason = SnapshotId(self._state.lineage, ending.lacking), ending.objection or rank.prove()
        if not reason:
            problems = codec.gather(self._group, rank.take(last, ending.keep), str)
            reason = next((f"rank {number}: {text}" for number, text in enumerate(problems) if text), "")
        if not reason:
            rank.agree(last)
            return last
        before = f"flushing iteration {ending.newest.iteration}" if ending.newest is not None else "nor an older one"
        self._events.emit(
            "last_not_taken", iteration=last.iteration, reason=reason,
            newest=ending.newest.iteration if ending.newest is not None else None,
        )  # fmt: skip
        self._events.announce(f"no snapshot of the final iteration {last.iteration} ({reason}); {before}")
        return None

    def _problem_at_end(self, lacking: SnapshotId) -> str:
        """The reasons of all SMPs for the failed last flush, that of ``lacking``. Collective; a rank that cannot
        reach the others returns its own node's reason."""
        causes = [self._protection.smp.flush_problem(lambda: self._protection.observe_flush(lacking).goes_on)]
        with suppress(RuntimeError, LaunchError):
            causes = codec.gather(self._group, causes[0], str)
        return "; ".join(sorted(set(filter(None, causes)))) or _NOBODY

    def _notice(self, iteration: int) -> Notice:
        return Notice(f"{self._group.name}/not-persisted/{iteration}")


_TURN_SECS = 1.0
"""Pause between gathers of the nodes' progress: no rank keeps waiting for a node that is known to have failed."""
_POLL_SECS = 0.02
_TELL_SECS = 10.0
_ASK_SECS = 5.0
_MOST_PROBLEMS = 3
_UNREADY_SECS = 60.0
"""Age from which an SMP that is not ready counts as failed: an SMP that died is replaced within seconds."""


class _Turn(NamedTuple):
    """A node's progress and its current problem."""

    state: int
    problem: str


def flush_last(
    group: Group, events: Events, last: SnapshotId, protection: Protection, *, timeout_secs: float, trying: str
) -> bool:
    """Wait until all nodes have flushed ``last``, which must be marked; returns whether it is persisted.
    Collective. ``trying``: the advice to append to logged problems.

    Raises:
        RuntimeError: a rank is unreachable.
    """
    begun = time.monotonic()
    events.announce(f"flushing iteration {last.iteration} to storage before the job ends")
    state, told, watch = FlushState.WORKING, begun, _NodeWatch(last, protection, begun + timeout_secs)
    while state == FlushState.WORKING:
        turns = codec.gather(group, _Turn(int(watch.turn()), watch.problem), _Turn)
        state = _of_all([turn.state for turn in turns])
        if state == FlushState.WORKING and time.monotonic() - told > _TELL_SECS:
            told = time.monotonic()
            problems = sorted({turn.problem for turn in turns} - {""})
            events.announce(
                f"iteration {last.iteration} has been flushing for {told - begun:.0f} s"
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
    """Watches the flush of the last snapshot on this rank's node, until a deadline."""

    def __init__(self, last: SnapshotId, protection: Protection, deadline: float) -> None:
        self._last, self._protection, self._deadline = last, protection, deadline
        self._ready_secs = self._asked = time.monotonic()  # when its SMP was last ready
        self.problem = ""
        """The SMP's last problem, if this rank leads the node."""

    def turn(self) -> FlushState:
        """Poll until the flush has ended, or for ``_TURN_SECS``; returns its state."""
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
