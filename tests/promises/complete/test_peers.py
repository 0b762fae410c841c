"""SMPs of several nodes: parity over nodes and packages of each other's shards, over real TCP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ftckpt.memory.heartbeat import Heartbeat
from ftckpt.memory.package import mirror_dir
from ftckpt.memory.parity_file import ParityFile
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.modes import Modes
from ftckpt.smp import chunk_source
from ftckpt.smp.channel import Channel
from ftckpt.smp.requests import ChunkRequest
from tests.support.smp_nodes import Node, Smp, check_parity, describe, parity_of
from tests.support.snapshots import LINEAGE
from tests.support.tiers import by_default
from tests.support.waiting import until

pytestmark = pytest.mark.multiproc
PEER = Modes(peer=True)


class Cluster:
    """Nodes and the tasks of their SMPs, in this process."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root, self._stack = root, stack
        self.nodes: list[Node] = []
        self.smps: list[Smp] = []
        self.modes = PEER

    def build(self, ranks_of: Sequence[Sequence[int]], modes: Modes, *, start: bool = True, **settings: Any) -> None:
        self.modes = modes
        of = sum(map(len, ranks_of))
        for index, ranks in enumerate(ranks_of):
            node = Node(self.root, f"n{index}", ranks, of)
            self._stack.callback(node.close)
            self.nodes.append(node)
            self.smps.append(Smp(node))
            self._stack.callback(self.smps[-1].close)
        self.configure(**settings)
        for smp in self.smps if start else ():
            smp.start()

    def configure(self, **settings: Any) -> None:
        ports = {node.name: smp.listen() for node, smp in zip(self.nodes, self.smps, strict=True)}
        for node, smp in zip(self.nodes, self.smps, strict=True):
            smp.configure(describe(node, self.nodes, self.modes, ports, **settings))

    def snapshot(self, slot: int, iteration: int) -> None:
        for node in self.nodes:
            node.snapshot(slot, iteration)

    def target(self, iteration: int) -> None:
        for node in self.nodes:
            node.target(iteration)

    def encode(self, slot: int, iteration: int) -> None:
        """A snapshot becomes the target, and all nodes encode it."""
        self.snapshot(slot, iteration)
        self.target(iteration)
        until(lambda: self.encoded(iteration), "encoded")

    def encoded(self, iteration: int) -> bool:
        return all(node.encoded(iteration) for node in self.nodes)

    def until_asked(self, node: int, times: int = 5) -> None:
        """Until others have asked a node so many times more."""
        enough = len(self.smps[node].asked) + times
        until(lambda: len(self.smps[node].asked) >= enough, "asked again and again")

    def check(self, iteration: int) -> int:
        return check_parity(self.nodes, self.modes, iteration)


