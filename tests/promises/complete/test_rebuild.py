"""Shards that were lost come back from parity, bit for bit, at the node of the rank that needs them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftckpt.memory.arena import Arena
from ftckpt.memory.slots import slot_name
from ftckpt.parity.modes import Modes
from ftckpt.parity.stripes import stripes
from tests.support.event_logs import read_events
from tests.support.flips import flip
from tests.support.pool import run_ranks
from tests.support.protected import Job, build, contents, file_groups, flip_chunk, record_begin, restart
from tests.support.snapshots import slot_of

pytestmark = pytest.mark.multiproc

NODE = Modes(node=True)
ITERATIONS = (3, 4, 5)


def made(job: Job, protected: tuple[int, ...] = (4, 5), hashed: bool = True) -> dict[int, list[bytes]]:
    """The job's arenas; what every shard was at each protected iteration."""
    build(job, ITERATIONS, protected, hashed)
    return {i: [contents(job, rank, i) for rank in range(len(job.nodes))] for i in protected}


def restarted(job: Job, tmp_path: Path, **options: Any) -> list[dict[str, Any]]:
    results = run_ranks(restart, len(job.nodes), job, tmp_path / "events", **options)
    return [result.value for result in results]


def assert_whole(job: Job, told: list[dict[str, Any]], iteration: int, wanted: list[bytes]) -> None:
    for rank, value in enumerate(told):
        assert value["iteration"] == iteration, value
        assert value["node"] == job.nodes[rank]
        assert contents(job, rank, iteration) == wanted[rank], f"rank {rank}"
    assert {value["source"] for value in told} == {told[0]["source"]}


def gone(job: Job, rank: int) -> None:
    shutil.rmtree(job.path(rank))


def slot_file(job: Job, rank: int, iteration: int = 5) -> Path:
    with closing(Arena.open(job.path(rank))) as arena:
        return job.path(rank) / slot_name(slot_of(arena, iteration))


def truncated(job: Job, rank: int) -> None:
    os.truncate(slot_file(job, rank), 20_000)


def stepped_byte(job: Job, rank: int) -> None:
    flip_chunk(job, rank, 5, 2)


def volatile_byte(job: Job, rank: int) -> None:
    with closing(Arena.open(job.path(rank))) as arena:
        chunk = arena.image.num_stepped_chunks
    flip_chunk(job, rank, 5, chunk)


def all_chunks(job: Job, rank: int) -> None:
    with closing(Arena.open(job.path(rank))) as arena:
        chunks = len(arena.image.chunks)
    for chunk in range(chunks):
        flip_chunk(job, rank, 5, chunk)


def header_byte(job: Job, rank: int) -> None:
    flip(slot_file(job, rank), 1500)


def objects_byte(job: Job, rank: int) -> None:
    with closing(Arena.open(job.path(rank))) as arena:
        begin = arena.image.objects.begin
    flip(slot_file(job, rank), begin + 300)


def padding_byte(job: Job, rank: int) -> None:
    with closing(Arena.open(job.path(rank))) as arena:
        begin = arena.image.stepped.end
    flip(slot_file(job, rank), begin + 1)


def torn_record(job: Job, rank: int) -> None:
    flip(job.path(rank) / "control", record_begin(job, rank, 5) + 26)


def control_byte(job: Job, rank: int) -> None:
    flip(job.path(rank) / "control", 20)


def being_written(job: Job, rank: int) -> None:
    with closing(Arena.open(job.path(rank), writable=True)) as arena:
        arena.control.begin(slot_of(arena, 5))


LOSSES: list[Callable[[Job, int], None]] = [
    gone, truncated, stepped_byte, volatile_byte, all_chunks, header_byte, objects_byte, padding_byte,
    torn_record, control_byte, being_written,
]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_node_parity_brings_back_any_one_arena(
    loss: Callable[[Job, int], None], arena_root: Path, tmp_path: Path
) -> None:
    job = Job(arena_root, ("a", "a", "a"), NODE)
    wanted = made(job)
    loss(job, 1)
    told = restarted(job, tmp_path)
    assert_whole(job, told, 5, wanted[5])
    by_package = (header_byte, objects_byte, padding_byte, volatile_byte)
    assert told[0]["source"] == ("memory" if loss in by_package else "node_parity")
    (event,) = read_events(tmp_path / "events", "rebuilt")
    assert event["shards"] == ["dp1"] and event["rank"] == 1
    assert not read_events(tmp_path / "events", "fallback")


def test_one_bad_chunk_per_stripe_in_all_arenas_at_once(arena_root: Path, tmp_path: Path) -> None:
    job = Job(arena_root, ("a",) * 4, NODE)
    wanted = made(job)
    for rank, chunk in enumerate([0, 1, 2, 4]):
        flip_chunk(job, rank, 5, chunk)
    told = restarted(job, tmp_path)
    assert_whole(job, told, 5, wanted[5])
    assert told[0]["sources"]["node_parity"]["chunks"] == 4


def test_parity_in_an_arena_that_cannot_be_read_brings_another_one_back(arena_root: Path, tmp_path: Path) -> None:
    """The control block of dp1 is bad, and a chunk of dp2 whose stripe has its block in the arena of dp1."""
    job = Job(arena_root, ("a", "b", "c"), Modes(peer=True))
    wanted = made(job, (5,))
    (group,) = file_groups(job)
    keeper, other = (group.places[job.shard(rank)] for rank in (1, 2))
    chunk = next(
        chunk
        for stripe in stripes(group)
        if stripe.blocks[0][0] == keeper
        for member, chunk in stripe.data
        if member == other and chunk >= 0
    )
    control_byte(job, 1)
    for iteration in ITERATIONS:
        flip_chunk(job, 2, iteration, chunk)
    assert_whole(job, restarted(job, tmp_path), 5, wanted[5])


