"""SMPs that are killed, stopped, misled or out of memory: protected snapshots stay, and training continues."""

from __future__ import annotations

import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from ftckpt.errors import PeerError
from ftckpt.memory.checks import CheckState
from ftckpt.memory.package import pack
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.modes import Modes
from ftckpt.smp import chunk_source
from ftckpt.smp.channel import FRAME, Channel, Delivery, Trust
from ftckpt.smp.requests import BytesRequest, ChunkRequest, decode_request, encode_object, exchange
from tests.support.smp_nodes import QUICK, SECRET, Node, Smp, SmpProcess, check_parity, describe
from tests.support.snapshots import LINEAGE, fill
from tests.support.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.multiproc]
PEER = Modes(peer=True)
NODE = Modes(node=True)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def two_nodes(root: Path, stack: ExitStack, chunks: int = 5) -> list[Node]:
    nodes = [Node(root, f"n{index}", [index], 2, chunks=chunks) for index in range(2)]
    for node in nodes:
        stack.callback(node.close)
    return nodes


def start_process(node: Node, stack: ExitStack, port: int = 0) -> SmpProcess:
    process = SmpProcess(node, port)
    stack.callback(process.kill)
    return process


def tell_port(smp: Smp, nodes: Sequence[Node], ports: dict[str, int], port: int, **settings: Any) -> None:
    """The port of n1: another one than before if another process has taken that meanwhile."""
    if port != ports["n1"]:
        smp.pause()
        ports["n1"] = port
        smp.configure(describe(nodes[0], nodes, PEER, ports, **settings))
        smp.start()


def test_a_peer_killed_in_the_middle_of_a_transfer_is_waited_for(
    arena_root: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_source, "_REPORT_SECS", 0.1)
    nodes = two_nodes(arena_root, stack)
    smp = stack.enter_context(closing(Smp(nodes[0])))
    other = start_process(nodes[1], stack)
    ports = {"n0": smp.listen(), "n1": other.port}
    settings = {"network_rate": "200kB/s", "protect_timeout_secs": 60.0}  # a transfer takes seconds
    smp.configure(describe(nodes[0], nodes, PEER, ports, **settings))
    other.configure(describe(nodes[1], nodes, PEER, ports, **settings))
    smp.start()
    for node in nodes:
        node.snapshot(0, 1)
        node.target(1)
    until(lambda: smp.tasks.status()["received_bytes"] > 0, "in the middle")
    other.kill()
    until(lambda: smp.tasks.status()["failing"], "it knows that the other is gone")
    assert not nodes[0].encoded(1) and smp.tasks.cannot is None
    again = start_process(nodes[1], stack, other.port)
    tell_port(smp, nodes, ports, again.port, **settings)
    again.configure(describe(nodes[1], nodes, PEER, ports, **settings))
    until(lambda: all(node.encoded(1) for node in nodes), "encoded")
    assert check_parity(nodes, PEER, 1) >= 2


def test_a_peer_that_is_stopped_is_given_up_and_used_again(arena_root: Path, stack: ExitStack) -> None:
    nodes = two_nodes(arena_root, stack)
    smp = stack.enter_context(closing(Smp(nodes[0])))
    other = start_process(nodes[1], stack)
    ports = {"n0": smp.listen(), "n1": other.port}
    smp.configure(describe(nodes[0], nodes, PEER, ports, protect_timeout_secs=4.0))
    other.configure(describe(nodes[1], nodes, PEER, ports))
    smp.start()
    for node in nodes:
        node.snapshot(0, 1)
        node.snapshot(1, 2)
    until(lambda: all(node.checked(i) for node in nodes for i in (1, 2)), "checked")
    other.signal(signal.SIGSTOP)
    nodes[0].target(1)
    slowest = _longest_step(smp)
    until(lambda: smp.tasks.cannot == SnapshotId(LINEAGE, 1), "cannot")
    assert slowest() < QUICK.step_secs, "its loop was held up by a peer that does not answer"
    assert len(smp.events.of("peer_lost")) == len(smp.events.of("not_covered")) == 1
    nodes[0].snapshot(2, 3)
    until(lambda: nodes[0].checked(3), "it still checks what is sealed")
    other.signal(signal.SIGCONT)
    for node in nodes:
        node.target(2)
    until(lambda: all(node.encoded(2) for node in nodes), "encoded")
    assert check_parity(nodes, PEER, 2) >= 2


