"""Where chunks of a snapshot come from: mapped slots of this node, and other nodes, a few at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from ftckpt.arena.control import Snapshot
from ftckpt.errors import ArenaError, CorruptError
from ftckpt.events import Events
from ftckpt.protect.groups import ParityGroup
from ftckpt.protect.stripes import Stripe
from ftckpt.smp.held import Found, Held, HeldArenas
from ftckpt.smp.pace import Pace
from ftckpt.smp.peers import Fetch, Peers
from ftckpt.smp.wire import Kind, Request
from ftckpt.smp.work import CannotError, Work

Bytes = npt.NDArray[np.uint8]

AHEAD = 4
AHEAD_BYTES = 64 << 20
"""Chunks that are asked for, or have come, and are not used yet: no more than these, but one."""
_POLL_SECS = 0.002
_AGAIN_SECS = 0.02
_MOST_AGAIN_SECS = 0.5
_TELL_SECS = 1.0


class Sources:
    """Reads bytes of a snapshot, each piece verified against its checksum.

    Args:
        node: name of this node.
        patience_secs: how long another node may fail, again and again, before it is given up.
    """

    def __init__(
        self, node: str, held: HeldArenas, peers: Peers, pace: Pace, *, events: Events, patience_secs: float
    ) -> None:
        self.node = node
        self.held = held
        self.pace = pace
        self.received_bytes = 0
        self.failing: dict[str, str] = {}
        """Nodes that do not answer, and why."""
        self._peers = peers
        self._events = events
        self._patience_secs = patience_secs
        self._since: dict[str, float] = {}

    def local(self, shard: str, chunk: int, snapshot: Snapshot) -> Work[Bytes]:
        """Returns chunk ``chunk`` of a slot of this node, in place.

        Raises:
            CorruptError: the bytes do not match their checksum.
            ArenaError: this node does not hold that snapshot, checked.
        """
        held, found = self.find(shard, snapshot)
        span = held.arena.image.chunks[chunk]
        yield from self.pace.memory(span.nbytes)
        held.renew(found.slot)
        if held.arena.hash_chunk(found.slot, chunk) != int(found.hashes[chunk]):
            raise CorruptError(f"{held.name}: chunk {chunk} of slot {found.slot} does not match its checksum")
        return np.frombuffer(held.arena.slot(found.slot), np.uint8, span.nbytes, span.begin)

    def find(self, shard: str, snapshot: Snapshot) -> tuple[Held, Found]:
        """The arena and slot of a shard of this node; raises ArenaError if it is not there, or not checked."""
        held = self.held.by_shard.get(shard)
        found = held.found(snapshot) if held is not None else None
        if held is None or found is None:
            raise ArenaError(f"{shard}: iteration {snapshot[1]} is not held here, or not checked")
        return held, found

    def ask(self, node: str, request: Request, at_most: int) -> Work[Fetch]:
        """Ask another node, once training leaves the network to us and what came so far is paid for."""
        yield from self.pace.receive()
        return self._peers.fetch(node, request, at_most, self.pace.received.charge)

    def take(self, node: str, fetch: Fetch, problem: Callable[[bytearray], str]) -> Work[bytearray]:
        """Wait for what was asked for, and ask again while the other node does not have it or fails.

        Args:
            problem: what is wrong with the bytes that came; "" if nothing is.

        Raises:
            CannotError: it has failed for too long.
        """
        pause = _AGAIN_SECS
        try:
            while True:
                while not fetch.done.is_set():
                    yield _POLL_SECS
                data, error = fetch.data, fetch.error
                if data is not None and (wrong := problem(data)):
                    error = f"{node}: {fetch.request.shard} at {fetch.request.iteration}: {wrong}"
                if error:
                    self._failed(node, error, fetch.tried)
                else:
                    self._answered(node)
                    if data is not None:
                        self.received_bytes += len(data)
                        return data
                yield pause
                pause = min(2 * pause, _MOST_AGAIN_SECS)
                fetch = yield from self.ask(node, fetch.request, fetch.at_most)
        finally:
            fetch.cancel()  # given up: nobody waits for it

    def _failed(self, node: str, error: str, tried: bool) -> None:
        now = time.monotonic()
        since = self._since.setdefault(node, now)
        if now - since >= min(_TELL_SECS, self._patience_secs) and node not in self.failing:
            self._events.emit("peer_lost", node=node, reason=error)
            self.failing[node] = error
        if tried and now - since >= self._patience_secs:
            raise CannotError(f"{error} (for {now - since:.0f} s)")

    def _answered(self, node: str) -> None:
        self._since.pop(node, None)
        if self.failing.pop(node, None) is not None:
            self._events.emit("peer_back", node=node)


class Feed:
    """Data chunks of the stripes of one group, in order, one snapshot. A few are asked for ahead of time.

    Whoever makes one closes it: what was asked for in vain is not transferred then.
    """

    def __init__(self, sources: Sources, group: ParityGroup, stripes: Iterable[Stripe], snapshot: Snapshot) -> None:
        self._sources = sources
        self._group = group
        self._snapshot = snapshot
        self._todo = deque(
            (member, chunk)
            for stripe in stripes
            for member, chunk in stripe.data
            if chunk >= 0 and group.members[member].node != sources.node
        )
        self._asked: dict[tuple[int, int], Fetch] = {}

    def next(self, stripe: Stripe) -> Work[list[Bytes | None]]:
        """Returns the arrays of ``stripe.data``, as ``codecs.encode`` takes them.

        Raises:
            CorruptError, ArenaError, CannotError: as ``Sources``.
        """
        arrays: list[Bytes | None] = []
        for index, chunk in stripe.data:
            member = self._group.members[index]
            if chunk < 0:
                arrays.append(None)
            elif member.node == self._sources.node:
                arrays.append((yield from self._sources.local(member.shard, member.first + chunk, self._snapshot)))
            else:
                data = yield from self._remote(index, chunk)
                arrays.append(np.frombuffer(data, np.uint8))
        return arrays

    def close(self) -> None:
        """Nobody wants what was asked for ahead of time any more."""
        for fetch in self._asked.values():
            fetch.cancel()
        self._asked.clear()

    def _remote(self, index: int, chunk: int) -> Work[bytearray]:
        while (index, chunk) not in self._asked:
            yield from self._ask_next()
        most = max(1, min(AHEAD, AHEAD_BYTES // self._group.chunk_bytes))
        while self._todo and len(self._asked) < most:
            yield from self._ask_next()
        member, fetch = self._group.members[index], self._asked.pop((index, chunk))
        nbytes = member.lengths[chunk]
        return (yield from self._sources.take(member.node, fetch, lambda data: _wrong_length(data, nbytes)))

    def _ask_next(self) -> Work[None]:
        index, chunk = self._todo.popleft()
        member, (lineage, iteration) = self._group.members[index], self._snapshot
        request = Request(Kind.CHUNK, member.shard, lineage, iteration, member.first + chunk)
        self._asked[index, chunk] = yield from self._sources.ask(member.node, request, member.lengths[chunk])


def _wrong_length(data: bytearray, nbytes: int) -> str:
    return "" if len(data) == nbytes else f"{len(data)} bytes instead of {nbytes}"
