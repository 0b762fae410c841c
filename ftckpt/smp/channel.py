"""Authenticated connections to an SMP: from trainers and the command line by Unix socket, from other SMPs by TCP.

PROTOCOL. Numbers are little-endian, lengths in bytes::

    hello, 48                    frame                              stream, only if payload is not 0
      0  magic   8 s               0  body     u32                    payload, in order
      8  flags   u8, 1: seal       4  flags    u8, 1: sealed          1 byte, 1: the payload was valid
      9  zeros   7                 5  zeros    3                        until its last byte was read
     16  nonce  32 s               8  payload  u64                    tag, 16
                                  16  body, then its tag, 16

A connection starts with a hello of each side, the client's first. Each side then proves that it knows the job's
secret: the client, then the server, sends an HMAC-SHA256 under it over a label of its role and both hellos. A proof
reveals nothing about the secret and is useless on another connection, in the other role, or with other flags. To an
unproven client a server reveals nothing, not even whether it has data: it answers a wrong proof with random bytes,
and hangs up without any if it has too many connections.

Then follow frames: a body, which is one JSON object, and optionally a payload. Each direction has its own key,
derived from the secret and both hellos, and AES-256-GCM uses the number of the record as nonce. Body and stream are a
record each. *Every* record is authenticated: altering, replaying, reordering, cutting or inserting one is detected.
If either hello requests it, the contents of records are also *sealed*, which leaves only the lengths and flags in the
first 16 bytes of a frame in the clear. Otherwise contents are in the clear (GMAC).

Over a Unix socket the secret is empty and proves nothing: the kernel names the peer's user instead (``trust_in``).

Every wait has a deadline, and every length is bounded before memory is allocated for it.
"""

from __future__ import annotations

import hmac
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from ftckpt.errors import ConfigError, PeerAuthError, PeerError, PeerTimeoutError, VersionError
from ftckpt.memory.directory import SMP_SOCKET_NAME

MAGIC = b"FTCKSMP2"
# Random nonces of 256 bits never repeat, and a proof is an HMAC-SHA256.
NONCE_BYTES = 32
PROOF_BYTES = 32
# GCM's longest tag.
TAG_BYTES = 16
MIN_SECRET_BYTES = 16
"""128 bits cannot be guessed, not even offline from recorded proofs."""

HELLO = struct.Struct("<8sB7x32s")
FRAME = struct.Struct("<IB3xQ")
_SEAL = 1
_PIECE_BYTES = 256 << 10
"""Unit of copying, authentication and sending: it stays in a core's cache in between."""


@dataclass(frozen=True)
class Deadlines:
    """Timeouts in seconds; a transfer may take ``step_secs`` plus its bytes over ``slowest_bytes_per_sec``.

    ``connect_secs``: connection, hellos and proofs together. ``idle_secs``: until the next request. The slowest rate
    is below a hundredth of a 10 Gbit/s link: training and other transfers leave more than that.
    """

    connect_secs: float = 5.0
    step_secs: float = 10.0
    idle_secs: float = 300.0
    slowest_bytes_per_sec: float = 10e6

    def transfer_secs(self, nbytes: int) -> float:
        """Longest time from the first to the last of ``nbytes``."""
        return self.step_secs + nbytes / self.slowest_bytes_per_sec


@dataclass(frozen=True)
class Trust:
    """Credentials of a connection, and whether this side requests sealed records."""

    secret: bytes = field(default=b"", repr=False)
    encrypt: bool = False

    def checked(self) -> Trust:
        """Returns itself.

        Raises:
            ConfigError: the secret is too short to be safe.
        """
        if len(self.secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"--ftckpt-secret-file: the secret has {len(self.secret)} bytes; it needs at least {MIN_SECRET_BYTES}"
            )
        return self


