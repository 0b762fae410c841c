"""Detection of the end of another agent's process, long before its heartbeats are overdue."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

_PORT = "ftckpt.port"
"""Key in the store of the rendezvous, followed by the name of an agent."""
_NO_LINGER = struct.pack("ii", 1, 0)
"""Closes connections by a reset, without TIME_WAIT."""


class AgentRing:
    """A port on which this agent listens, and attempts to connect to the next agent in a ring of all.

    The kernel refuses connections to the port of an ended process. For a machine that does not respond, and for an
    agent that has never accepted a connection (a firewall may refuse it), heartbeats decide.

    Args:
        store: the rendezvous store.
        me: torch's description of this agent.
    """

    def __init__(self, store: Any, me: Any) -> None:
        self.ended: set[Any] = set()
        """Agents whose process has ended."""
        self._store, self._me, self._next = store, me, me
        self._place: tuple[Any, ...] = ()  # family and address of the next agent; empty until it is published
        self._has_accepted = False
        self._attempt: socket.socket | None = None
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        self._listener.setblocking(False)
        store.set(f"{_PORT}/{me}", str(self._listener.getsockname()[1]))

    def poll(self, agents: Iterable[Any]) -> None:
        """Updates ``ended``; never waits for another agent."""
        with suppress(OSError):  # until no connection is pending
            while True:
                self._listener.accept()[0].close()
        others = sorted({*agents} - {self._me} - self.ended)
        if not others:
            return
        following = next((one for one in others if one > self._me), others[0])
        if following != self._next:
            self._next, self._place, self._has_accepted = following, (), False
            self._close_attempt()
        with suppress(OSError, RuntimeError):  # from name resolution and from the store
            code = self._connect()
            self._has_accepted = self._has_accepted or code == 0
            if self._has_accepted and code == errno.ECONNREFUSED:
                self.ended.add(following)

    def _connect(self) -> int:
        """Attempts to connect; returns the error number, 0 for success."""
        if not self._place:
            if not self._store.check([key := f"{_PORT}/{self._next}"]):
                return errno.EAGAIN
            found = socket.getaddrinfo(self._next.addr, int(self._store.get(key)), type=socket.SOCK_STREAM)
            self._place = found[0][0], found[0][4]
        if self._attempt is None:
            self._attempt = socket.socket(self._place[0], socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._attempt.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        code = self._attempt.connect_ex(self._place[1])
        if code not in (errno.EINPROGRESS, errno.EALREADY):
            self._close_attempt()
        return code

    def _close_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.close()
        self._attempt = None
