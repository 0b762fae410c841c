"""Fetches from the SMPs of other nodes: a few connections to each that is needed, over all links."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field

import xxhash

from ftckpt.errors import PeerError
from ftckpt.persist.storage import pauses
from ftckpt.smp.channel import Channel, Deadlines, Trust, connect
from ftckpt.smp.requests import BytesRequest, ChunkRequest, exchange

_BACKOFF_SECS, _MAX_BACKOFF_SECS = 0.1, 2.0
"""First and longest pause after consecutive failures."""
_MAX_QUEUED = 64
"""Far more than encoding and scrubbing have in flight: bounds the memory of unserved requests."""
_SHUNNED_SECS = 120.0
"""Time for which an unreachable address of a node is skipped, if the node has another one."""
CONNECTIONS = 4
"""Maximum per node: as many as chunks are prefetched. They are opened on demand."""


@dataclass
class Fetch:
    """A request for bytes: read ``data`` and ``error`` once ``done`` is set.

    ``data`` is None and ``error`` empty if the other side does not have the bytes (yet). ``tried`` is false if
    nothing was sent because of a recent failure, which is in ``error``. ``arrived`` is called with the number of
    received bytes, from another thread, even after ``cancel``.
    """

    request: BytesRequest
    at_most: int
    arrived: Callable[[int], None]
    done: threading.Event = field(default_factory=threading.Event)
    data: bytearray | None = None
    error: str = ""
    tried: bool = True
    cancelled: bool = False

    def cancel(self) -> None:
        """Skip the request, unless it was already sent."""
        self.cancelled = True

    def fail(self, error: str, tried: bool = True) -> None:
        """Set the error and wake the waiter."""
        self.error, self.tried = error, tried
        self.done.set()


class Peers:
    """The other nodes of a job, by name. ``configure``, then ``fetch``; one thread calls all methods."""

    def __init__(self, deadlines: Deadlines | None = None) -> None:
        self._deadlines = deadlines or Deadlines()
        self._addresses: dict[str, tuple[str, int]] = {}
        # Created on first use: of a thousand nodes a handful shares groups and packages with this one.
        self._peers: dict[str, _Peer] = {}
        self.trust = Trust()

    def configure(self, addresses: Mapping[str, tuple[str, int]], trust: Trust) -> None:
        """Set each node's addresses, separated by commas, and port. Connections to nodes that are gone or have moved,
        or under another secret, end.

        Raises:
            ConfigError: the secret is too short.
        """
        trust.checked()
        for node, peer in list(self._peers.items()):
            if trust != self.trust or addresses.get(node) != peer.address:
                self._peers.pop(node).close()
        self.trust, self._addresses = trust, dict(addresses)

    def fetch(
        self, node: str, request: BytesRequest, at_most: int, arrived: Callable[[int], None] = lambda nbytes: None
    ) -> Fetch:
        """Request bytes of ``node``. A thread completes the fetch within deadlines, even if the node is dead."""
        fetch = Fetch(request, at_most, arrived)
        if node not in self._addresses:
            fetch.fail(f"{node}: its SMP has no address")
            return fetch
        try:
            if node not in self._peers:
                first = len(self._peers)  # few connections: spread them over the interfaces
                self._peers[node] = _Peer(node, self._addresses[node], self.trust, self._deadlines, first)
            if not self._peers[node].put(fetch):
                fetch.fail(f"{node}: {_MAX_QUEUED} requests are queued already", tried=False)
        except (RuntimeError, MemoryError) as error:
            fetch.fail(f"{node}: no thread can be started for it: {error}")
        return fetch

    def close(self) -> None:
        """End all connections; waiting fetches fail."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._addresses.clear()


