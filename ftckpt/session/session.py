"""One rank's decisions: a pure state machine without a clock, shared memory or network.

Training ranks pass the same boundaries and read the same sequence of vote results, though not at the same time. All
that must be the same on all ranks follows from boundaries and results alone: when snapshots are due, when replicas
are proven, what is protected. A fact that only one rank knows (a failed copy, a missed deadline) takes effect through
its vote. Time is an argument, in seconds of any monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
from ftckpt.session.interval import Interval
from ftckpt.session.protection_scheduler import ProtectionScheduler, ProtectionStatus
from ftckpt.session.replica_check import ReplicaCheck
from ftckpt.session.vote import Readiness, Vote, VoteResult
from ftckpt.session.vote_schedule import VoteSchedule, VoteStep

ERROR_LIMIT = 3
"""Consecutive failed snapshots after which a rank turns snapshots off: one may be transient, three are permanent."""

_MORE_SNAPSHOTS = 5
"""Snapshots beyond ``ERROR_LIMIT`` before a new interval takes effect: every rank still on has read of it by then."""

_MOST_COST = 1e6
"""Maximum cost of a snapshot that a vote carries, in iterations."""


class SessionState:
    """One rank's decisions, driven by calls in the order of training.

    ``begin`` once; ``boundary`` at each boundary. Where a snapshot is due: ``vote_to_post``, ``posted`` and
    ``learn`` until no earlier step ``owes_vote``; then ``agree``, or ``miss`` if a result does not arrive; then the
    proof, if ``proof_due``; then ``take``. Votes may also be posted and read at any time before. ``fail`` and
    ``turn_off`` may be called at any time.
    """

    def __init__(self, config: Config, protects: bool = False, nodes: int = 1) -> None:
        self._config = config
        self.lineage = b""
        self.whole: SnapshotId | None = None
        """The newest snapshot that all ranks are known to have sealed."""
        self.iteration = -1
        """The iteration of the last snapshot that was due, or of the restored one."""
        self._passed = -1  # the iteration of the last boundary
        self.off_reason = ""
        """Why this rank takes no snapshots and no part in votes for the rest of this attempt; empty while on."""
        self.failures = 0
        """Consecutive failures; a sealed snapshot resets them."""
        # A rank that reads nothing posts OFF after ERROR_LIMIT snapshots: it is off before a change that it missed.
        self._error_limit = ERROR_LIMIT
        self._wished: tuple[int, int] | None = None  # last posted stretch and cost
        self._concluded = 0  # the measured interval that meets the budget; 0: none in this attempt
        self.interval = Interval(config.least_interval, ERROR_LIMIT + _MORE_SNAPSHOTS)
        self.replicas = ReplicaCheck(config.replica_check_interval > 0, self.interval.delay)
        self.targets = ProtectionScheduler.of(config) if protects else ProtectionScheduler(0)
        self.flushes = FlushScheduler.of(config, nodes)
        self.has_stepped = False
        """Whether optimizer-updated state of this rank may have changed since the start."""
        self._votes = VoteSchedule()
        self._reads = False  # between ``boundary`` and ``agree``: this boundary's own vote is not due yet
        self._newest = -1  # last posted
        self._will: Readiness | None = None  # the result for this snapshot; None: earlier votes are unread
        self._last_will = Readiness.GO  # of the last result
        self._last_number = 0  # of the last result
        self._last_round: int | None = None  # the number of the result that turned all ranks off
        self._said_off = False  # this rank has posted OFF
        self._gives_up = False
        self._missed = False  # results of this boundary were missing at the deadline
        self._whole_here_secs: float | None = None  # when a snapshot was first committed in the current arenas
        self._old_arenas = True

    def begin(self, lineage: bytes, restored: SnapshotId | None, now_secs: float, in_memory: bool = True) -> None:
        """Start: snapshots have ``lineage``, training resumes from ``restored``, which is the first protection
        target if it is ``in_memory``."""
        self.lineage, self.whole = lineage, restored if in_memory else None
        self.iteration = self._passed = restored.iteration if restored is not None else -1
        self.replicas.lay_out(0, self.iteration)
        self.targets.target = self.whole if self.targets.interval else None
        self.targets.chosen_secs = now_secs
        self.flushes.resume(self.iteration)

    def take_over(self, protected: SnapshotId | None, target: SnapshotId | None) -> None:
        """Adopt the snapshots in the arenas of all ranks: the one an earlier attempt protected, the restored one."""
        self.targets.protected, self.targets.target = protected, target

    def passes(self, iteration: int) -> list[Action]:
        """Check that ``iteration`` follows the last boundary. If not, snapshots stop and training continues: only
        the user knows the meaning of a smaller number."""
        last, self._passed = self._passed, iteration
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
            self.iteration = iteration
            self._will, self._missed, self._reads = None, False, True
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
        if self.off or self._last_will == Readiness.OFF or (self._lost and self._said_off):
            return None
        return self._votes.next(self.pending, but=int(self._reads), unasked=self._lost)

    @property
    def unread(self) -> bool:
        """Whether vote results may arrive that this rank has not read."""
        return self._votes.unread and not self.off and self._last_will != Readiness.OFF

    @property
    def waits(self) -> bool:
        """Whether this rank must read a result to know if it ``owes_vote``."""
        return self._votes.waits and self.unread

    @property
    def pending(self) -> bool:
        """Whether another vote would settle something; depends on results alone, so the same on all ranks."""
        return self.targets.pending or self.flushes.pending or self._last_will == Readiness.SKIP

    @property
    def _lost(self) -> bool:
        """Whether this rank has missed results too often: it turns all ranks off."""
        return self._missed and self.failures >= self._error_limit

    def vote_to_post(
        self, newest: SnapshotId | None, will: Readiness, wish: IntervalRequest, guard: ProtectionStatus,
        now_secs: float, *, flush: FlushStatus = NO_FLUSH,
    ) -> Vote:  # fmt: skip
        """This rank's vote, when ``owes_vote``: its newest sealed snapshot, its readiness and its requests."""
        # The restored snapshot has another lineage and does not count.
        own = newest.iteration if newest is not None and newest.lineage == self.lineage else -1
        if self._gives_up or self._lost or (self.failures >= self._error_limit and own <= self._newest):
            will = Readiness.OFF  # unless a snapshot was sealed since, which resets the failures
        tasks = *self.targets.report(guard, now_secs), *self.flushes.report(flush, now_secs)
        self._wished = wish.stretch, int(min(wish.cost, _MOST_COST) * 1e6)
        return self._make_vote(own, will, *self._wished, *tasks, self.flushes.wish(wish))

    def empty_vote(self) -> Vote:
        """The vote if ``vote_to_post`` raises: nothing sealed, SKIP. It repeats the last requests, as this rank's
        may be the only ones that count."""
        is_last = self._gives_up or self.failures >= self._error_limit
        wished = self._wished or (self.interval.changes[-1][1], -1)
        return self._make_vote(-1, Readiness.OFF if is_last else Readiness.SKIP, *wished)

    def _make_vote(self, newest: int, will: Readiness, *more: Any) -> Vote:
        step = self._next_step
        assert step is not None, "call this only if a vote is owed"
        return replace(Vote(step.number, newest, will, *more), due=step.due, step=self._votes.step)

    def posted(self, vote: Vote) -> None:
        """The vote is in flight."""
        self._votes.posted()
        self._said_off = self._said_off or vote.will == Readiness.OFF
        if vote.newest > self._newest:
            self._newest, self.failures = vote.newest, 0

    def miss(self) -> None:
        """Results were missing at the deadline: this rank takes no snapshot, and its next vote says so."""
        self._reads, self._missed = False, True

    def learn(self, verdicts: Sequence[VoteResult], now_secs: float) -> list[Action]:
        """Apply vote results, in their order."""
        actions: list[Action] = []
        marks, whole = self.marks, self.whole
        for verdict in verdicts:
            self._votes.read(verdict)
            self._last_will, self._last_number = verdict.will, verdict.number
            # Every result counts: an earlier one may name a snapshot to keep where the last names none.
            if verdict.newest >= 0 and (self.whole is None or verdict.newest > self.whole.iteration):
                self.whole = SnapshotId(self.lineage, verdict.newest)
            actions += self.targets.learn(verdict, self.lineage, now_secs)
            # While protection fails, committed but unprotected snapshots are flushed.
            protects = self.targets.interval and not self.targets.given_up
            newest = self.targets.protected if protects else self.whole
            actions += self.flushes.learn(verdict, newest, now_secs)
            actions += self.replicas.compare(verdict)
            if self.interval.learn(verdict.number, verdict.stretch):
                actions.append(self._interval_change(verdict))
            if verdict.cost >= 0 and self._config.interval == "auto" and verdict.stretch != self._concluded:
                self._concluded = verdict.stretch
                actions.append(IntervalConclusion(verdict.stretch))
        if self.whole is not None and self.whole != whole:
            actions.append(CommitMark(self.whole))
            if self._whole_here_secs is None:
                self._whole_here_secs = now_secs
        if self.marks != marks:
            actions.append(self.marks)
        if self._supersedes(now_secs):
            self._old_arenas = False
            actions.append(OldArenaRemoval())
        return actions

    def agree(self) -> list[Action]:
        """All results that decide about this boundary's snapshot have been read.

        Ranks turn off only here: all at the same boundary, before its proof, which is collective.
        """
        self._reads, self._will = False, self._last_will
        if self._will != Readiness.OFF:
            return []
        # Other ranks may have read it a boundary earlier and enter no collective since.
        self._last_round = self._last_number
        return [self.turn_off("a rank had too many consecutive failed snapshots, or can take none")]

    @property
    def proof_due(self) -> bool:
        """Whether all ranks enter a proof at this boundary.

        A rank that reads late that all turn off must not enter a proof: the others, already off, do not.
        """
        others_left = self._last_round is not None and self._last_round < self.interval.number - 1
        return not others_left and self.replicas.proof_due(self.interval.number)

    @property
    def late(self) -> bool:
        """Whether this rank may lack results that others have read: it must not treat its arena as an old one."""
        return self.off or self._will is None

    def proved(self, stepped: bool, changed: bool, new_arenas: bool) -> None:
        """Apply the outcome of a proof, see ``Proof``; the same on all ranks.

        In rebuilt arenas nothing is protected yet, and the old ones hold the only committed snapshot.
        """
        self.replicas.proved(self.interval.number, stepped, changed, new_arenas)
        if new_arenas:
            self.targets.forget()
            self.flushes.forget()
            self._old_arenas, self._whole_here_secs = True, None

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
        snapshots = self.whole, self.targets.protected, self.targets.target, self.flushes.current
        return frozenset(one for one in snapshots if one is not None)

    def take(self, has_room: bool, obstacle: str = "") -> TakeSnapshot | SkipSnapshot | None:
        """Decide about this boundary's snapshot. ``has_room``: a slot has none of ``keep``. ``obstacle``: why no
        slot can be written yet. Returns None if ftckpt is off."""
        if self.off or self._will is None:
            return None
        if self._will != Readiness.GO:
            return SkipSnapshot("a rank is not ready")
        if self._gives_up:  # after this boundary's vote: the snapshot of the others cannot be committed
            return SkipSnapshot("this rank takes no more snapshots")
        if reason := self.replicas.obstacle or obstacle:
            return SkipSnapshot(reason)
        if not has_room:
            return SkipSnapshot("no free slot: all are pinned by the pending protection or flush")
        return TakeSnapshot(SnapshotId(self.lineage, self.iteration), self.keep)

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
        if self._said_off and self._missed and not self.off:
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

    def _interval_change(self, verdict: VoteResult) -> Announcement:
        config, cost = self._config, verdict.cost / 1e6
        interval, what = verdict.stretch * config.least_interval, "in total"
        if config.interval != "auto":
            what = "in the fence"
        fields = {"of": "memory", "interval": interval, "cost": cost, "overhead_budget": config.overhead_budget}
        text = f"snapshot interval changes to {interval} iteration(s)"
        if cost < 0:
            fields["cost"] = None
            text += " for a while, to measure the cost of a snapshot"
        else:
            text += f": one costs {cost:.2%} of an iteration {what}, and the budget is {config.overhead_budget:.2%}"
        return Announcement("interval_changed", fields, text)

    def _supersedes(self, now_secs: float) -> bool:
        """Whether older arenas can be removed: a snapshot in the new ones is committed, and protected.

        The latter is not required without protection, or if that fails or takes too long.
        """
        if not self._old_arenas or self._whole_here_secs is None:
            return False
        targets, waited_secs = self.targets, now_secs - self._whole_here_secs
        is_safe = not targets.interval or targets.protected is not None or targets.degraded
        return is_safe or waited_secs > max(self._config.protect_timeout_secs, targets.wait_secs)
