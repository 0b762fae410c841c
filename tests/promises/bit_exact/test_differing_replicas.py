"""Replicas that diverge while training runs: each holder copies its own from then on, and nothing is lost."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftckpt.capture import sample
from ftckpt.cli.main import main
from ftckpt.errors import MemoryBudgetError
from ftckpt.memory import ledger
from ftckpt.session.shard import Shard
from ftckpt.session.snapshot_driver import SnapshotDriver
from tests.support import jobs
from tests.support.faults import Fault
from tests.support.pool import run_ranks

pytestmark = pytest.mark.multiproc

ARGV = ["--pp", "2", "--no-distributed-optimizer"]
RANKS = 4
THREE = ["--no-distributed-optimizer", "--global-batch", "6"]
DIFFERING_AT = 8
KEY = "exp_avg_sq/decoder.layers.0.mlp.linear_fc1.weight"


def described() -> Any:
    """The optimizer-updated pieces of this rank's job."""
    return sys.modules["ftckpt.megatron"].integration.state.describe().stepped


def spoiled(rank: int, world_size: int, run: jobs.Run, no_room: bool = False) -> jobs.Outcome:
    """One element of rank 1 goes wrong right before the proof that comes with snapshot ``DIFFERING_AT``."""
    prove, calls = Shard.prove, [0]

    def spoil(self: Shard, *rest: Any) -> bool:
        calls[0] += 1
        if calls[0] == 4:  # with snapshots 1, 2, 4 and 8
            if rank == 1:
                pieces = described()
                next(piece for piece in pieces if piece.fragment.key == KEY).tensor[0] = 1e-3
            if no_room:
                ledger.check_budget = full  # type: ignore[assignment]
        return prove(self, *rest)

    Shard.prove = spoil  # type: ignore[method-assign]
    sample.SAMPLE_BYTES = 1 << 30  # each snapshot compares everything, so that the one before is known to be right
    return jobs.train(rank, world_size, run)


@pytest.mark.slow
@pytest.mark.parametrize("on_corruption", ["abort", "report"])
def test_of_three_replicas_the_one_that_goes_wrong_is_named(settings: dict[str, Any], on_corruption: str) -> None:
    settings["on_corruption"] = on_corruption
    run = jobs.Run(THREE, until=12, settings=settings, nodes=["n0", "n0", "n1"])
    results = run_ranks(spoiled, 3, run, expect_failures=on_corruption == "abort", grace_secs=10.0)
    told = jobs.events(settings, "replicas_differ")
    assert len(told) == 3, "once by each rank"
    assert all(one["odd_ranks"] == ["rank 1 on n0"] and KEY in one["fragments"][0] for one in told)
    if on_corruption == "report":
        return
    for result in results:
        assert result.error is not None, "every rank ends by it"
        for text in ("SilentCorruptionError", "rank 1 on n0", KEY, "at iteration 8", "same at iteration 7"):
            assert text in result.error
        assert re.search("rollback(_before=|-before )8", result.error)
    # Nothing was given up for arenas that nobody needs any more; what the text names is not in memory.
    back = jobs.Run(THREE, until=12, settings={**settings, "rollback_before": 5}, nodes=run.nodes)
    assert all("no snapshot before iteration 5" in str(result.error) for result in jobs.broken(3, back))
    newest = jobs.Run(THREE, until=12, settings=settings, nodes=run.nodes)
    reference = jobs.outcomes(3, jobs.Run(THREE, until=12))
    assert jobs.assert_continues(reference, jobs.outcomes(3, newest)) == 7


@pytest.mark.slow
@pytest.mark.parametrize("on_corruption", ["abort", "report"])
def test_what_differs_is_told_where_there_is_no_room_for_new_arenas(
    settings: dict[str, Any], on_corruption: str
) -> None:
    run = jobs.Run(THREE, until=12, settings={**settings, "on_corruption": on_corruption}, nodes=["n0", "n0", "n1"])
    results = run_ranks(spoiled, 3, run, True, expect_failures=on_corruption == "abort", grace_secs=10.0)
    assert len(jobs.events(settings, "replicas_differ")) == 3
    ended = ["SilentCorruptionError" in str(result.error) for result in results]
    assert ended == [on_corruption == "abort"] * 3
    off = {event["rank"] for event in jobs.events(settings, "turned_off")}
    assert on_corruption == "abort" or off == {0, 1, 2}, "the whole snapshot stays"


def full(path: Path, need_bytes: int) -> None:
    raise MemoryBudgetError("no room")


def plans(settings: dict[str, Any]) -> list[int]:
    found = jobs.events(settings, "plan")
    return [sum(e["rank"] == rank for e in found) for rank in range(RANKS)]


def resumed_at(settings: dict[str, Any]) -> int:
    """The iteration from which a restart resumes, to the same bits as an undisturbed job."""
    reference = jobs.outcomes(RANKS, jobs.Run(ARGV, until=14))
    return jobs.assert_continues(reference, jobs.outcomes(RANKS, jobs.Run(ARGV, until=14, settings=settings)))


