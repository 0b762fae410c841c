"""A reader of snapshots on storage, in the layout of the job that persisted them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import xxhash

from ftckpt.array_types import Buffer, Bytes
from ftckpt.errors import ConvertError, CorruptError, StorageError
from ftckpt.memory.image import SlotImage, Span
from ftckpt.model import objects
from ftckpt.model.lineage import UNKNOWN, Lineage, is_past
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist.commit import MANIFEST_NAME, OWNER_NAME, VOID, folder_of, iteration_of, lineage_of_claim
from ftckpt.persist.paths import is_manifest
from ftckpt.persist.retention import void_of
from ftckpt.persist.shard_file import ShardFile
from ftckpt.persist.shards import StoredShard, StoredSnapshot
from ftckpt.universal.arenas import ShardReader, touched
from ftckpt.universal.storage import CheckedOnce, explained, map_file

log = logging.getLogger("ftckpt")

_UNPACKED = 16
"""Decompressed chunks to cache: successive strips of a worker share the chunk at their border."""


def recognises(path: Path) -> bool:
    """Whether ``path`` is a snapshot on storage, or a directory of several."""
    return any(is_manifest(folder / MANIFEST_NAME) for folder in (path, *_folders(path).values()))


@dataclass
class _File:
    """A shard's mapped file, and its verified chunks. ``unpacked``: decompresses a chunk; all files have the same."""

    path: Path
    data: Bytes
    shard: ShardFile
    unpacked: Callable[[ShardFile, int], Buffer]
    checked: CheckedOnce[int] = field(default_factory=CheckedOnce)

    @property
    def image(self) -> SlotImage:
        return self.shard.image

    def read(self, span: Span, key: str) -> Bytes:
        """See ``ShardSource``."""
        chunks, parts = touched(self.image.chunks, span), list[Bytes]()
        try:
            if self.shard.entry.frames is None:
                for chunk in chunks:
                    self.checked.check(chunk, partial(self.shard.chunk, chunk))
                return self.data[span.begin : span.end]
            for chunk in chunks:
                data, at = np.frombuffer(self.unpacked(self.shard, chunk), np.uint8), self.image.chunks[chunk].begin
                parts.append(data[max(0, span.begin - at) : span.end - at])
        except StorageError as error:
            raise ConvertError(f"{error}: {key} is corrupt") from None
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])

    def objects(self) -> object:
        """See ``ShardSource``."""
        try:
            return objects.decode(bytes(self.shard.objects()))
        except (StorageError, CorruptError) as error:
            raise ConvertError(f"{self.path}: the objects: {error}") from None


class SnapshotReader(ShardReader):
    """Reads the snapshot at ``path``; of a directory of several that of ``iteration``, or the newest valid one.

    Each chunk is verified when it is first read.

    Raises:
        ConvertError: there is no such snapshot, or it is corrupt, incomplete, or of another version.
    """

    def __init__(self, path: Path, iteration: int | None = None, roles: Collection[str] | None = None) -> None:
        path = _choose(path, iteration)
        where = path / MANIFEST_NAME
        with explained(where):
            self._manifest = where.read_bytes()
        try:
            stored = StoredSnapshot.decode(self._manifest, str(where))
            if stored.layout.get("dcp"):
                raise ConvertError(
                    f"{path}: is of torch.distributed.checkpoint: load it with ftckpt.dcp.StorageReader"
                )
            # One cache for all files: it limits the memory.
            unpacked = lru_cache(_UNPACKED)(ShardFile.chunk)
            files = {shard: _open(path, shard, entry, unpacked) for shard, entry in stored.shards.items()}
        except StorageError as error:
            raise ConvertError(str(error)) from None
        if stored.snapshot in _voided(path.parent):  # the user named it: read it all the same
            log.warning("ftckpt: %s was invalidated and is about to be removed", path)
        super().__init__(stored.snapshot.iteration, files, roles)

    def fingerprint(self) -> str:
        """The checksum of the manifest, which has those of all chunks."""
        return xxhash.xxh3_64_hexdigest(self._manifest)


def _open(folder: Path, shard: str, entry: StoredShard, unpacked: Callable[[ShardFile, int], Buffer]) -> _File:
    path = folder / entry.file
    data = map_file(path)
    if path.parent != folder or len(data) != entry.nbytes:
        raise ConvertError(f"{path}: has {len(data)} bytes, {MANIFEST_NAME} lists {entry.nbytes}")
    file = ShardFile(str(path), shard, entry, lambda begin, n: data[begin : begin + n].data)
    return _File(path, data, file, unpacked)


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
