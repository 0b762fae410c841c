"""Checks of the network between nodes: pairs of nodes fetch data from each other over the SMP's protocol."""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import xxhash

from ftckpt.cli.findings import SKIPPED, CheckResult, Result, attempt, failed, passed, warned
from ftckpt.errors import ConfigError
from ftckpt.events import Events
from ftckpt.group import Group
from ftckpt.model.codec import gather
from ftckpt.model.snapshot import SnapshotId
from ftckpt.session.addresses import listening_address
from ftckpt.smp.channel import Deadlines, Delivery, Trust
from ftckpt.smp.peers import Peers
from ftckpt.smp.ports import PORTS
from ftckpt.smp.requests import ChunkRequest
from ftckpt.smp.server import Server

_AREA = "network"
_CONNECT_SECS, _PAIR_SECS = 4.0, 8.0
"""Deadlines of a connection and of a pair: well below that of the group, in which all other ranks wait."""
# Long enough for TCP to open its window; 0.3 s at the least rate.
_BYTES = 32 << 20
# Medians; the first trip also opens the connection, and does not count.
_ROUNDS, _TRIPS = 3, 20
# A link of 1 Gbit/s: a node's state of 100 GB takes a quarter of an hour to protect.
_LEAST_RATE = 1e8
_FEW_NODES = 8
"""Of so many nodes, all pairs are checked."""
_PROBE = SnapshotId(bytes(16), 0)
_OTHER_INTERFACE = "name the interface that connects the nodes: here --smp-listen, for the job --ftckpt-smp-listen"


class NodeFacts(NamedTuple):
    """A node: its ``first`` rank, and the machine that this rank reports."""

    first: int
    machine: str


class Port(NamedTuple):
    """The address of a node's server; ``number`` is 0 if there is none, because of ``problem``."""

    host: str = ""
    number: int = 0
    problem: str = ""


def pair_checks(group: Group, nodes: Mapping[str, NodeFacts], listen: str) -> Iterator[CheckResult]:
    """Runs the pair checks and yields this rank's results. Collective: the first ranks of ``nodes`` communicate, all
    others wait. ``listen`` is as the setting ``smp_listen``."""
    me = next((node for node, one in nodes.items() if one.first == group.rank), "")
    trust = Trust(bytes.fromhex(gather(group, secrets.token_hex(32) if group.rank == 0 else "", str)[0]))
    names = sorted(nodes)
    with _serving(bool(me), trust, [one.machine for one in nodes.values()], listen) as port:
        ports = gather(group, port, Port)
        for distance in distances(len(names)):
            if me:
                other = names[(names.index(me) + distance) % len(names)]
                yield attempt(_AREA, f"from {other}", _talk(trust, me, other, ports[nodes[other].first]))
            group.gather(b"")  # a barrier: a node serves one other at a time
    if group.rank == 0 and len(names) > _FEW_NODES:
        apart = ", ".join(map(str, distances(len(names))))
        text = f"only nodes {apart} apart in the order of their names were checked"
        yield CheckResult(_AREA, "other pairs", SKIPPED, text)


def distances(nodes: int) -> list[int]:
    """How far apart nodes are that read from each other, in the order of their names: neighbours, which are often in
    one rack, and nodes 1/4 and 1/2 of all nodes apart, which are not."""
    return list(range(1, nodes)) if nodes <= _FEW_NODES else sorted({1, nodes // 4, nodes // 2})


@contextmanager
def _serving(serves: bool, trust: Trust, machines: Sequence[str], listen: str) -> Iterator[Port]:
    """Runs an SMP's server with test data if ``serves``, and yields its port."""
    if not serves:
        yield Port()
        return
    data = bytes(_BYTES)
    views = {0: memoryview(data)[:1], 1: memoryview(data)}
    hashes = {chunk: xxhash.xxh3_64_intdigest(view) for chunk, view in views.items()}

    @contextmanager
    def find(request: Any) -> Iterator[Delivery | None]:
        yield Delivery(views[request.chunk], hashes[request.chunk])

    server = Server({}, find=find, events=Events(None, 0))
    try:
        try:
            host = listening_address(listen, machines, os.environ)
            port = Port(host, server.listen(host, trust))
        except ConfigError as error:  # reported as a result: the other ranks wait for this one
            port = Port(problem=str(error))
        yield port
    finally:
        server.close()


def _talk(trust: Trust, me: str, node: str, place: Port) -> Callable[[], Result]:
    def talk() -> Result:
        if place.problem:
            return failed(f"{node}: {place.problem}", _OTHER_INTERFACE)
        secs: dict[int, list[float]] = {0: [], 1: []}
        if problem := _fetch(trust, node, place, secs):
            how = f"open TCP ports {PORTS[0]} to {PORTS[-1]} in firewalls between nodes, or {_OTHER_INTERFACE}"
            return failed(f"{me} receives nothing from {problem}", how)
        trip, rate = statistics.median(secs[0][1:]), _BYTES / statistics.median(secs[1])
        text = f"{rate / 1e9:.2f} GB/s, {1e3 * trip:.2f} ms round trip, at {place.host}"
        figures = {"bytes_per_sec": rate, "round_trip_secs": trip}
        if rate < _LEAST_RATE:
            return warned(text, _OTHER_INTERFACE, **figures)
        return passed(text, **figures)

    return talk


def _fetch(trust: Trust, node: str, place: Port, secs: Mapping[int, list[float]]) -> str:
    """Fetches chunks until done or out of time, and appends the seconds of each to ``secs``. The error, or ""."""
    end = time.monotonic() + _PAIR_SECS
    peers = Peers(Deadlines(_CONNECT_SECS, _PAIR_SECS, _PAIR_SECS))
    try:
        peers.configure({node: (place.host, place.number)}, trust)
        for chunk in (0,) * _TRIPS + (1,) * _ROUNDS:
            begin = time.monotonic()
            fetch = peers.fetch(node, ChunkRequest(_PROBE, "probe", chunk), _BYTES)
            if not fetch.done.wait(end - begin):
                # On a slow link the chunks received so far suffice to measure its rate.
                late = f"{_BYTES >> 20} MiB do not arrive" if chunk else "no answer"
                return "" if secs[1] else f"{node} at {place.host}:{place.number}: {late} within {_PAIR_SECS:g} s"
            if fetch.data is None:
                return fetch.error or f"{node} at {place.host}:{place.number}: it does not answer"
            secs[chunk].append(time.monotonic() - begin)
    finally:
        peers.close()
    return ""
