"""Ranks of a job without processes: real states and agreements, a simulated all-reduce, slots as dictionaries.

Each rank goes through an iteration in steps, in the order in which ``Checkpointer`` calls its state; between two
steps of a rank any other may run. ``Job.check`` holds after every step what must hold at any instant.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np

from ftckpt.capture.capture import writable_slots
from ftckpt.config import Config
from ftckpt.model.sampled import Comparison
from ftckpt.model.snapshot import SnapshotId
from ftckpt.schedule.cost import IntervalRequest
from ftckpt.session import session
from ftckpt.session.actions import (
    CommitMark,
    Disable,
    Divergence,
    OldArenaRemoval,
    SkipSnapshot,
    TakeSnapshot,
    UpdateTargets,
)
from ftckpt.session.protection_scheduler import ProtectionStatus
from ftckpt.session.session import SessionState
from ftckpt.session.vote import Agreement, AgreementError, Readiness, VoteResult

POSITIONS = 2
"""Number of samples."""

POSTED, PROOF = "posted", "proof"
"""The places where a rank waits for others: with a deadline for their posts, without one in a proof."""


@dataclass(frozen=True)
class Fate:
    """The events of one rank in an iteration.

    ``copies``: of the last snapshot are ``sealed`` before the fence, or ``late``, after it, or run ``longer``, past
    the boundary; ``failed``; or ``stuck``: they run on when the snapshot is dropped. ``impatient``: it waits for
    nobody's post. ``begin_fails``: its snapshot fails before a copy begins. ``stretch``: its wish. ``smp``: what its
    node's SMP does, ``covers`` the target, does and ``rests`` behind it, is ``slow``, ``gives up`` or is ``dead``.
    ``steps``: whether the optimizer does. ``breaks``: where its connections do: before a ``post``, before a ``read``,
    in a ``proof``, or in the last step to a new ``layout``.
    """

    copies: str = "sealed"
    impatient: bool = False
    begin_fails: bool = False
    stretch: int = 1
    smp: str = "covers"
    steps: bool = True
    breaks: str = ""


CALM = Fate()


class Rounds:
    """The all-reduce: the n-th posts of all ranks belong together, and are there when the last one is.

    ``given_up``: the notice of a rank whose connections broke.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.posts: list[dict[int, Sequence[int]]] = []
        self.words: dict[int, dict[int, Any]] = {}
        self.given_up = False

    def put(self, rank: int, number: int, words: Sequence[int]) -> None:
        if len(self.posts) == number:
            self.posts.append({})
        self.posts[number][rank] = words

    def complete(self, number: int) -> bool:
        """Whether all ranks have posted; a negative ``number`` is of words that go with ``-1 - number``."""
        return len(self.posts[number] if number >= 0 else self.words[-1 - number]) == self.size


class RankGroup:
    """The part of a group that ``Agreement`` uses."""

    def __init__(self, rounds: Rounds, rank: int) -> None:
        self.rounds = rounds
        self._rank = rank
        self.num_posted = 0
        self.broken = False

    def give_up(self, reason: str) -> None:
        self.broken = self.rounds.given_up = True

    def start_minimum(self, words: Sequence[int]) -> tuple[int, Any]:
        if self.broken:
            raise RuntimeError("connections broke")
        number, self.num_posted = self.num_posted, self.num_posted + 1
        self.rounds.put(self._rank, number, words)
        return number, Outcome(lambda: np.min([*self.rounds.posts[number].values()], axis=0))

    def start_gather(self, words: Any) -> tuple[int, Any]:
        number = self.num_posted - 1
        rows = self.rounds.words.setdefault(number, {})
        rows[self._rank] = words
        return -1 - number, Outcome(lambda: np.stack([rows[rank] for rank in range(self.rounds.size)]))

    def give_back(self, read: Any) -> None: ...

    def is_complete(self, numbers: Sequence[int]) -> bool:
        if self.broken or self.rounds.given_up:
            return True
        return all(self.rounds.complete(number) for number in numbers)

    def finish(self, number: int, timeout_secs: float) -> bool:
        if not self.broken and self.rounds.complete(number):
            return True
        if self.broken or self.rounds.given_up:
            self.broken = True
            raise RuntimeError("a rank gave up")
        return False


