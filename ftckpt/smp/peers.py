"""What an SMP fetches from those of other nodes: a thread and a connection for each that was ever asked."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import xxhash

from ftckpt.smp.channel import Channel, Deadlines, PeerError, Trust, connect
from ftckpt.smp.requests import BytesRequest, ChunkRequest, exchange

_BACKOFF_SECS = (0.1, 0.2, 0.5, 1.0, 2.0)
"""After the first failure in a row, the second, …; all later ones have the last."""
_MAX_QUEUED = 64
"""Far more than cover and scrub have under way: what nobody takes must not pile up."""


@dataclass
class Fetch:
    """Bytes that were requested: read ``data`` and ``error`` once ``done`` is set.

    ``data`` is None and ``error`` empty where the other side does not have it (yet). ``tried`` is false where
    nothing was sent, because an earlier failure is not long ago: ``error`` is that one's then.
    ``arrived`` is called with the bytes that came, from another thread, also where nobody wants them any more.
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
        """Nobody waits for it any more: it is not sent for, unless that has begun."""
        self.cancelled = True

    def fail(self, error: str, tried: bool = True) -> None:
        """Nothing will come; who waits is woken."""
        self.error, self.tried = error, tried
        self.done.set()


class Peers:
    """The other nodes of a job, by name. All methods belong to one thread."""

    def __init__(self, deadlines: Deadlines | None = None) -> None:
        self._deadlines = deadlines or Deadlines()
        self._addresses: dict[str, tuple[str, int]] = {}
        # Made when first asked: of a thousand nodes a handful shares groups and packages with this one.
        self._peers: dict[str, _Peer] = {}
        self.trust = Trust()

    def configure(self, addresses: Mapping[str, tuple[str, int]], trust: Trust) -> None:
        """Who is where. Connections to nodes that are gone, have moved, or had another secret end.

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
        """Ask ``node``; answered in its thread, within deadlines, also when the node is dead or unknown."""
        fetch = Fetch(request, at_most, arrived)
        if node not in self._addresses:
            fetch.fail(f"{node}: its SMP has no address")
            return fetch
        try:
            if node not in self._peers:
                self._peers[node] = _Peer(node, self._addresses[node], self.trust, self._deadlines)
        except (RuntimeError, MemoryError) as error:
            fetch.fail(f"{node}: no thread can be started for it: {error}")
            return fetch
        if not self._peers[node].queue.put(fetch):
            fetch.fail(f"{node}: {_MAX_QUEUED} requests wait for it already", tried=False)
        return fetch

    def close(self) -> None:
        """End all connections; fetches that wait end with an error."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._addresses.clear()


class _Queue:
    """Fetches that have not begun, in order. Any thread puts, one thread gets; None ends it."""

    def __init__(self) -> None:
        self._waiting: deque[Fetch | None] = deque()
        self._some = threading.Condition()

    def put(self, fetch: Fetch | None) -> bool:
        """False where too many wait already; those that were cancelled do not count, and are forgotten."""
        with self._some:
            live = [other for other in self._waiting if other is None or not other.cancelled]
            self._waiting = deque(live)
            if fetch is not None and len(live) >= _MAX_QUEUED:
                return False
            self._waiting.append(fetch)
            self._some.notify()
            return True

    def get(self) -> Fetch | None:
        """The next one, however long it takes to come."""
        with self._some:
            self._some.wait_for(lambda: len(self._waiting) > 0)
            return self._waiting.popleft()


class _Peer:
    """One other node: its address, and the thread that talks to it."""

    def __init__(self, node: str, address: tuple[str, int], trust: Trust, deadlines: Deadlines) -> None:
        self.address = address
        self.queue = _Queue()
        self._node = node
        self._trust = trust
        self._deadlines = deadlines
        self._channel: Channel | None = None
        self._closed = False
        self._failures = 0
        self._not_before = 0.0
        self._error = ""
        threading.Thread(target=self._run, name=f"smp-peer-{node}", daemon=True).start()

    def close(self) -> None:
        """From any thread; nothing is sent for afterwards."""
        self._closed = True
        self.queue.put(None)  # before the channel: its thread, woken by the abort, must find the end of its queue
        channel = self._channel
        if channel is not None:
            channel.abort()

    def _run(self) -> None:
        while (fetch := self.queue.get()) is not None:
            if self._closed:
                fetch.fail(f"{self._node}: the connection was given up")
            elif not fetch.cancelled:
                try:
                    self._serve(fetch)
                finally:
                    # In any case: who waits for it has no deadline of its own.
                    fetch.done.set()
        self._hang_up()

    def _serve(self, fetch: Fetch) -> None:
        # What waits behind a failure fails with it: else each would wait for its own deadlines, one after the other.
        if time.monotonic() < self._not_before:
            fetch.error, fetch.tried = self._error, False
            return
        try:
            fetch.data = self._exchange(fetch)
            self._failures = 0
        except Exception as error:  # noqa: BLE001 - what comes later waits for this thread, too
            self._hang_up()
            host, port = self.address
            fetch.error = self._error = f"{self._node} at {host}:{port}: {str(error) or type(error).__name__}"
            pause = _BACKOFF_SECS[min(self._failures, len(_BACKOFF_SECS) - 1)]
            self._failures += 1
            self._not_before = time.monotonic() + pause

    def _exchange(self, fetch: Fetch) -> bytearray | None:
        request = fetch.request
        reply = exchange(self._channel or self._connect(), request, self._deadlines, most_payload=fetch.at_most)
        if reply.error:
            raise PeerError(f"it refuses: {reply.error}")
        if reply.payload is None:
            return None
        fetch.arrived(len(reply.payload))
        # The channel proves that the bytes are those that were sent; only this, that they were good in memory there.
        if xxhash.xxh3_64_intdigest(reply.payload) != reply.fields.get("hash"):
            name = f"chunk {request.chunk}" if isinstance(request, ChunkRequest) else "the package"
            raise PeerError(f"{name} of {request.shard} at {request.snapshot.iteration} does not match its checksum")
        return reply.payload

    def _connect(self) -> Channel:
        deadline = time.monotonic() + self._deadlines.connect_secs
        # In this order, and ``close`` the other way round: one of the two threads sees what the other did.
        channel = self._channel = connect(self.address, self._deadlines.connect_secs)
        if self._closed:
            raise PeerError("the connection was given up")
        channel.greet(self._trust, deadline)
        return channel

    def _hang_up(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
