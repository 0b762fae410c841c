"""How the SMPs of a job's nodes talk: who may ask, what can be asked, and the bytes of an answer.

Numbers are little-endian, lengths in bytes::

    hello, 40          request, 40 + name        answer, 24           then
      0  magic   8 s     0  kind        u8         0  status   u8       payload, as long as announced
      8  nonce  32 s     1  zeros       5          1  zeros    7        trailer, 1: 1 where the payload was
                         6  name length u16        8  length   u64         valid until it was sent
                         8  chunk       u32        16 xxh3-64  u64      (both only with status HERE)
                         12 zeros       4
                         16 lineage     16 s
                         32 iteration   i64
                         40 shard name

A connection begins with a hello of each side, the asker's first. Each then proves that it knows the job's
secret: the asker, and after that the answerer, sends HMAC-SHA256 over a word for its role and both nonces.
Nobody learns the secret or can use a proof twice or in the other role; an answerer tells nothing, not even
whether it holds anything, to who has not proven it. What follows is not encrypted.

Every wait has a deadline and every length is bounded before memory is allocated for it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from ftckpt.arena.control import MAX_SHARD_BYTES
from ftckpt.arena.package import MAX_PACKAGE_BYTES
from ftckpt.errors import ConfigError, FtckptError

MAGIC = b"FTCKSMP1"
NONCE_BYTES = 32
PROOF_BYTES = 32
MIN_SECRET_BYTES = 16
MAX_PAYLOAD_BYTES = max(MAX_PACKAGE_BYTES, 1 << 30)

_HELLO = struct.Struct("<8s32s")
_REQUEST = struct.Struct("<B5xHI4x16sq")
_ANSWER = struct.Struct("<B7xQQ")
_PIECE_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class PeerError(FtckptError):
    """Another node's SMP cannot be reached, is too slow, refuses, or answers nonsense: look at that node."""


class RefusedError(PeerError):
    """The other side does not know the job's secret, or does not believe that this one does."""


class Kind(IntEnum):
    """What is asked for."""

    CHUNK = 1
    PACKAGE = 2


class Status(IntEnum):
    """How an answer begins. ``NOT_HERE``: no such bytes, or not yet."""

    HERE = 1
    NOT_HERE = 2


@dataclass(frozen=True)
class Deadlines:
    """Longest waits in seconds; a transfer may take ``step_secs`` plus its bytes over ``slowest_bytes_per_sec``."""

    connect_secs: float = 5.0
    step_secs: float = 10.0
    idle_secs: float = 300.0
    slowest_bytes_per_sec: float = 10e6

    def transfer_secs(self, nbytes: int) -> float:
        """Longest time for a payload of ``nbytes``."""
        return self.step_secs + nbytes / self.slowest_bytes_per_sec


@dataclass(frozen=True)
class Request:
    """Bytes of one shard at one snapshot: ``chunk`` of its slot, or (kind PACKAGE) its package."""

    kind: Kind
    shard: str
    lineage: bytes
    iteration: int
    chunk: int = 0

    def encode(self) -> bytes:
        """What goes over the wire."""
        shard = self.shard.encode()
        return _REQUEST.pack(self.kind, len(shard), self.chunk, self.lineage, self.iteration) + shard


