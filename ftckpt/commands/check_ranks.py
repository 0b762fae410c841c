"""What the ranks of a job to come find of each other: one directory a node, one time, SMPs that reach each other."""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash

from ftckpt.commands.findings import FAILED, PASSED, SKIPPED, WARNED, Finding, attempt
from ftckpt.errors import ConfigError
from ftckpt.events import Events
from ftckpt.frameworks.launcher import node_name
from ftckpt.group import Group
from ftckpt.job.addresses import listening_address, machine
from ftckpt.model.codec import gather
from ftckpt.model.snapshot import SnapshotId
from ftckpt.smp.channel import Deadlines, Delivery, Trust
from ftckpt.smp.peers import Peers
from ftckpt.smp.requests import ChunkRequest
from ftckpt.smp.server import Server
from ftckpt.store.directory import leave_word, node_directory, read_word, remove_tree

_AREA = "network"
_SECS = 30.0
_MOST_SKEW_SECS = 1.0
_BYTES = 32 << 20
_ROUNDS, _TRIPS = 3, 20
_MOST_PAIRED = 8
"""Nodes of which each talks to each other; of more each talks to the next."""
_LEAST_RATE = 1e8
_PROBE = SnapshotId(bytes(16), 0)


class RankFacts(NamedTuple):
    """Where a rank is, and the time there."""

    node: str
    machine: str
    time: float


class Port(NamedTuple):
    """Where the server of a node listens; ``number`` 0: at none, for the reason ``problem``."""

    host: str = ""
    number: int = 0
    problem: str = ""


class LaunchedRanks:
    """The ranks that a launcher has started, this one among them. Every method is collective."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.group = Group(_SECS)
        self.group.gather(b"")  # the times below are taken together
        me = RankFacts(node_name("", os.environ), machine(), time.time())
        self.ranks = gather(self.group, me, RankFacts)
        self.rank, self.me = self.group.rank, me
        self.leads = next(rank for rank, one in enumerate(self.ranks) if one.node == me.node) == self.rank

    def as_training(self) -> dist.ProcessGroup:
        """All ranks, connected as training connects them."""
        backend = "nccl" if torch.cuda.is_available() else "gloo"  # under ROCm RCCL goes by this name
        group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=timedelta(seconds=2 * _SECS))
        return group

    @property
    def local(self) -> int:
        """Ranks of this node."""
        return sum(one.node == self.me.node for one in self.ranks)

    @property
    def leaders(self) -> dict[str, int]:
        """The first rank of each node."""
        found: dict[str, int] = {}
        for rank, one in enumerate(self.ranks):
            found.setdefault(one.node, rank)
        return found

    def look(self, arena: Path | None) -> Iterator[Finding]:
        """Each finding as it comes. ``arena``: None where a rank has none."""
        yield self._clocks()
        if arena is not None:
            yield self._directory(arena)
        if len(self.leaders) == 1:
            yield Finding(_AREA, "SMP pairs", SKIPPED, "one node: nothing is sent")
        else:
            yield from self._pairs()

    def _clocks(self) -> Finding:
        skew = max(one.time for one in self.ranks) - min(one.time for one in self.ranks)
        text, figures = f"clocks of {len(self.ranks)} ranks are {skew:.3f} s apart", {"secs": skew}
        if skew > _MOST_SKEW_SECS:
            return Finding(
                "host", "clock", WARNED, text, "set them by NTP: object stores refuse requests",
                figures,
            )  # fmt: skip
        return Finding("host", "clock", PASSED, text, figures=figures)

    def _directory(self, arena: Path) -> Finding:
        """Ranks of one node see one directory, and not one of their container's each."""
        word = secrets.token_hex(4) if self.rank == 0 else ""
        job = f"check-{gather(self.group, word, str)[0]}"
        node_dir, left, problem = arena / f"ftckpt-{job}" / self.me.node, "", ""
        try:
            try:
                node_dir = node_directory(arena, job, self.me.node)
                left = leave_word(node_dir) if self.leads else ""
            finally:
                words = gather(self.group, left, str)
            if read_word(node_dir) != words[self.leaders[self.me.node]]:
                problem = f"{node_dir.parent.parent} of rank {self.rank} is not that of its node's first rank"
        except Exception as error:  # noqa: BLE001 - told below, by all ranks together
            problem = str(error)
        self.group.gather(b"")  # all have read it
        if self.leads:
            remove_tree(node_dir.parent)
        if problem:
            return Finding(
                "host", "one directory", FAILED, problem,
                "let containers of a node share it (one --ipc, a hostPath), or give each a name with FTCKPT_NODE",
            )  # fmt: skip
        return Finding("host", "one directory", PASSED, f"the {self.local} rank(s) of node {self.me.node} see one")

    def _pairs(self) -> Iterator[Finding]:
        """Pair by pair, so that no two share a link, by the protocol of SMPs."""
        secret = bytes.fromhex(gather(self.group, secrets.token_hex(32) if self.rank == 0 else "", str)[0])
        trust, nodes = Trust(secret), list(self.leaders)
        with _serving(self.leads, trust, [one.machine for one in self.ranks]) as port:
            ports = gather(self.group, port, Port)
            places = {node: ports[rank] for node, rank in self.leaders.items()}
            far = nodes if len(nodes) <= _MOST_PAIRED else []
            pairs = [(a, b) for a in far for b in far if a != b]
            pairs = pairs or [(a, b) for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True)]
            for reader, other in pairs:
                found: list[Finding] = []
                if self.leads and self.me.node == reader:
                    found.append(attempt(_AREA, f"from {other}", _talk(trust, other, places[other])))
                self.group.gather(b"")
                yield from found


@contextmanager
def _serving(serves: bool, trust: Trust, machines: Sequence[str]) -> Iterator[Port]:
    """The port at which an SMP's server gives bytes away; 0 where none does."""
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
            host = listening_address("", machines, os.environ)
            port = Port(host, server.listen(host, trust))
        except ConfigError as error:  # told: the others wait for this rank
            port = Port(problem=str(error))
        yield port
    finally:
        server.close()


def _talk(trust: Trust, node: str, place: Port) -> Callable[[], Finding]:
    def talk() -> Finding:
        if place.problem:
            raise ConfigError(place.problem)
        peers = Peers(Deadlines(_SECS, _SECS, _SECS))
        try:
            peers.configure({node: (place.host, place.number)}, trust)
            secs: dict[int, list[float]] = {0: [], 1: []}
            for chunk in (0,) * _TRIPS + (1,) * _ROUNDS:
                begin = time.perf_counter()
                fetch = peers.fetch(node, ChunkRequest(_PROBE, "probe", chunk), _BYTES)
                if not fetch.done.wait(_SECS) or fetch.data is None:
                    raise TimeoutError(fetch.error or f"{node} at {place.host} does not answer")
                secs[chunk].append(time.perf_counter() - begin)
        finally:
            peers.close()
        trip, rate = statistics.median(secs[0][1:]), _BYTES / statistics.median(secs[1])
        text = f"{rate / 1e9:.2f} GB/s, {1e3 * trip:.2f} ms there and back, at {place.host}"
        figures = {"bytes_per_sec": rate, "round_trip_secs": trip}
        if rate < _LEAST_RATE:
            how = "name the fast interface with --ftckpt-smp-listen"
            return Finding(_AREA, f"from {node}", WARNED, text, how, figures)
        return Finding(_AREA, f"from {node}", PASSED, text, figures=figures)

    return talk