def trust_in(sock: socket.socket, trust: Trust) -> Trust:
    """The credentials to demand on ``sock``: the only rule of who is trusted.

    Over a Unix socket: processes of this user, by the credentials that the kernel reports. No secret is required: a
    trainer brings it with its first requests. Over the network: peers that prove ``trust``; nobody without a secret.

    Raises:
        PeerAuthError: another user, or no secret is known.
    """
    if sock.family == socket.AF_UNIX:
        uid = _peer_uid(sock)
        if uid != os.geteuid():
            raise PeerAuthError(f"it belongs to another user: user {uid}")
        return Trust()
    if not trust.secret:
        raise PeerAuthError("no secret is known yet")
    return trust


def _peer_uid(sock: socket.socket) -> int:
    credentials = struct.Struct("=3i")  # struct ucred: pid, uid, gid
    return int(credentials.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))[1])


@dataclass(frozen=True)
class Delivery:
    """Bytes to send after a body. ``valid`` reports, once they were read, whether they stayed unchanged meanwhile."""

    view: memoryview
    hash: int
    valid: Callable[[], bool] = lambda: True


@dataclass(frozen=True)
class Frame:
    """A received body, and its payload if there was a valid one."""

    body: bytes
    payload: bytearray | None = None


class _Keys:
    """One direction of a connection: its key, and the number of its next record."""

    def __init__(self, secret: bytes, direction: bytes, hellos: bytes) -> None:
        self._key = algorithms.AES(hmac.digest(secret, b"ftckpt smp key " + direction + hellos, "sha256"))
        self._records = 0

    def next(self) -> Cipher[modes.GCM]:
        """The cipher of the next record. Reuse of a nonce would reveal the authentication key."""
        self._records += 1
        return Cipher(self._key, modes.GCM(struct.pack("<4xQ", self._records)))


