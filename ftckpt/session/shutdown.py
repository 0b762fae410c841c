"""The end of a job: the flush of its final snapshot, that of the last boundary, taken if missing, else the newest on
all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ftckpt.errors import CaptureError, LaunchError, in_words
from ftckpt.events import Events
from ftckpt.group import Group
from ftckpt.memory.heartbeat import FlushState
from ftckpt.model import codec
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import human_secs, listed
from ftckpt.persist import commit
from ftckpt.session import deadlines
from ftckpt.session.actions import TakeSnapshot, UpdateTargets
from ftckpt.session.protection import Protection
from ftckpt.session.rank_context import RankContext
from ftckpt.session.reminders import save_command
from ftckpt.session.snapshot_driver import NO_REASON, SnapshotDriver

_TURN_SECS = 1.0
"""Pause between gathers of the nodes' progress: no rank keeps waiting for a node that is known to have failed."""
_POLL_SECS = 0.02
_TELL_SECS = 10.0
# Each question takes a turn of the loop that also flushes.
_ASK_SECS = 5.0
_MOST_PROBLEMS = 3
_UNREADY_SECS = 60.0
"""Age from which an SMP that is not ready counts as failed: an SMP that died is replaced within seconds."""


class RankShutdown(NamedTuple):
    """One rank's state at the end of the job.

    ``boundary``: the iteration of its last boundary in this attempt, which needs a snapshot; -1: none. ``sealed``:
    the snapshots in its arena. ``protected``, ``going`` (being flushed) and ``persisted``: by the vote results that
    this rank has read. ``objection``: why it cannot take a snapshot of its last boundary; empty if it can.
    """

    boundary: int = -1
    sealed: tuple[SnapshotId, ...] = ()
    protected: SnapshotId | None = None
    going: SnapshotId | None = None
    persisted: SnapshotId | None = None
    objection: str = ""


class JobEnd(NamedTuple):
    """The combined state of all ranks at the end of the job.

    ``newest``: the newest snapshot that all ranks have sealed. ``lacking``: the last iteration, if its snapshot is
    missing, else -1. ``objection``: why it cannot be taken; empty if it can. ``keep``: snapshots that must not be
    overwritten for it. ``persisted``: snapshots on storage.
    """

    newest: SnapshotId | None
    lacking: int
    objection: str
    keep: frozenset[SnapshotId]
    persisted: frozenset[SnapshotId]

    @classmethod
    def of(cls, ranks: Sequence[RankShutdown]) -> JobEnd:
        """Combine the states of all ranks, with the same outcome on each.

        Some ranks may have read more vote results than others, so their newest committed snapshots may differ, and
        one could overwrite what another keeps. Only the snapshots in the arenas count.
        """
        everywhere = frozenset.intersection(*(frozenset(rank.sealed) for rank in ranks))
        persisted = frozenset(rank.persisted for rank in ranks if rank.persisted is not None)
        newest = _newest(everywhere)
        going = _newest({rank.going for rank in ranks if rank.going is not None} & everywhere - persisted)
        # One mark suffices: it follows from the votes of all nodes. Older ones are not needed then.
        protected = _newest(rank.protected for rank in ranks if rank.protected is not None)
        boundaries = [rank.boundary for rank in ranks]
        have = newest.iteration if newest is not None else -1
        lacking = max(boundaries) if max(boundaries) > have else -1
        objections = [f"rank {number}: {rank.objection}" for number, rank in enumerate(ranks) if rank.objection]
        if min(boundaries) != max(boundaries):
            objections.insert(0, f"ranks ended at different iterations: {min(boundaries)} and {max(boundaries)}")
        keep = frozenset(one for one in (newest, protected, going) if one is not None)
        return cls(newest, lacking, "".join(objections[:1]), keep, persisted)


