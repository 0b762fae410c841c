"""A snapshot on storage: a file for each shard, and the manifest that makes them one. Pure; ``FORMAT.md``.

The file of a shard is the image of its slot: header, chunks and objects as they lie in memory, so that nothing is
gathered, cast or cut anew to write it, and what memory has lost of a snapshot is taken from storage chunk by chunk;
``compression`` packs each chunk of it.
Left out is what the slot holds of other shards to protect them.
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
"""What is hashed and handed on at a time: it stays in the core's cache from one to the other."""

_OWN = ("private", "shared")
_ZEROS = bytes(PIECE_BYTES)


class ShardImage(NamedTuple):
    """The image of a shard's file, and which chunk of the slot each of its own is."""

    image: SlotImage
    chunks: tuple[int, ...]

    @classmethod
    def of(cls, slot: SlotImage) -> ShardImage:
        """Of a shard that lies in a slot of this image."""
        manifest, kept = slot.manifest, [section for section in slot.sections if section.kind in _OWN]
        if len(kept) == len(slot.sections):
            return cls(slot, tuple(range(len(slot.chunks))))
        # What protects others stands behind what is the shard's own.
        sections = tuple(section for section in manifest.sections if section.kind in _OWN)
        count = sum(section.fragments for section in sections)
        stripped = replace(manifest, stepped=manifest.stepped[:count], sections=sections)
        num_own = sum(section.num_chunks for section in kept)
        volatile = range(slot.num_stepped_chunks, len(slot.chunks))
        return cls(SlotImage.of(stripped), (*range(num_own), *volatile))


@dataclass(frozen=True)
class StoredShard:
    """One shard's file: its name beside the manifest, bytes, xxh3-64 of all of it as 16 hex digits, and what of it
    is proven chunk by chunk: xxh3-64 of each, of the objects in use, and the digest of the shard's own manifest."""

    file: str
    nbytes: int
    checksum: str
    digest: str
    objects_used: int
    objects_hash: int
    chunk_hashes: Hashes
    frames: Hashes | None = None
    """Of a compressed file the bytes of the header, of the frame of each chunk, and of that of the objects."""
    spare_bytes: int = 0
    """At the end of the file, room that objects do not use: no restart reads it."""

    @property
    def needed_bytes(self) -> int:
        """Of the file from its begin, what a restart reads at most."""
        return self.nbytes - self.spare_bytes

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
        spare = int(entry.get("spare_bytes", 0))  # earlier versions did not write it
        if min(nbytes, used, objects_hash, spare, nbytes - spare) < 0:
            raise ValueError(f"{file}: a size that cannot be")
        if frames is not None and (len(frames) != len(hashes) + 2 or sum(frames.tolist()) != nbytes):
            raise ValueError(f"{file}: its frames are not what is in it")
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
    """All that a reader must know of a snapshot on storage, with the lineage under which it was taken.

    ``name`` is that of the checkpoint where it was read, as ``ftckpt list`` prints it.
    """

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
        """JSON for people, ending in a line feed. Equal snapshots give equal bytes."""
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
                    f"{where}: is no manifest of a snapshot: its format is not {FORMAT!r}; beside what others load "
                    "snapshots lie in the folder 'ftckpt'",
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


def files_of(manifest: bytes) -> frozenset[str] | None:
    """The files that a manifest names; None: it is damaged, or of another version."""
    try:
        return frozenset(shard.file for shard in StoredSnapshot.decode(manifest, "").shards.values())
    except StorageError:
        return None


def contents(shard: ShardImage, slot: SlotImage, data: memoryview, stored: StoredShard) -> Iterator[memoryview]:
    """The bytes of a shard's file, from ``data``, all of a slot of image ``slot``, in pieces of at most
    ``PIECE_BYTES``.

    What has a checksum in ``stored`` is compared with it as it goes by: each byte is read once.

    Raises:
        CorruptError: bytes are not what they were; those before it were given out.
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
        raise CorruptError(f"{name} is not what it was when its checksum was taken")


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
    """Of the JSON without the checksum: sorted keys, no blanks, ASCII."""
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())
