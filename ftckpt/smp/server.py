"""The SMP's end of all connections: of its node's processes at a Unix socket, of other nodes at a TCP port."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
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
"""Of other nodes; each has a thread, whose stack is of the memory that the process may have."""
MAX_UNPROVEN = 64
"""More that have not proven the secret yet, which takes them milliseconds: groups of nodes may come all at once."""
MAX_LOCAL_CONNECTIONS = 32
_LOCAL_IDLE_SECS = 10.0
"""Clients on the node send one request and hang up."""
_CLOSE_SECS = 2.0
"""For replies that are being sent: enough for a chunk over any usual network."""
_LEAVE_SECS = 1.0
"""For the thread of one that was turned out, before another is begun in its place."""
_REPORT_AGAIN_SECS = 60.0
_MAX_REPORTED = 256
_NOT_HERE = encode_object({"ok": True, "here": False})

Handler = Callable[[Any], Mapping[str, Any]]
"""Gets a request and returns the reply's fields, or raises FtckptError. Called in the loop that polls."""
Find = Callable[[Any], AbstractContextManager[Delivery | None]]
"""Looks up what is wanted and holds it while it is sent; None: not here (yet). Called from many threads."""


@dataclass
class _Call:
    """A request on its way through the loop."""

    request: SmpRequest
    done: threading.Event = field(default_factory=threading.Event)
    reply: Mapping[str, Any] = field(default_factory=dict)
    error: FtckptError | None = None


