"""What an SMP fetches from those of other nodes: a few connections to each that was ever asked, over all links."""

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
CONNECTIONS = 4
"""To one node: as many as chunks that are requested ahead of time. One that nothing waits for is not made."""


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
        """Who is where: addresses with commas between, and a port. Connections to nodes that are gone, have moved, or
        had another secret end.

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
                first = len(self._peers)  # of few connections each goes over another interface
                self._peers[node] = _Peer(node, self._addresses[node], self.trust, self._deadlines, first)
            if not self._peers[node].put(fetch):
                fetch.fail(f"{node}: {_MAX_QUEUED} requests wait for it already", tried=False)
        except (RuntimeError, MemoryError) as error:
            fetch.fail(f"{node}: no thread can be started for it: {error}")
            return fetch
        return fetch

    def close(self) -> None:
        """End all connections; fetches that wait end with an error."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._addresses.clear()


class _Peer:
    """One other node: its addresses, what waits for it, and its connections, each with a thread."""

    def __init__(self, node: str, address: tuple[str, int], trust: Trust, deadlines: Deadlines, first: int) -> None:
        self.address, self.node, self.trust, self.deadlines = address, node, trust, deadlines
        self._first = first
        self.closed = False
        self._links: list[_Link] = []
        self._waiting: deque[Fetch] = deque()
        self._busy = 0
        self._changed = threading.Condition()

    def put(self, fetch: Fetch) -> bool:
        """Have ``fetch`` served; False where too many wait already: those that were cancelled are forgotten.

        Raises:
            RuntimeError, MemoryError: no thread can be started.
        """
        with self._changed:
            self._waiting = deque(other for other in self._waiting if not other.cancelled)
            if len(self._waiting) >= _MAX_QUEUED:
                return False
            needs_link = self._busy + len(self._waiting) >= len(self._links)
            if needs_link and len(self._links) < CONNECTIONS:
                try:
                    self._links.append(_Link(self, self._first + len(self._links)))
                except (RuntimeError, MemoryError):
                    if not self._links:
                        raise
            self._waiting.append(fetch)
            self._changed.notify_all()
            return True

    def next(self, link: _Link) -> Fetch | None:
        """What ``link`` is to serve, however long it takes to come; None: nothing yet, it shall connect before."""
        with self._changed:
            while True:
                # What waits must not try a broken link while another one works.
                if self.closed or (self._waiting and (link.channel is not None or not self._works)):
                    self._busy += bool(self._waiting)
                    return self._waiting.popleft() if self._waiting else None
                left_secs = link.not_before - time.monotonic()
                if self._waiting and left_secs <= 0:
                    return None
                self._changed.wait(max(0.0, left_secs) if self._waiting else None)

    def served(self, fetch: Fetch) -> None:
        """In any case: who waits for it has no deadline of its own."""
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()  # whether any connection works may have changed
        fetch.done.set()

    def close(self) -> None:
        """From any thread; nothing is sent for afterwards."""
        with self._changed:
            self.closed = True  # before the channels: a thread that the abort wakes must see it
            self._changed.notify_all()
            for link in self._links:
                if (channel := link.channel) is not None:
                    channel.abort()

    @property
    def _works(self) -> bool:
        return any(link.channel is not None for link in self._links)


class _Link:
    """One connection to another node, over one of its addresses: the next one where that fails."""

    def __init__(self, peer: _Peer, number: int) -> None:
        hosts, port = peer.address
        self.channel: Channel | None = None
        self.not_before = 0.0
        self._peer = peer
        self._places = [(host, port) for host in hosts.split(",")]
        self._at = number
        self._failures = 0
        self._error = ""
        threading.Thread(target=self._run, name=f"smp-peer-{peer.node}", daemon=True).start()

    def _run(self) -> None:
        peer = self._peer
        while (fetch := peer.next(self)) is not None or not peer.closed:
            if fetch is None:
                self._attempt(self._connect)
                continue
            try:
                if peer.closed:
                    fetch.fail(f"{peer.node}: the connection was given up")
                elif not fetch.cancelled:
                    self._serve(fetch)
            finally:
                peer.served(fetch)
        self._hang_up()

    def _serve(self, fetch: Fetch) -> None:
        # What waits behind a failure fails with it: else each would wait for its own deadlines, one after the other.
        if time.monotonic() < self.not_before:
            fetch.error, fetch.tried = self._error, False
        elif not self._attempt(lambda: self._exchange(fetch)):
            fetch.error = self._error

    def _attempt(self, action: Callable[[], object]) -> bool:
        """Whether ``action`` succeeded; the connection is given up where not."""
        host, port = self._places[self._at % len(self._places)]
        try:
            action()
        except Exception as error:  # noqa: BLE001 - what comes later waits for this thread, too
            self._hang_up()
            self._error = f"{self._peer.node} at {host}:{port}: {str(error) or type(error).__name__}"
            self.not_before = time.monotonic() + _BACKOFF_SECS[min(self._failures, len(_BACKOFF_SECS) - 1)]
            self._failures += 1
            self._at += 1
            return False
        return True

    def _exchange(self, fetch: Fetch) -> None:
        request, channel = fetch.request, self.channel or self._connect()
        reply = exchange(channel, request, self._peer.deadlines, most_payload=fetch.at_most)
        if reply.error:
            raise PeerError(f"it refuses: {reply.error}")
        self._failures = 0
        if reply.payload is None:
            return
        fetch.arrived(len(reply.payload))
        # The channel proves that the bytes are those that were sent; only this, that they were good in memory there.
        if xxhash.xxh3_64_intdigest(reply.payload) != reply.fields.get("hash"):
            name = f"chunk {request.chunk}" if isinstance(request, ChunkRequest) else "the package"
            raise PeerError(f"{name} of {request.shard} at {request.snapshot.iteration} does not match its checksum")
        fetch.data = reply.payload

    def _connect(self) -> Channel:
        connect_secs = self._peer.deadlines.connect_secs
        deadline = time.monotonic() + connect_secs
        # In this order, and ``close`` the other way round: one of the two threads sees what the other did.
        channel = self.channel = connect(self._places[self._at % len(self._places)], connect_secs)
        if self._peer.closed:
            raise PeerError("the connection was given up")
        channel.greet(self._peer.trust, deadline)
        return channel

    def _hang_up(self) -> None:
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close()
