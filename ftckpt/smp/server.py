"""The SMP's end of the Unix socket: bounded messages of this user's processes, with deadlines, in one thread."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftckpt.arena.directory import SMP_SOCKET_NAME
from ftckpt.errors import FtckptError, SmpError
from ftckpt.events import log
from ftckpt.smp.protocol import MAX_REPLY_BYTES, MAX_REQUEST_BYTES, decode_line, encode_line, peer_uid, socket_address

_CONNECTION_SECS = 10.0
_MOST_CONNECTIONS = 32
_PIECE_BYTES = 1 << 18

Handler = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class _Connection:
    """One request on its way in, then its reply on its way out."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.received = bytearray()
        self.reply: bytes | None = None
        self.deadline = time.monotonic() + _CONNECTION_SECS


class Server:
    """Listens in ``node_dir``; the lock of the SMP must be held: whatever socket lies there is stale.

    Args:
        handlers: by ``request``; each gets the message and returns the reply's fields, or raises FtckptError.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(self, node_dir: Path, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self._path = node_dir / SMP_SOCKET_NAME
        self._connections: dict[int, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._path.unlink(missing_ok=True)
        with socket_address(node_dir) as address:
            self._listener.bind(address)
        self._path.chmod(0o600)
        self._inode = self._path.lstat().st_ino
        self._listener.listen(_MOST_CONNECTIONS)
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    def poll(self, timeout_secs: float) -> None:
        """Serve what is there, waiting for it up to ``timeout_secs``; drop who is late."""
        for key, _ in self._selector.select(timeout_secs):
            connection = key.data
            try:
                if connection is None:
                    self._accept()
                elif connection.reply is None:
                    self._receive(connection)
                else:
                    self._send(connection)
            except OSError:  # the other end is gone
                if connection is not None:
                    self._drop(connection)
        now = time.monotonic()
        for connection in [other for other in self._connections.values() if now >= other.deadline]:
            log.warning("a connection was idle for %g s: dropped", _CONNECTION_SECS)
            self._drop(connection)

    def close(self) -> None:
        """Hang up and remove the socket."""
        with suppress(OSError):
            if self._path.lstat().st_ino == self._inode:  # another SMP serves where this one's directory was removed
                self._path.unlink()
        for connection in list(self._connections.values()):
            with suppress(OSError):
                self._send(connection)
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        connected, _ = self._listener.accept()
        connected.setblocking(False)
        uid = peer_uid(connected)
        if uid != os.geteuid() or len(self._connections) >= _MOST_CONNECTIONS:
            log.warning("a connection was refused: user %d, %d others", uid, len(self._connections))
            connected.close()
            return
        connection = _Connection(connected)
        self._connections[connected.fileno()] = connection
        self._selector.register(connected, selectors.EVENT_READ, connection)

    def _receive(self, connection: _Connection) -> None:
        piece = connection.socket.recv(_PIECE_BYTES)
        if not piece:
            self._drop(connection)
            return
        connection.received += piece
        end = connection.received.find(b"\n", max(0, len(connection.received) - len(piece)))
        if end < 0 and len(connection.received) < MAX_REQUEST_BYTES:
            return
        if end < 0 or end >= MAX_REQUEST_BYTES:
            reply = _refusal(f"a request of more than {MAX_REQUEST_BYTES} bytes")
        else:
            reply = self._answer(connection.received[:end])
        connection.received.clear()
        connection.reply = reply
        self._selector.modify(connection.socket, selectors.EVENT_WRITE, connection)
        self._send(connection)

    def _answer(self, line: bytearray) -> bytes:
        name = "?"
        try:
            message = decode_line(line)
            name = str(message.get("request"))[:40]
            handler = self._handlers.get(name)
            if handler is None:
                raise SmpError(f"unknown request {name!r}; known are {', '.join(self._handlers)}")
            reply = encode_line({"ok": True, **handler(message)})
        except FtckptError as error:
            return _refusal(str(error))
        except Exception as error:  # noqa: BLE001 - a wrong request must not end what others rely on
            log.exception("request %r failed", name)
            return _refusal(f"{type(error).__name__}: {error}")
        return reply if len(reply) <= MAX_REPLY_BYTES else _refusal(f"a reply of {len(reply)} bytes")

    def _send(self, connection: _Connection) -> None:
        if connection.reply:
            try:
                sent = connection.socket.send(connection.reply)
            except BlockingIOError:
                return
            connection.reply = connection.reply[sent:]
        if connection.reply == b"":
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._connections.pop(connection.socket.fileno(), None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()


def _refusal(text: str) -> bytes:
    text = " ".join(text.split())[:1000]
    log.warning("refused: %s", text)
    return encode_line({"ok": False, "error": text})
