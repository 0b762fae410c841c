"""The side of an SMP that asks other nodes: a thread and a connection for each of them."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import xxhash

from ftckpt.smp.wire import Channel, Deadlines, Kind, PeerError, Request, check_secret, greet, read_answer

_BACKOFF_SECS = (0.1, 0.2, 0.5, 1.0, 2.0)
_MOST_QUEUED = 64


@dataclass
class Fetch:
    """Something that was asked for: read ``data`` and ``error`` once ``done`` is set.

    ``data`` is None and ``error`` empty where the other side does not have it (yet). ``tried`` is false where
    nobody was asked, because an earlier failure is not long ago: ``error`` is that one's then.
    ``arrived`` is told the bytes that came, from another thread, also where nobody wants them any more.
    """

    request: Request
    at_most: int
    arrived: Callable[[int], None]
    done: threading.Event = field(default_factory=threading.Event)
    data: bytearray | None = None
    error: str = ""
    tried: bool = True
    cancelled: bool = False

    def cancel(self) -> None:
        """Nobody waits for it any more: it is not asked for, unless that has begun."""
        self.cancelled = True

    def fail(self, error: str, tried: bool = True) -> None:
        """It does not come."""
        self.error, self.tried = error, tried
        self.done.set()


class Peers:
    """The other nodes of a job, by name. All methods belong to one thread."""

    def __init__(self, deadlines: Deadlines | None = None) -> None:
        self._deadlines = deadlines or Deadlines()
        self._peers: dict[str, _Peer] = {}
        self.secret = b""

    def configure(self, addresses: Mapping[str, tuple[str, int]], secret: bytes) -> None:
        """Who is where. Connections to nodes that are gone, have moved, or had another secret end.

        Raises:
            ConfigError: the secret is too short.
        """
        check_secret(secret)
        for node, peer in list(self._peers.items()):
            if secret != self.secret or addresses.get(node) != peer.address:
                self._peers.pop(node).close()
        self.secret = secret
        for node, address in addresses.items():
            if node not in self._peers:
                self._peers[node] = _Peer(node, address, secret, self._deadlines)

    def fetch(
        self, node: str, request: Request, at_most: int, arrived: Callable[[int], None] = lambda nbytes: None
    ) -> Fetch:
        """Ask ``node``; answered in its thread, within deadlines, also when the node is dead or unknown."""
        wanted = Fetch(request, at_most, arrived)
        peer = self._peers.get(node)
        if peer is None:
            wanted.fail(f"{node}: its SMP has no address")
        elif not peer.queue.put(wanted):
            wanted.fail(f"{node}: {_MOST_QUEUED} requests wait for it already", tried=False)
        return wanted

    def close(self) -> None:
        """End all connections; what was asked for ends with an error."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()


class _Queue:
    """What is asked for and not begun, in order. Any thread puts, one thread gets; None ends it."""

    def __init__(self) -> None:
        self._waiting: deque[Fetch | None] = deque()
        self._some = threading.Condition()

    def put(self, wanted: Fetch | None) -> bool:
        """False where too many wait already; those that were cancelled do not count, and are forgotten."""
        with self._some:
            live = [fetch for fetch in self._waiting if fetch is None or not fetch.cancelled]
            self._waiting = deque(live)
            if wanted is not None and len(live) >= _MOST_QUEUED:
                return False
            self._waiting.append(wanted)
            self._some.notify()
            return True

    def get(self) -> Fetch | None:
        """The next one, however long it takes to come."""
        with self._some:
            self._some.wait_for(lambda: len(self._waiting) > 0)
            return self._waiting.popleft()

    def qsize(self) -> int:
        """How many wait."""
        return len(self._waiting)


class _Peer:
    """One other node: its address, and the thread that talks to it."""

    def __init__(self, node: str, address: tuple[str, int], secret: bytes, deadlines: Deadlines) -> None:
        self.address = address
        self.queue = _Queue()
        self._node = node
        self._secret = secret
        self._deadlines = deadlines
        self._channel: Channel | None = None
        self._closed = False
        self._failures = 0
        self._not_before = 0.0
        self._error = ""
        threading.Thread(target=self._run, name=f"smp-ask-{node}", daemon=True).start()

    def close(self) -> None:
        """From any thread; nothing is asked for afterwards."""
        self._closed = True
        self.queue.put(None)
        channel = self._channel
        if channel is not None:
            channel.abort()

    def _run(self) -> None:
        while (wanted := self.queue.get()) is not None:
            if self._closed:
                wanted.fail(f"{self._node}: the connection was given up")
            elif not wanted.cancelled:
                self._serve(wanted)
                wanted.done.set()
        self._hang_up()

    def _serve(self, wanted: Fetch) -> None:
        if time.monotonic() < self._not_before:
            wanted.error, wanted.tried = self._error, False
            return
        try:
            wanted.data = self._ask(wanted)
            self._failures = 0
        except (PeerError, MemoryError) as error:
            self._hang_up()
            host, port = self.address
            wanted.error = self._error = f"{self._node} at {host}:{port}: {error or 'no memory for its answer'}"
            pause = _BACKOFF_SECS[min(self._failures, len(_BACKOFF_SECS) - 1)]
            self._failures += 1
            self._not_before = time.monotonic() + pause

    def _ask(self, wanted: Fetch) -> bytearray | None:
        channel = self._channel or self._connect()
        channel.write(wanted.request.encode(), time.monotonic() + self._deadlines.step_secs)
        answer = read_answer(channel, wanted.at_most, self._deadlines)
        if answer is None:
            return None
        data, expected = answer
        wanted.arrived(len(data))
        if xxhash.xxh3_64_intdigest(data) != expected:
            what = wanted.request
            name = f"chunk {what.chunk}" if what.kind == Kind.CHUNK else "the package"
            raise PeerError(f"{name} of {what.shard} at {what.iteration} does not match its checksum")
        return data

    def _connect(self) -> Channel:
        deadline = time.monotonic() + self._deadlines.connect_secs
        try:
            sock = socket.create_connection(self.address, timeout=self._deadlines.connect_secs)
        except OSError as error:
            raise PeerError(f"cannot be reached: {error}") from None
        self._channel = Channel(sock)
        if self._closed:
            raise PeerError("the connection was given up")
        greet(self._channel, self._secret, deadline)
        return self._channel

    def _hang_up(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