@dataclass
class _Listener:
    """Sockets that are listened at, what is allowed there, and the connections that they made."""

    sockets: list[socket.socket]
    local: bool
    max_connections: int
    max_request_bytes: int
    deadlines: Deadlines
    accepting: list[threading.Thread] = field(default_factory=list)
    threads: dict[Channel, threading.Thread] = field(default_factory=dict)
    unproven: dict[Channel, str] = field(default_factory=dict)
    """Those of ``threads`` that have not proven the secret yet, oldest first, and from where they come."""
    guard: threading.Lock = field(default_factory=threading.Lock)
    """Of both: those in them have begun."""
    closed: bool = False

    def make_room(self) -> str:
        """Turn one out where too many have proven nothing yet; returns from where it came, or "".

        The oldest of the address with most of them: who floods the port crowds out himself, and whoever knows the
        secret has proven it long before he is the oldest.
        """
        with self.guard:
            if len(self.unproven) < MAX_UNPROVEN:
                return ""
            # Of equals the first, which began with the oldest of all.
            origin = max(Counter(self.unproven.values()).items(), key=lambda each: each[1])[0]
            oldest = next(channel for channel, each in self.unproven.items() if each == origin)
            del self.unproven[oldest]
            thread = self.threads[oldest]
            oldest.abort()
        thread.join(_LEAVE_SECS)  # not within the guard, which it takes at its end
        return origin

    def admit(self, channel: Channel) -> None:
        """It has proven the secret.

        Raises:
            PeerAuthError: there are too many of those.
            PeerError: it was turned out at this moment.
        """
        with self.guard:
            known = self.unproven.pop(channel, None) is not None
            full = len(self.threads) - len(self.unproven) > self.max_connections
        if not known:
            raise PeerError("it was turned out before its proof was read")
        if full:
            raise PeerAuthError(f"there are {self.max_connections} connections already")

    def abort(self) -> None:
        """End all connections; their threads are woken and close them."""
        with self.guard:
            for channel in self.threads:
                channel.abort()

    def close(self) -> None:
        """Stop listening; replies that are being sent are finished, within a moment."""
        self.closed = True
        for listening in self.sockets:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        _join(self.accepting)  # a thread that runs while the interpreter ends may crash it
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
    """Answers requests: a thread listens at each socket, and one serves each connection.

    Requests about state wait for the loop that calls ``poll``, so that state needs no locks; bytes are looked up and
    sent by the thread of the connection, so that the loop goes on meanwhile. Over the network bytes are given, and
    what lies here is told; nothing is changed.

    Args:
        handlers: one for each kind of request that the loop serves.
        find: of bytes that other nodes want.
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
        # No SimpleQueue: its ``get`` waits for ever where a signal's handler returns behind the deadline (CPython 3.9
        # to 3.12), and the loop that is to end by the signal waits here.
        self._calls: queue.Queue[_Call] = queue.Queue()
        self._guard, self._decoding = threading.Lock(), threading.Lock()  # neither is taken within the other
        self._reported: dict[str, float] = {}
        self._unix: _Listener | None = None
        self._network: _Listener | None = None
        self._socket_path: tuple[Path, int] | None = None
        self._closed = False

    def serve_node(self, node_dir: Path) -> None:
        """Answer this node's processes in ``node_dir``; the lock of the SMP is held: what lies there is stale.

        Raises:
            OSError: the socket cannot be made.
        """
        path = node_dir / SMP_SOCKET_NAME
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.unlink(missing_ok=True)
        with socket_address(node_dir) as address:
            listening.bind(address)
        path.chmod(0o600)  # the directory is 0700: nobody else has come in between
        self._socket_path = path, path.lstat().st_ino
        listening.listen(MAX_LOCAL_CONNECTIONS)
        deadlines = replace(self._deadlines, idle_secs=_LOCAL_IDLE_SECS)
        self._unix = _Listener([listening], True, MAX_LOCAL_CONNECTIONS, MAX_REQUEST_BYTES, deadlines)
        self._start(self._unix)

    def listen(self, host: str, trust: Trust, port: int = 0) -> int:
        """Answer other nodes at ``host``, one address or several with commas between; returns the port: ``port``
        itself if it is free, 0 is any.

        A second call for the same host, and the same port or any, keeps it and takes over ``trust``: connections of
        other nodes made with another secret end.

        Raises:
            ConfigError: the address cannot be listened at, or the secret is too short.
        """
        trust.checked()
        if self._network is not None and self._host == host and port in (0, self.port):
            if trust != self._trust:
                self._trust = trust  # first: a connection that is beginning compares it before each request
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
        """At which other nodes are answered; 0: at none."""
        return 0 if self._network is None else int(self._network.sockets[0].getsockname()[1])

    @property
    def connections(self) -> int:
        """How many other nodes have now."""
        return 0 if self._network is None else len(self._network.threads)

    def poll(self, timeout_secs: float) -> None:
        """Serve the requests that wait for the loop; wait for one up to ``timeout_secs``."""
        with suppress(queue.Empty):
            self._handle(self._calls.get(timeout=timeout_secs) if timeout_secs > 0 else self._calls.get_nowait())
            while True:
                self._handle(self._calls.get_nowait())

    def close(self) -> None:
        """Hang up, once replies are sent that wait for nothing, and remove the socket."""
        # Before the queue is emptied: ``_call`` looks at it after it has put its request there.
        self._closed = True
        if self._socket_path is not None:
            path, inode = self._socket_path
            with suppress(OSError):
                if path.lstat().st_ino == inode:  # another SMP serves where this one's directory was removed
                    path.unlink()
        with suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                call.error = SmpError("the SMP ends")
                call.done.set()
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
                    time.sleep(0.1)  # out of descriptors, or a connection that is gone already
                continue
            origin, channel = "this node" if listener.local else str(address[0]), Channel(sock)
            # Counted before anything is proven: otherwise strangers could make any number of threads.
            if crowded := listener.make_room():
                self._report_refusal(crowded, f"{MAX_UNPROVEN} connections wait to prove the secret: the oldest goes")
            if refusal := self._begin(listener, channel, origin):
                channel.close()
                self._report_refusal(origin, refusal)

    def _begin(self, listener: _Listener, channel: Channel, origin: str) -> str:
        """Start the thread of a connection; returns why it cannot be, or ""."""
        thread = threading.Thread(target=self._run, args=(listener, channel, origin), name="smp-answer", daemon=True)
        with listener.guard:
            if listener.closed:
                return "the SMP ends"
            listener.threads[channel], listener.unproven[channel] = thread, origin
            try:
                thread.start()
            except (RuntimeError, MemoryError) as error:  # the thread that accepts must live: nobody else does
                del listener.threads[channel], listener.unproven[channel]
                return f"no thread can be started for it: {error}"
        return ""

    def _run(self, listener: _Listener, channel: Channel, origin: str) -> None:
        deadlines, trust = listener.deadlines, self._trust  # the trust of this connection, from its first byte on
        try:
            channel.welcome(trust, time.monotonic() + deadlines.connect_secs)
            listener.admit(channel)
            while not listener.closed and (listener.local or trust == self._trust):
                frame = channel.receive(listener.max_request_bytes, 0, deadlines, deadlines.idle_secs)
                self._answer(channel, frame.body, listener)
        except PeerAuthError as error:
            self._report_refusal(origin, str(error))
        except PeerError as error:
            # It went away, or is broken: who still wants something connects again.
            log.debug("a connection from %s ended: %s", origin, error)
        finally:
            with listener.guard:
                listener.threads.pop(channel, None)
                listener.unproven.pop(channel, None)
            channel.close()

    def _answer(self, channel: Channel, body: bytes, listener: _Listener) -> None:
        deadlines = listener.deadlines
        try:
            with self._decoding:  # one at a time: what is parsed may take twenty times the bytes that came
                request = decode_request(body)
            if not (listener.local or request.FROM_ANYWHERE):
                raise SmpError(f"{request.WORD} is for processes of the SMP's own node")
            if not isinstance(request, BytesRequest):
                reply = encode_object({"ok": True, **self._call(request)})
                if len(reply) > MAX_REPLY_BYTES:
                    raise SmpError(f"a reply of {len(reply)} bytes")
        except FtckptError as error:
            refusal = error.to_json()
            # One line: some of it came from the other side, and it goes into the log.
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
        """Have the loop serve a request.

        Raises:
            FtckptError: it was refused.
            SmpError: the loop does not come to it.
        """
        call = _Call(request)
        self._calls.put(call)
        if self._closed or not call.done.wait(self._deadlines.step_secs):
            raise SmpError("the SMP ends" if self._closed else "the SMP is busy")
        if call.error is not None:
            raise call.error
        return call.reply

    def _handle(self, call: _Call) -> None:
        try:
            handler = self._handlers.get(type(call.request))
            if handler is None:
                raise SmpError(f"{call.request.WORD} is not served here")
            call.reply = handler(call.request)
        except FtckptError as error:
            call.error = error
        except Exception as error:  # noqa: BLE001 - a wrong request must not end what others rely on
            log.exception("request %r failed", call.request.WORD)
            call.error = SmpError(in_words(error))
        call.done.set()

    def _report_refusal(self, origin: str, reason: str) -> None:
        """Once a minute for each address, so that a stranger who tries and tries fills no log."""
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
        if thread.ident is not None:  # one that could not be started cannot be joined
            thread.join(max(0.0, deadline - time.monotonic()))
