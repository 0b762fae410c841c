"""The final snapshot of a job: that of the last boundary, taken if missing, else the newest on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ftckpt.capture.boundary import LastBoundary
from ftckpt.config import Config
from ftckpt.errors import CaptureError, in_words
from ftckpt.events import Events
from ftckpt.model.snapshot import SnapshotId
from ftckpt.session import deadlines
from ftckpt.session.actions import TakeSnapshot
from ftckpt.session.protection import Protection
from ftckpt.session.session import SessionState
from ftckpt.session.shard import Shard


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


class RankShutdownReport:
    """One rank's part of the final snapshot, after its last fence. Only the training thread calls its methods.

    Args:
        kept: the kept state of the last boundary.
        boundary: the iteration of that boundary.
        begin: starts a snapshot; returns the slot.
    """

    def __init__(
        self, config: Config, events: Events, state: SessionState, protection: Protection, *,
        shard: Shard, kept: LastBoundary | None, boundary: int, begin: Callable[[TakeSnapshot], int],
    ) -> None:  # fmt: skip
        self._timeout_secs = deadlines.FENCE_SECS
        self._events = events
        self._state = state
        self._protection = protection
        self._shard = shard
        self._kept = kept
        self._boundary = boundary
        self._begin = begin

    def find(self) -> RankShutdown:
        """This rank's state, once its copies have finished."""
        capture, state = self._shard.capture, self._state
        objection = self._state.objection or self._settle()
        if not objection:
            objection = "its state was not kept" if self._kept is None else self._kept.objection(self._boundary)
        sealed = tuple(capture.arena.snapshots()) if capture is not None else ()
        flushes = state.flushes
        return RankShutdown(
            self._boundary, sealed, state.targets.protected, flushes.current, flushes.persisted, objection
        )

    def prove(self) -> str:
        """Verify that all ranks' copy plans are current; returns why not, or "". Collective."""
        return "" if self._shard.proves() else "replica check failed: the copy plan is stale"

    def take(self, snapshot: SnapshotId, keep: frozenset[SnapshotId]) -> str:
        """Take this rank's part of ``snapshot``, of the last boundary, into a slot that has none of ``keep``; returns
        why that failed, or ""."""
        capture, begun = self._shard.capture, time.perf_counter()
        assert capture is not None, "the objection of a rank that has none"
        if capture.arena.find(snapshot) is not None:
            return ""  # taken at its boundary: only other ranks lack it
        try:
            self._shard.complete(keep | self._state.keep)  # a short job may end before all slots are allocated
            # The unprotected target may be overwritten; the committed and the protected snapshot may not.
            if capture.has_room(keep | self._state.keep):
                keep |= self._state.keep
            else:
                self._protection.mark(self._state.let_target_go())  # first: the SMP must stop reading it
            slot = self._begin(TakeSnapshot(snapshot, keep))
            capture.fence(self._timeout_secs)
            capture.settle(self._timeout_secs)
        except Exception as error:  # noqa: BLE001 - an older snapshot is flushed instead, and the log says why
            return in_words(error)
        secs = time.perf_counter() - begun
        self._events.emit("snapshot", iteration=snapshot.iteration, slot=slot, blocked_secs=secs)
        return ""

    def agree(self, snapshot: SnapshotId) -> None:
        """Mark ``snapshot`` as committed: all ranks have it."""
        self._state.whole = snapshot
        if self._shard.capture is not None:
            self._shard.capture.arena.control.mark_whole(snapshot)

    def _settle(self) -> str:
        """Wait for the copies of the last snapshot, and of a dropped one; returns why they have not ended, or ""."""
        capture = self._shard.capture
        if capture is None:
            return "it has no arena"
        with suppress(CaptureError):  # dropped: it is taken again
            capture.settle(self._timeout_secs)
        if capture.flight is None or capture.flight.wait(self._timeout_secs):
            return ""
        return "copies of an earlier snapshot have not finished"


def _newest(snapshots: Iterable[SnapshotId]) -> SnapshotId | None:
    return max(snapshots, default=None)
