"""Agreement of ranks: no order of failures on different ranks makes them lose, mix or wait."""

from __future__ import annotations

import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.errors import CaptureError
from ftckpt.memory.arena import Arena
from ftckpt.memory.package import list_packages
from ftckpt.session.shard import Proof, Shard
from ftckpt.session.vote import Readiness
from tests.support import jobs, plain
from tests.support.arenas import check_all
from tests.support.pool import RankFailure, run_ranks
from tests.support.waiting import meet, until

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

FAST = {"replica_check_interval": 0, "error_limit": 9}


def start_over(settings: dict[str, Any], nodes: list[str] | None = None) -> list[Any]:
    return [result.value for result in run_ranks(plain.restored, 2, settings, nodes)]


def failing_in_turn(
    rank: int, world_size: int, settings: dict[str, Any], failing: set[tuple[int, int]], at: int
) -> None:
    """Copies of (rank, iteration) in ``failing`` raise; all ranks die while ``at`` is being copied."""
    checkpointer, state = plain.make(rank, world_size, settings)
    assert checkpointer.restore() is None
    copying = threading.Event()

    def disturb() -> None:
        if (rank, state.iteration) in failing:
            raise OSError("copy failed")
        if state.iteration == at:
            copying.set()
            threading.Event().wait()  # until it is killed

    plain.before_each_copy(disturb)
    if (0, -5) in failing:  # rank 0 fails at 5 before it touches a slot
        state.failing = {5: CaptureError("an object could not be saved once")}
    plain.train(checkpointer, state, range(1, at + 1))
    checkpointer.capture.flight.hurry.set()  # type: ignore[union-attr]  # no window comes, and no fence
    assert copying.wait(20)
    meet(Path(settings["events"]).parent / "copying", world_size)
    plain.die()


def test_only_what_all_ranks_name_is_whole(settings: dict[str, Any]) -> None:
    """Ranks that each have a newer snapshot, but not the same one, must pin the common one."""
    settings |= {**FAST, "slots": 2}
    run_ranks(failing_in_turn, 2, settings, {(1, 4), (0, -5)}, 6, expect_failures=True)
    assert start_over(settings) == [(3, 3, [3.0], [3.0])] * 2


def going_back(rank: int, world_size: int, settings: dict[str, Any], nodes: list[str]) -> None:
    checkpointer, state = plain.restarted(rank, world_size, settings, nodes)
    iteration, deadline, protects = 0, time.monotonic() + 60, settings["protect"] != "none"
    while iteration < 6 or (protects and checkpointer.protected is None):
        iteration += 1
        plain.iterate(checkpointer, state, iteration)
        assert time.monotonic() < deadline
    checkpointer.fence()
    # With protection some slot may hold any of the first ones: they, too, are undone.
    plain.train(checkpointer, state, range(1 if protects else 3, 7), offset=100.0)
    if checkpointer.capture is not None and checkpointer.capture.flight is not None:
        checkpointer.capture.flight.wait(20)  # what is copied, wrongly, is sealed
    assert not protects or list_packages(checkpointer.node_dir), "what the SMP has made, or was at, stays there"
    meet(Path(settings["events"]).parent / "gone back", world_size)
    plain.die()


@pytest.mark.parametrize(("protect", "nodes"), [("none", "aa"), ("node", "aa"), ("peer", "ab")])
def test_going_back_in_one_process_never_mixes(protect: str, nodes: str, settings: dict[str, Any]) -> None:
    """Snapshots stop at a smaller iteration number: a restart has the snapshot committed before."""
    settings |= {"protect": protect, "objects_size": "1MiB", "chunk_size": "64KiB"}
    run_ranks(going_back, 2, {**settings, **FAST}, list(nodes), expect_failures=True)
    first, second = start_over(settings, list(nodes))
    start = first[0]
    assert first == second == (start, start, [float(start)], [float(torch.tensor(float(start)).bfloat16())])
    assert start == 6 or (protect != "none" and start > 6), "with protection it trains until a snapshot is protected"
    assert len(jobs.events(settings, "turned_off")) == 2