def test_nothing_of_parity_is_read_where_all_is_there(arena_root: Path, tmp_path: Path) -> None:
    job = Job(arena_root, ("a", "a", "a"), NODE)
    wanted = made(job)
    for path in arena_root.glob("*/a/dp*/parity.node.*"):
        flip(path, path.stat().st_size - 4096 * 2)
    for path in arena_root.glob("*/a/.mirror/*"):
        flip(path, 100)
    told = restarted(job, tmp_path)
    assert_whole(job, told, 5, wanted[5])
    assert told[0]["source"] == "memory"
    for name in ("rebuilt", "fallback", "arena_problem"):
        assert not read_events(tmp_path / "events", name)
    for event in read_events(tmp_path / "events", "verified"):
        assert event["states"] == {"sealed": 3} and len(event["unprotected"]) == 1


@pytest.mark.parametrize(("losses", "nodes"), [(1, 2), (1, 3), (2, 4)])
def test_peer_parity_brings_back_whole_nodes(losses: int, nodes: int, arena_root: Path, tmp_path: Path) -> None:
    names = tuple(f"n{index // 2}" for index in range(2 * nodes)) if nodes < 4 else ("n0", "n1", "n2", "n3")
    job = Job(arena_root, names, Modes(peer=True, peer_losses=losses))
    wanted = made(job)
    for node in sorted(set(names))[1 : 1 + losses]:
        shutil.rmtree(job.node_dir(node))
    told = restarted(job, tmp_path)
    assert_whole(job, told, 5, wanted[5])
    assert told[0]["source"] == "peer_parity"


@pytest.mark.parametrize("replica", ["replica", "copy"])
@pytest.mark.parametrize("nodes", [2, 3])
def test_replicas_parity_and_peers_bring_back_a_node(
    replica: str, nodes: int, arena_root: Path, tmp_path: Path
) -> None:
    names = tuple(f"n{rank}" for rank in range(nodes))
    modes = Modes(replica=replica, peer=True)
    job = Job(arena_root, names, modes, replica, (tuple(range(nodes)),))
    wanted = made(job)
    shutil.rmtree(job.node_dir("n1"))
    told = restarted(job, tmp_path)
    assert_whole(job, told, 5, wanted[5])
    mode = "copy" if replica == "copy" else "replica_parity"
    assert set(told[0]["sources"]) == {mode, "peer_parity"}


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("replica", ["replica", "copy"])
def test_a_slot_full_of_other_bytes_is_written_over(
    replica: str, uneven: bool, arena_root: Path, tmp_path: Path
) -> None:
    """Blocks in slots may be shorter than their chunks: the bytes after them are part of the chunk."""
    modes = Modes(replica=replica, peer=True)
    job = Job(arena_root, ("n0", "n1", "n2"), modes, replica, ((0, 1, 2),), uneven=uneven)
    wanted = made(job)
    with closing(Arena.open(job.path(0), writable=True)) as arena:
        slot, begin = slot_of(arena, 5), len(arena.image.header)
        arena.control.begin(slot)
        with arena.slot(slot) as view:
            view[begin:] = b"\xff" * (len(view) - begin)
    told = restarted(job, tmp_path)
    assert_whole(job, told, 5, wanted[5])


@pytest.mark.parametrize("replica", ["replica", "copy"])
def test_a_chunk_of_a_share_comes_back_without_any_package(replica: str, arena_root: Path, tmp_path: Path) -> None:
    """Blocks in slots are of every snapshot that was sealed, protected or not."""
    job = Job(arena_root, ("n0", "n1", "n2"), Modes(replica=replica), replica, ((0, 1, 2),))
    build(job, ITERATIONS, ())
    wanted = [contents(job, rank, 5) for rank in range(3)]
    with closing(Arena.open(job.path(1))) as arena:
        data, blocks = (section.first_chunk for section in arena.image.sections[1:])
    flip_chunk(job, 1, 5, data)
    flip_chunk(job, 2 if replica == "replica" else 0, 5, blocks)  # a block of another stripe
    told = restarted(job, tmp_path)
    assert_whole(job, told, 5, wanted)
    mode = "copy" if replica == "copy" else "replica_parity"
    assert set(told[0]["sources"]) == {mode}


def test_node_parity_and_peers_help_each_other(arena_root: Path, tmp_path: Path) -> None:
    """A node is lost and all chunks of an arena of another one: node parity reconstructs what peers need."""
    names = ("n0", "n0", "n0", "n1", "n1", "n1", "n2", "n2", "n2")
    job = Job(arena_root, names, Modes(node=True, peer=True))
    wanted = made(job, protected=(5,))
    shutil.rmtree(job.node_dir("n1"))
    all_chunks(job, 1)
    told = restarted(job, tmp_path)
    assert_whole(job, told, 5, wanted[5])
    assert set(told[0]["sources"]) == {"node_parity", "peer_parity"}


def test_ranks_on_other_nodes_than_before(arena_root: Path, tmp_path: Path) -> None:
    """Nodes swap names: what is there is read over the network, what is not is rebuilt where it is needed."""
    job = Job(arena_root, ("a", "a", "a", "b", "b", "b"), NODE)
    wanted = made(job)
    gone(job, 4)
    swapped = replace(job, nodes=("b", "b", "b", "a", "a", "a"))
    told = restarted(swapped, tmp_path)
    assert [value["iteration"] for value in told] == [5] * 6
    assert [value["node"] for value in told] == ["a", "a", "a", "b", "a", "b"]
    assert contents(swapped, 4, 5) == wanted[5][4]
