"""Requests to an SMP and its replies: the JSON objects in the bodies of frames.

A request has ``request``, the word of its kind, and that kind's fields. A reply has ``ok``, and either the fields of
the answer or ``error``. State never travels here: it lies in shared memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import xxhash

from ftckpt.errors import FtckptError, PeerError, SmpError, error_from_json
from ftckpt.memory.directory import is_shard
from ftckpt.memory.package import MAX_PACKAGE_BYTES
from ftckpt.model import codec
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist_setting import PERSIST_FORMATS
from ftckpt.smp.channel import Channel, Deadlines

VERSION = 7
"""Of requests, and of what an SMP keeps in files; an SMP of another version is replaced."""
MAX_REQUEST_BYTES = 8 << 20
"""A description of the groups of eight arenas of 64 GB takes about a tenth."""
MAX_NETWORK_REQUEST_BYTES = 64 << 10
"""Other nodes name a snapshot, and shards of it."""
MAX_REPLY_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = max(MAX_PACKAGE_BYTES, 1 << 30)
"""A chunk may have any size that a user sets; this is what nobody needs."""


@dataclass(frozen=True)
class SmpRequest:
    """Base of all kinds. Those that are about state are served in the SMP's loop; they come from this node alone, or
    only read it and come from any node that knows the secret (``FROM_ANYWHERE``)."""

    WORD: ClassVar[str] = ""
    FROM_ANYWHERE: ClassVar[bool] = False


@dataclass(frozen=True)
class HelloRequest(SmpRequest):
    """Who are you? ``version``, ``pid``, ``job``, ``node``, ``configured``, ``port`` (0: it does not listen)."""

    WORD = "hello"


@dataclass(frozen=True)
class StatusRequest(SmpRequest):
    """What do you do? Trainers that it sees, its memory, and ``duties``."""

    WORD = "status"


@dataclass(frozen=True)
class ReportRequest(SmpRequest):
    """What lies on your node? The answer of ``status``, and ``inventory``, a ``restore.inventory.Inventory``."""

    WORD = "report"
    FROM_ANYWHERE = True


@dataclass(frozen=True)
class ProtectionRequest(SmpRequest):
    """What protects ``snapshot``, in ``layout``, on your node? Of packages those of ``shards``. The answer has
    ``protection``, a ``restore.inventory.NodeProtection`` that ``reports.packed`` has packed."""

    WORD = "protection"
    FROM_ANYWHERE = True
    snapshot: SnapshotId
    shards: tuple[str, ...]
    layout: dict[str, Any]


@dataclass(frozen=True)
class ConfigureRequest(SmpRequest):
    """Guard what ``description`` names: places, groups, packages of other nodes, settings. Answer other nodes at its
    ``port`` of its ``address``, to those who know its ``secret`` (hex). The answer has ``problem``: why it cannot
    answer them, "" where it can."""

    WORD = "configure"
    description: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class EndRequest(SmpRequest):
    """The job is over: remove the SMP's files, and end."""

    WORD = "end"


@dataclass(frozen=True)
class PersistRequest(SmpRequest):
    """Bring the newest snapshot to storage: at ``where`` in ``form``, one of ``config.PERSIST_FORMATS``, or as the
    job does where that is empty, given up after ``timeout_secs``: begun with ``anew``, unless one is on its way
    there. Without it the answer says how far that is.

    Raises:
        SmpError: no time that can be waited, no such form.
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
    """Bytes of one shard at one snapshot, for other nodes; answered by ``here``, ``hash`` (xxh3-64) and a payload.

    Raises:
        SmpError: ``shard`` names none.
    """

    FROM_ANYWHERE = True
    snapshot: SnapshotId
    shard: str

    def __post_init__(self) -> None:
        if not is_shard(self.shard):  # it becomes part of a file name
            raise SmpError(f"{self.shard[:40]!r} names no shard")


@dataclass(frozen=True)
class ChunkRequest(BytesRequest):
    """A chunk of a checked slot.

    Raises:
        SmpError: as its base, or a negative number.
    """

    WORD = "chunk"
    chunk: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 0:
            raise SmpError(f"there is no chunk {self.chunk}")


@dataclass(frozen=True)
class PackageRequest(BytesRequest):
    """The package of the shard."""

    WORD = "package"


REQUESTS: dict[str, type[SmpRequest]] = {
    kind.WORD: kind
    for kind in (
        HelloRequest, StatusRequest, ReportRequest, ProtectionRequest, ConfigureRequest, EndRequest, PersistRequest,
        ChunkRequest, PackageRequest,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Reply:
    """What an SMP answered; ``payload`` is None where there is none, or it became invalid while it was sent."""

    fields: Mapping[str, Any]
    payload: bytearray | None = None

    @property
    def error(self) -> str:
        """Why the request was refused; "" if it was not."""
        return "" if self.fields.get("ok") is True else str(self.fields.get("error"))

    def refusal(self, prefix: str = "") -> FtckptError:
        """The error for which the request was refused, of its class, with ``prefix`` before its text."""
        return error_from_json(self.fields, prefix)


def encode_object(message: Mapping[str, Any]) -> bytes:
    """``message`` as the body of a frame, compact JSON."""
    # ``str`` is the form of a SnapshotId.
    return json.dumps(message, separators=(",", ":"), default=str).encode()


def decode_object(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        SmpError: it is none.
    """
    try:
        message = json.loads(body)
    # The last two: deep nesting, and values that take a multiple of their text.
    except (ValueError, RecursionError, MemoryError) as error:
        raise SmpError(f"not a JSON object: {type(error).__name__}") from None
    if not isinstance(message, dict):
        raise SmpError(f"not a JSON object but {type(message).__name__}")
    return message


def encode_request(request: SmpRequest) -> bytes:
    """The body of a request."""
    return encode_object({"request": request.WORD, **vars(request)})


def decode_request(body: bytes | bytearray) -> SmpRequest:
    """The request in a body.

    Raises:
        SmpError: unknown, or its fields are not those of its kind.
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
        most_payload: bytes that the caller has room for.

    Raises:
        PeerError: as ``Channel``, or nonsense.
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


def guard_digest(description: Mapping[str, Any]) -> int:
    """A digest, never 0, of what a description says is to be guarded: arenas, groups, packages of other nodes; and of
    the attempt that says so."""
    # Leader and SMP each compute it; ranks compare theirs with that in the SMP's pulse, where 0 is none.
    arenas = sorted(str(place["arena"]) for place in description["places"].values())
    value = [arenas, description["groups"], description["mirror_from"], description.get("owner", "")]
    return xxhash.xxh3_64_intdigest(json.dumps(value, sort_keys=True).encode()) | 1
