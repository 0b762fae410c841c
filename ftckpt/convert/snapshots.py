"""Snapshots on storage as checkpoints: what a job has persisted, in the layout that it had."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from ftckpt.convert.arenas import (
    ShardFragment,
    logical_fragments,
    objects_by_shard,
    snapshot_catalog,
    without_doubles,
)
from ftckpt.convert.catalog import Bytes, Catalog, Reader
from ftckpt.convert.storage import CheckedOnce, explained, map_file
from ftckpt.errors import ConvertError, CorruptError, FtckptError, StorageError
from ftckpt.model import objects
from ftckpt.model.topology import first_of_each_stage
from ftckpt.persist.commit import MANIFEST_NAME, folder_of, iteration_of
from ftckpt.persist.shards import FORMAT, StoredShard, StoredSnapshot
from ftckpt.store.image import SlotImage, parse_image


def recognises(path: Path) -> bool:
    """Whether ``path`` is a snapshot on storage, or a directory of those."""
    if _folders(path):
        return True
    try:
        with open(path / MANIFEST_NAME, "rb") as file:
            return f'"{FORMAT}"'.encode() in file.read(256)
    except OSError:
        return False


@dataclass
class _File:
    """One shard's file, mapped, and which of its chunks were compared with their checksums."""

    path: Path
    entry: StoredShard
    data: Bytes
    image: SlotImage
    checked: CheckedOnce[int] = field(default_factory=CheckedOnce)


class SnapshotReader(Reader):
    """The snapshot at ``path``, or of a directory of several the newest, or that of ``iteration``.

    Every chunk is compared with its checksum when something of it is first read.

    Raises:
        ConvertError: there is none, or one that is damaged, not complete, or of another version.
    """

    def __init__(self, path: Path, iteration: int | None = None, roles: Collection[str] | None = None) -> None:
        self._path = path = _choose(path, iteration)
        where = path / MANIFEST_NAME
        with explained(where):
            self._manifest = where.read_bytes()
        try:
            self.stored = StoredSnapshot.decode(self._manifest, str(where))
        except StorageError as error:
            raise ConvertError(str(error)) from None
        self._files = {shard: self._open(shard, entry) for shard, entry in self.stored.shards.items()}
        self.catalog, self._entries = self._make_catalog(roles)

    def read(self, index: int) -> Bytes:
        if not self._files:
            raise ConvertError(f"{self._path}: was closed")
        return self._read(self._entries[index])

    def where(self, index: int) -> object:
        return self._entries[index].shard

    def fingerprint(self) -> str:
        """Of the manifest, which has the checksums of all chunks."""
        return xxhash.xxh3_64_hexdigest(self._manifest)

    def close(self) -> None:
        self._files = {}

    def _open(self, shard: str, entry: StoredShard) -> _File:
        path = self._path / entry.file
        data = map_file(path)
        if path.parent != self._path or len(data) != entry.nbytes:
            raise ConvertError(f"{path}: has {len(data)} bytes, {MANIFEST_NAME} says {entry.nbytes}")
        try:
            image = parse_image(data[: 8 + int.from_bytes(data[:8].tobytes(), "little")].data)
        except FtckptError as error:
            raise ConvertError(f"{path}: {error}") from None
        manifest = image.manifest
        if (manifest.shard, manifest.digest.hex(), image.file_bytes) != (shard, entry.digest, entry.nbytes):
            raise ConvertError(f"{path}: is not what {MANIFEST_NAME} says")
        return _File(path, entry, data, image)

    def _make_catalog(self, roles: Collection[str] | None) -> tuple[Catalog, list[ShardFragment]]:
        manifests = [file.image.manifest for file in self._files.values()]
        entries = without_doubles(
            logical_fragments(manifests, roles), lambda entry: xxhash.xxh3_64_intdigest(self._read(entry).data)
        )
        found = objects_by_shard(first_of_each_stage(list(self._files)), self._objects)
        catalog = snapshot_catalog(self.stored.snapshot.iteration, manifests, entries, found)
        if roles is not None and "weight" not in roles:
            # Masters that were read only to make weights of them are no part of what was asked for.
            catalog = replace(catalog, derived={}, padded=catalog.padded & {e.fragment.key for e in entries})
        return catalog, entries

    def _read(self, entry: ShardFragment) -> Bytes:
        file = self._files[entry.shard]
        begin = file.image.offsets[entry.index]
        end = begin + entry.fragment.nbytes
        chunks = file.image.chunks
        first = bisect_right(chunks, begin, key=lambda span: span.begin) - 1
        for chunk in range(first, len(chunks) if begin < end else 0):
            if chunks[chunk].begin >= end:
                break
            file.checked.check(chunk, partial(self._compare, file, chunk, entry.fragment.key))
        return file.data[begin:end]

    @staticmethod
    def _compare(file: _File, chunk: int, key: str) -> None:
        span = file.image.chunks[chunk]
        if xxhash.xxh3_64_intdigest(file.data[span.begin : span.end].data) != int(file.entry.chunk_hashes[chunk]):
            raise ConvertError(f"{file.path}: chunk {chunk}, which holds {key}, is damaged")

    def _objects(self, shard: str) -> Any:
        file = self._files[shard]
        begin = file.image.objects.begin
        data = file.data[begin : begin + file.entry.objects_used].tobytes()
        try:
            if xxhash.xxh3_64_intdigest(data) != file.entry.objects_hash:
                raise CorruptError("do not match their checksum")
            return objects.decode(data)
        except CorruptError as error:
            raise ConvertError(f"{file.path}: the objects of {shard}: {error}") from None


def _folders(path: Path) -> dict[int, Path]:
    """Snapshots in a directory, by iteration."""
    found = {iteration_of(manifest.parent.name): manifest.parent for manifest in path.glob(f"iter_*/{MANIFEST_NAME}")}
    return {iteration: folder for iteration, folder in found.items() if iteration is not None}


def _choose(path: Path, iteration: int | None) -> Path:
    folders = _folders(path)
    if not folders:
        if iteration is not None and path.name != folder_of(iteration):
            raise ConvertError(f"--iteration {iteration}: {path} is one snapshot, and not that one")
        return path
    if iteration is None:
        return folders[max(folders)]
    if iteration not in folders:
        raise ConvertError(f"--iteration {iteration}: {path} has iterations {', '.join(map(str, sorted(folders)))}")
    return folders[iteration]
