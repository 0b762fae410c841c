"""Nodes are lost and the job resumes with fewer ranks, which reconstruct the lost shards."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftckpt.events import Events
from ftckpt.group import Group
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.parity.modes import Modes
from ftckpt.restore.restart import Restart
from ftckpt.restore.shard_reconstruction import ShardReconstruction
from tests.support.event_logs import read_events
from tests.support.pool import run_ranks
from tests.support.protected import Job, build, contents

pytestmark = pytest.mark.multiproc

PEER = Modes(peer=True)


def choose(rank: int, world_size: int, job: Job, nodes: tuple[str, ...], events: Path) -> Any:
    """A start of ``job`` with one rank for each of ``nodes``, up to the point where tensors would be read."""
    return chosen(rank, job, nodes, events)


def choose_and_die(rank: int, world_size: int, job: Job, nodes: tuple[str, ...], kill: str) -> Any:
    """Runs ``choose``; rank 0 dies when it reaches the step ``kill`` of a reconstruction."""
    return chosen(rank, job, nodes, None, kill)


def chosen(rank: int, job: Job, nodes: tuple[str, ...], events: Path | None, kill: str = "") -> Any:
    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if kill and rank == 0:
        setattr(ShardReconstruction, kill, die)
    members = tuple(RankPlace({"dp": place}, node) for place, node in enumerate(nodes))
    topology = Topology(rank, members, {"dp": len(nodes)})
    found = Restart(Group(30.0), topology, job.node_dir(topology.me.node), Events(events, rank))
    try:
        decision = found.choose("fail")
        found.invalidate_newer(decision)
        assert decision is not None
        sources = {shard: source.node for shard, source in decision.sources.items()}
        return decision.snapshot.iteration, decision.layout, sources, found.source
    finally:
        found.close()


def started(job: Job, nodes: tuple[str, ...], tmp_path: Path) -> tuple[int, str, Job]:
    """The iteration, its source, and the job with its arenas where they are now."""
    told = [result.value for result in run_ranks(choose, len(nodes), job, nodes, tmp_path / "events")]
    assert all(value == told[0] for value in told)
    iteration, layout, sources, source = told[0]
    assert layout == job.topology.layout
    shards = [member.shard for member in job.topology.members]
    return iteration, source, replace(job, nodes=tuple(sources[shard] for shard in shards))


CASES: dict[str, tuple[Job, tuple[str, ...], tuple[str, ...], set[str]]] = {
    "one of four nodes of two ranks": (
        Job(Path(), ("n0", "n0", "n1", "n1", "n2", "n2", "n3", "n3"), PEER), ("n3",), ("n0", "n1", "n2"),
        {"peer_parity"},
    ),
    "two of four nodes": (
        Job(Path(), ("n0", "n1", "n2", "n3"), Modes(peer=True, peer_losses=2)), ("n0", "n2"),
        ("n1", "n3", "n3"), {"peer_parity"},
    ),
    "a mirrored node": (
        Job(Path(), ("n0", "n0", "n1", "n1"), Modes(peer=True, peer_group=2)), ("n0",), ("n1",),
        {"peer_parity"},
    ),
    "replicas and peers": (
        Job(Path(), ("n0", "n1", "n2"), Modes(replica="replica", peer=True), "replica", ((0, 1, 2),)), ("n1",),
        ("n0", "n2"), {"replica_parity", "peer_parity"},
    ),
    "a node of parity of its own, and a new one": (
        Job(Path(), ("n0", "n0", "n0", "n1", "n1", "n1", "n2", "n2", "n2"), Modes(node=True, peer=True)), ("n1",),
        ("n0", "n2", "n9", "n9"), {"peer_parity"},
    ),
}  # fmt: skip
"""The job, lost nodes, nodes of the remaining ranks, the sources of each reconstructed shard."""


@pytest.mark.parametrize("case", CASES)
def test_what_is_gone_is_rebuilt_evenly(case: str, arena_root: Path, tmp_path: Path) -> None:
    job, gone, nodes, modes = CASES[case]
    job = replace(job, root=arena_root)
    build(job, (3, 4, 5), (4, 5))
    wanted = [contents(job, rank, 5) for rank in range(len(job.nodes))]
    for node in gone:
        shutil.rmtree(job.node_dir(node))
    iteration, source, now = started(job, nodes, tmp_path)
    assert (iteration, set(source.split("+"))) == (5, modes)
    assert [contents(now, rank, 5) for rank in range(len(job.nodes))] == wanted
    kept = [(before, after) for before, after in zip(job.nodes, now.nodes, strict=True) if before not in gone]
    assert all(before == after for before, after in kept)
    counts = Counter({node: 0 for node in nodes})
    counts.update(now.nodes)
    assert max(counts.values()) - min(counts.values()) <= 1 or "n9" in nodes
    rebuilt = [event["shards"] for event in read_events(tmp_path / "events", "rebuilt")]
    assert sum(map(len, rebuilt)) == sum(node in gone for node in job.nodes)
    assert not read_events(tmp_path / "events", "arena_problem"), "shards of the old layout are no strangers"
    again, source, _ = started(job, nodes, tmp_path)
    assert (again, source) == (5, "memory"), "what was rebuilt stays"


def test_an_arena_of_a_node_that_has_fewer_ranks_now(arena_root: Path, tmp_path: Path) -> None:
    """Shards of both layouts have the same names."""
    job = Job(arena_root, ("a", "a", "a"), Modes(node=True))
    build(job, (4, 5), (4, 5))
    wanted = [contents(job, rank, 5) for rank in range(3)]
    shutil.rmtree(job.path(1))
    iteration, source, now = started(job, ("a", "a"), tmp_path)
    assert (iteration, source) == (5, "node_parity")
    assert [contents(now, rank, 5) for rank in range(3)] == wanted


@pytest.mark.faults
@pytest.mark.parametrize("kill", ["open", "put", "finish"])
def test_killed_while_it_rebuilds_for_another_layout(kill: str, arena_root: Path, tmp_path: Path) -> None:
    """The next start reconstructs it again, wherever its ranks are."""
    job = Job(arena_root, ("n0", "n0", "n1", "n1", "n2", "n2"), PEER)
    build(job, (3, 4, 5), (4, 5))
    wanted = [contents(job, rank, 5) for rank in range(6)]
    shutil.rmtree(job.node_dir("n1"))
    nodes = ("n0", "n2", "n2")
    ended = run_ranks(choose_and_die, 3, job, nodes, kill, expect_failures=True, grace_secs=1.0)
    assert ended[0].exitcode == -signal.SIGKILL
    for then in (("n2", "n0"), ("n0", "n2", "n2", "n0", "n0", "n2")):
        iteration, _, now = started(job, then, tmp_path)
        assert iteration == 5 and [contents(now, rank, 5) for rank in range(6)] == wanted