def _longest_step(smp: Smp) -> Callable[[], float]:
    step, longest = smp.tasks.step, [0.0]

    def timed(deadline: float) -> bool:
        begun = time.monotonic()
        try:
            return step(deadline)
        finally:
            longest[0] = max(longest[0], time.monotonic() - begun)

    smp.tasks.step = timed  # type: ignore[method-assign]
    return lambda: longest[0]


Answer = Callable[[Channel, BytesRequest], None]


def _answer(data: bytes, value: int | None = None) -> Answer:
    """Answers as an SMP with ``data``; ``value`` in place of its checksum."""
    number = xxhash.xxh3_64_intdigest(data) if value is None else value
    body = encode_object({"ok": True, "here": True, "hash": number})
    return lambda channel, _: channel.send(body, time.monotonic() + 10, Delivery(memoryview(data), number))


def _raw(data: bytes) -> Answer:
    return lambda channel, _: channel.write(data, time.monotonic() + 10)


ANSWERS: dict[str, Answer] = {
    "garbage": _raw(random.Random(7).randbytes(5000)),
    "too long": _raw(FRAME.pack(20, 0, 1 << 40) + bytes(1 << 16)),
    "wrong bytes": _answer(bytes(65536), 12345),
    "altered": _raw(FRAME.pack(2, 0, 0) + b"{}" + bytes(16)),
    "another's package": lambda channel, request: _answer(bytes(request.snapshot.iteration * 1000))(channel, request),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_peer_that_answers_nonsense_is_given_up(arena_root: Path, stack: ExitStack, kind: str) -> None:
    """It knows the secret; its wrong reports are not believed, and logged once."""
    nodes = two_nodes(arena_root, stack)
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    stop = threading.Event()
    stack.callback(stop.set)
    threading.Thread(target=_talk_nonsense, args=(server, ANSWERS[kind], stop), daemon=True).start()
    smp = stack.enter_context(closing(Smp(nodes[0])))
    ports = {"n0": smp.listen(), "n1": server.getsockname()[1]}
    smp.configure(describe(nodes[0], nodes, PEER, ports, protect_timeout_secs=3.0))
    smp.start()
    nodes[0].snapshot(0, 1)
    nodes[0].target(1)
    until(lambda: smp.tasks.cannot == SnapshotId(LINEAGE, 1), "cannot")
    assert len(smp.events.of("peer_lost")) == len(smp.events.of("not_covered")) == 1
    assert nodes[0].states(1) == [CheckState.CHECKED] and smp.tasks.status()["received_bytes"] == 0
    assert nodes[0].packages(1) == ["dp0"]


@pytest.mark.parametrize("wrong", ["iteration", "shard", "damaged"])
def test_a_package_that_is_not_what_was_asked_for_is_not_kept(arena_root: Path, stack: ExitStack, wrong: str) -> None:
    nodes = two_nodes(arena_root, stack)
    modes = Modes(replica="copy")  # nothing but packages travels
    for iteration in (1, 2):
        nodes[1].snapshot(iteration, iteration, hashed=True)
    good, other = (pack(nodes[1].arenas[0], slot) for slot in (1, 2))
    nodes[0].snapshot(0, 1, hashed=True)
    lie = {"iteration": other, "shard": pack(nodes[0].arenas[0], 0), "damaged": good[:-1] + b"x"}[wrong]
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    stop = threading.Event()
    stack.callback(stop.set)
    lies = [lie]

    def lying(channel: Channel, request: BytesRequest) -> None:
        _answer(lies[-1])(channel, request)

    threading.Thread(target=_talk_nonsense, args=(server, lying, stop), daemon=True).start()
    smp = stack.enter_context(closing(Smp(nodes[0])))
    ports = {"n0": smp.listen(), "n1": server.getsockname()[1]}
    smp.configure(describe(nodes[0], nodes, modes, ports, protect_timeout_secs=3.0))
    smp.start()
    nodes[0].target(1)
    until(lambda: smp.tasks.cannot == SnapshotId(LINEAGE, 1), "cannot")
    assert nodes[0].packages(1) == ["dp0"] and nodes[0].packages(2) == []
    lies.append(good)
    nodes[0].target(-1)
    until(lambda: smp.tasks.status()["target"] is None, "given up")
    nodes[0].target(1)
    until(lambda: nodes[0].encoded(1), "encoded")
    assert nodes[0].packages(1) == ["dp0", "dp1"]


def _talk_nonsense(server: socket.socket, answer: Answer, stop: threading.Event) -> None:
    server.settimeout(0.2)
    while not stop.is_set():
        try:
            with closing(Channel(server.accept()[0])) as channel:
                channel.welcome(Trust(bytes.fromhex(SECRET)), time.monotonic() + 10)
                while True:
                    request = decode_request(channel.receive(1 << 12, 0, QUICK).body)
                    assert isinstance(request, BytesRequest)
                    answer(channel, request)
        except (PeerError, OSError):
            pass


def test_an_smp_killed_at_any_time_loses_nothing(arena_root: Path, stack: ExitStack) -> None:
    """SIGKILL of a real process that talks to a peer, at many moments, then one that may end."""
    nodes = two_nodes(arena_root, stack)
    smp = stack.enter_context(closing(Smp(nodes[0])))
    ports = {"n0": smp.listen(), "n1": 0}
    delays = random.Random(3)
    for node in nodes:
        node.snapshot(0, 1)
        node.target(1)
    for attempt in range(6):
        other = start_process(nodes[1], stack, ports["n1"])
        tell_port(smp, nodes, ports, other.port, protect_timeout_secs=60.0)
        other.configure(describe(nodes[1], nodes, PEER, ports, protect_timeout_secs=60.0))
        until(lambda: nodes[1].checked(1), "checked")
        if attempt == 1:  # from now on 1 is protected, and 2 the one that suffers
            until(lambda: all(node.encoded(1) for node in nodes), "encoded")
            for node in nodes:
                node.protected(1)
                node.snapshot(1, 2)
                node.target(2)
        time.sleep(delays.uniform(0, 0.1))  # any instant
        other.kill()
        if attempt >= 1:
            assert check_parity(nodes, PEER, 1) >= 2
    last = start_process(nodes[1], stack, ports["n1"])
    tell_port(smp, nodes, ports, last.port, protect_timeout_secs=60.0)
    last.configure(describe(nodes[1], nodes, PEER, ports, protect_timeout_secs=60.0))
    until(lambda: all(node.encoded(2) for node in nodes), "encoded")
    assert check_parity(nodes, PEER, 2) >= 2 and check_parity(nodes, PEER, 1) >= 2


def test_what_a_trainer_overwrites_while_it_is_sent_is_dropped(arena_root: Path, stack: ExitStack) -> None:
    """A slot that is taken over while a peer reads it: the peer gets what it asked for or nothing, never a mix."""
    nodes = two_nodes(arena_root, stack, chunks=3)
    smp = stack.enter_context(closing(Smp(nodes[0])))
    port = smp.listen()
    smp.configure(describe(nodes[0], nodes, PEER, {"n0": port}))
    smp.start()
    arena = nodes[0].arenas[0]
    expected = {}
    for iteration in range(1, 3):
        fill(arena, iteration, iteration)
        expected[iteration] = [arena.hash_chunk(iteration, chunk) for chunk in range(len(arena.image.chunks))]
    stop = threading.Event()
    stack.callback(stop.set)
    writer = threading.Thread(target=_write_on, args=(arena, stop))
    writer.start()
    got = 0
    with closing(Channel(socket.create_connection(("127.0.0.1", port)))) as channel:
        channel.greet(Trust(bytes.fromhex(SECRET)), time.monotonic() + 20)
        begun = time.monotonic()
        while time.monotonic() < begun + (3 if got else 30):
            for iteration in (1, 2):
                request = ChunkRequest(SnapshotId(LINEAGE, iteration), "dp0", 1)
                reply = exchange(channel, request, QUICK, most_payload=1 << 20)
                assert not reply.error
                if reply.payload is not None:
                    got += 1
                    assert reply.fields["hash"] == expected[iteration][1] == xxhash.xxh3_64_intdigest(reply.payload)
    stop.set()
    writer.join(30)
    assert got > 0


def _write_on(arena: Any, stop: threading.Event) -> None:
    """Both snapshots, again and again, with other bytes in between."""
    while not stop.is_set():
        for iteration in (1, 2):
            arena.control.begin(iteration)
            with arena.slot(iteration) as view:
                span = arena.image.chunks[1]
                view[span.begin : span.end] = np.random.default_rng().bytes(span.nbytes)
            fill(arena, iteration, iteration)
            time.sleep(0.05)  # long enough to be read now and then