@dataclass
class Outcome:
    """The outcome of a collective; it is computed when all ranks have posted."""

    find: Callable[[], Any]

    @property
    def values(self) -> Any:
        return self.find()


@dataclass
class Flight:
    slot: int
    snapshot: SnapshotId
    stuck: bool = False


@dataclass
class Rank:
    """One rank: what survives its death are ``slots``, ``old`` arenas, and marks."""

    index: int
    num_slots: int
    slots: dict[int, SnapshotId | None] = field(default_factory=dict)
    old: set[SnapshotId] = field(default_factory=set)
    marks: UpdateTargets = field(default_factory=lambda: UpdateTargets(None, None))
    covered: set[SnapshotId] = field(default_factory=set)
    flight: Flight | None = None
    waits: str = ""
    sampled: tuple[int, int] = (0, 0)
    """The number of the snapshot with which it has sampled last, and its digest."""
    doubts: list[Divergence] = field(default_factory=list)
    read: int = 0
    """Verdicts that it has read."""
    missed: bool = False
    iteration: int = -1
    """The iteration of the last snapshot that was due, or of the restored one."""
    passed: int = -1
    """The iteration of the last boundary."""
    decision: TakeSnapshot | SkipSnapshot | None = None
    fate: Fate = CALM

    def __post_init__(self) -> None:
        self.slots = dict.fromkeys(range(self.num_slots))

    def start(self, config: Config, protects: bool, rounds: Rounds, error_limit: int) -> None:
        with patch.object(session, "ERROR_LIMIT", error_limit):
            self.state = SessionState(config, protects)
        self.group = RankGroup(rounds, self.index)
        self.agreement = Agreement(self.group)  # type: ignore[arg-type]
        self.has_stepped = False
        self.flight, self.read, self.waits = None, 0, ""
        self.sampled, self.doubts = (0, 0), []

    @property
    def sealed(self) -> set[SnapshotId]:
        return {snapshot for snapshot in self.slots.values() if snapshot is not None} | self.old

    @property
    def newest(self) -> SnapshotId | None:
        return max((snapshot for snapshot in self.slots.values() if snapshot is not None), default=None)

    def iterate(self, job: Job, iteration: int, fate: Fate) -> Generator[None]:
        """The steps of an iteration; at each ``waits`` names what this rank waits for."""
        state = self.state
        self.decision, self.missed, self.fate = None, False, fate
        if (
            fate.smp in ("covers", "rests")
            and self.marks.target in self.slots.values()
            and self.marks.target is not None
        ):
            self.covered.add(self.marks.target)
        if self.flight is not None and self.flight.stuck and fate.copies != "stuck":
            self.flight = None
        if fate.copies == "sealed":
            self._seal()
        yield
        if state.off:
            return
        if fate.steps:
            self.has_stepped = True
        if fate.copies == "failed" and self._drop():
            self._execute(state.fail("copy failed"))
        self._vote(job, fate)
        yield
        last, self.passed = self.passed, iteration
        self._execute(state.check_order(last, iteration))
        if state.off:
            return
        due = state.boundary(iteration)
        job.heard(self.index, iteration, due)
        if due:
            self.iteration = iteration
            yield from self._snapshot(job, fate)
            return
        self._seal()  # a copy that was late
        if state.unread:
            self._read_complete(job)
        self._vote(job, fate)

    def _vote(self, job: Job, fate: Fate) -> None:
        if self.state.waits:
            self._read_complete(job)
        while not self.state.off and self._post(job, fate):
            pass

    def _snapshot(self, job: Job, fate: Fate) -> Generator[None]:
        state = self.state
        if fate.copies == "stuck" and self._drop(stuck=True):
            self._execute(state.fail("copies are stuck"))
        if fate.copies != "longer":
            self._seal()
        yield
        while True:
            while self._post(job, fate, now=True):
                pass
            if not fate.impatient:
                self.waits = POSTED
            yield
            self.waits = ""
            self._read(job)
            yield
            if state.off or self.missed or not state.owes_vote:
                break
        if not (state.off or self.missed):
            self._execute(state.agree())
        if state.proof_due and not self.group.broken:
            yield from self._prove(job)
        if self.missed:
            self._execute(state.fail("no answer"))
        else:
            self._take(job, fate)

    def _read(self, job: Job) -> None:
        state = self.state
        if state.off:
            return
        if self.fate.breaks == "read":
            self.group.give_up("")
        try:
            verdicts = self.agreement.read(0.0)
        except AgreementError:
            self._disconnect()
            return
        if verdicts is None:
            self.missed = True
            job.missed(self)
            state.miss()
        else:
            self._learn(job, verdicts)

    def _read_complete(self, job: Job) -> None:
        try:
            self._learn(job, self.agreement.read_complete())
        except AgreementError:
            self._disconnect()

    def _learn(self, job: Job, verdicts: Sequence[VoteResult]) -> None:
        self.read += len(verdicts)
        self._execute(self.state.learn(verdicts, job.now_secs))

    def _prove(self, job: Job) -> Generator[None]:
        state = self.state
        number = state.interval.number
        job.proofs.setdefault(number, {})[self.index] = (self._late, self.has_stepped)
        self.waits = PROOF
        yield
        self.waits = ""
        came = job.prove(number)
        if not came or self.fate.breaks == "proof" or job.layout_broke:
            self._disconnect()

    def _disconnect(self) -> None:
        self.group.give_up("")
        if not self.state.off:
            self._execute([self.state.turn_off("connections broke")])

    def _take(self, job: Job, fate: Fate) -> None:
        writable = self._writable()
        self.decision = self.state.take(self.iteration, bool(writable))
        sampled = self.state.interval.number, int(job.drifts and self.index == 0)
        if not isinstance(self.decision, TakeSnapshot):
            if self.decision is not None and not self.state.objection:
                self.sampled = sampled
            return
        assert not job.wrong, "a snapshot of what a proof has shown to be wrong"
        assert self._writable(self.decision.keep) == writable
        assert not job.alarmed, "a snapshot behind an alarm that was read"
        if fate.begin_fails or self.flight is not None:
            self._execute(self.state.fail("it cannot begin"))
            return
        self.slots[writable[0]] = None
        self.flight = Flight(writable[0], self.decision.snapshot)
        self.sampled = sampled

    @property
    def _late(self) -> bool:
        return self.state.late or self.flight is not None

    def _writable(self, keep: frozenset[SnapshotId] | None = None) -> list[int]:
        return writable_slots(self.slots, self.state.keep if keep is None else keep)

    def _seal(self) -> None:
        if self.flight is not None and not self.flight.stuck:
            self.slots[self.flight.slot], self.flight = self.flight.snapshot, None

    def _drop(self, stuck: bool = False) -> bool:
        if self.flight is None or self.flight.stuck:
            return False
        self.flight.stuck = True
        if not stuck:
            self.flight = None
        return True

    def _post(self, job: Job, fate: Fate, now: bool = False) -> bool:
        """Whether a round is on its way that was not."""
        state = self.state
        if not state.owes_vote or (not now and self.flight is not None and not self.flight.stuck):
            return False
        target = state.targets.target
        guard = ProtectionStatus(
            alive=fate.smp != "dead",
            configured=True,
            sealed=target in self.slots.values(),
            covered=target in self.covered,
            gave_up=fate.smp == "gives up",
            rests=fate.smp == "rests",
        )
        will = Readiness.SKIP if self.flight is not None else Readiness.GO
        vote = state.vote_to_post(self.newest, will, IntervalRequest(fate.stretch), guard, job.now_secs)
        assert not state.off, "a rank that is off posts"
        if fate.breaks == "post":
            self.group.give_up("")
        number = self.group.num_posted
        try:
            self.agreement.post(vote, *(self._words(job, vote.number) if vote.due else ()))
        except AgreementError:
            self._disconnect()
            return False
        job.rounds_posted.setdefault(number, []).append(vote)
        state.posted(vote)
        return True

    def _words(self, job: Job, number: int) -> tuple[Any, Any]:
        if not job.config.replica_check_interval:
            return None, None
        comparison = Comparison.of([np.arange(len(job.ranks), dtype=np.int32)], len(job.ranks))
        words = comparison.unsampled()
        if self.sampled[0] == number:
            words[:] = 0, self.sampled[1]
        return words, comparison

    def _execute(self, decisions: Sequence[Any]) -> None:
        for decision in decisions:
            match decision:
                case CommitMark(snapshot):
                    assert snapshot in self.sealed
                case UpdateTargets():
                    self.marks = decision
                case OldArenaRemoval():
                    self.old.clear()
                case Divergence():
                    self.doubts.append(decision)
                case Disable():
                    assert self.state.off
                    self._drop()

    def lay_out_anew(self) -> None:
        whole = self.state.committed
        self.old = {whole} if whole is not None else set()
        self.slots, self.covered = dict.fromkeys(range(self.num_slots)), set()
        self.marks = UpdateTargets(None, None)


