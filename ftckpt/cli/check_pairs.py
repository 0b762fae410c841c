"""Checks of the network between nodes: pairs of nodes fetch data from each other over the SMP's protocol."""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any, NamedTuple

import xxhash

from ftckpt.cli.findings import SKIPPED, CheckResult, Result, attempt, failed, passed, warned
from ftckpt.errors import ConfigError
from ftckpt.events import Events
from ftckpt.group import Group
from ftckpt.model.codec import gather
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.groups import apart, mirror_nodes
from ftckpt.parity.modes import MIRROR_COPIES, MOST_MEMBERS
from ftckpt.session.addresses import listening_address
from ftckpt.smp.channel import Deadlines, Delivery, Trust
from ftckpt.smp.peers import Peers
from ftckpt.smp.ports import PORTS
from ftckpt.smp.requests import ChunkRequest
from ftckpt.smp.server import Server

_AREA = "network"
_CONNECT_SECS, _PAIR_SECS = 4.0, 8.0
"""Deadlines of a connection and of a pair: well below that of the group, in which all other ranks wait."""
_BYTES = 32 << 20
_ROUNDS, _TRIPS = 3, 20
_LEAST_RATE = 1e8
_FAR = (2, 4)
"""In large jobs, nodes 1/2 and 1/4 of all nodes apart are paired, too: replica sets may have such distances."""
_PROBE = SnapshotId(bytes(16), 0)
_OTHER_INTERFACE = "name the interface that connects the nodes: here --smp-listen, for the job --ftckpt-smp-listen"

Pair = tuple[str, str]


class NodeFacts(NamedTuple):
    """A node: its ``first`` rank, and the machine and rack that this rank reports."""

    first: int
    machine: str
    rack: str


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
    pairs = arranged_pairs({node: one.rack for node, one in nodes.items()})
    with _serving(bool(me), trust, [one.machine for one in nodes.values()], listen) as port:
        ports = gather(group, port, Port)
        for both in rounds_of(pairs):
            # One direction at a time: a node that reads does not serve meanwhile.
            for readers in (dict(both), {other: reader for reader, other in both}):
                if me in readers:
                    other = readers[me]
                    yield attempt(_AREA, f"from {other}", _talk(trust, me, other, ports[nodes[other].first]))
                group.gather(b"")
    if group.rank == 0 and (left := len(nodes) * (len(nodes) - 1) // 2 - len(pairs)):
        text = (
            f"{left} of {left + len(pairs)} pairs of nodes were not checked; checked are members of a peer group, "
            "mirrors of packages, and some distant pairs; replica sets and --ftckpt-peer-group may use others"
        )
        yield CheckResult(_AREA, "other pairs", SKIPPED, text)


def arranged_pairs(racks: Mapping[str, str]) -> list[Pair]:
    """All pairs of a few nodes; of more nodes, the pairs that protection uses by default (members of a peer group,
    nodes and the mirrors of their packages) and some distant pairs."""
    nodes = sorted(racks)
    if len(nodes) <= MOST_MEMBERS:
        return list(combinations(nodes, 2))
    groups = apart(nodes, lambda node: node, racks.__getitem__, MOST_MEMBERS)
    pairs = [pair for members in groups for pair in combinations(members, 2)]
    pairs += [(node, keeper) for node, of in mirror_nodes(nodes, MIRROR_COPIES, racks).items() for keeper in of]
    for part in _FAR:
        pairs += zip(nodes, nodes[len(nodes) // part :] + nodes[: len(nodes) // part], strict=True)
    return list(dict.fromkeys((min(pair), max(pair)) for pair in pairs))


def rounds_of(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Divides ``pairs`` into rounds. A node occurs at most once per round, so its pairs run concurrently."""
    rounds: list[list[Pair]] = []
    busy: list[set[str]] = []
    for pair in pairs:
        place = next((place for place, nodes in enumerate(busy) if nodes.isdisjoint(pair)), len(rounds))
        if place == len(rounds):
            rounds.append([])
            busy.append(set())
        rounds[place].append(pair)
        busy[place].update(pair)
    return rounds


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
