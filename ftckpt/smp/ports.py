"""TCP ports at which SMPs answer other nodes."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Callable

from ftckpt.errors import ConfigError

PORTS = range(20000, 29000)
"""Below those that a kernel lends to outgoing connections (Linux: 32768 to 60999). Other nodes remember the port, and
an SMP that takes the place of a killed one must find it free. Launchers' usual ports lie above (29400, 29500)."""
_TRIES = 8


def listen_at(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Sockets that listen at ``port`` of each address of ``host``, commas between; at another where that is taken, or
    0.

    Raises:
        ConfigError: the first address cannot be listened at.
    """
    return _first_free(host, port, lambda family, place: socket.create_server(place, family=family, backlog=backlog))


class PortHold:
    """A port of ``host``, of each of its addresses, that is nobody else's, before there is an SMP to listen at it.

    Raises:
        ConfigError: the address cannot be listened at.
    """

    def __init__(self, host: str) -> None:
        self._sockets = _first_free(host, 0, _bound)
        self.host = host
        self.number = int(self._sockets[0].getsockname()[1])

    def lend(self) -> None:
        """From now on a process that shares addresses, as every SMP does, may listen at it."""
        # Bound without it, which no other socket was then, and shared since: the kernel looks at both sockets as they
        # are when the second one is bound, and lets at most one of them listen.
        for held in self._sockets:
            if held.fileno() >= 0:  # closed where somebody listens at it
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def close(self) -> None:
        """Let go of it; who listens at it stays."""
        for held in self._sockets:
            held.close()


def _bound(family: int, place: tuple[str, int]) -> socket.socket:
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.bind(place)
    except BaseException:  # nobody else would close it
        held.close()
        raise
    return held


def _first_free(host: str, port: int, take: Callable[[int, tuple[str, int]], socket.socket]) -> list[socket.socket]:
    """What ``take`` makes of the first port that is free at all addresses: ``port``, one of many, at last any."""
    try:
        places = [(socket.getaddrinfo(one, 0, type=socket.SOCK_STREAM)[0][0], one) for one in host.split(",")]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--ftckpt-smp-listen: {host!r} is no address: {error}") from None
    some = random.SystemRandom().sample(PORTS, _TRIES)
    for wanted in (*([port] if port else []), *some, *(0,) * _TRIES):
        taken: list[socket.socket] = []
        try:
            for family, address in places:
                try:
                    taken.append(take(family, (address, taken[0].getsockname()[1] if taken else wanted)))
                except OSError as error:
                    # Without one of several interfaces, which may have failed since, the others do.
                    if not taken or error.errno != errno.EADDRNOTAVAIL:
                        raise
            return taken
        except (OSError, OverflowError) as error:  # the latter: no number of a port
            problem = str(error)
            for each in taken:
                each.close()
    raise ConfigError(f"--ftckpt-smp-listen: cannot listen at {host!r}: {problem}")
