"""The file ``checks`` of an arena: the SMP's checksums of sealed slots.

A record file (``record``) with two records per slot. The CHECKED record has the checksums of the chunks as words, and
the sequence of the control record and the gap as fields. The ENCODED record has no words and names a snapshot and a
sequence. Each record has its own checksum, and ENCODED counts only with a CHECKED of the same seal: a reader never
combines records of different seals. ``FORMAT.md`` has the byte map.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from ftckpt.array_types import Hashes
from ftckpt.errors import ArenaError, ConfigError, CorruptError, MismatchError
from ftckpt.memory.atomic_files import fresh_name, remove_unfinished
from ftckpt.memory.control_block import MAX_SLOTS, SealId
from ftckpt.memory.mapping import Mapping, create_mapping, file_id, open_mapping
from ftckpt.memory.record import EMPTY, HEADER_BYTES, RECORD_BYTES, WRITING, Format, Header, Record, Records, Stores
from ftckpt.model.manifest import MAX_CHUNKS
from ftckpt.model.snapshot import SnapshotId

CHECKS_NAME = "checks"
_ENCODED = HEADER_BYTES + 8 * MAX_SLOTS  # after 8 unused bytes per slot
FORMAT = Format("checks file", b"FTCKPTCK", 1, fixed_bytes=8 * MAX_SLOTS + RECORD_BYTES * MAX_SLOTS)
_FIELDS = struct.Struct("<Qd8x")  # sequence, gap in seconds; fields of a record have 24 bytes
_U64 = struct.Struct("<Q")


class CheckState(IntEnum):
    """Progress of the SMP with a sealed slot: checksums computed, this node's part of the protection encoded."""

    NONE = 0
    CHECKED = 1
    ENCODED = 2


@dataclass(frozen=True)
class Check:
    """The SMP's entry for one slot; it counts only if the control record has the same ``seal_id``.

    ``gap_secs``: time from the seal to the computation of the hashes.
    """

    state: CheckState
    seal_id: SealId
    gap_secs: float
    chunk_hashes: Hashes

    @property
    def snapshot(self) -> SnapshotId:
        return self.seal_id[0]


