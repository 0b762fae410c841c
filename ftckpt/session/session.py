"""What a rank decides, and from what: a state with no clock, memory or network of its own.

Ranks that train come to the same boundaries and read the same sequence of verdicts, though not the same number of
them at a time. Whatever must be alike on all ranks follows from boundaries and verdicts alone: when snapshots are
due, when replicas are proven, what is protected. What only one rank knows (a failed copy, a missed deadline) it
posts. Time is an argument, in seconds of any clock that does not go back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ftckpt.config import Config
from ftckpt.model.sampled import SampleOutcome
from ftckpt.model.snapshot import SnapshotId
from ftckpt.schedule.cost import IntervalRequest
from ftckpt.session.actions import (
    Action,
    Announcement,
    Disable,
    Divergence,
    IntervalConclusion,
    MarkCommitted,
    OldArenaRemoval,
    SkipSnapshot,
    TakeSnapshot,
    UpdateTargets,
)
from ftckpt.session.cadence import Interval, Proofs, ReplicaTrust
from ftckpt.session.flush_scheduler import NO_FLUSH, FlushScheduler, FlushStatus
from ftckpt.session.protection_scheduler import ProtectionScheduler, ProtectionStatus
from ftckpt.session.vote import Readiness, Vote, VoteResult
from ftckpt.session.vote_schedule import VoteSchedule, VoteStep

ERROR_LIMIT = 3
"""Failed snapshots in a row after which a rank turns snapshots off: one may be bad luck, the third is a fault that
stays."""

_MORE_SNAPSHOTS = 5
"""Snapshots beyond ``ERROR_LIMIT`` after which a new interval begins: whoever still trains then has read of it."""

_MOST_COST = 1e6
"""Iterations that a snapshot may cost, as far as rounds say."""


class RankState:
    """One rank's session, as far as it decides.

    Events come in the order of training: ``begin`` once; at each boundary ``boundary`` and, where a snapshot is due,
    ``round_to_post``, ``posted`` and ``learn`` until no earlier step ``owes_round``, then ``agree``, or ``miss``
    where a verdict does not come, then the proof, if ``proof_due``, and ``take``. Rounds may be posted and read at
    any time before, and ``fail`` and ``turn_off`` come at any time.
    """

    def __init__(self, config: Config, protects: bool = False, nodes: int = 1) -> None:
        self._config = config
        self.lineage = b""
        self.whole: SnapshotId | None = None
        """The newest snapshot that all ranks are known to have sealed."""
        self.iteration = -1
        """Of the last snapshot that was due, or of the one that was restored."""
        self._before = -1  # of the one that was due before it
        self._passed = -1  # of the last boundary
        self.off_reason = ""
        """Why this rank takes, posts and reads nothing in this attempt any more; empty while it does."""
        self.failures = 0
        """In a row: a snapshot that was sealed ends the row."""
        # A rank that reads nothing posts OFF after ERROR_LIMIT snapshots: it is off before a change that it missed.
        self._error_limit = ERROR_LIMIT
        self._wished: tuple[int, int] | None = None  # as posted: stretch and cost
        self._concluded = 0  # the interval that was found to keep the budget; 0: none was in this attempt
        self.interval = Interval(config.least_interval, ERROR_LIMIT + _MORE_SNAPSHOTS)
        self.proofs = Proofs(config.replica_check_interval > 0)
        self._trust = ReplicaTrust(0, -1)
        self._trusted_before = -1  # the last proof
        self._proved = 0  # the number of the snapshot with the last proof
        self._alarm: int | None = None  # the number of the snapshot with which replicas differ, until a proof
        self._iterations: dict[int, int] = {}  # by number, of snapshots whose verdict was not read
        self.targets = ProtectionScheduler.of(config) if protects else ProtectionScheduler(0)
        self.flushes = FlushScheduler.of(config, nodes)
        self.has_stepped = False
        """Whether stepped state of this rank may have changed since the start."""
        self._wrong = False  # what ranks copy must change, and has not yet
        self._votes = VoteSchedule()
        self._reads = False  # verdicts, for the snapshot of this boundary, whose own round comes behind them
        self._newest = -1  # as posted
        self._will: Readiness | None = None  # of all ranks, None: not all that counts for this snapshot was read
        self._last_will = Readiness.GO  # by the last verdict
        self._last_number = 0  # of a verdict
        self._last_round: int | None = None  # with which all ranks turned off
        self._said_off = False  # in a round that was not read yet
        self._gives_up = False
        self._missed = False  # the verdicts of this boundary
        self._whole_here_secs: float | None = None  # when a snapshot was whole in the arenas as they are laid out
        self._old_arenas = True
        self._named: tuple[SnapshotId | None, ...] = ()
        self._keep: frozenset[SnapshotId] = frozenset()

    def begin(self, lineage: bytes, restored: SnapshotId | None, now_secs: float, in_memory: bool = True) -> None:
        """Snapshots have ``lineage`` from now on; training goes on from ``restored``, which is the first to be
        protected where it lies ``in_memory``."""
        self.lineage, self.whole = lineage, restored if in_memory else None
        self.iteration = self._passed = restored.iteration if restored is not None else -1
        self.lay_out(0)
        self.targets.target = self.whole if self.targets.interval else None
        self.targets.chosen_secs = now_secs
        self.flushes.resume(self.iteration)

    def lay_out(self, positions: int) -> None:
        """Samples have so many ``positions`` from now on; 0: there are none. Nothing differs now."""
        self._trust = ReplicaTrust(positions, self.iteration)

    @property
    def trusted(self) -> int:
        """The newest iteration at which replicas are known to be the same; -1: none since the beginning."""
        return self._trust.iteration

    def take_over(self, protected: SnapshotId | None, target: SnapshotId | None) -> None:
        """What the arenas of all ranks hold of what an earlier attempt protected, and of what was restored."""
        self.targets.protected, self.targets.target = protected, target

    def passes(self, iteration: int) -> list[Action]:
        """Training is at the boundary of ``iteration``. Where that is not after the last one snapshots stop, and
        nothing else changes: what a smaller number means only the user knows."""
        last, self._passed = self._passed, iteration
        if iteration > last or self.off:
            return []
        back = f"; --ftckpt-rollback-before {iteration} would give up what came after" if iteration > 1 else ""
        return [self.turn_off(
            f"step({iteration}) after step({last}): give step() a number that grows with each call and restart, such "
            f"as that of all optimizer steps, not of epochs{back}"
        )]  # fmt: skip

    def boundary(self, iteration: int) -> bool:
        """Training is at the boundary of ``iteration``; whether a snapshot is due."""
        due = self.interval.due(iteration)
        self._votes.boundary(self.interval.number, due, self.pending)
        if due:
            self._before, self.iteration = self.iteration, iteration
            self._will, self._missed, self._reads = None, False, True
            self._iterations[self.interval.number] = iteration
        return due

    @property
    def owes_round(self) -> bool:
        """Whether this rank has yet to post what it has.

        Whoever comes to a boundary posts for it, whatever failed there: rounds of all ranks pair up by their order
        alone.
        """
        return self._next_step is not None

    @property
    def _next_step(self) -> VoteStep | None:
        """With a round that this rank can post."""
        if self._votes.settled:  # mostly
            return None
        if self.off or self._last_will == Readiness.OFF or (self._lost and self._said_off):
            return None
        return self._votes.next(self.pending, but=int(self._reads), unasked=self._lost)

    @property
    def unread(self) -> bool:
        """Whether verdicts may come that this rank has not read."""
        return self._votes.unread and not self.off and self._last_will != Readiness.OFF

    @property
    def waits(self) -> bool:
        """Whether this rank must read to know if it ``owes_round``."""
        return self._votes.waits and self.unread

    @property
    def pending(self) -> bool:
        """Whether another round would settle something, by verdicts alone: the same on all ranks."""
        return self.targets.pending or self.flushes.pending or self._last_will == Readiness.SKIP

    @property
    def _lost(self) -> bool:
        """Whether this rank has failed too often to find out what the others know: it turns all off."""
        return self._missed and self.failures >= self._error_limit

    def round_to_post(
        self, newest: SnapshotId | None, will: Readiness, wish: IntervalRequest, guard: ProtectionStatus,
        now_secs: float, *, flush: FlushStatus = NO_FLUSH,
    ) -> Vote:  # fmt: skip
        """This rank's round, when ``owes_round``: what it has sealed, and what it wants of the next snapshot."""
        # What was restored is of another lineage, and no snapshot of this one.
        own = newest.iteration if newest is not None and newest.lineage == self.lineage else -1
        if self._gives_up or self._lost or (self.failures >= self._error_limit and own <= self._newest):
            will = Readiness.OFF  # unless one was sealed since: that ends the row of failures
        tasks = *self.targets.report(guard, now_secs), *self.flushes.report(flush, now_secs)
        self._wished = wish.stretch, int(min(wish.cost, _MOST_COST) * 1e6)
        return self._round(own, will, *self._wished, *tasks, self.flushes.wish(wish))

    def empty_round(self) -> Vote:
        """In the place of ``round_to_post`` where that raises: this rank has nothing and takes nothing. It wishes for
        what it did before, as it may be the one that speaks for all."""
        is_last = self._gives_up or self.failures >= self._error_limit
        wished = self._wished or (self.interval.changes[-1][1], -1)
        return self._round(-1, Readiness.OFF if is_last else Readiness.SKIP, *wished)

    def _round(self, newest: int, will: Readiness, *more: Any) -> Vote:
        step = self._next_step
        assert step is not None, "only where a round is owed"
        return Vote(step.number, newest, will, *more)._replace(due=step.due, step=self._votes.step)

    def posted(self, round_: Vote) -> None:
        """The round is on its way."""
        self._votes.posted()
        self._said_off = self._said_off or round_.will == Readiness.OFF
        if round_.newest > self._newest:
            self._newest, self.failures = round_.newest, 0

    def miss(self) -> None:
        """Verdicts were missing at the deadline: this rank takes nothing, and posts that with the next round."""
        self._reads, self._missed = False, True

    def learn(self, verdicts: Sequence[VoteResult], now_secs: float) -> list[Action]:
        """These verdicts were read, in their order."""
        actions: list[Action] = []
        marks, whole = self.marks, self.whole
        for verdict in verdicts:
            self._votes.read(verdict)
            self._last_will, self._last_number = verdict.will, verdict.number
            # Each one counts: the last may name nothing where an earlier one named what must be kept.
            if verdict.whole >= 0 and (self.whole is None or verdict.whole > self.whole.iteration):
                self.whole = SnapshotId(self.lineage, verdict.whole)
            actions += self.targets.learn(verdict, self.lineage, now_secs)
            # Where protection fails for long storage is all the more worth having.
            protects = self.targets.interval and not self.targets.given_up
            newest = self.targets.protected if protects else self.whole
            actions += self.flushes.learn(verdict, newest, now_secs)
            actions += self._compare(verdict)
            if self.interval.learn(verdict.number, verdict.stretch):
                actions.append(self._interval_change(verdict))
            if verdict.cost >= 0 and self._config.interval == "auto" and verdict.stretch != self._concluded:
                self._concluded = verdict.stretch
                actions.append(IntervalConclusion(verdict.stretch))
        if self.whole is not None and self.whole != whole:
            actions.append(MarkCommitted(self.whole))
            if self._whole_here_secs is None:
                self._whole_here_secs = now_secs
        if self.marks != marks:
            actions.append(self.marks)
        if self._supersedes(now_secs):
            self._old_arenas = False
            actions.append(OldArenaRemoval())
        return actions

    def agree(self) -> list[Action]:
        """All verdicts were read that count for the snapshot of this boundary.

        Only here do all turn off: at a boundary to which they come together, and to its proof.
        """
        self._reads, self._will = False, self._last_will
        if self._will != Readiness.OFF:
            return []
        # Others may have read it a boundary earlier, and come to nothing collective any more.
        self._last_round = self._last_number
        return [self.turn_off("a rank had too many failed snapshots in a row, or can take none")]

    @property
    def proof_due(self) -> bool:
        """Whether all ranks prove at this boundary.

        One that read late that all turn off does not enter a proof which the others, long off, do not come to.
        """
        others_left = self._last_round is not None and self._last_round < self.interval.number - 1
        return not others_left and (self._wrong or self._alarm_due or self.proofs.due(self.interval.number))

    @property
    def _alarm_due(self) -> bool:
        """Whether replicas are proven for an alarm: when whoever still trains has read of it."""
        return self._alarm is not None and self.interval.number >= self._alarm + self.interval.delay

    def _compare(self, verdict: VoteResult) -> list[Action]:
        """What the sample that came with ``verdict`` says. From the alarm on until the proof nothing is taken."""
        iteration = self._iterations.pop(verdict.number, -1)
        if verdict.replicas == SampleOutcome.MATCHED:
            self._trust.match(verdict.number, iteration)
        if verdict.replicas != SampleOutcome.DIFFER or self._alarm is not None:
            return []
        if verdict.number < self._proved:  # read late: that proof has answered it
            return [Divergence(self._trusted_before, iteration)]
        self._alarm = verdict.number
        return [Divergence(self.trusted, iteration)]

    @property
    def late(self) -> bool:
        """Whether this rank may not know what the others know: it must not take its arena for an old one."""
        return self.off or self._will is None

    def mistrust(self) -> list[Action]:
        """A proof has found that replicas differ, or what was derived does not follow. Samples, which come to
        everything in turn, may not have shown it: what was taken since all was the same may mix states."""
        is_known = self._alarm is not None or self._wrong or self.trusted >= self._before
        return [] if is_known else [Divergence(self.trusted, self._before)]

    def proved(self, stepped: bool, changed: bool, new_arenas: bool) -> None:
        """A proof has ended; all arguments as all ranks know them, see ``Proof``.

        Where the arenas could not be laid out anew at once, nothing is taken until they are: it would be whole, and
        wrong. In arenas that are laid out anew nothing is protected yet, and older ones hold the only whole snapshot.
        """
        self.proofs.learn(self.interval.number, stepped)
        self._wrong = changed and not new_arenas
        self._alarm, self._proved, self._trusted_before = None, self.interval.number, self.trusted
        if not changed:
            self._trust.prove(self.iteration)
        if new_arenas:
            self.targets.forget()
            self.flushes.forget()
            self._old_arenas, self._whole_here_secs = True, None

    def not_protected(self) -> list[Action]:
        """Nothing can be protected in the arenas as they are laid out now."""
        self.targets.stop()
        return [self.marks]

    @property
    def marks(self) -> UpdateTargets:
        """What the SMP and readers of the arena are to know."""
        return UpdateTargets(self.targets.protected, self.targets.target, self.flushes.current)

    @property
    def keep(self) -> frozenset[SnapshotId]:
        """Snapshots whose slots must not be written."""
        snapshots = self.whole, self.targets.protected, self.targets.target, self.flushes.current
        if snapshots != self._named:  # asked for several times at each boundary
            self._named, self._keep = snapshots, frozenset(one for one in snapshots if one is not None)
        return self._keep

    def take(self, has_room: bool, obstacle: str = "") -> TakeSnapshot | SkipSnapshot | None:
        """What happens at this boundary; ``has_room``: a slot holds none of ``keep``. ``obstacle``: why this rank
        cannot write to one yet. None: ftckpt is off."""
        if self.off or self._will is None:
            return None
        if self._will != Readiness.GO:
            return SkipSnapshot("a rank is not ready")
        if self._gives_up:  # behind the round of this boundary: nothing that the others take now becomes whole
            return SkipSnapshot("this rank takes no more snapshots")
        if self._wrong:
            return SkipSnapshot("ranks must copy other things than they do, and one was late in laying out anew")
        if self._alarm is not None:
            return SkipSnapshot("replicas differ: the next proof finds out which, and each rank copies its own then")
        if obstacle:
            return SkipSnapshot(obstacle)
        if not has_room:
            return SkipSnapshot("every slot is kept until the target is protected")
        return TakeSnapshot(SnapshotId(self.lineage, self.iteration), self.keep)

    @property
    def objection(self) -> str:
        """Why no snapshot can be taken where all ranks wait for it, at the end of the job; empty where one can."""
        if self.off:
            return "snapshots were turned off"
        is_wrong = self._wrong or self._alarm is not None
        return "replicas differ, and it must copy other things than it does" if is_wrong else ""

    def let_target_go(self) -> UpdateTargets:
        """Nothing comes to be protected any more: the slot of the target is free."""
        self.targets.target = None
        return self.marks

    def give_up(self, error: str) -> list[Action]:
        """This rank takes no more snapshots, and all others learn it with its next round."""
        if self._gives_up or self.off:
            return []
        self._gives_up = True
        return [Announcement("snapshot_error", {"error": error, "in_a_row": self.failures})]

    def fail(self, error: str) -> list[Action]:
        """A snapshot failed."""
        self.failures += 1
        actions: list[Action] = [Announcement("snapshot_error", {"error": error, "in_a_row": self.failures})]
        # What this rank has said binds all, once the others come: it waits for them no longer, and posts no more.
        if self._said_off and self._missed and not self.off:
            actions.append(self.turn_off("too many failed snapshots in a row, and the other ranks do not answer"))
        return actions

    @property
    def off(self) -> bool:
        """Whether this rank takes no snapshots in this attempt any more."""
        return bool(self.off_reason)

    def turn_off(self, reason: str) -> Disable:
        """This rank takes, posts and reads nothing from now on."""
        self.off_reason = reason
        return Disable(reason)

    def _interval_change(self, verdict: VoteResult) -> Announcement:
        config, cost = self._config, verdict.cost / 1e6
        interval, what = verdict.stretch * config.least_interval, "all in all"
        if config.interval != "auto":
            what = "in the fence"
        fields = {"of": "memory", "interval": interval, "cost": cost, "overhead_budget": config.overhead_budget}
        text = f"soon a snapshot every {interval} iteration(s)"
        if cost < 0:
            fields["cost"] = None
            text += ", for a while, to measure what one costs"
        else:
            text += f": {what} it costs {cost:.2%} of one, and the budget is {config.overhead_budget:.2%}"
        return Announcement("interval_changed", fields, text)

    def _supersedes(self, now_secs: float) -> bool:
        """Whether older arenas can go: a snapshot is whole in the new ones, and as safe as those were.

        That is protected, unless nothing is, or that fails or takes too long.
        """
        if not self._old_arenas or self._whole_here_secs is None:
            return False
        targets, waited_secs = self.targets, now_secs - self._whole_here_secs
        is_safe = not targets.interval or targets.protected is not None or targets.degraded
        return is_safe or waited_secs > max(self._config.protect_timeout_secs, targets.wait_secs)
