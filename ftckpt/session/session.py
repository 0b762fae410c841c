"""One rank's decisions: a pure state machine without a clock, shared memory or network.

Training ranks pass the same boundaries and read the same sequence of vote results, though not at the same time. All
that must be the same on all ranks follows from boundaries and results alone: when snapshots are due, when replicas
are proven, what is protected. A fact that only one rank knows (a failed copy, a missed deadline) takes effect through
its vote. Time is an argument, in seconds of any monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from ftckpt.config import Config
from ftckpt.model.snapshot import SnapshotId
from ftckpt.schedule.cost import IntervalRequest
from ftckpt.session.actions import (
    Action,
    Announcement,
    CommitMark,
    Disable,
    IntervalConclusion,
    OldArenaRemoval,
    SkipSnapshot,
    TakeSnapshot,
    UpdateTargets,
)
from ftckpt.session.flush_scheduler import NO_FLUSH, FlushScheduler, FlushStatus
from ftckpt.session.protection_scheduler import ProtectionScheduler, ProtectionStatus
from ftckpt.session.replica_check import ReplicaCheck
from ftckpt.session.vote import Readiness, Vote, VoteResult, VoteSchedule, VoteStep

ERROR_LIMIT = 3
"""Consecutive failed snapshots after which a rank turns snapshots off: one may be transient, three are permanent."""

_MORE_SNAPSHOTS = 5
"""Snapshots beyond ``ERROR_LIMIT`` before a new interval takes effect: every rank still on has read of it by then."""

_MOST_COST = 1e6
"""Maximum cost of a snapshot that a vote carries, in iterations."""


class Interval:
    """The iterations at which snapshots are due: the configured interval times a factor (stretch) that all ranks read
    from the same vote results.

    A change takes effect ``delay`` snapshots after its result. A rank that reads nothing for that long has turned all
    ranks off, so every rank that is still on knows of a change before it takes effect. The delay counts snapshots,
    not iterations, whose numbers may jump.
    """

    def __init__(self, config: Config, delay: int) -> None:
        self._iterations, self._budget = config.least_interval, config.overhead_budget
        self._is_auto = config.interval == "auto"
        self.delay = delay
        self.number = 0
        """Snapshots that were due so far."""
        self.changes = [(0, 1)]
        """(number of the first snapshot, stretch) of each change."""
        self._concluded = 0  # the last measured stretch that keeps the budget; 0: none in this attempt

    def learn(self, result: VoteResult) -> Iterator[Announcement | IntervalConclusion]:
        """Apply the ranks' maximum request."""
        begin, known = self.changes[-1]
        # Votes from before the last change took effect: their requests were measured without it.
        if result.stretch != known and result.number >= begin:
            self.changes.append((result.number + self.delay, result.stretch))
            yield self._change(result)
        if result.cost >= 0 and self._is_auto and result.stretch != self._concluded:
            self._concluded = result.stretch
            yield IntervalConclusion(result.stretch)

    def resume(self, stretch: int) -> None:
        """Start with a ``stretch`` that all ranks know before the first boundary."""
        self.changes = [(0, stretch)]

    def due(self, iteration: int) -> bool:
        """Whether a snapshot is due at this boundary; call it exactly once per boundary."""
        is_due = iteration % self.spacing == 0
        self.number += is_due
        return is_due

    @property
    def spacing(self) -> int:
        """The current number of iterations from one snapshot to the next."""
        place = -1
        while self.changes[place][0] > self.number:
            place -= 1
        return self._iterations * self.changes[place][1]

    def _change(self, result: VoteResult) -> Announcement:
        cost, interval = result.cost / 1e6, result.stretch * self._iterations
        fields = {"of": "memory", "interval": interval, "cost": cost, "overhead_budget": self._budget}
        text = f"snapshot interval changes to {interval} iteration(s)"
        if cost < 0:
            fields["cost"] = None
            text += " for a while, to measure the cost of a snapshot"
        else:
            what = "in total" if self._is_auto else "in the fence"
            text += f": one costs {cost:.2%} of an iteration {what}, and the budget is {self._budget:.2%}"
        return Announcement("interval_changed", fields, text)


class Phase(Enum):
    """Progress of the snapshot that was due last: its ranks' votes are being read, were read, or are missing."""

    READING = auto()
    AGREED = auto()
    MISSED = auto()


