"""TCP ports at which SMPs answer other nodes."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from typing import TypeVar

from ftckpt.errors import ConfigError

PORTS = range(20000, 29000)
"""Below those that a kernel lends to outgoing connections (Linux: 32768 to 60999). Other nodes remember the port, and
an SMP that takes the place of a killed one must find it free. Launchers' usual ports lie above (29400, 29500)."""
_TRIES = 8

T = TypeVar("T")


def listen_at(host: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens at ``port`` of ``host``; at another where that one is taken, or 0.

    Raises:
        ConfigError: the address cannot be listened at.
    """
    return _first_free(host, port, lambda family, place: socket.create_server(place, family=family, backlog=backlog))


class PortHold:
    """A port of ``host`` that is nobody else's, known before there is an SMP to listen at it.

    Raises:
        ConfigError: the address cannot be listened at.
    """

    def __init__(self, host: str) -> None:
        self._socket = _first_free(host, 0, _bound)
        self.host = host
        self.number = int(self._socket.getsockname()[1])

    def lend(self) -> None:
        """From now on a process that shares addresses, as every SMP does, may listen at it."""
        # Bound without it, which no other socket was then, and shared since: the kernel looks at both sockets as they
        # are when the second one is bound, and lets at most one of them listen.
        if self._socket.fileno() >= 0:  # closed where somebody listens at it
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def close(self) -> None:
        """Let go of it; who listens at it stays."""
        self._socket.close()


def _bound(family: int, place: tuple[str, int]) -> socket.socket:
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.bind(place)
    except BaseException:
        held.close()
        raise
    return held


def _first_free(host: str, port: int, take: Callable[[int, tuple[str, int]], T]) -> T:
    """What ``take`` makes of the family and the first place that is free: ``port``, one of many, at last any."""
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--ftckpt-smp-listen: {host!r} is no address: {error}") from None
    some = random.SystemRandom().sample(PORTS, _TRIES)
    for wanted in (*([port] if port else []), *some, 0):
        try:
            return take(family, (host, wanted))
        except (OSError, OverflowError) as error:  # the latter: no number of a port
            problem = str(error)
    raise ConfigError(f"--ftckpt-smp-listen: cannot listen at {host!r}: {problem}")
