"""The snapshot that a job ends with: the newest that all ranks have, or one of the last boundary, taken then."""

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
from ftckpt.session.session import RankState
from ftckpt.session.shard import Shard


class RankShutdown(NamedTuple):
    """What one rank has and knows where the job ends, and nothing is trained or taken any more.

    ``boundary``: the iteration of its last one in this attempt, of which a snapshot is wanted; -1: of none.
    ``sealed``: what its arena holds. ``protected``, ``going`` (to storage) and ``persisted`` as this rank has read of
    them.
    ``objection``: why it cannot take a snapshot of its last boundary; empty where it can.
    """

    boundary: int = -1
    sealed: tuple[SnapshotId, ...] = ()
    protected: SnapshotId | None = None
    going: SnapshotId | None = None
    persisted: SnapshotId | None = None
    objection: str = ""


class JobEnd(NamedTuple):
    """What all ranks together have where the job ends.

    ``newest``: sealed by all of them. ``lacking``: the last iteration, where a snapshot of it is missing; -1 where
    none is. ``objection``: why that cannot be taken; empty where it can. ``keep``: what must not be written over for
    it. ``persisted``: what is on storage.
    """

    newest: SnapshotId | None
    lacking: int
    objection: str
    keep: frozenset[SnapshotId]
    persisted: frozenset[SnapshotId]

    @classmethod
    def of(cls, ranks: Sequence[RankShutdown]) -> JobEnd:
        """From what each rank has, the same on all of them.

        Verdicts may have been read by some ranks and not by others, so what each of them calls whole says too little:
        one could write over what another keeps. What lies in the arenas says all.
        """
        everywhere = frozenset.intersection(*(frozenset(rank.sealed) for rank in ranks))
        persisted = frozenset(rank.persisted for rank in ranks if rank.persisted is not None)
        newest = _newest(everywhere)
        going = _newest({rank.going for rank in ranks if rank.going is not None} & everywhere - persisted)
        # Marked after a verdict of all nodes: one mark is proof enough, and behind it no older one is needed.
        protected = _newest(rank.protected for rank in ranks if rank.protected is not None)
        boundaries = [rank.boundary for rank in ranks]
        have = newest.iteration if newest is not None else -1
        lacking = max(boundaries) if max(boundaries) > have else -1
        objections = [f"rank {number}: {rank.objection}" for number, rank in enumerate(ranks) if rank.objection]
        if min(boundaries) != max(boundaries):
            objections.insert(0, f"ranks have come to different iterations: {min(boundaries)} and {max(boundaries)}")
        keep = frozenset(one for one in (newest, protected, going) if one is not None)
        return cls(newest, lacking, "".join(objections[:1]), keep, persisted)


class RankShutdownReport:
    """One rank's part of the last snapshot, behind its last fence; all methods are called by the training thread.

    Args:
        kept: of the last boundary.
        boundary: its iteration.
        begin: begins to take a snapshot; returns the slot.
    """

    def __init__(
        self, config: Config, events: Events, state: RankState, protection: Protection, *,
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
        """What this rank has, when its copies have ended."""
        capture, state = self._shard.capture, self._state
        objection = self._state.objection or self._settle()
        if not objection:
            objection = "nothing is kept of it" if self._kept is None else self._kept.objection(self._boundary)
        sealed = tuple(capture.arena.snapshots()) if capture is not None else ()
        flushes = state.flushes
        return RankShutdown(
            self._boundary, sealed, state.targets.protected, flushes.current, flushes.persisted, objection
        )

    def prove(self) -> str:
        """Whether all ranks copy what they must; says why not. Collective."""
        return "" if self._shard.proves() else "ranks must copy other things than they do"

    def take(self, snapshot: SnapshotId, keep: frozenset[SnapshotId]) -> str:
        """Have this rank's part of ``snapshot``, of the last boundary, in a slot that holds nothing of ``keep``;
        returns why it could not be had, or ""."""
        capture, begun = self._shard.capture, time.perf_counter()
        assert capture is not None, "the objection of a rank that has none"
        if capture.arena.find(snapshot) is not None:
            return ""  # others have failed to take it at its boundary
        try:
            self._shard.complete(keep | self._state.keep)  # a short job may end before all slots have their memory
            # The target can go, which is not protected yet: what is whole stays, and what is protected.
            if capture.has_room(keep | self._state.keep):
                keep |= self._state.keep
            else:
                self._protection.mark(self._state.let_target_go())  # first: the SMP makes no more of it
            slot = self._begin(TakeSnapshot(snapshot, keep))
            capture.fence(self._timeout_secs)
            capture.settle(self._timeout_secs)
        except Exception as error:  # noqa: BLE001 - the one before it goes to storage, and all are told why
            return in_words(error)
        secs = time.perf_counter() - begun
        self._events.emit("snapshot", iteration=snapshot.iteration, slot=slot, blocked_secs=secs)
        return ""

    def agree(self, snapshot: SnapshotId) -> None:
        """All ranks have it."""
        self._state.whole = snapshot
        if self._shard.capture is not None:
            self._shard.capture.arena.control.mark_whole(snapshot)

    def _settle(self) -> str:
        """Wait for the copies of the last snapshot, and for those of one that was dropped."""
        capture = self._shard.capture
        if capture is None:
            return "it has no arena"
        with suppress(CaptureError):  # dropped: it is taken once more
            capture.settle(self._timeout_secs)
        if capture.flight is None or capture.flight.wait(self._timeout_secs):
            return ""
        return "copies of an earlier snapshot have not ended"


def _newest(snapshots: Iterable[SnapshotId]) -> SnapshotId | None:
    return max(snapshots, default=None)