class LastFlush:
    """One rank's part of the final snapshot and of its flush, after its last fence. Only the training thread calls
    its methods.

    ``boundary`` is the iteration of its last boundary in this attempt; -1: none.
    """

    def __init__(self, rank: RankContext, snapshots: SnapshotDriver, boundary: int) -> None:
        self._rank, self._snapshots, self._boundary = rank, snapshots, boundary

    def run(self) -> str:
        """Flush the last snapshot; takes it first if it is missing. Returns why that failed, or "". Collective.

        Raises:
            RuntimeError: a rank is unreachable.
        """
        rank = self._rank
        ending = JobEnd.of(codec.gather(rank.group, self._report(), RankShutdown))
        last = self._take_missing(ending) or ending.newest
        if last is None or last in ending.persisted:
            return ""
        targets = rank.state.targets
        rank.protection.mark(UpdateTargets(targets.protected, targets.target, flush=last))
        trying = (
            f"the flush is retried for {human_secs(commit.FLUSH_SECS)}; to stop waiting, end the job, which leaves "
            f"its snapshots in memory, and save them with {save_command(rank.config)}"
        )
        came = flush_last(
            rank.group, rank.events, last, rank.protection, timeout_secs=commit.FLUSH_SECS, trying=trying
        )
        return "" if came else self._problem(last)

    def _report(self) -> RankShutdown:
        """This rank's state, once its copies have finished."""
        capture, kept, state = self._snapshots.capture, self._snapshots.kept, self._rank.state
        objection = state.objection or self._settle()
        if not objection:
            objection = "its state was not kept" if kept is None else kept.objection(self._boundary)
        sealed = tuple(capture.arena.snapshots()) if capture is not None else ()
        flushes = state.flushes
        return RankShutdown(
            self._boundary, sealed, state.targets.protected, flushes.current, flushes.persisted, objection
        )

    def _settle(self) -> str:
        """Wait for the copies of the last snapshot, and of a dropped one; returns why they have not ended, or ""."""
        capture = self._snapshots.capture
        if capture is None:
            return "it has no arena"
        with suppress(CaptureError):  # dropped: it is taken again
            capture.settle(deadlines.FENCE_SECS)
        if capture.flight is None or capture.flight.wait(deadlines.FENCE_SECS):
            return ""
        return "copies of an earlier snapshot have not finished"

    def _take_missing(self, ending: JobEnd) -> SnapshotId | None:
        """Take the snapshot of the last iteration if it is missing; None if it is not, or cannot be taken."""
        if ending.lacking < 0:
            return None
        rank = self._rank
        last, reason = SnapshotId(rank.state.lineage, ending.lacking), ending.objection
        if not reason and not self._snapshots.shard.proves():
            reason = "replica check failed: the copy plan is stale"
        if not reason:
            problems = codec.gather(rank.group, self.take(last, ending.keep), str)
            reason = next((f"rank {number}: {text}" for number, text in enumerate(problems) if text), "")
        if not reason:  # committed: all ranks have it
            rank.state.committed = last
            if self._snapshots.capture is not None:
                self._snapshots.capture.arena.control.mark_whole(last)
            return last
        newest = ending.newest.iteration if ending.newest is not None else None
        before = f"flushing iteration {newest}" if newest is not None else "nor an older one"
        rank.events.emit("last_not_taken", iteration=last.iteration, reason=reason, newest=newest)
        rank.events.announce(f"no snapshot of the final iteration {last.iteration} ({reason}); {before}")
        return None

    def take(self, snapshot: SnapshotId, keep: frozenset[SnapshotId]) -> str:
        """Take this rank's part of ``snapshot``, of the last boundary, into a slot that has none of ``keep``; returns
        why that failed, or ""."""
        capture, state, begin = self._snapshots.capture, self._rank.state, time.perf_counter()
        assert capture is not None, "the objection of a rank that has none"
        if capture.arena.find(snapshot) is not None:
            return ""  # taken at its boundary: only other ranks lack it
        try:
            self._snapshots.shard.complete(keep | state.keep)  # a short job may end before all slots are allocated
            # The unprotected target may be overwritten; the committed and the protected snapshot may not.
            if capture.has_room(keep | state.keep):
                keep |= state.keep
            else:
                self._rank.protection.mark(state.let_target_go())  # first: the SMP must stop reading it
            slot = self._snapshots.take(TakeSnapshot(snapshot, keep))
            capture.fence(deadlines.FENCE_SECS)
            capture.settle(deadlines.FENCE_SECS)
        except Exception as error:  # noqa: BLE001 - an older snapshot is flushed instead, and the log says why
            return in_words(error)
        secs = time.perf_counter() - begin
        self._rank.events.emit("snapshot", iteration=snapshot.iteration, slot=slot, blocked_secs=secs)
        return ""

    def _problem(self, last: SnapshotId) -> str:
        """The reasons of all SMPs for the failed flush of ``last``. Collective; a rank that cannot reach the others
        returns its own node's reason."""
        protection = self._rank.protection
        causes = [protection.smp.flush_problem(lambda: protection.observe_flush(last).is_running)]
        with suppress(RuntimeError, LaunchError):
            causes = codec.gather(self._rank.group, causes[0], str)
        return "; ".join(sorted(set(filter(None, causes)))) or NO_REASON


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
    state, told, watch = FlushState.WORKING, begun, NodeWatch(last, protection, begun + timeout_secs)
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


class NodeWatch:
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


def _newest(snapshots: Iterable[SnapshotId]) -> SnapshotId | None:
    return max(snapshots, default=None)