@pytest.fixture
def cluster(arena_root: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(arena_root, stack)


@pytest.mark.parametrize(
    "ranks_of, modes",
    [
        ([[0], [1]], Modes(peer=True)),
        ([[0, 1], [2, 3], [4, 5]], Modes(peer=True)),
        ([[0], [1], [2], [3], [4]], Modes(peer=True, peer_losses=2)),
        ([[0], [1], [2]], Modes(peer=True, peer_losses=2)),
        ([[0, 1, 2], [3, 4, 5]], Modes(node=True, peer=True)),
        ([[0, 1], [2]], Modes(peer=True)),
    ],
    ids=["two", "three-by-two", "rs", "mirror", "node-and-peer", "uneven"],
)
def test_a_target_is_encoded_on_all_nodes(cluster: Cluster, ranks_of: list[list[int]], modes: Modes) -> None:
    cluster.build(ranks_of, modes)
    for iteration in (1, 2):
        cluster.encode(iteration, iteration)
        assert cluster.check(iteration) >= len(ranks_of)
        for node in cluster.nodes:
            node.protected(iteration)
    assert cluster.check(1) >= len(ranks_of), "the parity before the last one is still there"
    shards = sorted(arena.manifest.shard for node in cluster.nodes for arena in node.arenas)
    kept = [shard for node in cluster.nodes for shard in node.packages(2)]
    assert sorted(kept) == sorted(shards * min(1 + modes.mirror_copies, len(cluster.nodes)))
    received = sum(event["received_bytes"] for smp in cluster.smps for event in smp.events.of("covered"))
    assert received > 0 and all(smp.events.of("peer_lost") == [] for smp in cluster.smps)


def test_what_travels_is_sealed_where_the_job_wants_it(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = bytearray()
    write = Channel.write

    def recorded(self: Channel, data: bytes | bytearray | memoryview, deadline: float) -> None:
        sent.extend(data)
        write(self, data, deadline)

    monkeypatch.setattr(Channel, "write", recorded)
    cluster.build([[0], [1]], PEER, start=False)
    chunks = []
    for encrypt in (False, True):
        cluster.configure(encrypt=encrypt)
        sent.clear()
        iteration = 1 + encrypt
        cluster.snapshot(iteration, iteration)
        cluster.target(iteration)
        for smp in cluster.smps:
            smp.start()
        until(lambda: cluster.encoded(iteration), "encoded")  # noqa: B023
        for smp in cluster.smps:
            smp.pause()
        assert cluster.check(iteration) >= 2
        span = cluster.nodes[0].arenas[0].image.chunks[0]
        with cluster.nodes[0].arenas[0].slot(iteration) as slot:
            chunks.append(bytes(slot[span.begin : span.begin + 1000]) in sent)
    assert chunks == [True, False]


def test_each_byte_of_state_travels_once_per_loss(cluster: Cluster) -> None:
    cluster.build([[0], [1], [2]], Modes(peer=True, peer_losses=1))
    cluster.encode(0, 1)
    arenas = [arena for node in cluster.nodes for arena in node.arenas]
    state = sum(arena.image.chunks[c].nbytes for arena in arenas for c in range(arena.image.num_stepped_chunks))
    packages = sum(path.stat().st_size for node in cluster.nodes for path in mirror_dir(node.dir).glob("*"))
    received = sum(event["received_bytes"] for smp in cluster.smps for event in smp.events.of("covered"))
    assert received == state + packages * 2 // 3  # of three copies of a package one did not travel


def test_one_that_is_late_is_waited_for(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_source, "_REPORT_SECS", 0.02)
    cluster.build([[0], [1], [2]], PEER)
    for node in cluster.nodes[:2]:
        node.snapshot(0, 1)
    cluster.target(1)
    until(lambda: all(node.checked(1) for node in cluster.nodes[:2]), "checked")
    cluster.until_asked(2)
    assert not any(node.encoded(1) for node in cluster.nodes)
    assert all(smp.tasks.cannot is None and smp.events.of("peer_lost") == [] for smp in cluster.smps)
    cluster.nodes[2].snapshot(0, 1)
    until(lambda: cluster.encoded(1), "encoded")
    assert cluster.check(1) >= 3


def test_a_target_that_changes_is_left_at_once(cluster: Cluster) -> None:
    cluster.build([[0], [1]], PEER)
    cluster.nodes[0].snapshot(0, 1)
    cluster.target(1)  # n1 never has it
    until(lambda: cluster.smps[0].tasks.status()["encoding"] and cluster.nodes[0].checked(1), "under way")
    cluster.encode(1, 2)
    assert cluster.check(2) >= 2 and not cluster.nodes[0].encoded(1)


@pytest.mark.parametrize("phase", by_default(["tail", "fence", "optimizer"], ["tail"]))
def test_nothing_is_sent_while_training_uses_the_network(cluster: Cluster, phase: str) -> None:
    cluster.build([[0], [1]], PEER, start=False)
    cluster.snapshot(0, 1)
    cluster.target(1)
    deadline = time.monotonic() + 20.0
    while not cluster.nodes[0].checked(1):
        assert time.monotonic() < deadline
        for smp in cluster.smps:
            smp.tasks.step(time.monotonic() + 0.1)
    pulse = Heartbeat.open(cluster.nodes[0].dir, 0)
    pulse.beat(1, phase)
    [arena] = cluster.nodes[0].arenas
    service, wanted = cluster.smps[0].tasks.service, ChunkRequest(SnapshotId(LINEAGE, 1), arena.manifest.shard, 0)
    begun = time.monotonic()
    threading.Timer(0.5, pulse.beat, (1, "forward")).start()
    with service.find(wanted) as delivery:
        assert delivery is not None and time.monotonic() - begun > 0.4
    pulse.leave()


def test_bad_parity_and_packages_are_fetched_again(cluster: Cluster) -> None:
    cluster.build([[0], [1], [2]], PEER)
    cluster.encode(0, 1)
    for smp in cluster.smps:
        smp.pause()
    node, smp = cluster.nodes[0], cluster.smps[0]
    file = parity_of(node.arenas[0].path, "peer", 1)
    path = file.path
    file.close()
    file = ParityFile.open(path, writable=True)
    file.block(0)[1] ^= 1
    file.close()
    package = next(mirror_dir(node.dir).glob("dp1.*"))
    package.write_bytes(package.read_bytes()[:-1])
    cluster.configure(scrub_secs=0.1)
    for each in cluster.smps:
        each.start()
    until(lambda: smp.events.of("corrupt"), "the block is noticed")
    covered = len(smp.events.of("covered"))
    until(lambda: len(smp.events.of("covered")) > covered, "encoded again")
    until(lambda: node.packages(1) == ["dp0", "dp1", "dp2"] and cluster.encoded(1), "the package comes again")
    assert cluster.check(1) >= 3