def counts_backwards(rank: int, world_size: int, settings: dict[str, Any]) -> Any:
    """A script counts 4 after 6, as one that counts in epochs does; what the next start restores, and its row."""
    settings |= {"slots": 8, "replica_check_interval": 0, "objects_size": "1MiB", "chunk_size": "64KiB"}
    checkpointer, state = plain.restarted(rank, world_size, settings)
    plain.train(checkpointer, state, range(1, 7))
    checkpointer.fence()
    plain.train(checkpointer, state, (4, 5, 6, 3, 40), offset=100.0)
    assert checkpointer.off
    checkpointer.close(remove=False)
    checkpointer, state = plain.make(rank, world_size, settings)
    start = checkpointer.restore()
    checkpointer.close(remove=False)
    return start, state.row.unique().tolist()


def test_a_smaller_number_stops_snapshots_and_gives_up_none(settings: dict[str, Any]) -> None:
    results = [result.value for result in run_ranks(counts_backwards, 2, settings)]
    assert results == [(6, [6.0])] * 2


def weight_off_on_one_rank(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    checkpointer, state = plain.restarted(rank, world_size, settings)
    for iteration in range(1, 6):
        checkpointer.fence()
        state.advance(iteration, float(iteration))
        state.weight[7] = 64.0 if rank == 1 else state.weight[7]
        checkpointer.step(iteration)
    checkpointer.fence()
    plain.die()


def test_a_weight_that_is_derived_on_some_ranks_only_is_each_ranks_own(settings: dict[str, Any]) -> None:
    run_ranks(weight_off_on_one_rank, 2, settings, expect_failures=True)
    (start, _, _, first), (_, _, _, second) = start_over(settings)
    assert (first, second) == ([float(start)], [float(start), 64.0])


def long_interval(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    checkpointer, state = plain.restarted(rank, world_size, settings, ["a", "b"])
    plain.train(checkpointer, state, range(1, 15))
    until(lambda: 10 in plain.sealed(settings, rank), "sealed, some time after the fence")
    plain.die()


@pytest.mark.parametrize("damage", ["flipped bit", "node gone"])
def test_what_was_sealed_before_the_first_mark_is_not_lost_in_silence(damage: str, settings: dict[str, Any]) -> None:
    settings["interval"] = 10
    run_ranks(long_interval, 2, settings, expect_failures=True)
    root = Path(settings["arena"]) / "ftckpt-test"
    if damage == "node gone":
        shutil.rmtree(root / "b")
    else:
        check_all(root / "b")
    for slot in root.glob("b/*/slot*") if damage == "flipped bit" else []:
        data = bytearray(slot.read_bytes())
        data[2 * 4096] ^= 1
        slot.write_bytes(data)
    with pytest.raises(RankFailure, match=r"LostError.*cannot be restored"):
        start_over(settings, ["a", "b"])


def attempts_on_storage(rank: int, world_size: int, settings: dict[str, Any]) -> list[int | None]:
    """Attempts of a job that resume from iteration 2 of storage, each with the same command line but the first."""
    starts = []
    for rollback, iterations in ((False, range(1, 6)), (True, range(3, 5)), (True, range(5, 7)), (True, ())):
        checkpointer, state = plain.make(rank, world_size, settings)
        starts.append(checkpointer.restore(newer_than=2 if rollback else -1, rollback=rollback))
        for iteration in iterations:
            plain.iterate(checkpointer, state, iteration)
        checkpointer.close(remove=False)
    return starts


def test_the_operator_goes_back_once_and_not_at_each_restart(settings: dict[str, Any]) -> None:
    results = run_ranks(attempts_on_storage, 2, settings)
    assert [result.value for result in results] == [[None, None, 4, 6]] * 2
    assert [event["newest"] for event in jobs.events(settings, "rolled_back")] == [4, 4], "4 was known to be whole"


def spoil(job: Any, rank: int) -> None:
    """Give rank 1 one wrong element."""
    if rank == 1:
        pieces = job.checkpointer.snapshots.shard.state.stepped
        key = "exp_avg_sq/decoder.layers.0.mlp.linear_fc1.weight"
        next(piece for piece in pieces if piece.fragment.key == key).tensor[0] = 1e-3


def test_one_of_two_halves_differs_between_replicas(settings: dict[str, Any]) -> None:
    """The halves of a gated layer share a key: only the half that differs is private."""
    argv = ["--no-distributed-optimizer", "--swiglu"]
    # Twelve: on a loaded machine no snapshot is taken for several iterations, until the new slots are allocated.
    jobs.broken(2, jobs.Run(argv, 12, settings, restored=spoil, end="die"))
    assert jobs.events(settings, "replicas_differ")
    resumed = jobs.outcomes(2, jobs.Run(argv, 13, settings))
    assert {outcome.start for outcome in resumed} <= set(range(4, 13))


def slowly_sealed(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    hash_chunk = Arena.hash_chunk
    # Hashes that take longer than it is from the last boundary to the end.
    Arena.hash_chunk = lambda *args: (time.sleep(0.1), hash_chunk(*args))[1]  # type: ignore[method-assign, assignment]
    checkpointer, state = plain.restarted(rank, world_size, settings)
    plain.train(checkpointer, state, range(1, 4))
    checkpointer.close(remove=False)


def test_the_last_snapshot_of_a_job_that_leaves_its_arenas_is_sealed(settings: dict[str, Any]) -> None:
    run_ranks(slowly_sealed, 2, {**settings, **FAST})
    assert start_over(settings) == [(3, 3, [3.0], [3.0])] * 2


def used_after_close(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    checkpointer, state = plain.restarted(rank, world_size, settings)
    plain.iterate(checkpointer, state, 1)
    checkpointer.close()
    for _ in range(3):
        checkpointer.phase("forward")
        checkpointer.phase("window")
    checkpointer.fence()
    checkpointer.step(2)
    assert checkpointer.begun == 1


def test_a_closed_checkpointer_stays_out_of_the_way(settings: dict[str, Any]) -> None:
    run_ranks(used_after_close, 2, settings)


def told_late(rank: int, world_size: int, settings: dict[str, Any], trouble: str) -> list[bool]:
    """Whether this rank reported in each proof that it is late; rank 1 is in trouble before the fourth."""
    said: list[bool] = []
    prove = Shard.prove

    def recorded(self: Shard, late: bool, *rest: Any) -> Proof:
        said.append(late)
        return prove(self, late, *rest)

    Shard.prove = recorded  # type: ignore[method-assign]
    checkpointer, state = plain.restarted(rank, world_size, settings)
    free, ended = threading.Event(), threading.Event()

    def disturb() -> None:
        if (trouble, rank, state.iteration) == ("stuck", 1, 7):
            assert free.wait(60)
            ended.set()

    plain.before_each_copy(disturb)
    agreement = checkpointer.rank.links.agreement
    post = agreement.post
    for iteration in range(1, 9):
        if iteration == 8 and rank == 1 and trouble == "off":
            agreement.post = lambda vote: post(replace(vote, will=Readiness.OFF))  # type: ignore[method-assign]
        checkpointer.fence()
        if iteration == 8 and rank == 1 and trouble == "error":
            checkpointer.snapshots.shard.complete = broken_complete  # type: ignore[method-assign, union-attr]
        state.advance(iteration, float(iteration))
        checkpointer.step(iteration)
    free.set()
    assert (trouble, rank) != ("stuck", 1) or ended.wait(60)
    checkpointer.close(remove=False)
    return said


def broken_complete() -> None:
    raise OSError("the tmpfs was unmounted")


@pytest.mark.parametrize("trouble", ["stuck", "error", "off"])
def test_a_rank_that_is_not_up_to_date_says_so_in_a_proof(trouble: str, settings: dict[str, Any]) -> None:
    """Otherwise it would reallocate while a copy still writes, or with another pinned snapshot. And whatever failed
    in it, it enters the proof, in which the others wait for it."""
    settings |= {"fence_secs": 0.2, "vote_secs": 5.0, "error_limit": 3, "objects_size": "1MiB"}
    results = [result.value for result in run_ranks(told_late, 2, settings, trouble)]
    assert all(said[:3] == [False] * 3 and len(said) == 4 for said in results)
    assert results[1][3] == (trouble != "error")
    assert results[0][3] == (trouble == "off"), "off is what all ranks hear"
