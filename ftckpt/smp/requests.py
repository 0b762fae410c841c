"""Requests to an SMP and its replies: the JSON objects in the bodies of frames.

A request has ``request``, its name, and the fields of its class. A reply has ``ok``, and either the fields of the
answer or ``error``. Training state is never in them: it is in shared memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import xxhash

from ftckpt.errors import FtckptError, PeerError, SmpError, error_from_json
from ftckpt.memory.directory import is_shard
from ftckpt.memory.package import MAX_PACKAGE_BYTES
from ftckpt.model import codec
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist_setting import PERSIST_FORMATS
from ftckpt.smp.channel import Channel, Deadlines, Trust, connect

VERSION = 8
"""Version of requests and of an SMP's files; an SMP of another version is replaced."""
MAX_REQUEST_BYTES = 8 << 20
"""Ten times the description of the groups of eight arenas of 64 GB."""
MAX_NETWORK_REQUEST_BYTES = 64 << 10
"""Other nodes send a snapshot and names of shards."""
MAX_REPLY_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = max(MAX_PACKAGE_BYTES, 1 << 30)
"""The chunk size is configurable; nobody needs this much."""


@dataclass(frozen=True)
class SmpRequest:
    """Base class. The SMP's loop serves requests about its state. Only processes of the same node may send them, but
    any node with the secret may send those that only read (``FROM_ANYWHERE``)."""

    WORD: ClassVar[str] = ""
    FROM_ANYWHERE: ClassVar[bool] = False


@dataclass(frozen=True)
class StatusRequest(SmpRequest):
    """Identify the SMP by ``version``, ``pid``, ``job``, ``node``, ``configured`` and ``port`` (0: it does not
    listen), and report its state: trainers, its memory, and ``tasks``."""

    WORD = "status"


@dataclass(frozen=True)
class ReportRequest(SmpRequest):
    """Report the node's contents: the reply of ``status``, and ``inventory``, a ``memory.inventory.Inventory``."""

    WORD = "report"
    FROM_ANYWHERE = True


@dataclass(frozen=True)
class ProtectionRequest(SmpRequest):
    """Report the node's protection of ``snapshot`` in ``layout``, with the packages of ``shards``. The reply has
    ``protection``, a ``memory.inventory.NodeProtection`` encoded by ``reports.packed``."""

    WORD = "protection"
    FROM_ANYWHERE = True
    snapshot: SnapshotId
    shards: tuple[str, ...]
    layout: dict[str, Any]


@dataclass(frozen=True)
class ConfigureRequest(SmpRequest):
    """Apply ``description``: arenas, groups, packages to mirror, settings, and the ``address``, ``port`` and
    ``secret`` (hex) for answering other nodes. The reply has ``problem``: why it cannot answer them, "" if it can."""

    WORD = "configure"
    description: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class EndRequest(SmpRequest):
    """End the SMP of a job that is over, and remove its files."""

    WORD = "end"


@dataclass(frozen=True)
class PersistRequest(SmpRequest):
    """Flush the newest snapshot, or report the progress.

    With ``anew`` a flush to ``where`` in ``form``, one of ``PERSIST_FORMATS``, starts unless one runs; an empty
    ``where`` is the job's own storage. It fails after ``timeout_secs``. Without ``anew`` nothing starts.

    Raises:
        SmpError: an impossible timeout, or an unknown form.
    """

    WORD = "persist"
    where: str
    timeout_secs: float
    anew: bool
    form: str = PERSIST_FORMATS[0]

    def __post_init__(self) -> None:
        if not 0 < self.timeout_secs < 1e9:
            raise SmpError(f"timeout_secs {self.timeout_secs} is no time to wait")
        if self.form not in PERSIST_FORMATS:
            raise SmpError(f"form {self.form[:40]!r} is none of {', '.join(PERSIST_FORMATS)}")


@dataclass(frozen=True)
class BytesRequest(SmpRequest):
    """Request bytes of one shard at one snapshot; the reply has ``here``, ``hash`` (xxh3-64) and a payload.

    Raises:
        SmpError: ``shard`` is no name of a shard.
    """

    FROM_ANYWHERE = True
    snapshot: SnapshotId
    shard: str

    def __post_init__(self) -> None:
        if not is_shard(self.shard):  # it becomes part of a file name
            raise SmpError(f"{self.shard[:40]!r} names no shard")


@dataclass(frozen=True)
class ChunkRequest(BytesRequest):
    """Request a chunk of a checked slot.

    Raises:
        SmpError: as the base class, or a negative number.
    """

    WORD = "chunk"
    chunk: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 0:
            raise SmpError(f"there is no chunk {self.chunk}")


