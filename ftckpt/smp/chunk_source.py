"""Chunks of a snapshot: read from local slots, prefetched from other nodes, and served to other nodes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import xxhash

from ftckpt.array_types import Bytes
from ftckpt.errors import ArenaError, CorruptError, ProtectionUnavailableError
from ftckpt.events import Events
from ftckpt.memory.package import mapped_package
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.groups import ParityGroup
from ftckpt.parity.stripes import Stripe
from ftckpt.persist.storage import pauses
from ftckpt.smp.arenas import CheckedSlot, MonitoredArenas
from ftckpt.smp.channel import Delivery
from ftckpt.smp.peers import Fetch, Peers
from ftckpt.smp.requests import BytesRequest, ChunkRequest
from ftckpt.smp.work import Throttle, Work

AHEAD = 4
AHEAD_BYTES = 64 << 20
"""Maximum chunks, in number and bytes, that are requested or received and not used yet; one is always allowed."""
_POLL_SECS = 0.002
"""Shorter than elsewhere: parity waits for each received chunk."""
_AGAIN_SECS = 0.02
"""First pause before a missing chunk is requested again; each pause doubles."""
# Nodes seal and check within an iteration of each other: longer pauses would delay protection for nothing.
_MAX_AGAIN_SECS = 0.5
_REPORT_SECS = 1.0
"""Failures that last longer are reported: most broken connections are restored sooner."""


class Sources:
    """Supplies the bytes of snapshots: local chunks with their checksums, and fetches from other nodes.

    Args:
        node: name of this node.
        patience_secs: how long another node may fail before ``take`` raises.
    """

    def __init__(
        self,
        node: str,
        arenas: MonitoredArenas,
        peers: Peers,
        pace: Throttle,
        *,
        events: Events,
        patience_secs: float,
    ) -> None:
        self.node = node
        self.arenas = arenas
        self.pace = pace
        self.received_bytes = 0
        self.failing: dict[str, str] = {}
        """The failing nodes, and why."""
        self._peers = peers
        self._events = events
        self._patience_secs = patience_secs
        self._since: dict[str, float] = {}

    def local(self, shard: str, chunk: int, snapshot: SnapshotId) -> LocalChunk:
        """Chunk ``chunk`` of a slot of this node; raises ArenaError if the slot is missing or not checked."""
        if (found := self.arenas.find(shard, snapshot)) is None:
            raise ArenaError(f"{shard}: iteration {snapshot.iteration} is not in memory, or not checked")
        return LocalChunk(found, chunk)

    def request(self, node: str, request: BytesRequest, at_most: int) -> Work[Fetch]:
        """Request bytes of another node, once the network is idle and earlier bytes are paid off."""
        yield from self.pace.receive(at_most)
        return self._peers.fetch(node, request, at_most, self.pace.received.charge)

    def take(self, node: str, fetch: Fetch, problem: Callable[[bytearray], str]) -> Work[bytearray]:
        """Wait for a fetch; repeat it while the other node fails or does not have the bytes yet.

        Args:
            problem: describes an error in the received bytes; "" if there is none.

        Raises:
            ProtectionUnavailableError: the node has failed for ``patience_secs``.
        """
        try:
            for pause_secs in pauses(_AGAIN_SECS, _MAX_AGAIN_SECS):
                while not fetch.done.is_set():
                    yield _POLL_SECS
                data, error = fetch.data, fetch.error
                if data is not None and (wrong := problem(data)):
                    error = f"{node}: {fetch.request.shard} at {fetch.request.snapshot.iteration}: {wrong}"
                if error:
                    self._failed(node, error, fetch.tried)
                else:
                    self._answered(node)
                    if data is not None:
                        self.received_bytes += len(data)
                        return data
                # Usually it is not there yet: nodes seal and check at different times.
                yield pause_secs
                fetch = yield from self.request(node, fetch.request, fetch.at_most)
        finally:
            fetch.cancel()  # if the caller has stopped waiting, it is not transferred
        raise AssertionError("pauses are endless")

    def _failed(self, node: str, error: str, tried: bool) -> None:
        now = time.monotonic()
        since = self._since.setdefault(node, now)
        if now - since >= min(_REPORT_SECS, self._patience_secs) and node not in self.failing:
            self._events.emit("peer_lost", node=node, reason=error)
            self.failing[node] = error
        # Fetches that were not even tried, after a recent failure, must not exhaust the patience by themselves.
        if tried and now - since >= self._patience_secs:
            raise ProtectionUnavailableError(f"{error} (for {now - since:.0f} s)")

    def _answered(self, node: str) -> None:
        self._since.pop(node, None)
        if self.failing.pop(node, None) is not None:
            self._events.announce(f"the SMP of node {node} answers again")


class Chunk:
    """A chunk for parity. This base class: one received from another node and already verified."""

    def __init__(self, data: Bytes) -> None:
        self.data = data

    def read(self, begin: int, end: int) -> Bytes:
        """The next piece; pieces are read in order. Empty after the end."""
        return self.data[begin:end]


class LocalChunk(Chunk):
    """A chunk in a slot of this node, read in place and hashed meanwhile; unverified until ``verify``."""

    def __init__(self, slot: CheckedSlot, chunk: int) -> None:
        mapped = slot.arena.mapped
        span = mapped.image.chunks[chunk]
        super().__init__(np.frombuffer(mapped.slot(slot.slot), np.uint8, span.nbytes, span.begin))
        self._slot, self._chunk, self._hash = slot, chunk, xxhash.xxh3_64()

    def read(self, begin: int, end: int) -> Bytes:
        piece = self.data[begin:end]
        self._hash.update(piece.data)
        return piece

    def verify(self) -> None:
        """Raises CorruptError if the bytes, read completely, do not match the checksum."""
        if self._hash.intdigest() != int(self._slot.hashes[self._chunk]):
            name, slot = self._slot.arena.name, self._slot.slot
            raise CorruptError(f"{name}: chunk {self._chunk} of slot {slot} does not match its checksum")


class Feed:
    """Data chunks of the stripes of one group at one snapshot, in order, with prefetching. Its creator closes it."""

    def __init__(self, sources: Sources, group: ParityGroup, stripes: Iterable[Stripe], snapshot: SnapshotId) -> None:
        self._sources = sources
        self._group = group
        self._snapshot = snapshot
        self._todo = deque(
            (member, chunk)
            for stripe in stripes
            for member, chunk in stripe.data
            if chunk >= 0 and group.members[member].node != sources.node
        )
        self._requested: dict[tuple[int, int], Fetch] = {}

    def next(self, stripe: Stripe) -> Work[list[Chunk | None]]:
        """Returns the chunks of ``stripe.data``; None where a member has none.

        Raises:
            ArenaError, ProtectionUnavailableError: as ``Sources``.
        """
        chunks: list[Chunk | None] = []
        for index, chunk in stripe.data:
            member = self._group.members[index]
            if chunk < 0:
                chunks.append(None)
            elif member.node == self._sources.node:
                chunks.append(self._sources.local(member.shard, member.first + chunk, self._snapshot))
            else:
                data = yield from self._remote(index, chunk)
                chunks.append(Chunk(np.frombuffer(data, np.uint8)))
        return chunks

    def close(self) -> None:
        """Cancel prefetches that were not used."""
        for fetch in self._requested.values():
            fetch.cancel()
        self._requested.clear()

    def _remote(self, index: int, chunk: int) -> Work[bytearray]:
        while (index, chunk) not in self._requested:
            yield from self._request_next()
        # The next chunks are fetched while this one is encoded; memory bounds their number.
        most = max(1, min(AHEAD, AHEAD_BYTES // self._group.chunk_bytes))
        while self._todo and len(self._requested) < most:
            yield from self._request_next()
        member, fetch = self._group.members[index], self._requested.pop((index, chunk))
        nbytes = member.lengths[chunk]
        return (yield from self._sources.take(member.node, fetch, lambda data: _wrong_length(data, nbytes)))

    def _request_next(self) -> Work[None]:
        index, chunk = self._todo.popleft()
        member = self._group.members[index]
        request = ChunkRequest(self._snapshot, member.shard, member.first + chunk)
        self._requested[index, chunk] = yield from self._sources.request(member.node, request, member.lengths[chunk])


def _wrong_length(data: bytearray, nbytes: int) -> str:
    return "" if len(data) == nbytes else f"{len(data)} bytes instead of {nbytes}"


class Service:
    """Finds the bytes that other nodes request. Any thread may call ``find``; it waits until ``pace`` allows it."""

    def __init__(self, arenas: MonitoredArenas, pace: Throttle) -> None:
        self.arenas = arenas
        self.pace = pace
        self.sent_bytes = 0

    @contextmanager
    def find(self, request: BytesRequest) -> Iterator[Delivery | None]:
        """The requested bytes; None: not in memory, not yet, or not now."""
        with ExitStack() as stack:
            try:
                if isinstance(request, ChunkRequest):
                    answer = self._chunk(request, stack)
                else:
                    answer = self._package(request, stack)
            # Another thread or process may close, replace or delete the arena or its file meanwhile.
            except (ArenaError, ValueError, OSError):
                answer = None
            yield answer

    def _chunk(self, request: ChunkRequest, stack: ExitStack) -> Delivery | None:
        if (slot := self.arenas.find(request.shard, request.snapshot)) is None:
            return None
        mapped = slot.arena.mapped
        if request.chunk >= len(mapped.image.chunks):
            return None
        span = mapped.image.chunks[request.chunk]
        if not self._may_send(span.nbytes):
            return None
        self.pace.read.charge(span.nbytes)
        data = stack.enter_context(mapped.slot(slot.slot))
        view = stack.enter_context(data[span.begin : span.end])

        def valid() -> bool:
            try:
                return slot.still_holds()
            except (ArenaError, ValueError):
                return False

        return Delivery(view, int(slot.hashes[request.chunk]), valid)

    def _package(self, request: BytesRequest, stack: ExitStack) -> Delivery | None:
        data = stack.enter_context(mapped_package(self.arenas.node_dir, request.shard, request.snapshot))
        if not self._may_send(len(data)):
            return None
        return Delivery(data, xxhash.xxh3_64_intdigest(data))

    def _may_send(self, nbytes: int) -> bool:
        """Wait for this thread's turn; False if it does not come soon: the client will request again."""
        turn = self.pace.send(nbytes)
        while True:
            try:
                time.sleep(next(turn))
            except StopIteration as end:
                self.sent_bytes += nbytes if end.value else 0
                return bool(end.value)
