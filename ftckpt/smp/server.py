"""Server of an SMP: for its node's processes at a Unix socket, for other nodes at a TCP port."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ftckpt.errors import FtckptError, PeerAuthError, PeerError, SmpError, in_words
from ftckpt.events import Events, log
from ftckpt.memory.directory import SMP_SOCKET_NAME
from ftckpt.smp.channel import Channel, Deadlines, Delivery, Trust, socket_address
from ftckpt.smp.ports import listen_at
from ftckpt.smp.requests import (
    MAX_NETWORK_REQUEST_BYTES,
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    BytesRequest,
    SmpRequest,
    decode_request,
    encode_object,
)

MAX_CONNECTIONS = 256
"""Of other nodes; each has a thread, whose stack counts in the process's memory limit."""
MAX_UNPROVEN = 64
"""Further connections that have not proven the secret yet: it takes milliseconds, but many may arrive at once."""
# Ranks and commands connect for one request each.
MAX_LOCAL_CONNECTIONS = 32
_LOCAL_IDLE_SECS = 10.0
"""Clients on the node send one request and hang up."""
_CLOSE_SECS = 2.0
"""Time to finish replies: enough for a chunk over any usual network."""
_LEAVE_SECS = 1.0
"""Wait for the thread of an evicted connection before the next one starts."""
_REPORT_AGAIN_SECS = 60.0
# A scan from many addresses must not grow memory.
_MAX_REPORTED = 256
_NOT_HERE = encode_object({"ok": True, "here": False})

Handler = Callable[[Any], Mapping[str, Any]]
"""Returns the reply's fields for a request, or raises FtckptError. Called in the loop that polls."""
Find = Callable[[Any], AbstractContextManager[Delivery | None]]
"""Finds requested bytes and holds them while they are sent; None: not available (yet). Called from many threads."""


@dataclass
class _Listener:
    """Listening sockets, their limits, and their connections."""

    sockets: list[socket.socket]
    local: bool
    max_connections: int
    max_request_bytes: int
    deadlines: Deadlines
    accepting: list[threading.Thread] = field(default_factory=list, init=False)
    threads: dict[Channel, threading.Thread] = field(default_factory=dict, init=False)
    unproven: dict[Channel, str] = field(default_factory=dict, init=False)
    """Those of ``threads`` that have not proven the secret yet, oldest first, with their origin."""
    guard: threading.Lock = field(default_factory=threading.Lock, init=False)
    """Protects both; their threads have been started."""
    closed: bool = field(default=False, init=False)

    def make_room(self) -> str:
        """Evict an unproven connection if there are too many; returns its origin, or "".

        The oldest one of the address with most of them: a flood evicts only its own, and a client with the secret has
        proven it long before it is the oldest.
        """
        with self.guard:
            if len(self.unproven) < MAX_UNPROVEN:
                return ""
            # ``max`` returns the first of equals: the address of the oldest connection.
            origin = max(Counter(self.unproven.values()).items(), key=lambda each: each[1])[0]
            oldest = next(channel for channel, each in self.unproven.items() if each == origin)
            del self.unproven[oldest]
            thread = self.threads[oldest]
            oldest.abort()
        thread.join(_LEAVE_SECS)  # outside of the guard, which the thread takes at its end
        return origin

    def admit(self, channel: Channel) -> str:
        """Move ``channel``, which has proven the secret, to the admitted connections; returns why it is refused, or
        "".

        Raises:
            PeerError: it has just been evicted.
        """
        with self.guard:
            known = self.unproven.pop(channel, None) is not None
            full = len(self.threads) - len(self.unproven) > self.max_connections
        if not known:
            raise PeerError("it was evicted before its proof was read")
        return f"there are {self.max_connections} connections already" if full else ""

    def abort(self) -> None:
        """End all connections; their threads are woken and close them."""
        with self.guard:
            for channel in self.threads:
                channel.abort()

    def close(self) -> None:
        """Stop listening and end all connections, after their current replies within ``_CLOSE_SECS``."""
        self.closed = True
        for listening in self.sockets:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        _join(self.accepting)  # a thread still running at interpreter exit may crash it
        for listening in self.sockets:
            listening.close()
        with self.guard:
            threads = dict(self.threads)
        for channel in threads:
            channel.end_input()
        _join(threads.values())
        self.abort()
        _join(threads.values())


