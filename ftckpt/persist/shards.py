"""A snapshot on storage: a file per shard, and a manifest. Pure; ``FORMAT.md`` specifies it.

A shard's file is the image of its slot: header, chunks and objects as in memory. Writing it needs no gather, cast or
other division into chunks, and a restart reads single chunks. ``compression`` compresses each chunk. Parity and
copies of other shards are omitted.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ftckpt.array_types import Hashes
from ftckpt.errors import CorruptError, StorageError
from ftckpt.memory.image import SlotImage
from ftckpt.model import codec
from ftckpt.model.lineage import UNKNOWN, Lineage
from ftckpt.model.snapshot import SnapshotId

FORMAT = "ftckpt-snapshot"
VERSION = 2
"""Raised whenever a reader of the previous version would misread a snapshot on storage."""

PIECE_BYTES = 1 << 20
"""Bytes hashed and written at a time: few enough to stay in the core's cache in between."""

_OWN = ("private", "shared")
_ZEROS = bytes(PIECE_BYTES)


class ShardImage(NamedTuple):
    """The image of a shard's file, and the slot's chunk number for each of its chunks."""

    image: SlotImage
    chunks: tuple[int, ...]

    @classmethod
    def of(cls, slot: SlotImage) -> ShardImage:
        """The file image of a shard in a slot of image ``slot``."""
        manifest, kept = slot.manifest, [section for section in slot.sections if section.kind in _OWN]
        if len(kept) == len(slot.sections):
            return cls(slot, tuple(range(len(slot.chunks))))
        # Sections that protect other shards follow the shard's own.
        sections = tuple(section for section in manifest.sections if section.kind in _OWN)
        count = sum(section.fragments for section in sections)
        stripped = replace(manifest, stepped=manifest.stepped[:count], sections=sections)
        num_own = sum(section.num_chunks for section in kept)
        volatile = range(slot.num_stepped_chunks, len(slot.chunks))
        return cls(SlotImage.of(stripped), (*range(num_own), *volatile))


@dataclass(frozen=True)
class StoredShard:
    """One shard's file: its name in the checkpoint's folder, size, xxh3-64 as 16 hex digits, the digest of the
    shard's own manifest, and for partial reads the xxh3-64 of each chunk and of the objects in use."""

    file: str
    nbytes: int
    checksum: str
    digest: str
    objects_used: int
    objects_hash: int
    chunk_hashes: Hashes
    frames: Hashes | None = None
    """The sizes of a compressed file's header, of each chunk's frame, and of the objects' frame."""
    spare_bytes: int = 0
    """Unused space for objects at the end of the file: no restart reads it."""

    def to_json(self) -> dict[str, Any]:
        value = {**vars(self), "chunk_hashes": _from_u64s(self.chunk_hashes)}
        del value["frames"]
        return value if self.frames is None else {**value, "frames": _from_u64s(self.frames)}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> StoredShard:
        """Inverse of ``to_json``. Raises KeyError, TypeError or ValueError for anything else."""
        hashes = _to_u64s(entry["chunk_hashes"])
        frames = _to_u64s(entry["frames"]) if "frames" in entry else None
        file, checksum, digest = (str(entry[name]) for name in ("file", "checksum", "digest"))
        nbytes, used, objects_hash = (int(entry[name]) for name in ("nbytes", "objects_used", "objects_hash"))
        spare = int(entry.get("spare_bytes", 0))  # absent in manifests of earlier versions
        if min(nbytes, used, objects_hash, spare, nbytes - spare) < 0:
            raise ValueError(f"{file}: an impossible size")
        if frames is not None and (len(frames) != len(hashes) + 2 or sum(frames.tolist()) != nbytes):
            raise ValueError(f"{file}: its frames do not match its chunks or size")
        return cls(file, nbytes, checksum, digest, used, objects_hash, hashes, frames, spare)

    def is_of(self, image: SlotImage) -> bool:
        """Whether this is the file of a shard of this image."""
        found = image.manifest.digest.hex(), len(image.chunks)
        if found != (self.digest, len(self.chunk_hashes)) or self.objects_used > image.objects.nbytes:
            return False
        if self.frames is None:
            return self.nbytes == image.file_bytes
        return int(self.frames[0]) == len(image.header)


