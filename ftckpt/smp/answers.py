"""The side of an SMP that answers other nodes: one thread listens, one serves each connection."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

from ftckpt.errors import ConfigError
from ftckpt.events import Events
from ftckpt.smp.wire import (
    Channel,
    Deadlines,
    PeerError,
    RefusedError,
    Request,
    check_secret,
    read_request,
    welcome,
    write_absent,
    write_head,
    write_trailer,
)

MAX_CONNECTIONS = 128
_TELL_AGAIN_SECS = 60.0
_MOST_TOLD = 256
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Answer:
    """Bytes to send. ``valid`` tells, after they were read, whether they had been those of the snapshot."""

    view: memoryview
    hash: int
    valid: Callable[[], bool]


Find = Callable[[Request], AbstractContextManager[Answer | None]]
"""Looks up what is asked for and holds it while it is sent; None: not here (yet). Called from many threads."""


class Answerer:
    """Listens at a TCP port and answers who knows the secret.

    Who does not is cut off and named in an event ``peer_refused`` (once a minute for each address).

    Args:
        host: address to listen at.
        port: the port; another one where it is taken, and 0: any.

    Raises:
        ConfigError: the address cannot be listened at, or the secret is too short.
    """

    def __init__(
        self, host: str, port: int, secret: bytes, *, find: Find, events: Events, deadlines: Deadlines | None = None
    ) -> None:
        self.host = host
        self._secret = check_secret(secret)
        self._find = find
        self._events = events
        self._deadlines = deadlines or Deadlines()
        self._guard = threading.Lock()
        self._channels: set[Channel] = set()
        self._told: dict[str, float] = {}
        self._closed = False
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="smp-accept", daemon=True)
        self._thread.start()

    def replace_secret(self, secret: bytes) -> None:
        """Connections made with another secret end; new ones need this one."""
        with self._guard:
            if check_secret(secret) == self._secret:
                return
            self._secret = secret
            channels = list(self._channels)
        for channel in channels:
            channel.abort()

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._channels)

    def close(self) -> None:
        """Stop listening and end all connections."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._thread.join(self._deadlines.step_secs)
        self._socket.close()
        with self._guard:
            channels = list(self._channels)
        for channel in channels:
            channel.abort()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, address = self._socket.accept()
            except OSError:
                if not self._closed:
                    time.sleep(0.1)  # out of descriptors, or a connection that is gone already
                continue
            with self._guard:
                full = self._closed or len(self._channels) >= MAX_CONNECTIONS
                if not full:
                    channel = Channel(sock)
                    self._channels.add(channel)
            if full:
                self._tell(address[0], f"there are {MAX_CONNECTIONS} connections already")
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(channel, address[0]), name="smp-answer", daemon=True).start()

    def _serve(self, channel: Channel, address: str) -> None:
        try:
            secret = self._secret
            welcome(channel, secret, time.monotonic() + self._deadlines.connect_secs)
            while secret == self._secret and not self._closed:
                self._answer(channel, read_request(channel, self._deadlines))
        except RefusedError as error:
            self._tell(address, str(error))
        except PeerError:
            pass  # it went away, or is broken: whoever asks again connects again
        finally:
            with self._guard:
                self._channels.discard(channel)
            channel.close()

    def _answer(self, channel: Channel, request: Request) -> None:
        with self._find(request) as answer:
            if answer is None:
                write_absent(channel, time.monotonic() + self._deadlines.step_secs)
                return
            nbytes = len(answer.view)
            deadline = time.monotonic() + self._deadlines.transfer_secs(nbytes)
            write_head(channel, nbytes, answer.hash, deadline)
            for begin in range(0, nbytes, _PIECE_BYTES):
                channel.write(answer.view[begin : begin + _PIECE_BYTES], deadline)
            write_trailer(channel, answer.valid(), deadline)

    def _tell(self, address: str, reason: str) -> None:
        now = time.monotonic()
        with self._guard:
            if now - self._told.get(address, -_TELL_AGAIN_SECS) < _TELL_AGAIN_SECS:
                return
            if len(self._told) >= _MOST_TOLD:
                self._told.clear()
            self._told[address] = now
        self._events.emit("peer_refused", address=address, reason=reason)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise ConfigError(f"smp_listen: {host!r} is no address: {error}") from None
    for wanted in dict.fromkeys((port, 0)):
        try:
            return socket.create_server((host, wanted), family=family, backlog=MAX_CONNECTIONS)
        except OSError as error:
            problem = str(error)
    raise ConfigError(f"smp_listen: cannot listen at {host!r}: {problem}")