class Server:
    """Answers requests: one thread per listening socket and one per connection.

    Call ``serve_node``, perhaps ``listen``, then ``poll`` in a loop, then ``close``. Requests about state wait for
    that loop, so that state needs no locks. Threads of connections find and send bytes concurrently. Over the network
    state can be read, not changed.

    Args:
        handlers: one for each class of request that the loop serves.
        find: finds bytes for other nodes.
    """

    def __init__(
        self, handlers: Mapping[type[SmpRequest], Handler], *, find: Find, events: Events,
        deadlines: Deadlines | None = None,
    ) -> None:  # fmt: skip
        self._handlers = dict(handlers)
        self._find = find
        self._events = events
        self._deadlines = deadlines or Deadlines()
        self._trust = Trust()
        self._host = ""
        # No SimpleQueue: its ``get`` blocks forever if a signal handler returns after the deadline (CPython 3.9 to
        # 3.12), and this loop must end by a signal.
        self._calls: queue.Queue[tuple[SmpRequest, Future[Mapping[str, Any]]]] = queue.Queue()
        self._guard, self._decoding = threading.Lock(), threading.Lock()  # never nested
        self._reported: dict[str, float] = {}
        self._unix: _Listener | None = None
        self._network: _Listener | None = None
        self._socket_path: tuple[Path, int] | None = None
        self._closed = False

    def serve_node(self, node_dir: Path) -> None:
        """Answer this node's processes at a socket in ``node_dir``. The caller holds the lock: an old one is stale.

        Raises:
            OSError: the socket cannot be created.
        """
        path = node_dir / SMP_SOCKET_NAME
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.unlink(missing_ok=True)
        with socket_address(node_dir) as address:
            listening.bind(address)
        path.chmod(0o600)  # the directory is 0700: nobody else could connect before this
        self._socket_path = path, path.lstat().st_ino
        listening.listen(MAX_LOCAL_CONNECTIONS)
        deadlines = replace(self._deadlines, idle_secs=_LOCAL_IDLE_SECS)
        self._unix = _Listener([listening], True, MAX_LOCAL_CONNECTIONS, MAX_REQUEST_BYTES, deadlines)
        self._start(self._unix)

    def listen(self, host: str, trust: Trust, port: int = 0) -> int:
        """Answer other nodes at ``host``, one address or several separated by commas; returns the port: ``port``
        unless it is taken or 0.

        A second call with the same host, and the same port or 0, only replaces ``trust``: connections under another
        secret end.

        Raises:
            ConfigError: the address cannot be bound, or the secret is too short.
        """
        trust.checked()
        if self._network is not None and self._host == host and port in (0, self.port):
            if trust != self._trust:
                self._trust = trust  # first: a starting connection compares it before each request
                self._network.abort()
            return self.port
        if self._network is not None:
            # First: the new one may want the same port.
            self._network.close()
            self._network = None
        listening = listen_at(host, port, MAX_CONNECTIONS)
        self._trust, self._host = trust, host
        network = _Listener(listening, False, MAX_CONNECTIONS, MAX_NETWORK_REQUEST_BYTES, self._deadlines)
        self._start(network)
        self._network = network
        return self.port

    @property
    def port(self) -> int:
        """The port for other nodes; 0: none."""
        return 0 if self._network is None else int(self._network.sockets[0].getsockname()[1])

    @property
    def connections(self) -> int:
        """The current number of connections of other nodes."""
        return 0 if self._network is None else len(self._network.threads)

    def poll(self, timeout_secs: float) -> None:
        """Serve the queued requests; wait for the first one up to ``timeout_secs``."""
        with suppress(queue.Empty):
            self._handle(*(self._calls.get(timeout=timeout_secs) if timeout_secs > 0 else self._calls.get_nowait()))
            while True:
                self._handle(*self._calls.get_nowait())

    def close(self) -> None:
        """Refuse queued requests, finish replies that are being sent, end all connections, and remove the socket."""
        # Before the queue is drained: ``_call`` checks it after queueing its request.
        self._closed = True
        if self._socket_path is not None:
            path, inode = self._socket_path
            with suppress(OSError):
                if path.lstat().st_ino == inode:  # not another SMP's, after the directory was removed
                    path.unlink()
        with suppress(queue.Empty):
            while True:
                self._calls.get_nowait()[1].set_exception(SmpError("the SMP ends"))
        for listener in (self._unix, self._network):
            if listener is not None:
                listener.close()

    def _start(self, listener: _Listener) -> None:
        for listening in listener.sockets:
            thread = threading.Thread(target=self._accept, args=(listener, listening), name="smp-accept", daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError):
                listener.close()
                raise
            listener.accepting.append(thread)

    def _accept(self, listener: _Listener, listening: socket.socket) -> None:
        while not listener.closed:
            try:
                sock, address = listening.accept()
            except OSError:
                if not listener.closed:
                    time.sleep(0.1)  # out of descriptors, or the connection is gone already
                continue
            origin, channel = "this node" if listener.local else str(address[0]), Channel(sock)
            # Limited before the proof: otherwise strangers could create any number of threads.
            if crowded := listener.make_room():
                self._report_refusal(crowded, f"{MAX_UNPROVEN} connections have no proof yet: the oldest is evicted")
            if refusal := self._begin(listener, channel, origin):
                channel.close()
                self._report_refusal(origin, refusal)

    def _begin(self, listener: _Listener, channel: Channel, origin: str) -> str:
        """Start the thread of a connection; returns why that fails, or ""."""
        thread = threading.Thread(target=self._run, args=(listener, channel, origin), name="smp-answer", daemon=True)
        with listener.guard:
            if listener.closed:
                return "the SMP ends"
            listener.threads[channel], listener.unproven[channel] = thread, origin
            try:
                thread.start()
            except (RuntimeError, MemoryError) as error:  # the thread that accepts must live: there is no other
                del listener.threads[channel], listener.unproven[channel]
                return f"no thread can be started for it: {error}"
        return ""

    def _run(self, listener: _Listener, channel: Channel, origin: str) -> None:
        deadlines, trust = listener.deadlines, self._trust  # fixed for this connection, from its first byte
        try:
            channel.welcome(trust, time.monotonic() + deadlines.connect_secs)
            if refusal := listener.admit(channel):
                self._report_refusal(origin, refusal)
            while not refusal and not listener.closed and (listener.local or trust == self._trust):
                frame = channel.receive(listener.max_request_bytes, 0, deadlines, deadlines.idle_secs)
                self._answer(channel, frame.body, listener)
        except PeerAuthError as error:
            self._report_refusal(origin, str(error))
        except PeerError as error:
            # Closed or broken: a client that needs more connects again.
            log.debug("a connection from %s ended: %s", origin, error)
        finally:
            with listener.guard:
                listener.threads.pop(channel, None)
                listener.unproven.pop(channel, None)
            channel.close()

    def _answer(self, channel: Channel, body: bytes, listener: _Listener) -> None:
        deadlines = listener.deadlines
        try:
            with self._decoding:  # one at a time: parsing may take twenty times the size
                request = decode_request(body)
            if not (listener.local or request.FROM_ANYWHERE):
                raise SmpError(f"{request.WORD} is for processes of the SMP's own node")
            if not isinstance(request, BytesRequest):
                reply = encode_object({"ok": True, **self._call(request)})
                if len(reply) > MAX_REPLY_BYTES:
                    raise SmpError(f"a reply of {len(reply)} bytes")
        except FtckptError as error:
            refusal = error.to_json()
            # One line: parts of it come from the client and go into the log.
            refusal["error"] = " ".join(str(refusal["error"]).split())[:1000]
            log.warning("refused: %s", refusal["error"])
            reply = encode_object({"ok": False, **refusal})
            channel.send(reply, time.monotonic() + deadlines.step_secs)
            return
        if isinstance(request, BytesRequest):
            self._deliver(channel, request, deadlines)
        else:
            channel.send(reply, time.monotonic() + deadlines.step_secs)

    def _deliver(self, channel: Channel, request: BytesRequest, deadlines: Deadlines) -> None:
        with self._find(request) as delivery:
            if delivery is None:
                channel.send(_NOT_HERE, time.monotonic() + deadlines.step_secs)
                return
            body = encode_object({"ok": True, "here": True, "hash": delivery.hash})
            channel.send(body, time.monotonic() + deadlines.transfer_secs(len(delivery.view)), delivery)

    def _call(self, request: SmpRequest) -> Mapping[str, Any]:
        """Let the loop serve a request.

        Raises:
            FtckptError: it was refused.
            SmpError: the SMP ends, or the loop is busy for too long.
        """
        reply: Future[Mapping[str, Any]] = Future()
        self._calls.put((request, reply))
        if self._closed:
            raise SmpError("the SMP ends")
        try:
            return reply.result(self._deadlines.step_secs)
        except FutureTimeoutError:
            raise SmpError("the SMP is busy") from None

    def _handle(self, request: SmpRequest, reply: Future[Mapping[str, Any]]) -> None:
        try:
            handler = self._handlers.get(type(request))
            if handler is None:
                raise SmpError(f"{request.WORD} is not served")
            reply.set_result(handler(request))
        except FtckptError as error:
            reply.set_exception(error)
        except Exception as error:  # noqa: BLE001 - a bad request must not end the SMP
            log.exception("request %r failed", request.WORD)
            reply.set_exception(SmpError(in_words(error)))

    def _report_refusal(self, origin: str, reason: str) -> None:
        """Report a refusal, at most once a minute per address, so that repeated attempts do not fill the log."""
        now = time.monotonic()
        with self._guard:
            if now - self._reported.get(origin, -_REPORT_AGAIN_SECS) < _REPORT_AGAIN_SECS:
                return
            if len(self._reported) >= _MAX_REPORTED:
                self._reported.clear()
            self._reported[origin] = now
        self._events.emit("peer_refused", address=origin, reason=reason)


def _join(threads: Iterable[threading.Thread]) -> None:
    deadline = time.monotonic() + _CLOSE_SECS
    for thread in threads:
        if thread.ident is not None:  # a thread that never started cannot be joined
            thread.join(max(0.0, deadline - time.monotonic()))
