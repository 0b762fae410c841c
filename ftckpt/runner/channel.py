"""What an agent and its server say to each other, and how a process ends with the one that started it."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
from contextlib import suppress
from typing import Any

_PR_SET_PDEATHSIG = 1


class Channel:
    """Messages as lines of JSON between an agent and its server."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = b""
        self.is_closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Where nobody listens any more, ``receive`` finds that out."""
        with suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_secs: float | None = 0.0) -> list[dict[str, Any]]:
        """The messages that are there, once one is; none after ``timeout_secs``, or where the other end is closed."""
        if self.is_closed or not select.select([self._socket], [], [], timeout_secs)[0]:
            return []
        try:
            data = self._socket.recv(1 << 20)
        except ConnectionError:
            data = b""
        self.is_closed = not data
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self._socket.close()


def end_with_parent(parent: int = 0) -> None:
    """Have the kernel kill this process when its parent ends, which was ``parent``, where that is known."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:  # it has ended before that
        os._exit(1)
