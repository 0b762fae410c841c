"""How a trainer talks to its node's SMP: over a Unix socket, one JSON object per line, one request per connection.

A request has ``request`` (one of hello, status, listen, configure, end) and its arguments; the reply has ``ok``, and
either the answer's fields or ``error``. State never travels here: it lies in shared memory.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from ftckpt.arena.directory import SMP_SOCKET_NAME
from ftckpt.errors import SmpError

VERSION = 1
"""Of the requests and of what an SMP keeps in files; an SMP of another version is replaced."""
MAX_REQUEST_BYTES = 8 << 20
"""A description of the groups of eight arenas of 64 GB takes about a tenth."""
MAX_REPLY_BYTES = 1 << 20

_PEER = struct.Struct("=3i")  # struct ucred: pid, uid, gid


def encode_line(message: Mapping[str, Any]) -> bytes:
    """``message`` as one line."""
    return json.dumps(message, separators=(",", ":"), default=str).encode() + b"\n"


def decode_line(line: bytes | bytearray) -> dict[str, Any]:
    """The message in one line.

    Raises:
        SmpError: it is not one JSON object.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError, MemoryError) as error:
        raise SmpError(f"not a JSON object: {type(error).__name__}") from None
    if not isinstance(message, dict):
        raise SmpError(f"not a JSON object but {type(message).__name__}")
    return message


def guarded(description: Mapping[str, Any]) -> int:
    """A digest, never 0, of what a description says is to be guarded: arenas, groups, packages of other nodes."""
    arenas = sorted(str(place["arena"]) for place in description["places"].values())
    value = [arenas, description["groups"], description["mirror_from"]]
    return xxhash.xxh3_64_intdigest(json.dumps(value, sort_keys=True).encode()) | 1


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end of a connected Unix socket."""
    answer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(answer)[1])


@contextmanager
def socket_address(node_dir: Path) -> Iterator[str]:
    """A short path of the SMP's socket in ``node_dir``, valid in the block: an address holds 107 bytes at most.

    Raises:
        OSError: no such directory.
    """
    fd = os.open(node_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SMP_SOCKET_NAME}"
    finally:
        os.close(fd)