class _Peer:
    """One other node: its addresses, its queue of fetches, and its connections, each with a thread."""

    def __init__(self, node: str, address: tuple[str, int], trust: Trust, deadlines: Deadlines, first: int) -> None:
        self.address, self._node, self._trust, self._deadlines = address, node, trust, deadlines
        self._places = deque((host, address[1]) for host in address[0].split(","))
        self._places.rotate(1 - first)
        self._shunned: dict[tuple[str, int], float] = {}
        self._channels: dict[Channel, tuple[str, int]] = {}
        self._waiting: deque[Fetch] = deque()
        self._threads = self._busy = 0
        self._guard = threading.Condition()  # of all above
        self._closed = False
        self._not_before, self._error = 0.0, ""
        self._backoff = pauses(_BACKOFF_SECS, _MAX_BACKOFF_SECS)

    def put(self, fetch: Fetch) -> bool:
        """Queue ``fetch`` and drop cancelled ones; False if the queue is full.

        Raises:
            RuntimeError, MemoryError: no thread can be started.
        """
        with self._guard:
            self._waiting = deque(other for other in self._waiting if not other.cancelled)
            if len(self._waiting) >= _MAX_QUEUED:
                return False
            if self._threads < min(CONNECTIONS, self._busy + len(self._waiting) + 1):
                with suppress(RuntimeError, MemoryError) if self._threads else nullcontext():
                    threading.Thread(target=self._run, name=f"smp-peer-{self._node}", daemon=True).start()
                    self._threads += 1
            self._waiting.append(fetch)
            self._guard.notify()
            return True

    def close(self) -> None:
        """End all connections, from any thread; nothing is sent afterwards."""
        with self._guard:
            self._closed = True  # before the channels: their threads, woken by the abort, must see it
            self._guard.notify_all()
            for channel in self._channels:
                channel.abort()

    def _run(self) -> None:
        channel = None
        while True:
            with self._guard:
                self._guard.wait_for(lambda: self._closed or self._waiting)
                if not self._waiting:
                    break
                fetch = self._waiting.popleft()
                self._busy += 1
            try:
                channel = self._serve(fetch, channel)
            finally:
                with self._guard:
                    self._busy -= 1
                # In any case: its waiter has no deadline.
                fetch.done.set()
        self._hang_up(channel)

    def _serve(self, fetch: Fetch, channel: Channel | None) -> Channel | None:
        """Serve ``fetch``; returns the connection to reuse, None if it failed."""
        if self._closed:
            fetch.fail(f"{self._node}: the connection was closed")
            return channel
        if fetch.cancelled:
            return channel
        # Queued fetches fail with the last one: else each would wait for its own deadlines, one after another.
        if time.monotonic() < self._not_before:
            fetch.error, fetch.tried = self._error, False
            return channel
        place = self._next_place() if channel is None else self._channels[channel]
        try:
            channel = channel or self._connect(place)
            fetch.data = self._exchange(fetch, channel)
            self._backoff = pauses(_BACKOFF_SECS, _MAX_BACKOFF_SECS)
        except Exception as error:  # noqa: BLE001 - later fetches need this thread, too
            if channel is None:
                self._shunned[place] = time.monotonic() + _SHUNNED_SECS
            self._hang_up(channel)
            host, port = place
            fetch.error = self._error = f"{self._node} at {host}:{port}: {str(error) or type(error).__name__}"
            self._not_before = time.monotonic() + next(self._backoff)
            return None
        return channel

    def _exchange(self, fetch: Fetch, channel: Channel) -> bytearray | None:
        request = fetch.request
        reply = exchange(channel, request, self._deadlines, most_payload=fetch.at_most)
        if reply.error:
            raise PeerError(f"it refuses: {reply.error}")
        if reply.payload is None:
            return None
        fetch.arrived(len(reply.payload))
        # The channel proves that the bytes are as sent, and only this that they were correct in memory there.
        if xxhash.xxh3_64_intdigest(reply.payload) != reply.fields.get("hash"):
            name = f"chunk {request.chunk}" if isinstance(request, ChunkRequest) else "the package"
            raise PeerError(f"{name} of {request.shard} at {request.snapshot.iteration} does not match its checksum")
        return reply.payload

    def _next_place(self) -> tuple[str, int]:
        """The next address in turn that is not shunned; if all are, the next one."""
        now = time.monotonic()
        with self._guard:
            self._places.rotate(-1)
            return next((place for place in self._places if self._shunned.get(place, 0.0) < now), self._places[0])

    def _connect(self, place: tuple[str, int]) -> Channel:
        deadline = time.monotonic() + self._deadlines.connect_secs
        channel = connect(place, self._deadlines.connect_secs)
        with self._guard:
            self._channels[channel] = place
        try:
            if self._closed:  # after the lock: either this sees it, or ``close`` has seen the channel
                raise PeerError("the connection was closed")
            channel.greet(self._trust, deadline)
        except BaseException:  # nobody else would close it
            self._hang_up(channel)
            raise
        return channel

    def _hang_up(self, channel: Channel | None) -> None:
        if channel is not None:
            with self._guard:
                del self._channels[channel]
            channel.close()
