"""Increments: shard files without the chunks that the complete file of an older checkpoint has.

Each shard refers to at most one file, and that file is complete: references never chain, and storage keeps at most
one file more per increment. The two newest checkpoints share no byte, so that a damaged or missing file leaves one of
them: a flush refers to what the checkpoint before the previous one refers to, or to that one's own file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from ftckpt.array_types import Buffer
from ftckpt.memory.image import SlotImage
from ftckpt.model.lineage import UNKNOWN, Lineage
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist.shards import BaseFile, StoredShard
from ftckpt.persist.storage import Storage

_MIN_SHARE = 0.5
"""Minimum part of a shard's bytes that an increment omits: below it, the files that increments keep on storage would
take more room than they save."""
_DEPTH = 2


@dataclass(frozen=True)
class CompleteFile:
    """A complete file of a shard, and the xxh3-128 of its chunks in memory, 0 for short ones."""

    file: BaseFile
    digest: str
    digests: Sequence[int]

    @classmethod
    def of(cls, folder: str, entry: StoredShard, digests: Sequence[int]) -> CompleteFile:
        """The file in ``folder`` that ``entry`` describes."""
        return cls(BaseFile(f"{folder}/{entry.file}", entry.nbytes, entry.frames), entry.digest, digests)

    def serves(self, entry: StoredShard, image: SlotImage, storage: Storage) -> bool:
        """Whether the file still exists, and the shard of ``entry``, of this ``image``, probably has enough chunks in
        common with it."""
        if self.digest != entry.digest:
            return False
        lower = np.array([digest & ((1 << 64) - 1) for digest in self.digests], np.uint64)
        same = (lower == entry.chunk_hashes) & (lower != 0)
        nbytes = np.array([chunk.nbytes for chunk in image.chunks], np.int64)
        is_enough = bool(nbytes[same].sum() >= max(1.0, _MIN_SHARE * nbytes.sum()))
        return is_enough and storage.size(self.file.file) == self.file.nbytes

    def has(self, number: int, chunk: Buffer) -> bool:
        """Whether chunk ``number`` of this file has these bytes."""
        return self.digests[number] != 0 and xxhash.xxh3_128_intdigest(chunk) == self.digests[number]


class IncrementHistory:
    """The complete files to which the last two checkpoints at one place refer, or which they are, by shard.

    It has only checkpoints that this process wrote and committed: it knows checksums of 128 bits of their chunks.
    """

    def __init__(self) -> None:
        self._lineage, self._newest = UNKNOWN, -1
        self._files: dict[str, tuple[CompleteFile, ...]] = {}

    def base(self, shard: str, snapshot: SnapshotId, lineage: Lineage) -> CompleteFile | None:
        """The file to which a shard of ``snapshot``, of ``lineage``, may refer."""
        files = self._files.get(shard, ()) if self._precedes(snapshot, lineage) else ()
        return files[0] if len(files) == _DEPTH else None

    def add(self, snapshot: SnapshotId, lineage: Lineage, files: Mapping[str, CompleteFile]) -> None:
        """Adds a committed checkpoint. Shards that this process did not write for it are forgotten."""
        before = self._files if self._precedes(snapshot, lineage) else {}
        self._files = {shard: (*before.get(shard, ()), file)[-_DEPTH:] for shard, file in files.items()}
        self._lineage, self._newest = lineage, snapshot.iteration

    def _precedes(self, snapshot: SnapshotId, lineage: Lineage) -> bool:
        return lineage == self._lineage and snapshot.iteration > self._newest
