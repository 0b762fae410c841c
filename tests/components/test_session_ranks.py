"""The decisions of all ranks of a job together, whatever happens to some of them, in any order of their steps."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ftckpt.config import Config
from ftckpt.model.snapshot import SnapshotId
from ftckpt.schedule.cost import IntervalRequest
from ftckpt.session.actions import Divergence, SkipSnapshot, TakeSnapshot
from ftckpt.session.protection_scheduler import ProtectionStatus
from ftckpt.session.session import SessionState
from ftckpt.session.vote import Readiness, VoteResult, VoteSchedule, VoteStep
from tests.components.simulated_ranks import CALM, Fate, Job

Order = Callable[[int], int]


def job(size: int = 2, slots: int = 2, error_limit: int = 3, **settings: int | str) -> Job:
    config = Config(protect_timeout_secs=5.0, **{"protect_interval": 1, "replica_check_interval": 0, **settings})  # type: ignore[arg-type]
    return Job(size, slots, config, slots > 2, error_limit)


def in_order(num_ready: int) -> int:
    return 0


def train(ranks: Job, iterations: int) -> None:
    for _ in range(iterations):
        ranks.iterate([CALM] * len(ranks.ranks), in_order)


def progresses(ranks: Job) -> None:
    """Where nothing fails, each snapshot that is due is committed, and protected where anything is."""
    if len(ranks.on) < len(ranks.ranks) or any(rank.state.failures for rank in ranks.ranks):
        ranks.start()
    # Until wishes for rarer snapshots are over, and spacings that show what one costs.
    train(ranks, 80 * ranks.config.least_interval)
    for rank in ranks.ranks:
        assert not rank.state.off
        assert (
            rank.state.committed is not None
            and rank.state.committed.iteration > ranks.iteration - 3 * ranks.config.least_interval
        )
        assert rank.state.failures == 0
        if ranks.protects:
            protected = rank.state.targets.protected
            assert protected is not None and protected.iteration > ranks.iteration - 7 * ranks.config.least_interval


TROUBLES = [
    *(Fate(copies=copies) for copies in ("late", "longer", "failed", "stuck")),
    *(Fate(impatient=True, copies=copies) for copies in ("sealed", "late", "longer", "failed")),
    *(Fate(smp=smp) for smp in ("rests", "slow", "gives up", "dead")),
    *(Fate(stretch=stretch, steps=False) for stretch in (1, 2, 3)),
    Fate(begin_fails=True),
    Fate(begin_fails=True, impatient=True),
    *(Fate(breaks=where) for where in ("post", "read", "proof", "layout")),
    Fate(breaks="post", impatient=True),
]
"""One thing, or two, that go wrong."""

FATES = st.sampled_from([CALM, *TROUBLES])
ORDERS = st.integers(0, 1 << 30).map(lambda seed: random.Random(seed).randrange)
"""In which order ranks take their steps."""


class Ranks(RuleBasedStateMachine):
    @initialize(
        size=st.integers(2, 4), slots=st.integers(2, 4), proofs=st.sampled_from((0, 3)),
        protect=st.sampled_from((1, 2, 3, "auto")),
        limit=st.integers(1, 4),
    )  # fmt: skip
    def begin(self, *, size: int, slots: int, proofs: int, protect: int | str, limit: int) -> None:
        self.job = job(size, slots, replica_check_interval=proofs, protect_interval=protect, error_limit=limit)

    @rule(fates=st.lists(FATES, min_size=4, max_size=4), order=ORDERS)
    def iterate(self, fates: list[Fate], order: Order) -> None:
        self.job.iterate(fates[: len(self.job.ranks)], order)

    @rule(troubled=st.integers(0, 3), fate=FATES, iterations=st.integers(1, 6), order=ORDERS)
    def one_rank_in_trouble(self, troubled: int, fate: Fate, iterations: int, order: Order) -> None:
        fates = [fate if rank == troubled else CALM for rank in range(len(self.job.ranks))]
        for _ in range(iterations):
            self.job.iterate(fates, order)

    @rule(iterations=st.integers(1, 4))
    def numbers_jump(self, iterations: int) -> None:
        self.job.iteration += iterations

    @rule(fates=st.lists(FATES, min_size=4, max_size=4), steps=st.integers(0, 40), order=ORDERS)
    def die(self, fates: list[Fate], steps: int, order: Order) -> None:
        self.job.iterate(fates[: len(self.job.ranks)], order, stop_after=steps)

    @rule(changed=st.booleans(), drifts=st.booleans())
    def replicas_differ(self, changed: bool, drifts: bool) -> None:
        self.job.changed_replicas, self.job.drifts = changed, drifts

    @precondition(lambda self: self.job.iteration > 2)
    @rule(order=ORDERS)
    def count_backwards(self, order: Order) -> None:
        """Snapshots stop on all ranks, and the next start has all that was committed."""
        self.job.iterate([CALM] * len(self.job.ranks), order)
        self.job.iteration -= 2
        self.job.iterate([CALM] * len(self.job.ranks), order)
        assert not self.job.on
        self.job.start()

    @rule()
    def nothing_fails(self) -> None:
        self.job.changed_replicas = self.job.drifts = False
        progresses(self.job)


TestRanks = Ranks.TestCase
TestRanks.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("seed", range(24))
def test_long_lives_of_many_jobs(seed: int) -> None:
    """The same machine on fixed paths: longer ones than are worth shrinking."""
    dice = random.Random(seed)
    ranks = job(
        dice.randint(2, 4),
        dice.randint(2, 4),
        replica_check_interval=dice.choice((0, 3)),
        protect_interval=dice.choice((1, 2, 3, "auto")),
        error_limit=dice.randint(1, 6),
        interval=dice.choice((1, 3, "auto")),
    )
    fates = [CALM] * len(ranks.ranks)
    for _ in range(120):
        stop_after = dice.randint(0, 40) if dice.random() < 0.05 else 1 << 30
        ranks.changed_replicas, ranks.drifts = dice.random() < 0.1, dice.random() < 0.05
        if dice.random() < 0.7:  # otherwise trouble lasts
            fates = [dice.choice(TROUBLES) if dice.random() < 0.3 else CALM for _ in ranks.ranks]
        ranks.iterate(fates, dice.randrange, stop_after)
        if dice.random() < 0.05 or not ranks.on:
            ranks.start()
    ranks.changed_replicas = ranks.drifts = False
    progresses(ranks)


def test_nothing_is_taken_of_what_a_proof_has_shown_to_be_wrong() -> None:
    """A rank that is late prevents the new layout on all; the next boundary has another proof."""
    ranks = job(2, replica_check_interval=1000)
    for _ in range(7):
        ranks.iterate([CALM, CALM], in_order)
    ranks.changed_replicas = True
    ranks.iterate([CALM, Fate(impatient=True)], lambda num_ready: num_ready - 1)
    assert ranks.wrong and not isinstance(ranks.ranks[0].decision, TakeSnapshot)
    for _ in range(4):
        ranks.iterate([CALM, CALM], in_order)
        if not ranks.wrong:
            break
    ranks.changed_replicas = False
    assert not ranks.wrong and ranks.iteration < 13
    progresses(ranks)


def test_a_rank_that_fails_too_often_turns_all_off() -> None:
    ranks = job(3, replica_check_interval=3)
    for _ in range(8):
        ranks.iterate([CALM, Fate(begin_fails=True), CALM], in_order)
    assert not ranks.on


def test_a_rank_that_reads_late_that_all_turn_off_enters_no_proof() -> None:
    """Ranks that are on time have entered the last proof. As no step is taken each snapshot has one."""
    ranks, still = job(2, replica_check_interval=1, error_limit=1), Fate(steps=False)
    for fate in (still, Fate(impatient=True, steps=False), still, still):
        ranks.iterate([fate, Fate(begin_fails=True, steps=False)], in_order)
    assert not ranks.on and sorted(ranks.proofs) == [1, 2]


@pytest.mark.parametrize("where", ["post", "read", "proof", "layout"])
def test_ranks_whose_connections_break_are_off_together_and_a_restart_has_what_one_alone_knew(where: str) -> None:
    ranks = job(3, replica_check_interval=1)
    train(ranks, 7)
    ranks.changed_replicas = where == "layout"
    ranks.iterate([CALM, Fate(breaks=where), CALM], in_order)
    known = ranks.knows.state.committed
    train(ranks, 2)
    assert not ranks.on and known is not None
    ranks.changed_replicas = False
    ranks.start()
    assert ranks.iteration >= known.iteration
    progresses(ranks)


@pytest.mark.parametrize("interval", [1, 4])
def test_a_rank_that_nobody_answers_posts_no_more_than_its_failures_allow(interval: int) -> None:
    """Its posts stay in memory until the others post."""
    state = SessionState(Config(interval=interval, replica_check_interval=0))
    state.begin(b"1" * 16, None, 0.0)
    num_posted = 0
    for iteration in range(1, 200):
        if state.off:
            break
        while state.owes_vote:
            state.posted(state.vote_to_post(None, Readiness.GO, IntervalRequest(), ProtectionStatus(), 0.0))
            num_posted += 1
        if not state.boundary(iteration):
            continue
        if num_posted:
            state.miss()
            state.fail("no answer")
        else:
            state.agree()
    assert state.off and num_posted <= 4


def test_a_rank_that_gave_up_behind_its_round_takes_nothing() -> None:
    """Others take what they have agreed on; it is never committed, and all are off with the next round."""
    state = SessionState(Config(replica_check_interval=0))
    state.begin(b"1" * 16, None, 0.0)
    state.boundary(1)
    state.agree()
    assert isinstance(state.take(state.interval.number, has_room=True), TakeSnapshot)
    one = SnapshotId(b"1" * 16, 1)
    state.posted(state.vote_to_post(one, Readiness.GO, IntervalRequest(), ProtectionStatus(), 0.0))
    state.give_up("its step is captured")
    state.boundary(2)
    state.learn([VoteResult(1, 1, will=Readiness.GO)], 0.0)
    state.agree()
    assert isinstance(state.take(state.interval.number, has_room=True), SkipSnapshot)
    last = state.vote_to_post(one, Readiness.GO, IntervalRequest(), ProtectionStatus(), 0.0)
    assert (last.newest, last.will) == (1, Readiness.OFF)


def test_a_drift_that_a_sample_shows_is_proven_by_all_and_what_came_since_the_last_match_is_doubtful() -> None:
    """One rank reads of it late; from the alarm on nothing is taken until each rank copies its own."""
    ranks = job(3, replica_check_interval=1000)
    train(ranks, 19)
    assert {rank.state.replicas.trusted for rank in ranks.ranks} == {16}, (
        "18 is not posted before the next boundary, and 17 has the other position"
    )
    ranks.drifts = ranks.changed_replicas = True
    ranks.iterate([CALM] * 3, in_order)
    ranks.iterate([CALM, CALM, Fate(impatient=True)], lambda num_ready: num_ready - 1)
    ranks.drifts = False
    proofs = len(ranks.proofs)
    while len(ranks.proofs) == proofs:
        train(ranks, 1)
        assert ranks.iteration < 33
    ranks.changed_replicas = False
    assert {tuple(rank.doubts) for rank in ranks.ranks} == {(Divergence(18, 20),)}
    assert {rank.state.replicas.trusted for rank in ranks.ranks} == {ranks.iteration}
    progresses(ranks)


@pytest.mark.parametrize("order", [in_order, random.Random(1).randrange])
def test_at_any_interval_a_snapshot_is_whole_and_protected_a_few_steps_behind_its_boundary(order: Order) -> None:
    """And steps in which there is nothing to settle have no round."""
    ranks, begun = job(3, slots=4, interval=20), 0
    for _ in range(100):
        ranks.iterate([CALM] * 3, order)
        if ranks.iteration % 20 == 0:
            begun = ranks.iteration
        for rank in ranks.ranks if begun else []:
            whole, protected = rank.state.committed, rank.state.targets.protected
            assert ranks.iteration < begun + 2 or (whole is not None and whole.iteration == begun)
            assert ranks.iteration < begun + 5 or (protected is not None and protected.iteration == begun)
    assert max(rank.group.num_posted for rank in ranks.ranks) <= 4 * 5


def test_steps_that_a_late_rank_has_missed_have_no_round() -> None:
    votes = VoteSchedule()
    votes.boundary(1, due=True, pending=False)
    assert votes.next(pending=False) == VoteStep(1, 1, due=True)
    votes.posted()
    for _ in range(4):
        votes.boundary(1, due=False, pending=False)
    assert votes.next(pending=False) is None and votes.waits, "what the verdict leaves is not known"
    votes.read(VoteResult(1, 1, step=5))
    assert votes.next(pending=True) is None and not votes.waits
    votes.boundary(1, due=False, pending=True)
    assert votes.next(pending=True) == VoteStep(6, 1, due=False)


def test_a_rank_that_fails_before_its_first_snapshot_does_not_turn_off_alone() -> None:
    """The others would wait for it in the proof of that snapshot."""
    bad, good = SessionState(Config(interval=50), True, 2), SessionState(Config(interval=50), True, 2)
    for state in (bad, good):
        state.begin(b"x" * 16, SnapshotId(b"o" * 16, 100), 0.0)
    for iteration in range(101, 110):
        bad.boundary(iteration)
        good.boundary(iteration)
        while bad.owes_vote and good.owes_vote:
            votes = bad.empty_vote(), good.empty_vote()
            bad.posted(votes[0])
            good.posted(votes[1])
            bad.fail("a vote raised")
            result = VoteResult.of([min(pair) for pair in zip(*(vote.words() for vote in votes), strict=True)])
            bad.learn([result], 1.0)
            good.learn([result], 1.0)
    assert bad.failures > 3 and not bad.off
