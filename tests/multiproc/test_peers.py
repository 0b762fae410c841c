"""SMPs of several nodes: parity over nodes and packages of each other's shards, over real TCP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ftckpt.memory.checks import CheckState
from ftckpt.memory.heartbeat import Heartbeat
from ftckpt.memory.package import mirror_dir
from ftckpt.memory.parity_file import ParityFile
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.modes import Modes
from ftckpt.smp import chunk_source
from ftckpt.smp.channel import Channel, Delivery
from ftckpt.smp.chunk_source import Feed
from ftckpt.smp.peers import CONNECTIONS
from ftckpt.smp.requests import BytesRequest, ChunkRequest, PackageRequest
from ftckpt.smp.traffic import NetworkProfile
from tests.support.smp_nodes import CHUNK, LINEAGE, Node, Smp, check_parity, describe, fill, flip, parity_of
from tests.support.tiers import by_default
from tests.support.waiting import until

pytestmark = pytest.mark.multiproc
PEER = Modes(peer=True)


class Cluster:
    """Nodes and the duties of their SMPs, in this process."""

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

    def cover(self, slot: int, iteration: int) -> None:
        """A snapshot becomes the target, and all nodes cover it."""
        self.snapshot(slot, iteration)
        self.target(iteration)
        until(lambda: self.covered(iteration), "covered")

    def covered(self, iteration: int) -> bool:
        return all(node.covered(iteration) for node in self.nodes)

    def until_asked(self, node: int, times: int = 5) -> None:
        """Until others have asked a node so many times more."""
        server, asked = self.smps[node].server, []
        find = server._find

        def counted(request: BytesRequest) -> AbstractContextManager[Delivery | None]:
            asked.append(request)
            return find(request)

        server._find = counted
        until(lambda: len(asked) >= times, "asked again and again")
        server._find = find

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
def test_a_target_is_covered_on_all_nodes(cluster: Cluster, ranks_of: list[list[int]], modes: Modes) -> None:
    cluster.build(ranks_of, modes)
    for iteration in (1, 2):
        cluster.cover(iteration, iteration)
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
        until(lambda: cluster.covered(iteration), "covered")  # noqa: B023
        for smp in cluster.smps:
            smp.pause()
        assert cluster.check(iteration) >= 2
        span = cluster.nodes[0].arenas[0].image.chunks[0]
        with cluster.nodes[0].arenas[0].slot(iteration) as slot:
            chunks.append(bytes(slot[span.begin : span.begin + 1000]) in sent)
    assert chunks == [True, False]


def test_each_byte_of_state_travels_once_per_loss(cluster: Cluster) -> None:
    cluster.build([[0], [1], [2]], Modes(peer=True, peer_losses=1))
    cluster.cover(0, 1)
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
    assert not any(node.covered(1) for node in cluster.nodes)
    assert all(smp.duties.cannot is None and smp.events.of("peer_lost") == [] for smp in cluster.smps)
    cluster.nodes[2].snapshot(0, 1)
    until(lambda: cluster.covered(1), "covered")
    assert cluster.check(1) >= 3


def test_a_target_that_changes_is_left_at_once(cluster: Cluster) -> None:
    cluster.build([[0], [1]], PEER)
    cluster.nodes[0].snapshot(0, 1)
    cluster.target(1)  # n1 never has it
    until(lambda: cluster.smps[0].duties.status()["covering"] and cluster.nodes[0].checked(1), "under way")
    cluster.cover(1, 2)
    assert cluster.check(2) >= 2 and not cluster.nodes[0].covered(1)


def test_a_node_that_stays_away_is_given_up_and_told_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftckpt.smp.peers._BACKOFF_SECS", (0.1,))
    cluster.build([[0], [1]], PEER, protect_timeout_secs=8.0)
    cluster.snapshot(0, 1)
    cluster.snapshot(1, 2)
    until(lambda: all(node.checked(i) for node in cluster.nodes for i in (1, 2)), "checked")
    cluster.smps[1].pause()
    cluster.smps[1].end()
    begun = time.monotonic()
    cluster.target(1)
    duties, events = cluster.smps[0].duties, cluster.smps[0].events
    until(lambda: duties.cannot == SnapshotId(LINEAGE, 1), "cannot")
    secs = time.monotonic() - begun
    assert 3.5 < secs < 20
    begun = time.monotonic()
    cluster.target(2)
    until(lambda: duties.cannot == SnapshotId(LINEAGE, 2), "cannot, at once this time")
    assert time.monotonic() - begun < secs / 2
    assert [event["node"] for event in events.of("peer_lost")] == ["n1"]
    assert [event["iteration"] for event in events.of("not_covered")] == [1, 2]
    assert "n1 at 127.0.0.1" in events.of("not_covered")[0]["reason"]
    assert duties.status()["state"] == "cannot" and "n1" in duties.status()["failing"]
    assert cluster.nodes[0].states(2) == [CheckState.CHECKED]


def test_a_node_with_another_secret_gets_nothing(cluster: Cluster) -> None:
    cluster.build([[0], [1]], PEER, start=False, protect_timeout_secs=4.0)
    ports = {node.name: smp.port for node, smp in zip(cluster.nodes, cluster.smps, strict=True)}
    other = describe(cluster.nodes[1], cluster.nodes, PEER, ports, secret="a1" * 32, protect_timeout_secs=4.0)
    cluster.smps[1].configure(other)
    for smp in cluster.smps:
        smp.start()
    cluster.snapshot(0, 1)
    cluster.target(1)
    until(lambda: all(smp.duties.cannot for smp in cluster.smps), "cannot")
    for smp in cluster.smps:
        assert [event["address"] for event in smp.events.of("peer_refused")] == ["127.0.0.1"]
        assert len(smp.events.of("peer_lost")) == len(smp.events.of("not_covered")) == 1
        assert smp.duties.status()["received_bytes"] == 0
    assert not any(node.packages(1) != [node.arenas[0].manifest.shard] for node in cluster.nodes)
    # The same secret for all of them, as after a restart of the trainers.
    for node, smp in zip(cluster.nodes, cluster.smps, strict=True):
        smp.pause()
        smp.configure(describe(node, cluster.nodes, PEER, ports, secret="b2" * 32))
        smp.start()
    until(lambda: cluster.covered(1), "covered")


def test_bad_bytes_of_another_node_make_no_parity(cluster: Cluster) -> None:
    cluster.build([[0], [1], [2]], PEER, protect_timeout_secs=3.0)
    cluster.snapshot(0, 1)
    until(lambda: all(node.checked(1) for node in cluster.nodes), "checked")
    arena = cluster.nodes[1].arenas[0]
    flip(arena, 0, arena.image.chunks[0].begin + 1)
    cluster.target(1)
    lacking = lambda: [smp for smp in cluster.smps if smp.duties.cannot]  # noqa: E731
    until(lacking, "cannot")
    assert "does not match its checksum" in lacking()[0].events.of("not_covered")[0]["reason"]
    assert not cluster.covered(1)
    flip(arena, 0, arena.image.chunks[0].begin + 1)
    cluster.target(-1)
    until(lambda: not any(smp.duties.status()["target"] for smp in cluster.smps), "given up")
    cluster.target(1)
    until(lambda: cluster.covered(1), "covered")
    assert cluster.check(1) >= 3


def test_only_a_few_chunks_are_asked_for_ahead(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    most = [0]
    ask = Feed._request_next

    def counted(self: Feed) -> Any:
        yield from ask(self)
        most[0] = max(most[0], len(self._requested))

    monkeypatch.setattr(Feed, "_request_next", counted)
    monkeypatch.setattr(chunk_source, "AHEAD_BYTES", 3 * CHUNK)
    cluster.build([[0], [1], [2]], PEER)
    cluster.cover(0, 1)
    assert most[0] == 3


def test_packages_are_pulled_as_memory_allows(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way: dict[str, int] = {}
    most = 0
    request, take = chunk_source.Sources.request, chunk_source.Sources.take

    def requested(self: Any, node: str, wanted: BytesRequest, at_most: int) -> Any:
        nonlocal most
        fetch = yield from request(self, node, wanted, at_most)
        if isinstance(wanted, PackageRequest) and self.node == "n1":
            under_way[wanted.shard] = at_most  # by shard: what its node did not have yet is requested anew
            most = max(most, sum(under_way.values()))
        return fetch

    def taken(self: Any, node: str, fetch: Any, problem: Any) -> Any:
        data = yield from take(self, node, fetch, problem)
        if isinstance(fetch.request, PackageRequest):
            assert len(data) <= fetch.at_most < len(data) + (64 << 10), "what may come is known beforehand"
            del under_way[fetch.request.shard]
        return data

    monkeypatch.setattr(chunk_source.Sources, "request", requested)
    monkeypatch.setattr(chunk_source.Sources, "take", taken)
    cluster.build([[0, 1, 2, 3, 4], [5]], PEER, start=False)
    size = cluster.nodes[0].holdings()[0].package_bytes
    monkeypatch.setattr("ftckpt.smp.encode.PULLED_BYTES", int(2.5 * size))
    for node in cluster.nodes:
        node.snapshot(0, 1)
    cluster.target(1)
    cluster.smps[0].start()
    smp = cluster.smps[1].start()
    until(lambda: cluster.nodes[1].covered(1), "covered")
    assert size < most <= 3.5 * size and len(cluster.nodes[1].packages(1)) == 6
    assert smp.duties.status()["network"] == {"bytes_per_sec": 0.0, "source": "the test", "wait_secs": 0.0}


def test_the_limit_of_what_is_received_is_kept(cluster: Cluster) -> None:
    cluster.build([[0], [1]], PEER, network_rate="200kB/s")
    cluster.cover(0, 1)
    for smp in cluster.smps:
        [covered] = smp.events.of("covered")
        assert covered["secs"] > 0.6 * (covered["received_bytes"] - CHUNK) / 2e5


def test_trainers_wait_as_long_as_the_network_needs(cluster: Cluster) -> None:
    cluster.build([[0], [1]], PEER, start=False, network_rate="200kB/s")
    one = cluster.smps[0]
    ports = {node.name: smp.port for node, smp in zip(cluster.nodes, cluster.smps, strict=True)}
    described = describe(cluster.nodes[0], cluster.nodes, PEER, ports, network_rate="2MB/s")
    one.configure({**described, "received_bytes": 5 * CHUNK})
    cluster.snapshot(0, 1)
    cluster.target(1)
    for smp in cluster.smps:
        smp.start()
    until(lambda: cluster.covered(1), "covered")
    forecast_secs, sent_secs = 5 * CHUNK / 2e6, 5 * CHUNK / 2e5
    trainer = Heartbeat.open(cluster.nodes[0].dir, None)
    assert 4 * forecast_secs < 2 * sent_secs < trainer.smp_wait_secs() < 10 * sent_secs, "the other one sends slowly"


def test_what_is_sent_is_limited_too(cluster: Cluster) -> None:
    cluster.build([[0], [1]], PEER, start=False)
    one, other = cluster.smps
    ports = {node.name: smp.port for node, smp in zip(cluster.nodes, cluster.smps, strict=True)}
    one.configure(describe(cluster.nodes[0], cluster.nodes, PEER, ports, network_rate="200kB/s"))
    cluster.snapshot(0, 1)
    cluster.target(1)
    for smp in cluster.smps:
        smp.start()
    until(lambda: cluster.nodes[1].covered(1), "covered by the one that may receive all it likes")
    [covered] = other.events.of("covered")
    assert covered["secs"] > 0.6 * (covered["received_bytes"] - CHUNK) / 2e5
    assert one.duties.status()["sent_bytes"] >= covered["received_bytes"]


@pytest.mark.parametrize("phase", by_default(["tail", "fence", "optimizer"], ["tail"]))
def test_nothing_is_sent_while_training_uses_the_network(cluster: Cluster, phase: str) -> None:
    cluster.build([[0], [1]], PEER, start=False)
    cluster.snapshot(0, 1)
    cluster.target(1)
    deadline = time.monotonic() + 20.0
    while not cluster.nodes[0].checked(1):
        assert time.monotonic() < deadline
        for smp in cluster.smps:
            smp.duties.step(time.monotonic() + 0.1)
    pulse = Heartbeat.open(cluster.nodes[0].dir, 0)
    pulse.beat(1, phase)
    [arena] = cluster.nodes[0].arenas
    service, wanted = cluster.smps[0].duties.service, ChunkRequest(SnapshotId(LINEAGE, 1), arena.manifest.shard, 0)
    begun = time.monotonic()
    threading.Timer(0.5, pulse.beat, (1, "forward")).start()
    with service.find(wanted) as delivery:
        assert delivery is not None and time.monotonic() - begun > 0.4
    pulse.leave()


@pytest.mark.parametrize("phase", by_default(["tail", "fence", "optimizer"], ["tail"]))
def test_transfers_hold_while_training_uses_the_network(cluster: Cluster, phase: str) -> None:
    cluster.build([[0], [1]], PEER, start=False)
    cluster.snapshot(0, 1)
    cluster.target(1)
    pulse = Heartbeat.open(cluster.nodes[0].dir, 0)
    pulse.beat(1, phase)
    asked: list[float] = []
    fetch = cluster.smps[0].duties._peers.fetch
    cluster.smps[0].duties._peers.fetch = lambda *a: (asked.append(time.monotonic()), fetch(*a))[1]  # type: ignore[method-assign]
    begun = time.monotonic()
    for smp in cluster.smps:
        smp.start()
    until(lambda: asked, "asked, although the phase never ends")
    assert asked[0] - begun > 0.3
    pulse.beat(1, "forward")
    until(lambda: cluster.covered(1), "covered")
    pulse.leave()


def test_transfers_wait_for_an_idle_part_whatever_the_phase(cluster: Cluster) -> None:
    cluster.build([[0], [1]], PEER, start=False)
    cluster.snapshot(0, 1)
    cluster.target(1)
    one = cluster.smps[0].duties
    one._traffic.profile = NetworkProfile(2.0, ((0.5, 1.0),))
    asked: list[float] = []
    fetch = one._peers.fetch
    one._peers.fetch = lambda *a: (asked.append(time.monotonic()), fetch(*a))[1]  # type: ignore[method-assign]
    pulse = Heartbeat.open(cluster.nodes[0].dir, 0)
    pulse.beat(1, "forward")
    begun = time.monotonic()
    for smp in cluster.smps:
        smp.start()
    until(lambda: cluster.covered(1), "covered")
    assert asked[0] - begun > 0.9
    pulse.leave()


def test_bad_parity_and_packages_are_fetched_again(cluster: Cluster) -> None:
    cluster.build([[0], [1], [2]], PEER)
    cluster.cover(0, 1)
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
    until(lambda: smp.events.of("repaired"), "the block is computed anew")
    until(lambda: node.packages(1) == ["dp0", "dp1", "dp2"] and cluster.covered(1), "the package comes again")
    assert cluster.check(1) >= 3


def test_what_is_gone_at_the_others_does_not_stop_a_scrub(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftckpt.smp.scrub._REMOTE_SECS", 0.5)
    cluster.build([[0], [1]], PEER, scrub_secs=0.1)
    cluster.cover(0, 1)
    smp, node = cluster.smps[0], cluster.nodes[0]
    path = parity_of(node.arenas[0].path, "peer", 1).path
    smp.pause()
    cluster.target(-1)
    for other in cluster.nodes[1:]:
        fill(other.arenas[0], 0, 2)
    file = ParityFile.open(path, writable=True)
    file.block(0)[1] ^= 1
    file.close()
    before = len(smp.events.of("scrubbed"))
    smp.start()
    until(lambda: len(smp.events.of("scrubbed")) > before + 1, "scrubbed")
    assert len(smp.events.of("corrupt")) == 1 and smp.events.of("repaired") == []


def test_packages_of_a_protected_snapshot_are_pulled_again_or_covered_is_taken_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftckpt.smp.scrub._REMOTE_SECS", 0.5)
    cluster.build([[0], [1]], PEER, scrub_secs=0.1)
    cluster.cover(0, 1)
    node, smp = cluster.nodes[0], cluster.smps[0]
    for each in cluster.nodes:
        each.protected(1)
    cluster.target(-1)
    until(lambda: not smp.duties.status()["target"], "no target any more")
    package = next(mirror_dir(node.dir).glob("dp1.*"))
    package.write_bytes(package.read_bytes()[:-1])
    until(lambda: smp.events.of("repaired"), "repaired")
    assert node.packages(1) == ["dp0", "dp1"] and node.covered(1)
    cluster.smps[1].pause()
    cluster.smps[1].end()
    package.write_bytes(package.read_bytes()[:-1])
    until(lambda: not package.exists(), "nobody has it any more")
    assert node.states(1) == [CheckState.CHECKED]


def test_what_a_target_that_was_given_up_asked_for_is_not_transferred(cluster: Cluster) -> None:
    cluster.build([[0, 1, 2], [3, 4, 5]], PEER)
    for iteration in (10, 11, 12):
        cluster.snapshot(iteration - 10, iteration)
    until(lambda: all(node.checked(i) for node in cluster.nodes for i in (10, 11, 12)), "checked")
    served: list[int] = []
    server = cluster.smps[1].server
    find = server._find

    @contextmanager
    def slow(request: BytesRequest) -> Iterator[Delivery | None]:
        time.sleep(0.2)  # a slow network
        served.append(request.snapshot.iteration)
        with find(request) as answer:
            yield answer

    server._find = slow
    for attempt in range(16):  # targets are given up one after the other
        cluster.nodes[0].target(10 + attempt % 2)
        time.sleep(0.1)  # less than a transfer takes
    cluster.nodes[0].target(12)
    status = cluster.smps[0].duties.status
    until(lambda: (status()["target"] or {}).get("iteration") == 12, "the SMP has read its new target")
    before = len(served)
    until(lambda: 12 in served, "the last one is asked for")
    assert served.index(12) - before <= CONNECTIONS, "those that were under way already"


def test_packages_that_are_not_there_yet_cost_no_network(cluster: Cluster) -> None:
    """A package may be of any size up to a bound: what counts is what comes."""
    cluster.build([[0, 1], [2, 3]], PEER, network_rate="20MB/s")
    cluster.nodes[0].snapshot(0, 1)
    cluster.target(1)
    cluster.until_asked(1)
    cluster.nodes[1].snapshot(0, 1)
    begun = time.monotonic()
    until(lambda: cluster.covered(1), "covered")
    assert time.monotonic() - begun < 15