@dataclass(frozen=True)
class StoredSnapshot:
    """The manifest of a checkpoint. ``lineage``: that of the snapshot when it was taken. ``name``: that of the
    checkpoint, as ``ftckpt list`` prints it."""

    snapshot: SnapshotId
    job: str
    layout: Mapping[str, int | str | bool]
    shards: Mapping[str, StoredShard]
    lineage: Lineage = UNKNOWN
    name: str = field(default="", compare=False)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards.values())

    def encode(self) -> bytes:
        """Indented JSON that ends in a line feed. Equal snapshots give equal bytes."""
        value: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "iteration": self.snapshot.iteration,
            "lineage": self.snapshot.lineage.hex(),
            "job": self.job,
            "layout": dict(self.layout),
            "history": codec.to_json(self.lineage),
            "shards": {name: shard.to_json() for name, shard in sorted(self.shards.items())},
        }
        value["checksum"] = _checksum(value)
        return (json.dumps(value, indent=1) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes, where: str) -> StoredSnapshot:
        """Inverse of ``encode``; ``where`` names the object in errors.

        Raises:
            StorageError: not such a manifest, damaged, or of another version.
        """
        try:
            value: dict[str, Any] = json.loads(data)
            if not isinstance(value, dict) or value.get("format") != FORMAT:
                raise StorageError(
                    f"{where}: is no manifest of a snapshot: its format is not {FORMAT!r}; next to exports, "
                    "snapshots are in the folder 'ftckpt'",
                    lasting=True,
                )
            if value["version"] != VERSION:
                text = f"{where}: format version {value['version']!r}, this ftckpt reads {VERSION}"
                raise StorageError(text, lasting=True)
            if value.pop("checksum") != _checksum(value):
                raise StorageError(f"{where}: damaged or edited: its checksum does not match", lasting=True)
            return cls(
                SnapshotId(bytes.fromhex(value["lineage"]), int(value["iteration"])),
                str(value["job"]),
                dict(value["layout"]),
                {str(name): StoredShard.from_json(entry) for name, entry in value["shards"].items()},
                codec.from_json(value["history"], Lineage),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise StorageError(f"{where}: is no manifest of a snapshot: {str(error)[:200]}", lasting=True) from None


def is_sound(manifest: bytes) -> bool:
    """Whether it is a manifest of this version, undamaged."""
    try:
        StoredSnapshot.decode(manifest, "")
    except StorageError:
        return False
    return True


def contents(shard: ShardImage, slot: SlotImage, data: memoryview, stored: StoredShard) -> Iterator[memoryview]:
    """The bytes of a shard's file in pieces of at most ``PIECE_BYTES``, from ``data``, a slot of image ``slot``.

    Checksums in ``stored`` are verified on the way: each byte is read once.

    Raises:
        CorruptError: a checksum does not match; the pieces up to there have been yielded.
    """
    image, name = shard.image, shard.image.manifest.shard
    yield from _pieces(memoryview(image.header))
    position = len(image.header)
    for span, chunk, expected in zip(image.chunks, shard.chunks, stored.chunk_hashes.tolist(), strict=True):
        yield from _zeros(span.begin - position)
        source = slot.chunks[chunk]
        yield from _proven(data[source.begin : source.end], expected, f"{name}: chunk {chunk}")
        position = span.end
    yield from _zeros(image.objects.begin - position)
    begin = slot.objects.begin
    yield from _proven(data[begin : begin + stored.objects_used], stored.objects_hash, f"{name}: objects")
    yield from _zeros(image.file_bytes - image.objects.begin - stored.objects_used)


def _proven(chunk: memoryview, expected: int, name: str) -> Iterator[memoryview]:
    digest = xxhash.xxh3_64()
    for piece in _pieces(chunk):
        digest.update(piece)
        yield piece
    if digest.intdigest() != expected:
        raise CorruptError(f"{name} does not match its checksum")


def _pieces(data: memoryview) -> Iterator[memoryview]:
    return (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))


def _zeros(nbytes: int) -> Iterator[memoryview]:
    while nbytes > 0:
        piece = memoryview(_ZEROS)[:nbytes]
        nbytes -= len(piece)
        yield piece


def _from_u64s(values: Hashes) -> str:
    return base64.b64encode(values.astype("<u8").tobytes()).decode()


def _to_u64s(text: str) -> Hashes:
    return np.frombuffer(base64.b64decode(text, validate=True), "<u8").astype(np.uint64)


def _checksum(value: Mapping[str, Any]) -> str:
    """The checksum of a manifest's JSON without the checksum itself: sorted keys, no spaces, ASCII."""
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())