class Channel:
    """A connected socket on which each call has a deadline (``time.monotonic``).

    Call ``greet`` (client) or ``welcome`` (server) first. One thread uses it; any may ``end_input`` or ``abort``.

    Raises (every method that sends or receives):
        PeerError: closed by the peer, late, broken, or altered in transit.
    """

    moved_bytes: ClassVar[int] = 0
    """Bytes sent and received by this process over the network; approximate, as threads add without a lock."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._is_local = sock.family == socket.AF_UNIX
        self._sealed = False
        self._sending: _Keys | None = None
        self._receiving: _Keys | None = None
        self._scratch = memoryview(b"")
        self._end = math.inf
        if not self._is_local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a request is one small frame

    def end_by(self, deadline: float) -> None:
        """Set an upper limit for the deadlines of all later calls."""
        self._end = deadline

    def greet(self, trust: Trust, deadline: float) -> None:
        """Perform the client's side of the handshake.

        Raises:
            PeerTimeoutError: no hello in time.
            PeerAuthError: the secrets of both sides differ.
        """
        trust = trust_in(self._socket, trust)
        mine = HELLO.pack(MAGIC, _SEAL * trust.encrypt, os.urandom(NONCE_BYTES))
        self.write(mine, deadline)
        try:
            theirs = bytes(self.read(HELLO.size, deadline))
        except PeerError as error:
            if time.monotonic() < min(deadline, self._end):
                raise  # the peer hung up, as an SMP that ends does
            raise PeerTimeoutError(str(error)) from None
        _check_version(theirs)
        self.write(_proof(trust, b"client", mine + theirs), deadline)
        # One that hangs up instead has too many connections, or ends: it answers a wrong proof, too.
        proof = self.read(PROOF_BYTES, deadline)
        if not hmac.compare_digest(proof, _proof(trust, b"server", mine + theirs)):
            raise PeerAuthError("it has another secret than this node")
        self._begin(trust, mine, theirs, (b"client", b"server"))

    def welcome(self, trust: Trust, deadline: float) -> None:
        """Perform the server's side of the handshake.

        Raises:
            PeerAuthError: the client does not know the secret.
        """
        trust = trust_in(self._socket, trust)
        theirs = bytes(self.read(HELLO.size, deadline))
        mine = HELLO.pack(MAGIC, _SEAL * trust.encrypt, os.urandom(NONCE_BYTES))
        self.write(mine, deadline)  # before the check: a client of another version must see this version
        _check_version(theirs)
        proof = self.read(PROOF_BYTES, deadline)
        if not hmac.compare_digest(proof, _proof(trust, b"client", theirs + mine)):
            with suppress(PeerError):
                self.write(os.urandom(PROOF_BYTES), deadline)
            raise PeerAuthError("it does not know the job's secret")
        self.write(_proof(trust, b"server", theirs + mine), deadline)
        self._begin(trust, theirs, mine, (b"server", b"client"))

    def send(self, body: bytes, deadline: float, payload: Delivery | None = None) -> None:
        """Send one frame; the bytes of ``payload`` are read while they are sent."""
        assert self._sending is not None, "greet or welcome comes first"
        nbytes = 0 if payload is None else len(payload.view)
        head = FRAME.pack(len(body), _SEAL * self._sealed, nbytes)
        record = self._sending.next().encryptor()
        record.authenticate_additional_data(head)
        sent = bytearray(body)
        self._pass(record, memoryview(sent))
        record.finalize()
        # In one call: a small frame is one packet.
        self.write(head + sent + record.tag, deadline)
        if payload is not None and nbytes:
            self._send_stream(self._sending, payload, deadline)

    def receive(
        self, most_body: int, most_payload: int, deadlines: Deadlines, wait_secs: float | None = None
    ) -> Frame:
        """Receive the next frame, whose start may take ``wait_secs`` (default: ``step_secs``).

        Raises:
            PeerError: also if it announces more than ``most_body`` or ``most_payload`` bytes.
        """
        assert self._receiving is not None, "greet or welcome comes first"
        head = self.read(FRAME.size, time.monotonic() + (deadlines.step_secs if wait_secs is None else wait_secs))
        # The lengths are unverified until the tag after the body, and so must be within bounds.
        num_body, flags, nbytes = FRAME.unpack(head)
        if flags != _SEAL * self._sealed or num_body > most_body or nbytes > most_payload:
            raise PeerError(
                f"it announces {num_body} and {nbytes} bytes; the limits are {most_body} and {most_payload}"
            )
        deadline = time.monotonic() + deadlines.transfer_secs(num_body)
        record = self._receiving.next().decryptor()
        record.authenticate_additional_data(head)
        body = self.read(num_body, deadline)
        self._pass(record, memoryview(body))
        self._read_tag(record, deadline)
        return Frame(bytes(body), self._receive_stream(self._receiving, nbytes, deadlines) if nbytes else None)

    def read(self, nbytes: int, deadline: float) -> bytearray:
        """Read exactly ``nbytes`` unverified bytes; the caller bounds the number."""
        data = bytearray(nbytes)
        self._read_into(memoryview(data), deadline)
        return data

    def write(self, data: bytes | bytearray | memoryview, deadline: float) -> None:
        """Send ``data`` unauthenticated."""
        with memoryview(data) as view:
            at = 0
            while at < len(view):
                piece = view[at : at + _PIECE_BYTES]
                at += self._wait(deadline, "accepts no data", lambda: self._socket.send(piece))  # noqa: B023

    def end_input(self) -> None:
        """Stop receiving, from any thread: a waiting receiver is woken, sending continues."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def abort(self) -> None:
        """End the connection from any thread: the thread that waits in it is woken with an error and closes it."""
        # Shut down, not closed: only that wakes a waiting thread, and the descriptor of a closed socket could be
        # another file's by the time that the thread resumes.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, from the thread that uses it."""
        self.abort()
        self._socket.close()

    def _begin(self, trust: Trust, client: bytes, server: bytes, roles: tuple[bytes, bytes]) -> None:
        # A request by either side is enough. Both proofs cover both hellos: nobody in between can clear the flag.
        self._sealed = any(HELLO.unpack(hello)[1] & _SEAL for hello in (client, server))
        self._sending, self._receiving = (_Keys(trust.secret, role, client + server) for role in roles)

    def _send_stream(self, keys: _Keys, payload: Delivery, deadline: float) -> None:
        record = keys.next().encryptor()
        if not self._scratch:
            self._scratch = memoryview(bytearray(_PIECE_BYTES))
        for begin in range(0, len(payload.view), _PIECE_BYTES):
            # A trainer may take the slot over at any moment. Bytes that changed between their authentication and
            # their sending would look like an attack, so both use one copy.
            with payload.view[begin : begin + _PIECE_BYTES] as source:
                piece = self._scratch[: len(source)]
                piece[:] = source
            self._pass(record, piece)
            self.write(piece, deadline)
        trailer = bytearray([payload.valid()])
        self._pass(record, memoryview(trailer))
        record.finalize()
        self.write(trailer + record.tag, deadline)

    def _receive_stream(self, keys: _Keys, nbytes: int, deadlines: Deadlines) -> bytearray | None:
        deadline = time.monotonic() + deadlines.transfer_secs(nbytes)
        record = keys.next().decryptor()
        data = bytearray(nbytes)
        with memoryview(data) as view:
            for begin in range(0, nbytes, _PIECE_BYTES):
                with view[begin : begin + _PIECE_BYTES] as piece:
                    self._read_into(piece, deadline)
                    self._pass(record, piece)
        trailer = self.read(1, deadline)
        self._pass(record, memoryview(trailer))
        self._read_tag(record, deadline)
        return data if trailer[0] == 1 else None

    def _pass(self, record: Any, piece: memoryview) -> None:
        """Authenticate a piece of ``record``, a GCM context, and seal or open it in place on a sealed connection."""
        if self._sealed:
            record.update_into(piece, piece)
        else:
            record.authenticate_additional_data(piece)

    def _read_tag(self, record: Any, deadline: float) -> None:
        try:
            record.finalize_with_tag(bytes(self.read(TAG_BYTES, deadline)))
        except InvalidTag:
            raise PeerError("its record was altered in transit") from None

    def _read_into(self, view: memoryview, deadline: float) -> None:
        at = 0
        while at < len(view):
            got = self._wait(deadline, "sends no data", lambda: self._socket.recv_into(view[at:]))  # noqa: B023
            if got == 0:
                raise PeerError("the connection was closed")
            at += got

    def _wait(self, deadline: float, what: str, call: Callable[[], int]) -> int:
        left_secs = min(deadline, self._end) - time.monotonic()
        if left_secs <= 0:
            raise PeerError(f"it {what} in time")
        try:
            self._socket.settimeout(left_secs)
            moved = call()
        except TimeoutError:
            raise PeerError(f"it {what} in time") from None
        except (OSError, ValueError) as error:
            raise PeerError(f"the connection broke: {error}") from None
        if not self._is_local:
            Channel.moved_bytes += moved
        return moved


