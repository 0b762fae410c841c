"""The flush scheduler: ranks conclude from the same vote results what to flush when, and what to pin meanwhile."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from test_commit import Unconditional

from ftckpt.config import Config
from ftckpt.memory.heartbeat import FlushState
from ftckpt.model.flush_interval import best_interval_secs
from ftckpt.model.lineage import FIRST, Request
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist.commit import CheckpointName
from ftckpt.persist.shards import StoredSnapshot
from ftckpt.restore.storage_catalog import _read
from ftckpt.schedule.cost import IntervalRequest
from ftckpt.session import shutdown
from ftckpt.session.flush_scheduler import FlushScheduler, FlushStatus
from ftckpt.session.protection_scheduler import ProtectionStatus
from ftckpt.session.session import SessionState
from ftckpt.session.shutdown import NodeWatch
from ftckpt.session.vote import Readiness, TaskState, VoteResult
from tests.support.smp_nodes import Seen

LINEAGE = b"l" * 16
READY = FlushStatus(ready=True, sealed=True, state=FlushState.WORKING)
DONE, CANNOT, WORKING = TaskState.DONE, TaskState.CANNOT, TaskState.WORKING


def at(iteration: int, lineage: bytes = LINEAGE) -> SnapshotId:
    return SnapshotId(lineage, iteration)


def verdict(flush: int = -1, flushed: TaskState = DONE, whole: int = -1) -> VoteResult:
    return VoteResult(0, whole, flush=flush, flushed=flushed)


def learn(flushes: FlushScheduler, one: VoteResult, newest: int, now_secs: float = 0.0) -> list[str]:
    return [news.event for news in flushes.learn(one, at(newest), now_secs)]


def test_the_first_at_or_behind_each_multiple_goes_to_storage() -> None:
    flushes = FlushScheduler(10, 100.0)
    for newest in (8, 9):
        assert learn(flushes, verdict(), newest) == [] and flushes.current is None
    learn(flushes, verdict(), 13)
    assert flushes.current == at(13)
    assert learn(flushes, verdict(13, WORKING), 24) == [] and flushes.current == at(13), "one at a time"
    assert learn(flushes, verdict(13), 14) == ["persisted"]
    assert flushes.persisted == at(13) and flushes.current is None
    learn(flushes, verdict(), 19)
    assert flushes.current is None, "once for each multiple"
    learn(flushes, verdict(), 20)
    assert flushes.current == at(20)


def test_one_that_does_not_come_there_makes_way_for_a_newer_one_after_a_rest() -> None:
    flushes = FlushScheduler(10, 100.0)
    learn(flushes, verdict(), 10)
    failed = READY._replace(state=FlushState.CANNOT)
    assert flushes.report(failed, 50.0) == (10, CANNOT)
    assert learn(flushes, verdict(10, CANNOT), 14) == ["flush_failed"] and flushes.current is None
    # As long as it took.
    assert flushes.report(READY, 99.0) == (-1, CANNOT) and flushes.report(READY, 101.0) == (-1, DONE)
    learn(flushes, verdict(-1, CANNOT), 15)
    assert flushes.current is None, "some node rests"
    learn(flushes, verdict(), 16)
    assert flushes.current == at(16), "and not only at the next multiple"


def test_what_is_on_its_way_is_kept_and_marked() -> None:
    state = SessionState(Config(persist="/there", persist_interval=4))
    state.begin(LINEAGE, None, 0.0)
    state.boundary(4)
    actions = state.learn([VoteResult(1, 4)], 0.0)
    assert state.marks.flush == at(4) and state.marks in actions
    state.boundary(5)
    state.learn([VoteResult(2, 5, flush=4, flushed=WORKING)], 0.0)
    assert state.keep == {at(4), at(5)}
    vote = state.vote_to_post(at(5), Readiness.GO, IntervalRequest(), ProtectionStatus(), 0.0, flush=READY)
    assert (vote.flush, vote.flushed) == (4, WORKING)
    state.boundary(6)
    state.learn([VoteResult(3, 6, flush=4)], 0.0)
    assert state.keep == {at(6)} and state.flushes.persisted == at(4)


def test_where_nothing_can_be_protected_what_is_whole_goes_to_storage() -> None:
    state = SessionState(Config(persist="/there", persist_interval=4), protects=True)
    state.begin(LINEAGE, None, 0.0)
    for number in range(1, 9):
        state.boundary(number)
        # No target is protected: each is given up.
        target = state.targets.target
        given_up = {"target": target.iteration, "cover": CANNOT} if target else {}
        state.learn([VoteResult(number, number, **given_up)], 0.0)  # type: ignore[arg-type]
        assert (state.marks.flush is not None) == (number >= 4), number


def test_the_last_does_not_wait_for_an_smp_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "_UNREADY_SECS", 0.3)
    monkeypatch.setattr(shutdown, "_TURN_SECS", 0.2)
    guard = READY
    node: Any = SimpleNamespace(observe_flush=lambda _: guard, smp=SimpleNamespace(problem_now=str))
    watch = NodeWatch(at(6), node, time.monotonic() + 60.0)
    for _ in range(3):
        assert watch.turn() == FlushState.WORKING, "for as long as it is to, while there is one"
    guard = READY._replace(ready=False)
    assert watch.turn() == FlushState.WORKING, "another may take its place"
    assert watch.turn() == FlushState.CANNOT


def test_what_was_abandoned_takes_the_place_of_nothing_that_counts() -> None:
    """However often it was flushed: a job was rolled back from all of it, and earlier checkpoints count."""
    storage = Unconditional("memory:///")
    for iteration in range(1, 31):
        manifest = StoredSnapshot(at(iteration), "job", {}, {}, FIRST).encode()
        storage.put(CheckpointName(iteration).manifest, manifest)
    found = _read(storage, Seen(), Request(name="iter_0000020"), FIRST.branch(5))
    assert [name for name, _ in found.manifests] == [f"iter_000000{iteration}" for iteration in range(5, 0, -1)]
    assert len(found.abandoned) == 25 and found.named[0] == "iter_0000020"


def tuning(mtbf_secs: float = 1e6) -> FlushScheduler:
    """One that has measured that a flush takes 50 s."""
    flushes = FlushScheduler.of(Config(persist="/there", persist_interval="auto", mtbf=f"{mtbf_secs:.0f}s"))
    flushes.resume(-47)
    learn(flushes, verdict(), 2, 100.0)
    assert flushes.current is None, "iterations that compile"
    learn(flushes, verdict(), 3, 100.0)
    assert flushes.current == at(3), "an early one, to know what it takes"
    assert flushes.request(IntervalRequest(iteration_secs=2.0)) == 0, "nothing is known yet"
    assert learn(flushes, verdict(3), 8, 150.0) == ["persisted"] and flushes.current is None
    return flushes


@pytest.mark.parametrize(
    ("mtbf_secs", "share", "cost_secs"), [(1e6, 0.2, 10.0), (1e6, 0.0, 0.5), (1e8, 0.2, 10.0), (1e4, 0.001, 0.5)]
)
def test_a_wish_follows_from_what_a_flush_takes_and_costs(mtbf_secs: float, share: float, cost_secs: float) -> None:
    wish = tuning(mtbf_secs).request(IntervalRequest(iteration_secs=2.0, flush_share=share))
    assert wish == round(best_interval_secs(cost_secs, 50.0, mtbf_secs) / 2.0)


def test_no_other_interval_loses_less() -> None:
    """For flushes that cost 10 s, in the model of Daly (2006): training with exponential times between failures."""

    def time_taken(interval_secs: float, mtbf: float) -> float:
        return mtbf * math.expm1((interval_secs + 10.0) / mtbf) / interval_secs

    for mtbf in (1e5, 1e6, 1e7):
        best = best_interval_secs(10.0, 10.0, mtbf)
        assert all(time_taken(best, mtbf) < time_taken(factor * best, mtbf) for factor in (0.5, 0.8, 1.25, 2.0))
    assert best_interval_secs(0.01, 50.0, 1e4) == 100.0, "storage rests as long as it works"
    assert best_interval_secs(1e4, 1.0, 1e3) == 1e3


def test_a_rank_judges_once_behind_each_flush() -> None:
    flushes = tuning()
    first = flushes.request(IntervalRequest(iteration_secs=2.0, flush_share=0.2))
    assert flushes.request(IntervalRequest(iteration_secs=20.0, flush_share=0.9)) == first
    learn(flushes, verdict(), 600, 200.0)
    learn(flushes, verdict(600), 620, 251.0)
    assert flushes.request(IntervalRequest(iteration_secs=2.1, flush_share=0.2)) == first, "no small change moves it"
    learn(flushes, verdict(), 1200, 300.0)
    learn(flushes, verdict(1200), 1250, 350.0)
    assert flushes.request(IntervalRequest(iteration_secs=8.0, flush_share=0.2)) < first / 3


def test_ranks_that_wish_for_different_intervals_choose_the_same_snapshots() -> None:
    """Measurements of one rank are its own; results that all have read are the same."""
    ranks, chosen = [tuning() for _ in range(3)], []
    for number in range(9, 1500):
        wishes = [rank.request(IntervalRequest(iteration_secs=2.0 + place)) for place, rank in enumerate(ranks)]
        current = ranks[0].current
        read = replace(verdict(current.iteration if current else -1), flush_interval=max(wishes))
        for rank in ranks:
            learn(rank, read, number, float(number))
        assert len({rank.current for rank in ranks}) == 1
        chosen += [number] if ranks[0].current is not None else []
    assert len({rank.requested for rank in ranks}) == 3 and len(chosen) > 5
    assert len({after - before for before, after in itertools.pairwise(chosen[-4:])}) == 1