class Checks:
    """A mapped ``checks`` file. Only the node's SMP writes; any process may read concurrently."""

    def __init__(self, path: Path, slots: int, num_chunks: int, digest: bytes, writable: bool) -> None:
        self.path = path
        self.slots = slots
        self.num_chunks = num_chunks
        # Read before the file is mapped: if the file is replaced in between, ``replaced`` is true.
        self._identity = file_id(path)
        self._map = _open(path, slots, num_chunks, digest, writable)
        self._stores = Stores(memoryview(self._map.data))
        self._checked = Records(self._stores, FORMAT.records_offset, slots, num_chunks)
        self._encoded = Records(self._stores, _ENCODED, slots, 0)

    @classmethod
    def create_or_open(cls, arena_dir: Path, slots: int, num_chunks: int, digest: bytes, writable: bool) -> Checks:
        """Map the file of an arena of ``slots`` slots of ``num_chunks`` chunks and the manifest's ``digest``.

        A writer creates a missing file and replaces one that is corrupt or belongs to another arena.

        Raises:
            ArenaError: missing (readers), or it cannot be created.
            CorruptError: corrupt, or of another arena (readers).
            MismatchError: of another format version (readers).
            ConfigError: impossible sizes.
            MemoryBudgetError: the file system is full.
        """
        if not 1 <= slots <= MAX_SLOTS or not 0 <= num_chunks <= MAX_CHUNKS or len(digest) != 16:
            raise ConfigError(f"{arena_dir}: impossible checks: {slots} slots of {num_chunks} chunks")
        path = arena_dir / CHECKS_NAME
        try:
            return cls(path, slots, num_chunks, digest, writable)
        except (ArenaError, MismatchError):
            if not writable:
                raise
        _create(path, slots, num_chunks, digest)
        return cls(path, slots, num_chunks, digest, writable)

    @property
    def replaced(self) -> bool:
        """Whether another file has replaced the mapped one, so that it must be opened again."""
        return self._identity != file_id(self.path)

    def read(self, slot: int) -> Check | None:
        """A copy of the entry for ``slot``; None if there is none, or if it does not verify."""
        checked, encoded = self._checked.read(slot), _seal_id(self._encoded.read(slot))
        seal_id = _seal_id(checked)
        if seal_id is None:
            return None
        state = CheckState.ENCODED if encoded == seal_id else CheckState.CHECKED
        return Check(state, seal_id, _FIELDS.unpack(checked.fields)[1], checked.words)

    def store_checked(self, slot: int, seal_id: SealId, hashes: Hashes, gap_secs: float) -> None:
        """Set CHECKED: ``hashes`` (one uint64 per chunk) belong to the seal ``seal_id`` of the control record."""
        if hashes.shape != (self.num_chunks,):
            raise ValueError(f"hashes {hashes.shape} of {self.num_chunks} chunks")
        snapshot, sequence = seal_id
        # ENCODED is cleared first: for the same seal it would count again as soon as CHECKED does.
        self._encoded.give_up(slot, EMPTY)
        self._checked.give_up(slot, WRITING)
        self._checked.put_fields(slot, _FIELDS.pack(sequence, gap_secs))
        self._checked.put_words(slot, hashes.astype("<u8").tobytes())
        self._checked.seal(slot, snapshot)

    def store_encoded(self, slot: int, seal_id: SealId) -> None:
        """Set ENCODED: this node has stored its part of the protection of that snapshot.

        Raises:
            ArenaError: ``slot`` is not CHECKED for ``seal_id``.
        """
        # Refused: with a CHECKED of another seal it would never count.
        check, (snapshot, sequence) = self.read(slot), seal_id
        if check is None or check.seal_id != seal_id:
            raise ArenaError(f"{self.path}: slot {slot} is not CHECKED for iteration {snapshot.iteration}")
        self._encoded.give_up(slot, WRITING)
        self._encoded.put_fields(slot, _U64.pack(sequence))
        self._encoded.seal(slot, snapshot)

    def drop_encoded(self, slot: int) -> None:
        """Clear ENCODED. CHECKED stays: it may have the only checksums of the snapshot."""
        self._encoded.give_up(slot, EMPTY)

    def close(self) -> None:
        self._stores.data.release()  # before the mapping, which stays mapped while a view lives
        self._map.close()


def checks_bytes(slots: int, num_chunks: int) -> int:
    """Size of the file in bytes."""
    return FORMAT.text_offset(slots, num_chunks)


def _open(path: Path, slots: int, num_chunks: int, digest: bytes, writable: bool) -> Mapping:
    # Any length: the header is checked against it.
    mapping = open_mapping(path, None, writable)
    try:
        header = FORMAT.read(mapping.data, str(path))
        if (header.records, header.words, header.digest) != (slots, num_chunks, digest):
            raise CorruptError(f"{path}: made for another arena: {header.records} slots of {header.words} chunks")
    except BaseException:  # no other code unmaps it
        mapping.close()
        raise
    return mapping


def _create(path: Path, slots: int, num_chunks: int, digest: bytes) -> None:
    """Create an empty file under a temporary name and replace any existing one by it."""
    try:
        remove_unfinished(path.parent, f"{path.name}*")
        with fresh_name(path) as fresh:
            nbytes = checks_bytes(slots, num_chunks)
            mapping = create_mapping(fresh, nbytes)
            FORMAT.write(mapping.data, Header(slots, num_chunks, nbytes, digest=digest))
            mapping.close()
            # Replaced, never overwritten: readers have the old file mapped and notice the new inode.
            fresh.rename(path)
    except OSError as error:
        raise ArenaError(f"{path}: cannot be created: {error.strerror}") from None


def _seal_id(record: Record) -> SealId | None:
    if record.snapshot is None:
        return None
    return record.snapshot, _U64.unpack_from(record.fields)[0]
