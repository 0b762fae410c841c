"""A node is lost for real, its agent, ranks, SMP and memory at once: another takes its place, and no bit differs."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ftckpt.torch
from ftckpt.memory.directory import SMP_STATE_NAME
from tests.support.launching import ITERATIONS, Nodes
from tests.support.pool import run_ranks
from tests.support.repository import ROOT
from tests.support.waiting import until

pytestmark = [pytest.mark.multiproc, pytest.mark.faults, pytest.mark.timeout(600)]

FSDP = (
    *("--wrap", "fsdp2", "--layers", "1", "--hidden", "32", "--seq", "32"),
    *("--global-batch", "8", "--micro-batch", "1"),
)
HSDP = (*FSDP, "--replicas", "2")
CHUNKS = ("--ftckpt-chunk-size", "64KiB", "--ftckpt-objects-size", "1MiB")

Make = Callable[..., Nodes]


def undisturbed(
    rank: int, world_size: int, arguments: tuple[str, ...], iterations: int
) -> tuple[list[str], dict[str, str]]:
    """Losses and final hashes of a rank."""
    import train_plain

    more = ["--iterations", str(iterations), "--log-file", os.devnull]
    job = train_plain.build(train_plain.parse_args([*arguments, *more]))
    job.checkpointer = ftckpt.torch.attach(job.model, job.optimizer)
    losses = [metrics["loss"].hex() for metrics in train_plain.train(job)]
    return losses, train_plain.final_hashes(job)


@functools.cache
def reference(
    num_ranks: int, arguments: tuple[str, ...], iterations: int = ITERATIONS
) -> tuple[list[str], list[dict[str, str]]]:
    """Losses, and the final hashes of the ranks."""
    results = [result.value for result in run_ranks(undisturbed, num_ranks, arguments, iterations, stand_in=False)]
    return results[0][0], [hashes for _, hashes in results]


@pytest.fixture
def make(tmp_path: Path, arena_root: Path) -> Iterator[Make]:
    made: list[Nodes] = []

    def make(count: int, arguments: tuple[str, ...], *settings: str, ranks: int = 4) -> Nodes:
        script = str(ROOT / "launch" / "train_plain.py")
        nodes = Nodes(
            tmp_path, arena_root, [script, *arguments, *CHUNKS, *settings], count=count, nproc=ranks // count
        )
        made.append(nodes)
        return nodes

    yield make
    for nodes in made:
        nodes.stop()


def lose_in_mid_iteration(nodes: Nodes, node: str, since: float = 0.0) -> tuple[set[str], int]:
    """Lose the node once some snapshot is protected; returns the shards it had, and that snapshot."""
    least = random.randint(3, 20)
    what = f"protection of a snapshot from {least} on"
    protected = nodes.wait_for(what, lambda: [found for found in nodes.protected(since) if found >= least])[-1]
    time.sleep(random.uniform(0, 0.05))  # any instant of an iteration
    return nodes.lose(node), protected


def check_came_back(nodes: Nodes, arguments: tuple[str, ...], protected: int, iterations: int = ITERATIONS) -> None:
    nodes.finish()
    (restored,) = nodes.restored()
    assert restored >= protected
    nodes.check_equal(*reference(nodes.count * nodes.nproc, arguments, iterations))
    nodes.check_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "replacement"),
    [(4, "127.0.0.4"), (4, "127.0.0.1"), (2, "127.0.0.1")],
    ids=["same ranks", "other ranks", "other ranks of two"],
)
def test_one_of_two_nodes(make: Make, ranks: int, replacement: str) -> None:
    """Each node alone holds its shards. With an address that sorts first the new node gets the ranks that the
    other one had, which then reads what it holds itself for the new one."""
    nodes = make(2, FSDP, ranks=ranks)
    nodes.start_node("a", "127.0.0.2")
    nodes.start_node("b", "127.0.0.3")
    lost, protected = lose_in_mid_iteration(nodes, "b")
    nodes.start_node("c", replacement)
    check_came_back(nodes, FSDP, protected)
    assert len(lost) == ranks // 2
    assert nodes.rebuilt().keys() == lost and all("peer_parity" in sources for sources in nodes.rebuilt().values())
    order = "ca" if replacement == "127.0.0.1" else "ac"
    nodes_now = [nodes.events(rank, "joined")[-1]["node"] for rank in range(ranks)]
    assert nodes_now == [node for node in order for _ in range(ranks // 2)]


@pytest.mark.slow
def test_a_killed_rank_of_the_only_node(make: Make) -> None:
    nodes = make(1, FSDP, ranks=2)
    nodes.start_node("a", "127.0.0.1")
    nodes.kill_rank(1)
    check_came_back(nodes, FSDP, protected=2)
    assert {event["source"] for event in nodes.events(0, "restored")} == {None, "memory"}


@pytest.mark.slow
def test_one_of_four_nodes(make: Make) -> None:
    """Two replicas of two shards each; shards and replicas move to other ranks."""
    nodes = make(4, HSDP)
    for index, node in enumerate("abcd"):
        nodes.start_node(node, f"127.0.0.{2 + index}")
    lost, protected = lose_in_mid_iteration(nodes, "c")
    nodes.start_node("e", "127.0.0.1")
    check_came_back(nodes, HSDP, protected)
    (shard,) = lost
    assert nodes.rebuilt().keys() == {shard} and "replica_parity" in nodes.rebuilt()[shard]
    assert [nodes.events(rank, "joined")[-1]["node"] for rank in range(4)] == list("eabd")


@pytest.mark.slow
def test_an_smp_that_is_lost_changes_nothing_and_its_successor_guards_the_node(make: Make) -> None:
    nodes, iterations = make(2, FSDP), 200
    nodes.common += ["--iterations", str(iterations)]  # as long as an SMP takes to start on busy cores
    nodes.start_node("a", "127.0.0.1")
    nodes.start_node("b", "127.0.0.2")
    nodes.wait_for("a protected snapshot", nodes.protected)
    smp = nodes.smp("a")
    assert smp is not None
    os.kill(smp, signal.SIGKILL)
    killed_at = time.time()
    nodes.wait_for("another SMP", lambda: nodes.smp("a") not in (None, smp))
    assert nodes.restored() == []
    back = nodes.wait_for("the event", lambda: nodes.events(0, "smp_restarted"))[-1]["time"]
    lost, protected = lose_in_mid_iteration(nodes, "b", since=max(back, killed_at))
    nodes.start_node("c", "127.0.0.2")
    check_came_back(nodes, FSDP, protected, iterations)
    assert nodes.rebuilt().keys() == lost


@pytest.mark.slow
def test_parity_inside_nodes_brings_no_node_back(make: Make) -> None:
    """The restart is refused: it names the shards, and leaves what there is."""
    nodes = make(2, FSDP, "--ftckpt-protect", "node")
    nodes.start_node("a", "127.0.0.1", "--restarts", "1")
    nodes.start_node("b", "127.0.0.2", "--restarts", "1")
    lost, _ = lose_in_mid_iteration(nodes, "b")
    nodes.start_node("c", "127.0.0.2", "--restarts", "1")
    until(lambda: "cannot be restored" in nodes.output(20000), nodes.output, secs=240)
    refusals = [line for line in nodes.output(20000).splitlines() if "cannot be restored" in line]
    assert all(shard in refusals[0] for shard in lost), refusals[0]
    assert nodes.restored() == [] and list(nodes.node_dir("a").iterdir())


@contextlib.contextmanager
def two_networks() -> Iterator[dict[str, tuple[str, str, list[str]]]]:
    """Two network namespaces that a cable joins: name → (address, interface, what runs a command in it)."""
    mark = uuid.uuid4().hex[:6]
    spaces = {name: f"ftckpt-{name}-{mark}" for name in "ab"}
    addresses = {"a": "10.231.77.1", "b": "10.231.77.2"}

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    try:
        for space in spaces.values():
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip(*f"link add cable netns {spaces['a']} type veth peer name cable netns {spaces['b']}".split())
        for name, space in spaces.items():
            ip("-n", space, "addr", "add", f"{addresses[name]}/24", "dev", "cable")
            ip("-n", space, "link", "set", "cable", "up")
        yield {name: (addresses[name], "cable", ["nsenter", f"--net=/run/netns/{spaces[name]}"]) for name in "ab"}
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
    finally:
        for space in spaces.values():
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


@pytest.mark.slow
def test_nodes_with_networks_of_their_own(make: Make) -> None:
    """SMPs find the addresses at which they reach each other: nothing of one node's loopback reaches the other."""
    with two_networks() as networks:
        nodes = make(2, FSDP)
        nodes.meet_at(networks["a"][0])
        for node, name in (("a", "a"), ("b", "b")):
            address, interface, prefix = networks[name]
            nodes.start_node(node, address, prefix=prefix, GLOO_SOCKET_IFNAME=interface)
        nodes.wait_for("a protected snapshot", nodes.protected)
        for node, other in ("ab", "ba"):
            told = json.loads((nodes.node_dir(node) / SMP_STATE_NAME).read_text())
            assert told["description"]["peers"][other][0] == networks[other][0]
        lost, protected = lose_in_mid_iteration(nodes, "b")
        address, interface, prefix = networks["b"]
        nodes.start_node("c", address, prefix=prefix, GLOO_SOCKET_IFNAME=interface)
        check_came_back(nodes, FSDP, protected)
        assert nodes.rebuilt().keys() == lost
