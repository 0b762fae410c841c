"""TCP ports at which SMPs answer other nodes."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Callable

from ftckpt.errors import ConfigError

PORTS = range(20000, 29000)
"""Below the kernel's ephemeral ports (Linux: 32768 to 60999) and launchers' usual ports (29400, 29500). Other nodes
remember the port, and the successor of a killed SMP must find it free."""
# Of 9000 ports: if eight in a row are taken, something else is wrong, and any port will do.
_TRIES = 8


def listen_at(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Sockets listening at ``port`` of each address of ``host``, separated by commas; at another port if that is
    taken or 0.

    Raises:
        ConfigError: the first address cannot be bound.
    """
    return _first_free(host, port, lambda family, place: socket.create_server(place, family=family, backlog=backlog))


class PortHold:
    """A reserved port on each address of ``host``, until an SMP listens at it. Call ``lend``, then ``close``.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, host: str) -> None:
        self._sockets = _first_free(host, 0, _bound)
        self.host = host
        self.number = int(self._sockets[0].getsockname()[1])

    def lend(self) -> None:
        """Let a process that binds with SO_REUSEADDR, as every SMP does, listen at the port."""
        # Bound without it, so that no other socket could share the port; set afterwards, as the kernel compares both
        # sockets' current options when the second one binds. At most one of them can listen.
        for held in self._sockets:
            if held.fileno() >= 0:  # -1 once closed
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def close(self) -> None:
        """Release the port; a listening SMP is not affected."""
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
    """Sockets by ``take`` at the first port free on all addresses: ``port``, random ones of PORTS, finally any."""
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
                    # One of several interfaces may have failed since: the others suffice.
                    if not taken or error.errno != errno.EADDRNOTAVAIL:
                        raise
            return taken
        except (OSError, OverflowError) as error:  # the latter: an invalid port
            problem = str(error)
            for each in taken:
                each.close()
    raise ConfigError(f"--ftckpt-smp-listen: cannot listen at {host!r}: {problem}")
