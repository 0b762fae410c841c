"""TCP ports at which SMPs answer other nodes."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable

from ftckpt.errors import ConfigError

PORTS = range(20000, 29000)
"""Below the kernel's ephemeral ports (Linux: 32768 to 60999) and launchers' usual ports (29400, 29500). Other nodes
remember the port, and the successor of a killed SMP must find it free."""
# Of 9000 ports: if eight in a row are taken, something else is wrong, and any port will do.
_TRIES = 8


def listen_at(host: str, port: int, backlog: int) -> socket.socket:
    """A socket listening at ``port`` of ``host``; at another port if that is taken or 0.

    Raises:
        ConfigError: the address cannot be bound.
    """
    return _first_free(host, port, lambda family, place: socket.create_server(place, family=family, backlog=backlog))


class PortHold:
    """A reserved port of ``host``, until an SMP listens at it. Call ``lend``, then ``close``.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, host: str) -> None:
        self._socket = _first_free(host, 0, _bound)
        self.host = host
        self.number = int(self._socket.getsockname()[1])

    def lend(self) -> None:
        """Let a process that binds with SO_REUSEADDR, as every SMP does, listen at the port."""
        # Bound without it, so that no other socket could share the port; set afterwards, as the kernel compares both
        # sockets' current options when the second one binds. At most one of them can listen.
        if self._socket.fileno() >= 0:  # -1 once closed
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def close(self) -> None:
        """Release the port; a listening SMP is not affected."""
        self._socket.close()


def _bound(family: int, place: tuple[str, int]) -> socket.socket:
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.bind(place)
    except BaseException:  # nobody else would close it
        held.close()
        raise
    return held


def _first_free(host: str, port: int, take: Callable[[int, tuple[str, int]], socket.socket]) -> socket.socket:
    """A socket by ``take`` at the first free port: ``port``, random ones of PORTS, finally any."""
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--ftckpt-smp-listen: {host!r} is no address: {error}") from None
    problem = ""
    for wanted in (*([port] if port else []), *random.SystemRandom().sample(PORTS, _TRIES), 0):
        try:
            return take(family, (host, wanted))
        except (OSError, OverflowError) as error:  # the latter: an invalid port
            problem = str(error)
    raise ConfigError(f"--ftckpt-smp-listen: cannot listen at {host!r}: {problem}")
