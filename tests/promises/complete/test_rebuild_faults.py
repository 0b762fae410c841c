"""Parity may be corrupt too, and a reconstruction killed: nothing wrong is ever restored, nothing is lost."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ftckpt.memory.arena import Arena
from ftckpt.memory.directory import list_arenas
from ftckpt.memory.package import list_packages, load, package_path
from ftckpt.memory.parity_file import ParityFile, list_parity, parity_path
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.modes import Modes
from ftckpt.restore.shard_reconstruction import ShardReconstruction
from tests.support.event_logs import read_events
from tests.support.flips import flip
from tests.support.killing import die_at
from tests.support.pool import run_ranks
from tests.support.protected import Job, build, contents, flip_chunk, restart
from tests.support.snapshots import LINEAGE, slot_of
from tests.support.tiers import by_default

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

NODE = Modes(node=True)
PEER = Modes(peer=True)
ITERATIONS = (3, 4, 5)


def node_job(root: Path, ranks: int = 3, protected: tuple[int, ...] = (4, 5)) -> Job:
    job = Job(root, ("a",) * ranks, NODE)
    build(job, ITERATIONS, protected)
    return job


def wanted_of(job: Job, iteration: int) -> list[bytes]:
    return [contents(job, rank, iteration) for rank in range(len(job.nodes))]


def restarted(job: Job, tmp_path: Path) -> list[dict[str, Any]]:
    return [result.value for result in run_ranks(restart, len(job.nodes), job, tmp_path / "events")]


def parity_of(job: Job, rank: int, iteration: int = 5, mode: str = "node") -> ParityFile:
    """Opened for writing; the caller closes it."""
    for index in range(2):
        file = ParityFile.open(parity_path(job.path(rank), mode, index), writable=True)
        if file.snapshot() == SnapshotId(LINEAGE, iteration):
            return file
        file.close()
    raise AssertionError(f"rank {rank} has no parity of iteration {iteration}")


def flip_block(job: Job, rank: int, block: int) -> None:
    with closing(parity_of(job, rank)) as file:
        file.block(block)[5] ^= 1


def forge_block(job: Job, rank: int, block: int) -> None:
    """Other bytes in a parity file, under a checksum that fits them."""
    with closing(parity_of(job, rank)) as file:
        file.block(block)[5] ^= 1
        file.begin(SnapshotId(LINEAGE, 5))
        for index in range(file.num_blocks):
            file.put(index, file.block(index))
        file.seal()


def test_a_corrupt_parity_block_is_never_used(arena_root: Path, tmp_path: Path) -> None:
    """The snapshot before it is reconstructed instead, and the bad block is logged."""
    job = node_job(arena_root)
    wanted = wanted_of(job, 4)
    shutil.rmtree(job.path(1))
    forge_block(job, 0, 0)
    told = restarted(job, tmp_path)
    assert {value["iteration"] for value in told} == {4}
    assert wanted_of(job, 4) == wanted
    assert any("corrupt" in text for e in read_events(tmp_path / "events", "arena_problem") for text in e["problems"])
    assert any("iteration 5" in text for text in told[0]["passed_over"])


def test_another_block_is_taken_in_place_of_a_corrupt_one(arena_root: Path, tmp_path: Path) -> None:
    """Node parity of a chunk is bad: its peers give it back."""
    job = Job(arena_root, ("a", "a", "a", "b", "b", "b"), Modes(node=True, peer=True))
    build(job, ITERATIONS, (4, 5))
    wanted = wanted_of(job, 5)
    shutil.rmtree(job.path(1))
    flip_block(job, 0, 1)
    told = restarted(job, tmp_path)
    assert {value["iteration"] for value in told} == {5}
    assert wanted_of(job, 5) == wanted
    assert set(told[0]["sources"]) == {"node_parity", "peer_parity"}


def test_a_bad_chunk_of_another_arena_is_found_before_it_spoils_the_rebuilt_one(
    arena_root: Path, tmp_path: Path
) -> None:
    job = Job(arena_root, ("a", "a", "a", "b", "b", "b"), Modes(node=True, peer=True))
    build(job, ITERATIONS, (5,))
    wanted = wanted_of(job, 5)
    shutil.rmtree(job.path(1))
    flip_chunk(job, 2, 5, 1)
    told = restarted(job, tmp_path)
    assert {value["iteration"] for value in told} == {5}
    assert wanted_of(job, 5) == wanted
    assert "peer_parity" in told[0]["sources"]


def test_corrupt_packages_are_left_out_and_told(arena_root: Path, tmp_path: Path) -> None:
    job = Job(arena_root, ("n0", "n1", "n2", "n3"), PEER)
    build(job, ITERATIONS, (4, 5))
    wanted = wanted_of(job, 5)
    shutil.rmtree(job.node_dir("n1"))
    flip(package_path(job.node_dir("n2"), "dp1", SnapshotId(LINEAGE, 5)), 200)
    told = restarted(job, tmp_path)
    assert {value["iteration"] for value in told} == {5}
    assert wanted_of(job, 5) == wanted
    assert read_events(tmp_path / "events", "arena_problem")


def test_packages_and_parity_of_another_layout_are_never_used(arena_root: Path, tmp_path: Path) -> None:
    job = node_job(arena_root)
    wanted = wanted_of(job, 5)
    (arena_root / "other").mkdir()
    other = node_job(arena_root / "other", 4)
    for package in list_packages(other.node_dir("a")):
        shutil.copy(package.path, job.node_dir("a") / ".mirror" / package.path.name)
    for path in list_arenas(other.node_dir("a")):
        arena = next(p for p in list_arenas(job.node_dir("a")) if p != job.path(1))
        for index in range(2):
            shutil.copy(parity_path(path, "node", index), parity_path(arena, "peer", index))
    own = package_path(job.node_dir("a"), "dp0", SnapshotId(LINEAGE, 5))
    assert load(own).manifest.layout == {"dp": 4}
    flip_chunk(job, 1, 5, 2)
    told = restarted(job, tmp_path)
    assert {value["iteration"] for value in told} == {5}
    assert wanted_of(job, 5) == wanted
    told_of = read_events(tmp_path / "events", "arena_problem")
    problems = [text for event in told_of for text in event["problems"]]
    assert any("dp3 is no shard of this layout" in text for text in problems)
    assert any((event["file"] or "").startswith("group ") for event in told_of)
    assert any("another layout" in text for text in problems)


def test_a_slot_without_checksums_is_compared_with_its_package(arena_root: Path, tmp_path: Path) -> None:
    """The file of checks is lost, the package is not."""
    job = Job(arena_root, ("a", "a", "a"), NODE)
    build(job, ITERATIONS, (5,))
    wanted = wanted_of(job, 5)
    for rank in range(3):
        unhash(job, rank)
    told = restarted(job, tmp_path)
    assert {value["iteration"] for value in told} == {5} and told[0]["source"] == "memory"
    for event in read_events(tmp_path / "events", "verified"):
        assert event["states"] == {"sealed": 3}
    flip_chunk(job, 1, 5, 3)
    told = restarted(job, tmp_path)
    assert {value["iteration"] for value in told} == {5} and told[0]["source"] == "node_parity"
    for rank in range(3):
        with closing(Arena.open(job.path(rank))) as arena:
            slot = slot_of(arena, 5)
            assert bytes(arena.slot(slot))[: len(wanted[rank])] == wanted[rank]


def unhash(job: Job, rank: int) -> None:
    """Seal a slot again, without checksums."""
    with closing(Arena.open(job.path(rank), writable=True)) as arena:
        slot = slot_of(arena, 5)
        record = arena.control.record(slot)
        assert record.snapshot is not None
        arena.control.begin(slot)
        arena.control.set_objects(slot, record.objects_used, record.objects_hash)
        arena.control.seal(slot, record.snapshot, hashed=False)


def test_a_start_from_the_beginning_voids_all_protection(arena_root: Path, tmp_path: Path) -> None:
    job = node_job(arena_root)
    for rank in range(3):
        with closing(Arena.open(job.path(rank), writable=True)) as arena:
            for slot in range(3):
                arena.control.void(slot)
            arena.control.mark_whole(None)
    assert list_parity(job.node_dir("a")) and list_packages(job.node_dir("a")), (
        "as an SMP may store them behind a void"
    )
    told = [result.value for result in run_ranks(restart, 3, job, tmp_path / "events", "fail")]
    assert "iteration" not in told[0]
    assert list_parity(job.node_dir("a")) == [] == list_packages(job.node_dir("a"))


@pytest.mark.parametrize(
    ("loss", "point"),
    by_default(
        product(["arena", "chunks"], ["begin", "put", "before_seal", "after_seal"]),
        [("arena", "after_seal"), ("chunks", "before_seal")],
    ),
)
def test_a_rebuild_that_is_killed_is_done_again(point: str, loss: str, arena_root: Path, tmp_path: Path) -> None:
    job = Job(arena_root, ("a", "a", "a", "b", "b", "b"), Modes(node=True, peer=True))
    build(job, ITERATIONS, (4, 5))
    wanted = wanted_of(job, 5)
    if loss == "arena":
        shutil.rmtree(job.node_dir("a"))
    else:
        for chunk in (0, 3):
            flip_chunk(job, 1, 5, chunk)
    results = run_ranks(
        restart_that_is_killed, 6, job, tmp_path / "events", point, expect_failures=True, grace_secs=2.0
    )
    in_place = loss == "chunks" and point != "put"
    assert (results[1].exitcode == -signal.SIGKILL) is not in_place, results[1]
    told = restarted(job, tmp_path)
    assert {value["iteration"] for value in told} == {5}
    assert wanted_of(job, 5) == wanted
    assert not list(job.node_dir("a").glob(".dp*")), "what was left half made is there still"


def restart_that_is_killed(rank: int, world_size: int, job: Job, events: Path, point: str) -> dict[str, Any]:
    if rank == 1:
        if point == "put":
            puts = []
            original = ShardReconstruction.put

            def put(self: ShardReconstruction, chunk: int, begin: int, data: Any) -> None:
                puts.append(chunk)
                if len(puts) == 2:
                    original(self, chunk, begin, data[: len(data) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                original(self, chunk, begin, data)

            ShardReconstruction.put = put  # type: ignore[method-assign]
        else:
            call = {"begin": "begin", "before_seal": "seal", "after_seal": "seal"}[point]
            die_at(f"ftckpt.memory.control_block:ControlBlock.{call}", after=point != "before_seal")
    return restart(rank, world_size, job, events)


def test_a_rank_that_fails_to_rebuild_is_an_error_on_all(arena_root: Path, tmp_path: Path) -> None:
    job = node_job(arena_root)
    shutil.rmtree(job.path(1))
    results = run_ranks(restart_that_fails, 3, job, tmp_path / "events", expect_failures=True)
    assert all("rank 1: OSError: out of luck" in (result.error or "") for result in results)
    told = restarted(job, tmp_path)
    assert {value["iteration"] for value in told} == {5}


def restart_that_fails(rank: int, world_size: int, job: Job, events: Path) -> dict[str, Any]:
    def put(self: ShardReconstruction, chunk: int, begin: int, data: Any) -> None:
        raise OSError("out of luck")

    if rank == 1:
        ShardReconstruction.put = put  # type: ignore[method-assign]
    return restart(rank, world_size, job, events)