@pytest.mark.slow
def test_the_old_arena_stays_while_no_snapshot_in_the_new_one_is_whole(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    failing = Fault(1, DIFFERING_AT, "copy", tmp_path / "failing", "raise")
    dead = Fault("all", DIFFERING_AT + 1, "begin", tmp_path / "dead", "kill", secs=20)
    run = jobs.Run(ARGV, until=12, settings=settings, faults=[failing, dead])
    run_ranks(spoiled, RANKS, run, expect_failures=True, grace_secs=3.0)
    assert failing.fired(1) and all(dead.fired(rank) for rank in range(RANKS))
    assert plans(settings) == [2] * RANKS and jobs.events(settings, "replicas_differ")
    assert resumed_at(settings) == DIFFERING_AT - 1


DRIFTS_AT = 20


def drifting(rank: int, world_size: int, run: jobs.Run, at: int = DRIFTS_AT, sample_bytes: int = 0) -> jobs.Outcome:
    """One element of rank 1 goes wrong right before the snapshot that is taken ``at`` an iteration."""
    sample.SAMPLE_BYTES, sample.LOOK_BYTES = sample_bytes or sample.SAMPLE_BYTES, 0

    take = SnapshotDriver.take

    def spoil(self: SnapshotDriver, decision: Any, *rest: Any) -> int:
        if rank == 1 and decision.snapshot.iteration == at:
            pieces = described()
            next(piece for piece in pieces if piece.fragment.key == KEY).tensor[0] = 1e-3
        return take(self, decision, *rest)

    SnapshotDriver.take = spoil  # type: ignore[method-assign]
    return jobs.train(rank, world_size, run)


@pytest.mark.parametrize("name", ["", pytest.param(f"iter_{DRIFTS_AT:07d}", marks=pytest.mark.slow)])
def test_a_drift_between_proofs_is_noticed_with_the_next_snapshot_and_not_restored(
    settings: dict[str, Any], name: str
) -> None:
    run = jobs.Run(ARGV, until=DRIFTS_AT + 3, settings=settings, end="die")
    run_ranks(drifting, RANKS, run, expect_failures=True, grace_secs=3.0)
    told = jobs.events(settings, "replicas_drift")
    assert [(one["after"], one["until"]) for one in told] == [(DRIFTS_AT - 1, DRIFTS_AT)] * RANKS
    taken = {one["iteration"] for one in jobs.events(settings, "snapshot")}
    assert max(taken) == DRIFTS_AT, "none between the alarm and the proof"
    again = jobs.Run(ARGV, until=DRIFTS_AT + 3, settings={**settings, "restore_from": name})
    resumed = jobs.outcomes(RANKS, again)
    if name:
        assert {one.start for one in resumed} == {DRIFTS_AT}
        return
    reference = jobs.outcomes(RANKS, jobs.Run(ARGV, until=DRIFTS_AT + 3))
    assert jobs.assert_continues(reference, resumed) == DRIFTS_AT - 1


@pytest.mark.slow
def test_a_drift_that_a_proof_finds_before_a_sample_is_not_restored(settings: dict[str, Any]) -> None:
    run = jobs.Run(ARGV, until=DIFFERING_AT, settings=settings, end="die")
    run_ranks(drifting, RANKS, run, DIFFERING_AT - 2, 1 << 10, expect_failures=True, grace_secs=3.0)
    told = jobs.events(settings, "replicas_drift")
    assert [(one["after"], one["until"]) for one in told] == [(4, DIFFERING_AT - 1)] * RANKS
    refused = jobs.broken(RANKS, jobs.Run(ARGV, until=DIFFERING_AT, settings=settings))
    assert all("LostError: only doubtful" in str(result.error) for result in refused)


@pytest.mark.slow
def test_a_drift_goes_to_storage_only_as_doubtful_and_what_was_before_it_stays(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job ends between the alarm and the proof, with ``DRIFTS_AT`` as the newest committed snapshot."""
    where = tmp_path / "storage"
    settings |= {"persist": str(where), "persist_format": "safetensors", "persist_interval": 100, "persist_keep": 1}
    run = jobs.Run(ARGV, until=DRIFTS_AT + 3, settings=settings)
    jobs.outcomes(RANKS, replace(run, until=10))  # its last snapshot goes to storage
    run_ranks(drifting, RANKS, run)
    assert [path.name for path in where.glob("iter_*")] == ["iter_0000010"], "a doubtful one is not exported"
    capsys.readouterr()
    main(["list", str(where), "--json"])
    stored = json.loads(capsys.readouterr().out)["snapshots"]
    assert {one["iteration"]: one["doubtful"] for one in stored} == {10: False, DRIFTS_AT: True}
    assert {one.start for one in jobs.outcomes(RANKS, run)} == {10}