@dataclass(frozen=True)
class PackageRequest(BytesRequest):
    """Request the package of the shard."""

    WORD = "package"


REQUESTS: dict[str, type[SmpRequest]] = {
    kind.WORD: kind
    for kind in (
        StatusRequest, ReportRequest, ProtectionRequest, ConfigureRequest, EndRequest, PersistRequest, ChunkRequest,
        PackageRequest,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Reply:
    """The reply of an SMP; ``payload`` is None if there is none, or it became invalid while it was sent."""

    fields: Mapping[str, Any]
    payload: bytearray | None = None

    @property
    def error(self) -> str:
        """The reason of a refusal; "" if there is none."""
        return "" if self.fields.get("ok") is True else str(self.fields.get("error"))

    def refusal(self, prefix: str = "") -> FtckptError:
        """The error of a refused request, of its original class, with ``prefix`` before its text."""
        return error_from_json(self.fields, prefix)


def encode_object(message: Mapping[str, Any]) -> bytes:
    """``message`` as the body of a frame, compact JSON."""
    # ``str``: for a SnapshotId.
    return json.dumps(message, separators=(",", ":"), default=str).encode()


def decode_object(body: bytes | bytearray) -> dict[str, Any]:
    """Decode the JSON object in a body.

    Raises:
        SmpError: it is none.
    """
    try:
        message = json.loads(body)
    # The last two: deep nesting, and values much larger than their text.
    except (ValueError, RecursionError, MemoryError) as error:
        raise SmpError(f"not a JSON object: {type(error).__name__}") from None
    if not isinstance(message, dict):
        raise SmpError(f"not a JSON object but {type(message).__name__}")
    return message


def encode_request(request: SmpRequest) -> bytes:
    """Encode a request as a body."""
    return encode_object({"request": request.WORD, **vars(request)})


def decode_request(body: bytes | bytearray) -> SmpRequest:
    """Decode the request in a body.

    Raises:
        SmpError: an unknown request, or wrong fields.
    """
    message = decode_object(body)
    word = message.pop("request", None)
    kind = REQUESTS.get(word) if isinstance(word, str) else None
    if kind is None:
        raise SmpError(f"unknown request {str(word)[:40]!r}; known are {', '.join(REQUESTS)}")
    needs = [each.name for each in fields(kind)]
    if message.keys() != set(needs):
        raise SmpError(f"{word}: needs {' and '.join(needs) or 'nothing more'}")
    try:
        return codec.from_json(message, kind)
    except ValueError as error:
        raise SmpError(f"{word}: {error}") from None


def exchange(channel: Channel, request: SmpRequest, deadlines: Deadlines, *, most_payload: int = 0) -> Reply:
    """Send one request and wait for its reply.

    Args:
        most_payload: maximum size of the payload.

    Raises:
        PeerError: as ``Channel``, or an invalid reply.
    """
    body = encode_request(request)
    if len(body) > MAX_REQUEST_BYTES:
        raise PeerError(f"a request of {len(body)} bytes; the most is {MAX_REQUEST_BYTES}")
    channel.send(body, time.monotonic() + deadlines.transfer_secs(len(body)))
    frame = channel.receive(MAX_REPLY_BYTES, min(most_payload, MAX_PAYLOAD_BYTES), deadlines)
    try:
        return Reply(decode_object(frame.body), frame.payload)
    except SmpError as error:
        raise PeerError(f"its reply is {error}") from None


def request_once(where: Path | tuple[str, int], trust: Trust, request: SmpRequest, timeout_secs: float) -> Reply:
    """Send one request over a connection of its own, to an SMP as in ``connect``.

    Raises:
        PeerError: no valid reply in time.
    """
    deadline = time.monotonic() + timeout_secs
    with closing(connect(where, timeout_secs)) as channel:
        channel.end_by(deadline)  # each stage may take what those before it have left
        channel.greet(trust, deadline)
        return exchange(channel, request, Deadlines(timeout_secs, timeout_secs, timeout_secs))


def guard_digest(description: Mapping[str, Any]) -> int:
    """A digest, never 0, of the parts of a description that protection depends on: arenas, groups, mirrored packages,
    and the attempt."""
    # Ranks compare the leader's digest with the one in the SMP's heartbeat, where 0 is none.
    arenas = sorted(str(place["arena"]) for place in description["places"].values())
    value = [arenas, description["groups"], description["mirror_from"], description.get("owner", "")]
    return xxhash.xxh3_64_intdigest(json.dumps(value, sort_keys=True).encode()) | 1
