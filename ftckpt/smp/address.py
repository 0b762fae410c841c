"""At which address a node's SMP answers those of other nodes, and the secret they share."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path

from ftckpt.errors import ConfigError

SECRET_BYTES = 32
_LEAST_SECRET_BYTES = 16
_MOST_SECRET_BYTES = 4096
_LOOPBACK = "127.0.0.1"


def machine() -> str:
    """What names this machine and its network: two processes with the same text reach each other over loopback."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def listening_address(configured: str, machines: Collection[str], env: Mapping[str, str]) -> str:
    """Where the SMP of this node listens: loopback where all ``machines`` are one, else the way to MASTER_ADDR.

    Raises:
        ConfigError: no address can be found, or the configured one is not this machine's.
    """
    if configured:
        _require_own(configured)
        return configured
    if len(set(machines)) == 1:
        return _LOOPBACK
    address = _towards(env.get("MASTER_ADDR", "")) or _towards(socket.gethostname())
    if not address or address.startswith("127."):
        raise ConfigError(
            "smp_listen: no address at which other nodes reach this one was found; name one of this machine's"
        )
    return address


def read_secret(path: Path) -> bytes:
    """32 bytes made of what is in ``path``, which only its owner may read.

    Raises:
        ConfigError: missing, readable by others, or too short; the text says how to make one.
    """
    how = f"make one with: (umask 077; head -c 32 /dev/urandom > {path})"
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_MOST_SECRET_BYTES)
    except OSError as error:
        raise ConfigError(f"secret_file: {path} cannot be read: {error.strerror}; {how}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"secret_file: {path} is open to others (mode {stat.S_IMODE(mode):o}); chmod 600 it")
    if len(text.strip()) < _LEAST_SECRET_BYTES:
        raise ConfigError(f"secret_file: {path} holds less than {_LEAST_SECRET_BYTES} bytes; {how}")
    return hashlib.sha256(b"ftckpt secret" + text).digest()


def _require_own(address: str) -> None:
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with closing(socket.socket(family, kind, protocol)) as probe:
            probe.bind(target)
    except OSError as error:
        raise ConfigError(f"smp_listen: {address!r} cannot be listened at here: {error}; name another") from None


def _towards(host: str) -> str:
    """This machine's address on the way to ``host``; nothing is sent."""
    if not host:
        return ""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, kind)) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""