class Job:
    """All ranks, from start to restart."""

    def __init__(self, size: int, num_slots: int, config: Config, protects: bool, error_limit: int = 3) -> None:
        self.config, self.error_limit = config, error_limit
        self.protects = protects
        self.ranks = [Rank(index, num_slots) for index in range(size)]
        self.iteration = 0
        self.lives = 0
        self.now_secs = 0.0
        self.changed_replicas = False
        self.drifts = False
        self.wrong = False
        self.start()

    @property
    def on(self) -> list[Rank]:
        return [rank for rank in self.ranks if not rank.state.off]

    def start(self) -> None:
        """A new attempt restores the newest snapshot of all ranks; none older than a rank knew to be committed."""
        known = self.knows.state.committed if self.lives else None
        self.wrong = False
        common = set.intersection(*(rank.sealed for rank in self.ranks))
        restored = max(common, default=None)
        assert known is None or (restored is not None and restored.iteration >= known.iteration), "progress is lost"
        self.lives += 1
        self.iteration = restored.iteration if restored is not None else 0
        rounds = Rounds(len(self.ranks))
        self.layout_broke = False
        self.proofs: dict[int, dict[int, tuple[bool, bool]]] = {}
        self.proven: set[int] = set()
        self.unproven: set[int] = set()
        self.rounds = rounds
        self.rounds_posted: dict[int, list[Any]] = {}
        self.boundaries: dict[int, dict[int, bool]] = {}
        for rank in self.ranks:
            rank.start(self.config, self.protects, rounds, self.error_limit)
            newer = {s for s in rank.sealed if s != restored and s.iteration >= self.iteration}
            rank.slots = {slot: None if held in newer else held for slot, held in rank.slots.items()}
            rank.old -= newer
        in_slots = set.intersection(*({s for s in rank.slots.values() if s} for rank in self.ranks))
        marks = {rank.marks.protected for rank in self.ranks}
        protected = marks.pop() if len(marks) == 1 else None
        for rank in self.ranks:
            rank.state.begin(bytes([self.lives]) * 16, restored, self.now_secs)
            rank.iteration = rank.passed = restored.iteration if restored is not None else -1
            rank.state.replicas.lay_out(POSITIONS if self.config.replica_check_interval else 0, rank.iteration)
            if self.protects:
                target = restored if restored in in_slots else None
                rank.state.adopt(protected if protected in in_slots else None, target)
                rank.marks = rank.state.marks

    @property
    def knows(self) -> Rank:
        """A rank that has read as many verdicts as any."""
        return max(self.ranks, key=lambda rank: rank.read)

    def iterate(self, fates: Sequence[Fate], choose: Callable[[int], int], stop_after: int = 1 << 30) -> None:
        """All ranks go through the next iteration, in an order that ``choose(number of ranks)`` decides step by step.

        After ``stop_after`` steps the job dies and restarts.
        """
        self.iteration += 1
        self.now_secs += 1.0
        steps = {
            rank.index: rank.iterate(self, self.iteration, fate) for rank, fate in zip(self.ranks, fates, strict=True)
        }
        while steps:
            if stop_after == 0:
                self.start()
                self.check()
                return
            stop_after -= 1
            index = self._next(sorted(steps), choose)
            try:
                with patch.object(session, "ERROR_LIMIT", self.error_limit):
                    next(steps[index])
            except StopIteration:
                del steps[index]
            self.check()
        self._check_iteration()

    def _next(self, indices: Sequence[int], choose: Callable[[int], int]) -> int:
        ready = [index for index in indices if not self._blocked(self.ranks[index])]
        if not ready:  # the deadlines of those who wait for posts pass
            ready = [index for index in indices if self.ranks[index].waits == POSTED]
        assert ready, "ranks wait in a proof for others that do not come"
        return ready[choose(len(ready))]

    def _blocked(self, rank: Rank) -> bool:
        if rank.group.broken or rank.group.rounds.given_up:
            return False
        if rank.waits == POSTED:
            return any(other.group.num_posted < rank.group.num_posted for other in self.ranks)
        return rank.waits == PROOF and len(self.proofs[rank.state.interval.number]) < len(self.ranks)

    def heard(self, index: int, iteration: int, due: bool) -> None:
        self.boundaries.setdefault(iteration, {})[index] = due

    def missed(self, rank: Rank) -> None:
        first = rank.agreement._posted[0].work
        absent = [other for other in self.ranks if other.index not in rank.group.rounds.posts[first]]
        assert not any(other.state.off for other in absent), "a rank waits for one that turned off"

    def prove(self, number: int) -> bool:
        """The effect of a proof on all ranks at once: it is collective, as is a new layout. False: ranks are
        missing."""
        if number in self.proven:
            return True
        if len(self.proofs[number]) < len(self.ranks):
            self.unproven.add(number)
            return False
        self.proven.add(number)
        ranks = self.proofs[number].values()
        broken = any(rank.fate.breaks == "proof" for rank in self.ranks)
        new_arenas = self.changed_replicas and not any(late for late, _ in ranks) and not broken
        self.wrong = self.changed_replicas and not new_arenas
        if new_arenas:
            assert len({rank.state.committed for rank in self.ranks}) == 1, "ranks keep different snapshots"
        for rank in self.ranks:
            if rank.fate.breaks == "proof":
                continue  # it comes here itself, and is lost
            if not new_arenas or rank.fate.breaks != "layout":  # that one breaks, with its arena made
                rank.state.proved(any(stepped for _, stepped in ranks), self.changed_replicas, new_arenas)
            if new_arenas:
                rank.state.replicas.lay_out(POSITIONS, rank.iteration)
                rank.lay_out_anew()
                self.layout_broke |= rank.fate.breaks == "layout"
        return True

    @property
    def alarmed(self) -> bool:
        """Whether a rank has read that replicas differ, and no proof has come since."""
        # One that is about to break in a proof learns nothing of it.
        return any(rank.state.replicas.alarm is not None and not rank.fate.breaks for rank in self.on)

    def check(self) -> None:
        """Checks the invariants of any instant."""
        knows = self.knows.state
        # In a new layout, before all ranks know it, only the whole one lies in what old arenas are left.
        kept = (knows.committed, *(() if self.layout_broke else (knows.targets.protected, knows.targets.target)))
        for rank in self.ranks:
            lost = [s for s in kept if s and s not in rank.sealed]
            assert not lost, f"rank {rank.index} has lost {[s.iteration for s in lost]}"
            if self.layout_broke:
                continue
            own = rank.state.keep - rank.sealed
            assert not own or rank.read < self.knows.read, f"rank {rank.index} has overwritten its own {own}"

    def _check_iteration(self) -> None:
        """Checks the invariants of an iteration's end."""
        dues = self.boundaries.get(self.iteration, {})
        assert len({dues[rank.index] for rank in self.on if rank.index in dues}) <= 1, (
            "a snapshot is due on some ranks"
        )
        for number, entered in self.proofs.items():
            assert len(entered) == len(self.ranks) or number in self.unproven, f"some ranks alone had proof {number}"
        heard = [rank for rank in self.on if not rank.missed and dues.get(rank.index)]
        assert len({type(rank.decision) for rank in heard}) <= 1, "some ranks alone take the snapshot"
        assert len({rank.decision.keep for rank in heard if isinstance(rank.decision, TakeSnapshot)}) <= 1
        for rank in heard:
            posted = self.rounds_posted.get(rank.read - 1, [])
            assert not isinstance(rank.decision, TakeSnapshot) or all(vote.will == Readiness.GO for vote in posted)
        for rounds in self.rounds_posted.values():
            steps = {(vote.number, vote.due) for vote in rounds if vote.will != Readiness.OFF}
            assert len(steps) <= 1, "rounds of different steps pair up"
        shortest = min((rank.state.interval.changes for rank in self.on), key=len, default=[])
        assert all(rank.state.interval.changes[: len(shortest)] == shortest for rank in self.on)