class Channel:
    """A connected socket whose reads and writes end at a deadline (``time.monotonic``).

    Raises (``read``, ``read_into``, ``write``):
        PeerError: closed by the other side, too late, or broken.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self, nbytes: int, deadline: float) -> bytearray:
        """Exactly ``nbytes``; the caller has bounded them."""
        data = bytearray(nbytes)
        self.read_into(memoryview(data), deadline)
        return data

    def read_into(self, view: memoryview, deadline: float) -> None:
        """Fill ``view``."""
        at = 0
        while at < len(view):
            got = self._wait(deadline, "sends nothing", lambda: self._socket.recv_into(view[at:]))  # noqa: B023
            if got == 0:
                raise PeerError("the connection was closed")
            at += got

    def write(self, data: bytes | memoryview, deadline: float) -> None:
        """Send all of ``data``."""
        with memoryview(data) as view:
            at = 0
            while at < len(view):
                piece = view[at : at + _PIECE_BYTES]
                at += self._wait(deadline, "takes nothing", lambda: self._socket.send(piece))  # noqa: B023

    def abort(self) -> None:
        """End the connection from any thread: the one that waits in it is woken with an error and closes it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, from the thread that uses it."""
        self.abort()
        self._socket.close()

    def _wait(self, deadline: float, what: str, call: Callable[[], int]) -> int:
        left = deadline - time.monotonic()
        if left <= 0:
            raise PeerError(f"it {what} in time")
        try:
            self._socket.settimeout(left)
            return call()
        except TimeoutError:
            raise PeerError(f"it {what} in time") from None
        except (OSError, ValueError) as error:
            raise PeerError(f"the connection broke: {error}") from None


def check_secret(secret: bytes) -> bytes:
    """``secret`` itself.

    Raises:
        ConfigError: too short to keep anybody out.
    """
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"secret_file: a secret of {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed")
    return secret


def greet(channel: Channel, secret: bytes, deadline: float) -> None:
    """The asker's side of the beginning.

    Raises:
        RefusedError: one side does not know the secret.
        PeerError: as ``Channel``, or not an SMP.
    """
    mine = os.urandom(NONCE_BYTES)
    channel.write(_HELLO.pack(MAGIC, mine), deadline)
    theirs = _read_hello(channel, deadline)
    channel.write(_proof(secret, b"asks", mine, theirs), deadline)
    try:
        proof = channel.read(PROOF_BYTES, deadline)
    except PeerError as error:
        raise RefusedError(f"it does not accept this node's secret ({error})") from None
    if not hmac.compare_digest(proof, _proof(secret, b"answers", mine, theirs)):
        raise RefusedError("it does not know the job's secret")


def welcome(channel: Channel, secret: bytes, deadline: float) -> None:
    """The answerer's side of the beginning.

    Raises:
        RefusedError: the other side does not know the secret.
        PeerError: as ``Channel``, or not an SMP.
    """
    theirs = _read_hello(channel, deadline)
    mine = os.urandom(NONCE_BYTES)
    channel.write(_HELLO.pack(MAGIC, mine), deadline)
    proof = channel.read(PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(secret, b"asks", theirs, mine)):
        raise RefusedError("it does not know the job's secret")
    channel.write(_proof(secret, b"answers", theirs, mine), deadline)


def read_request(channel: Channel, deadlines: Deadlines) -> Request:
    """The next request; waiting for it may take ``idle_secs``.

    Raises:
        PeerError: as ``Channel``, or not a request.
    """
    head = channel.read(_REQUEST.size, time.monotonic() + deadlines.idle_secs)
    kind, name_bytes, chunk, lineage, iteration = _REQUEST.unpack(head)
    if kind not in tuple(Kind) or not 1 <= name_bytes <= MAX_SHARD_BYTES or iteration < 0:
        raise PeerError(f"it asks for what is not known: kind {kind}, a name of {name_bytes} bytes")
    name = bytes(channel.read(name_bytes, time.monotonic() + deadlines.step_secs)).decode(errors="replace")
    if not _NAME.fullmatch(name):
        raise PeerError(f"it asks for {name[:40]!r}, which names no shard")
    return Request(Kind(kind), name, lineage, iteration, chunk)


def write_absent(channel: Channel, deadline: float) -> None:
    """Answer that the bytes are not here, or not yet."""
    channel.write(_ANSWER.pack(Status.NOT_HERE, 0, 0), deadline)


def write_head(channel: Channel, nbytes: int, value: int, deadline: float) -> None:
    """Begin an answer of ``nbytes`` whose xxh3-64 is ``value``; payload and ``write_trailer`` follow."""
    channel.write(_ANSWER.pack(Status.HERE, nbytes, value), deadline)


def write_trailer(channel: Channel, valid: bool, deadline: float) -> None:
    """End an answer: whether what was sent had been valid all the time."""
    channel.write(bytes([valid]), deadline)


def read_answer(channel: Channel, at_most: int, deadlines: Deadlines) -> tuple[bytearray, int] | None:
    """Payload and its announced xxh3-64, or None: not there (yet), or given up while it was sent.

    Args:
        at_most: bytes that the caller has room for.

    Raises:
        PeerError: as ``Channel``, a longer payload, or nonsense.
    """
    head = channel.read(_ANSWER.size, time.monotonic() + deadlines.step_secs)
    status, nbytes, value = _ANSWER.unpack(head)
    if status == Status.NOT_HERE:
        return None
    if status != Status.HERE:
        raise PeerError(f"it answers {status}, which means nothing")
    if nbytes > min(at_most, MAX_PAYLOAD_BYTES):
        raise PeerError(f"it announces {nbytes} bytes where at most {at_most} were asked for")
    payload = channel.read(nbytes, time.monotonic() + deadlines.transfer_secs(nbytes))
    trailer = channel.read(1, time.monotonic() + deadlines.step_secs)
    if trailer[0] not in (0, 1):
        raise PeerError(f"its answer ends with {trailer[0]}")
    return (payload, value) if trailer[0] else None


def _read_hello(channel: Channel, deadline: float) -> bytes:
    magic: bytes
    nonce: bytes
    magic, nonce = _HELLO.unpack(channel.read(_HELLO.size, deadline))
    if magic != MAGIC:
        raise PeerError("it is no SMP of this version of ftckpt")
    return nonce


def _proof(secret: bytes, role: bytes, asker: bytes, answerer: bytes) -> bytes:
    return hmac.new(secret, b"ftckpt smp " + role + asker + answerer, hashlib.sha256).digest()