class SessionState:
    """One rank's decisions, driven by calls in the order of training.

    ``begin`` once; ``boundary`` at each boundary. Where a snapshot is due: ``vote_to_post``, ``posted`` and
    ``learn`` until no earlier step ``owes_vote``; then ``agree``, or ``miss`` if a result does not arrive; then the
    proof, if ``proof_due``; then ``take``. Votes may also be posted and read at any time before. ``fail`` and
    ``turn_off`` may be called at any time.
    """

    def __init__(self, config: Config, protects: bool = False, nodes: int = 1) -> None:
        self.lineage = b""
        self.committed: SnapshotId | None = None
        """The newest snapshot that all ranks are known to have sealed."""
        self.off_reason = ""
        """Why this rank takes no snapshots and no part in votes for the rest of this attempt; empty while on."""
        self.failures = 0
        """Consecutive failures; a sealed snapshot resets them."""
        # A rank that reads nothing posts OFF after ERROR_LIMIT snapshots: it is off before a change that it missed.
        self.interval = Interval(config, ERROR_LIMIT + _MORE_SNAPSHOTS)
        self.replicas = ReplicaCheck(config.replica_check_interval > 0, self.interval.delay)
        self.targets = ProtectionScheduler.of(config) if protects else ProtectionScheduler(0)
        self.flushes = FlushScheduler.of(config, nodes)
        self._votes = VoteSchedule()
        # This rank's last vote, but with the newest iteration and the lowest readiness of all its votes.
        self._posted = Vote(0, -1, cost=-1)
        self._phase = Phase.AGREED  # nothing was missed: no result is due before the first snapshot
        self._result = VoteResult(0, -1)  # the last one
        self._gives_up = False
        self._has_old_arenas = True
        self._committed_here_secs: float | None = None  # when a snapshot was first committed in the current arenas

    def begin(self, lineage: bytes, restored: SnapshotId | None, now_secs: float, in_memory: bool = True) -> None:
        """Start: snapshots have ``lineage``, training resumes from ``restored``, which is the first protection
        target if it is ``in_memory``."""
        iteration = restored.iteration if restored is not None else -1
        self.lineage, self.committed = lineage, restored if in_memory else None
        self._posted = replace(self._posted, stretch=self.interval.changes[-1][1])
        self.replicas.lay_out(0, iteration)
        self.targets.target = self.committed if self.targets.interval else None
        self.targets.chosen_secs = now_secs
        self.flushes.resume(iteration)

    def adopt(self, protected: SnapshotId | None, target: SnapshotId | None) -> None:
        """Adopt the snapshots in the arenas of all ranks: the one an earlier attempt protected, the restored one."""
        self.targets.protected, self.targets.target = protected, target

    def check_order(self, last: int, iteration: int) -> list[Action]:
        """Check that ``iteration`` follows the ``last`` boundary. If not, snapshots stop and training continues: only
        the user knows the meaning of a smaller number."""
        if iteration > last or self.off:
            return []
        back = f"; to roll back, restart with --ftckpt-rollback-before {iteration}" if iteration > 1 else ""
        return [self.turn_off(
            f"step({iteration}) after step({last}): pass step() a number that grows with each call and restart, such "
            f"as the count of optimizer steps, not of epochs{back}"
        )]  # fmt: skip

    def boundary(self, iteration: int) -> bool:
        """Note the boundary of ``iteration``; returns whether a snapshot is due."""
        due = self.interval.due(iteration)
        self._votes.boundary(self.interval.number, due, self.pending)
        if due:
            self._phase = Phase.READING
            self.replicas.due(self.interval.number, iteration)
        return due

    @property
    def owes_vote(self) -> bool:
        """Whether this rank has a vote to post now.

        A rank posts for every boundary that it passes, whatever failed there: votes pair up by order alone.
        """
        return self._next_step is not None

    @property
    def _next_step(self) -> VoteStep | None:
        """The step whose vote this rank can post now."""
        if self._votes.settled:  # the common case
            return None
        if self.off or self._result.will == Readiness.OFF or (self._lost and self._has_posted_off):
            return None
        # While results of earlier votes are awaited, this boundary's own vote is not due yet.
        return self._votes.next(self.pending, but=int(self._phase == Phase.READING), unasked=self._lost)

    @property
    def unread(self) -> bool:
        """Whether vote results may arrive that this rank has not read."""
        return self._votes.unread and not self.off and self._result.will != Readiness.OFF

    @property
    def waits(self) -> bool:
        """Whether this rank must read a result to know if it ``owes_vote``."""
        return self._votes.waits and self.unread

    @property
    def pending(self) -> bool:
        """Whether another vote would settle something; depends on results alone, so the same on all ranks."""
        return self.targets.pending or self.flushes.pending or self._result.will == Readiness.SKIP

    @property
    def _lost(self) -> bool:
        """Whether this rank has missed results too often: it turns all ranks off."""
        return self._phase == Phase.MISSED and self.failures >= ERROR_LIMIT

    @property
    def _has_posted_off(self) -> bool:
        return self._posted.will == Readiness.OFF

    def vote_to_post(
        self, newest: SnapshotId | None, will: Readiness, request: IntervalRequest, protection: ProtectionStatus,
        now_secs: float, *, flush: FlushStatus = NO_FLUSH,
    ) -> Vote:  # fmt: skip
        """This rank's vote, when ``owes_vote``: its newest sealed snapshot, its readiness and its requests."""
        # The restored snapshot has another lineage and does not count.
        own = newest.iteration if newest is not None and newest.lineage == self.lineage else -1
        if self._gives_up or self._lost or (self.failures >= ERROR_LIMIT and own <= self._posted.newest):
            will = Readiness.OFF  # unless a snapshot was sealed since, which resets the failures
        tasks = *self.targets.report(protection, now_secs), *self.flushes.report(flush, now_secs)
        cost = int(min(request.cost, _MOST_COST) * 1e6)
        return self._make_vote(own, will, request.stretch, cost, *tasks, self.flushes.request(request))

    def empty_vote(self) -> Vote:
        """The vote if ``vote_to_post`` raises: nothing sealed, SKIP. It repeats the last requests, as this rank's
        may be the only ones that count."""
        will = Readiness.OFF if self._gives_up or self.failures >= ERROR_LIMIT else Readiness.SKIP
        return self._make_vote(-1, will, self._posted.stretch, self._posted.cost)

    def _make_vote(self, newest: int, will: Readiness, *more: Any) -> Vote:
        step = self._next_step
        assert step is not None, "call this only if a vote is owed"
        return replace(Vote(step.number, newest, will, *more), due=step.due, step=self._votes.step)

    def posted(self, vote: Vote) -> None:
        """The vote is in flight."""
        self._votes.posted()
        before = self._posted
        if vote.newest > before.newest:
            self.failures = 0
        self._posted = replace(vote, newest=max(vote.newest, before.newest), will=min(vote.will, before.will))

    def miss(self) -> None:
        """Results were missing at the deadline: this rank takes no snapshot, and its next vote says so."""
        self._phase = Phase.MISSED

    def learn(self, results: Sequence[VoteResult], now_secs: float) -> list[Action]:
        """Apply vote results, in their order."""
        actions: list[Action] = []
        marks, committed = self.marks, self.committed
        for result in results:
            self._votes.read(result)
            self._result = result
            # Every result counts: an earlier one may name a snapshot to keep where the last names none.
            if result.newest >= 0 and (self.committed is None or result.newest > self.committed.iteration):
                self.committed = SnapshotId(self.lineage, result.newest)
            actions += self.targets.learn(result, self.lineage, now_secs)
            # While protection fails, committed but unprotected snapshots are flushed.
            protects = self.targets.interval and not self.targets.given_up
            newest = self.targets.protected if protects else self.committed
            actions += self.flushes.learn(result, newest, now_secs)
            actions += self.replicas.compare(result)
            actions += self.interval.learn(result)
        if self.committed is not None and self.committed != committed:
            actions.append(CommitMark(self.committed))
            if self._committed_here_secs is None:
                self._committed_here_secs = now_secs
        if self.marks != marks:
            actions.append(self.marks)
        if self._supersedes(now_secs):
            self._has_old_arenas = False
            actions.append(OldArenaRemoval())
        return actions

    def agree(self) -> list[Action]:
        """All results that decide about this boundary's snapshot have been read.

        Ranks turn off only here: all at the same boundary, before its proof, which is collective.
        """
        self._phase = Phase.AGREED
        if self._result.will != Readiness.OFF:
            return []
        return [self.turn_off("a rank had too many consecutive failed snapshots, or can take none")]

    @property
    def proof_due(self) -> bool:
        """Whether all ranks enter a proof at this boundary.

        A rank that reads late that all turn off must not enter a proof: the others, already off, do not.
        """
        number, last = self.interval.number, self._result
        # Other ranks may have read it a boundary earlier and enter no collective since.
        others_left = last.will == Readiness.OFF and last.number < number - 1
        return not others_left and self.replicas.proof_due(number)

    @property
    def late(self) -> bool:
        """Whether this rank may lack results that others have read: it must not treat its arena as an old one."""
        return self.off or self._phase != Phase.AGREED

    def proved(self, stepped: bool, changed: bool, new_arenas: bool) -> None:
        """Apply the outcome of a proof, see ``Proof``; the same on all ranks.

        In rebuilt arenas nothing is protected yet, and the old ones hold the only committed snapshot.
        """
        self.replicas.proved(self.interval.number, stepped, changed, new_arenas)
        if new_arenas:
            self.targets.forget()
            self.flushes.forget()
            self._has_old_arenas, self._committed_here_secs = True, None

    def not_protected(self) -> list[Action]:
        """Stop protection: it is impossible with the current arenas."""
        self.targets.stop()
        return [self.marks]

    @property
    def marks(self) -> UpdateTargets:
        """The targets for the SMP and for readers of the arena."""
        return UpdateTargets(self.targets.protected, self.targets.target, self.flushes.current)

    @property
    def keep(self) -> frozenset[SnapshotId]:
        """Snapshots whose slots must not be written."""
        snapshots = self.committed, self.targets.protected, self.targets.target, self.flushes.current
        return frozenset(one for one in snapshots if one is not None)

    def take(self, iteration: int, has_room: bool, obstacle: str = "") -> TakeSnapshot | SkipSnapshot | None:
        """Decide about the snapshot of ``iteration``. ``has_room``: a slot has none of ``keep``. ``obstacle``: why no
        slot can be written yet. Returns None if ftckpt is off."""
        if self.late:
            return None
        if self._result.will != Readiness.GO:
            return SkipSnapshot("a rank is not ready")
        if self._gives_up:  # after this boundary's vote: the snapshot of the others cannot be committed
            return SkipSnapshot("this rank takes no more snapshots")
        if reason := self.replicas.obstacle or obstacle:
            return SkipSnapshot(reason)
        if not has_room:
            return SkipSnapshot("no free slot: all are pinned by the pending protection or flush")
        return TakeSnapshot(SnapshotId(self.lineage, iteration), self.keep)

    @property
    def objection(self) -> str:
        """Why the final snapshot of the job cannot be taken; empty if it can."""
        if self.off:
            return "snapshots were turned off"
        return "replicas differ, and the copy plan is stale" if self.replicas.obstacle else ""

    def let_target_go(self) -> UpdateTargets:
        """Drop the protection target, which frees its slot."""
        self.targets.target = None
        return self.marks

    def give_up(self, error: str) -> list[Action]:
        """Stop taking snapshots on this rank; its next vote turns off all others."""
        if self._gives_up or self.off:
            return []
        self._gives_up = True
        return [Announcement("snapshot_error", {"error": error, "in_a_row": self.failures})]

    def fail(self, error: str) -> list[Action]:
        """Count a failed snapshot."""
        self.failures += 1
        actions: list[Action] = [Announcement("snapshot_error", {"error": error, "in_a_row": self.failures})]
        # The OFF of this rank turns off the others once they read it: there is no need to wait for them.
        if self._has_posted_off and self._phase == Phase.MISSED and not self.off:
            actions.append(self.turn_off("too many consecutive failed snapshots, and the other ranks do not answer"))
        return actions

    @property
    def off(self) -> bool:
        """Whether this rank takes no snapshots for the rest of this attempt."""
        return bool(self.off_reason)

    def turn_off(self, reason: str) -> Disable:
        """Turn this rank off: no snapshots and no votes from now on."""
        self.off_reason = reason
        return Disable(reason)

    def _supersedes(self, now_secs: float) -> bool:
        """Whether older arenas can be removed: a snapshot in the new ones is committed, and protected.

        The latter is not required without protection, or if that fails or takes too long.
        """
        if not self._has_old_arenas or self._committed_here_secs is None:
            return False
        targets, waited_secs = self.targets, now_secs - self._committed_here_secs
        is_safe = not targets.interval or targets.protected is not None or targets.degraded
        return is_safe or waited_secs > max(targets.timeout_secs, targets.wait_secs)