def _check_version(hello: bytes) -> None:
    if HELLO.unpack(hello)[0] != MAGIC:
        raise VersionError("it is no SMP of this version of ftckpt")


def _proof(trust: Trust, role: bytes, hellos: bytes) -> bytes:
    return hmac.digest(trust.secret, b"ftckpt smp " + role + hellos, "sha256")


@contextmanager
def socket_address(node_dir: Path) -> Iterator[str]:
    """A short path of the SMP's socket in ``node_dir``, valid in the block: socket addresses have at most 107 bytes.

    Raises:
        OSError: no such directory.
    """
    fd = os.open(node_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SMP_SOCKET_NAME}"
    finally:
        os.close(fd)


def connect(where: Path | tuple[str, int], timeout_secs: float) -> Channel:
    """A channel to the SMP of a node's directory, or at a port of the first reachable of several addresses, separated
    by commas; call ``greet`` next.

    Raises:
        PeerError: it cannot be reached in time.
    """
    try:
        if not isinstance(where, Path):
            *others, last = [(host, where[1]) for host in where[0].split(",")]
            each_secs = timeout_secs / (len(others) + 1)
            for place in others:
                with suppress(OSError):
                    return Channel(socket.create_connection(place, timeout=each_secs))
            return Channel(socket.create_connection(last, timeout=each_secs))
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.settimeout(timeout_secs)
            with socket_address(where) as address:
                connected.connect(address)
        except BaseException:  # nobody else would close it
            connected.close()
            raise
        return Channel(connected)
    except (OSError, UnicodeError, OverflowError) as error:  # the latter two: an impossible host or port
        raise PeerError(f"cannot be reached: {error}") from None
