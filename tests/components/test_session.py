"""A session: votes, and what ranks conclude from them."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ftckpt.config import Config
from ftckpt.model.snapshot import SnapshotId
from ftckpt.session.actions import Divergence, IntervalConclusion
from ftckpt.session.protection_scheduler import ProtectionScheduler, ProtectionStatus
from ftckpt.session.replica_check import ReplicaCheck
from ftckpt.session.session import Interval, SessionState
from ftckpt.session.vote import Readiness, TaskState, Vote, VoteResult

# --- the session ---


LINEAGE = b"l" * 16
NOW_SECS = 100.0


numbers = itertools.count(1)


def verdict(whole: int, target: int = -1, cover: TaskState = TaskState.READY) -> VoteResult:
    """The vote result for one more snapshot."""
    return VoteResult(next(numbers), whole, target=target, cover=cover)


def at(iteration: int) -> SnapshotId:
    return SnapshotId(LINEAGE, iteration)


def learn(targets: ProtectionScheduler, *verdicts: VoteResult) -> list[str]:
    """The events of what happens to targets."""
    return [news.event for verdict in verdicts for news in targets.learn(verdict, LINEAGE, NOW_SECS)]


def kept(targets: ProtectionScheduler) -> set[SnapshotId]:
    return {snapshot for snapshot in (targets.protected, targets.target) if snapshot is not None}


def test_a_whole_snapshot_is_the_target_until_all_have_covered_it() -> None:
    targets = ProtectionScheduler(1)
    learn(targets, verdict(4))
    assert targets.target == at(4) and targets.protected is None
    assert learn(targets, verdict(5, 4, TaskState.WORKING)) == [] and kept(targets) == {at(4)}
    assert learn(targets, verdict(6, 4)) == ["protected"]
    assert targets.protected == at(4) and targets.target == at(6)


def test_a_target_that_cannot_be_covered_is_given_up_and_the_protected_one_stays() -> None:
    targets = ProtectionScheduler(1)
    learn(targets, verdict(4), verdict(5, 4))
    assert learn(targets, verdict(6, 5, TaskState.CANNOT), verdict(7)) == ["not_protected"]
    assert targets.protected == at(4) and targets.target == at(7) and targets.degraded
    assert learn(targets, verdict(8, 7, TaskState.CANNOT)) == [], "one event for all that fail in a row"
    assert learn(targets, verdict(9), verdict(10, 9)) == ["protected"] and not targets.degraded


GUARDING = ProtectionStatus(alive=True, configured=True, sealed=True)


def test_a_target_for_which_the_network_needs_longer_is_waited_for() -> None:
    targets = ProtectionScheduler(1, timeout_secs=30.0, target=at(4), chosen_secs=NOW_SECS)
    slow = GUARDING._replace(wait_secs=400.0)
    assert targets.report(slow, NOW_SECS + 399.0) == (4, TaskState.WORKING)
    assert targets.report(slow, NOW_SECS + 401.0) == (4, TaskState.CANNOT)
    targets.target = None
    assert targets.report(slow, NOW_SECS + 1200.0) == (-1, TaskState.CANNOT), "it rests as much longer"


def test_a_node_that_has_taken_its_share_of_the_cores_rests_once_anything_is_protected() -> None:
    targets, resting = ProtectionScheduler(1), GUARDING._replace(covered=True, rests=True)
    targets.protected, targets.target, targets.chosen_secs = at(3), at(4), NOW_SECS
    assert targets.report(resting, NOW_SECS) == (4, TaskState.DONE)
    targets.target = None
    assert targets.report(resting, NOW_SECS) == (-1, TaskState.DONE)
    assert targets.report(resting._replace(rests=False), NOW_SECS) == (-1, TaskState.READY)
    assert targets.report(resting._replace(alive=False), NOW_SECS) == (-1, TaskState.CANNOT)
    targets.protected = None
    assert targets.report(resting, NOW_SECS) == (-1, TaskState.READY), "nothing is protected yet"


def proven(last: int, steps_from: int, repeats: bool = True) -> list[int]:
    """The snapshots that have a proof; steps are skipped before snapshot ``steps_from``."""
    replicas, found = ReplicaCheck(repeats, delay=8), []
    for number in range(1, last + 1):
        if replicas.proof_due(number):
            found.append(number)
            replicas.proved(number, number >= steps_from, changed=False, new_arenas=False)
    return found


def test_proofs_come_at_first_close_from_where_steps_begin() -> None:
    assert proven(90, steps_from=1) == [1, 2, 4, 8]
    assert proven(40, steps_from=6) == [1, 2, 3, 4, 5, 6, 7, 9, 13]
    assert proven(40, steps_from=6, repeats=False) == [1]


def test_what_was_proven_last_is_what_is_trusted() -> None:
    state = SessionState(Config())
    trusted = []
    for iteration, changed in ((1, False), (2, False), (4, True), (8, False)):
        state.boundary(iteration)
        state.proved(stepped=True, changed=changed, new_arenas=False)
        trusted.append(state.replicas.trusted)
    assert trusted == [1, 2, 2, 8]


def test_what_was_taken_since_all_was_the_same_is_in_doubt_where_a_proof_finds_a_difference_first() -> None:
    state = SessionState(Config())
    state.begin(b"of this run", None, 0.0)
    state.replicas.lay_out(100, -1)
    found = []
    for iteration in range(1, 6):
        state.boundary(iteration)
        found.append(state.replicas.mistrust())
        if iteration == 2:
            state.proved(stepped=True, changed=False, new_arenas=False)
    assert found == [[], [Divergence(-1, 1)], [], [Divergence(2, 3)], [Divergence(2, 4)]]


def request(interval: Interval, number: int, stretch: int) -> bool:
    """Whether this result changes the interval."""
    return bool(list(interval.learn(VoteResult(number, -1, stretch=stretch))))


def test_an_interval_changes_at_the_same_snapshot_for_all() -> None:
    interval = Interval(Config(interval=2), delay=8)
    assert [i for i in range(1, 9) if interval.due(i)] == [2, 4, 6, 8]
    assert request(interval, 4, 3)
    assert not request(interval, 5, 3)
    assert not request(interval, 6, 4), "a change that is not in force yet is not changed again"
    assert [i for i in range(9, 40) if interval.due(i)] == [10, 12, 14, 16, 18, 20, 22, 24, 30, 36]
    assert interval.number == 14 and request(interval, 14, 1)
    interval.resume(7)
    assert [i for i in range(40, 70) if interval.due(i)] == [42, 56]


def test_only_what_was_concluded_is_kept_for_the_next_attempt() -> None:
    """And once, whatever it was before: a measurement in progress concludes nothing."""
    state = SessionState(Config())
    state.begin(LINEAGE, None, 0.0)
    kept = []
    for stretch, cost in ((1, -1), (6, -1), (6, -1), (6, 60_000), (6, 60_000), (1, 5_000)):
        actions = state.learn([VoteResult(next(numbers), -1, stretch=stretch, cost=cost)], 0.0)
        kept.append([action.interval for action in actions if isinstance(action, IntervalConclusion)])
    assert kept == [[], [], [], [6], [], [1]]


# --- the input and the result of the all-reduce ---


ROUNDS = st.lists(
    st.builds(
        Vote,
        number=st.just(7),
        newest=st.integers(-1, 3),
        will=st.sampled_from(Readiness),
        stretch=st.integers(1, 1000),
        cost=st.integers(0, 1 << 40),
        flush_interval=st.integers(0, 1 << 30),
        target=st.integers(-1, 3),
        cover=st.sampled_from(TaskState),
        flush=st.integers(-1, 3),
        flushed=st.sampled_from(TaskState),
        step=st.integers(1, 1 << 40),
    ),
    min_size=1,
    max_size=4,
)


@given(ROUNDS)
def test_a_verdict_is_what_all_rounds_mean_together(rounds: list[Vote]) -> None:
    minima = [min(words) for words in zip(*(vote.words() for vote in rounds), strict=True)]
    newest, targets = {vote.newest for vote in rounds}, {vote.target for vote in rounds}
    flushes = {vote.flush for vote in rounds}
    assert VoteResult.of(minima) == VoteResult(
        number=7,
        newest=newest.pop() if len(newest) == 1 else -1,
        will=min(vote.will for vote in rounds),
        stretch=max(vote.stretch for vote in rounds),
        cost=max(vote.cost for vote in rounds),
        flush_interval=max(vote.flush_interval for vote in rounds),
        target=targets.pop() if len(targets) == 1 else -1,
        cover=min(vote.cover for vote in rounds),
        flush=flushes.pop() if len(flushes) == 1 else -1,
        flushed=min(vote.flushed for vote in rounds),
        step=max(vote.step for vote in rounds),
    )
