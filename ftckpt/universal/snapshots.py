"""A reader of snapshots on storage, in the layout of the job that persisted them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError, CorruptError, StorageError
from ftckpt.memory.image import Span
from ftckpt.model import objects
from ftckpt.model.lineage import UNKNOWN, Lineage, is_past
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist.commit import MANIFEST_NAME, OWNER_NAME, VOID, folder_of, iteration_of, lineage_of_claim
from ftckpt.persist.paths import is_manifest
from ftckpt.persist.retention import void_of
from ftckpt.persist.shard_file import ShardFile
from ftckpt.persist.shards import StoredShard, StoredSnapshot
from ftckpt.universal.arenas import ShardFragment, read_catalog, touched
from ftckpt.universal.catalog import Reader
from ftckpt.universal.storage import CheckedOnce, explained, map_file

log = logging.getLogger("ftckpt")

_UNPACKED = 16
"""Decompressed chunks to cache: successive strips of a worker share the chunk at their border."""


def recognises(path: Path) -> bool:
    """Whether ``path`` is a snapshot on storage, or a directory of several."""
    return any(is_manifest(folder / MANIFEST_NAME) for folder in (path, *_folders(path).values()))


@dataclass
class _File:
    """A shard's mapped file, and its verified chunks."""

    path: Path
    data: Bytes
    shard: ShardFile
    checked: CheckedOnce[int] = field(default_factory=CheckedOnce)


class SnapshotReader(Reader):
    """Reads the snapshot at ``path``; of a directory of several that of ``iteration``, or the newest valid one.

    Each chunk is verified when it is first read.

    Raises:
        ConvertError: there is no such snapshot, or it is corrupt, incomplete, or of another version.
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
        if self.stored.snapshot in _voided(path.parent):  # the user named it: read it all the same
            log.warning("ftckpt: %s was invalidated and is about to be removed", path)
        self._files = {shard: self._open(shard, entry) for shard, entry in self.stored.shards.items()}
        self._unpacked = lru_cache(_UNPACKED)(self._chunk)
        self.catalog, self._entries = read_catalog(
            self.stored.snapshot.iteration,
            [file.shard.image.manifest for file in self._files.values()],
            roles,
            lambda entry: self._read(entry, 0, entry.fragment.nbytes),
            self._objects,
        )

    def read(self, index: int) -> Bytes:
        return self.read_part(index, 0, self._entries[index].fragment.nbytes)

    def read_part(self, index: int, begin: int, end: int) -> Bytes:
        if not self._files:
            raise ConvertError(f"{self._path}: was closed")
        return self._read(self._entries[index], begin, end)

    def where(self, index: int) -> object:
        return self._entries[index].shard

    def fingerprint(self) -> str:
        """The checksum of the manifest, which has those of all chunks."""
        return xxhash.xxh3_64_hexdigest(self._manifest)

    def close(self) -> None:
        self._files = {}
        self._unpacked.cache_clear()

    def _open(self, shard: str, entry: StoredShard) -> _File:
        path = self._path / entry.file
        data = map_file(path)
        if path.parent != self._path or len(data) != entry.nbytes:
            raise ConvertError(f"{path}: has {len(data)} bytes, {MANIFEST_NAME} lists {entry.nbytes}")
        try:
            return _File(
                path, data, ShardFile(str(path), shard, entry, lambda begin, n: data[begin : begin + n].data)
            )
        except StorageError as error:
            raise ConvertError(str(error)) from None

    def _read(self, entry: ShardFragment, begin: int, end: int) -> Bytes:
        file, image = self._files[entry.shard], self._files[entry.shard].shard.image
        offset = image.offsets[entry.index]
        wanted = Span(offset + begin, offset + end)
        chunks, parts = touched(image.chunks, wanted), list[Bytes]()
        try:
            if file.shard.entry.frames is None:
                for chunk in chunks:
                    file.checked.check(chunk, partial(file.shard.chunk, chunk))
                return file.data[wanted.begin : wanted.end]
            for chunk in chunks:
                data, at = np.frombuffer(self._unpacked(entry.shard, chunk), np.uint8), image.chunks[chunk].begin
                parts.append(data[max(0, wanted.begin - at) : wanted.end - at])
        except StorageError as error:
            raise ConvertError(f"{error}: {entry.fragment.key} is corrupt") from None
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])

    def _chunk(self, shard: str, number: int) -> memoryview:
        return memoryview(self._files[shard].shard.chunk(number))

    def _objects(self, shard: str) -> Any:
        file = self._files[shard]
        try:
            return objects.decode(bytes(file.shard.objects()))
        except StorageError as error:
            raise ConvertError(f"the objects of {shard}: {error}") from None
        except CorruptError as error:
            raise ConvertError(f"{file.path}: the objects of {shard}: {error}") from None


def _folders(path: Path) -> dict[int, Path]:
    """The snapshots in a directory, by iteration."""
    found = {iteration_of(manifest.parent.name): manifest.parent for manifest in path.glob(f"iter_*/{MANIFEST_NAME}")}
    return {iteration: folder for iteration, folder in found.items() if iteration is not None}


def _newest(path: Path, newest_first: Sequence[Path]) -> Path:
    void, head = _voided(path), _head(path)
    chosen = next((folder for folder in newest_first if _counts(folder, void, head)), None)
    if chosen is None:
        raise ConvertError(
            f"{path}: all its snapshots are rolled back or invalidated; --iteration reads one of them anyway"
        )
    if chosen != newest_first[0]:
        log.warning("ftckpt: reading %s: newer snapshots are rolled back or invalidated", chosen)
    return chosen


def _counts(folder: Path, void: Collection[SnapshotId], head: Lineage) -> bool:
    """Whether a restart may use the snapshot; also True if it is unreadable: reading it raises the error."""
    where = folder / MANIFEST_NAME
    try:
        stored = StoredSnapshot.decode(where.read_bytes(), str(where))
    except (OSError, StorageError):
        return True
    return stored.snapshot not in void and is_past(stored.lineage, stored.snapshot.iteration, head)


def _head(path: Path) -> Lineage:
    with suppress(OSError):
        return lineage_of_claim((path / OWNER_NAME).read_bytes()) or UNKNOWN
    return UNKNOWN


def _voided(path: Path) -> set[SnapshotId]:
    # Not through a storage backend: those need write permission.
    with explained(path):
        return void_of(mark.name for mark in (path / VOID).glob("*"))


def _choose(path: Path, iteration: int | None) -> Path:
    folders = _folders(path)
    if not folders:
        if iteration is not None and path.name != folder_of(iteration):
            raise ConvertError(f"--iteration {iteration}: {path} is a snapshot of another iteration")
        return path
    if iteration is None:
        return _newest(path, [folders[number] for number in sorted(folders, reverse=True)])
    if iteration not in folders:
        raise ConvertError(f"--iteration {iteration}: {path} has iterations {', '.join(map(str, sorted(folders)))}")
    return folders[iteration]
