"""The file ``checks`` of an arena: what a node's SMP knows of sealed slots, and which slots it reads.

A record file (``record``) with two lists of records: one record per slot says CHECKED, its words are the checksums of
the chunks, its fields the sequence of the control record and the gap; one without words says COVERED, of the snapshot
and the sequence in it. So each claim has its own proof, and COVERED counts only beside a CHECKED of the same sealing:
what is read of one and of the other at different moments never combines. ``FORMAT.md`` has the bytes.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from ftckpt.array_types import Hashes
from ftckpt.errors import ArenaError, ConfigError, CorruptError, MismatchError
from ftckpt.memory.control_block import MAX_SLOTS, SealId
from ftckpt.memory.directory import fresh_name, remove_half_made
from ftckpt.memory.mapping import Mapping, create_mapping, file_id, open_mapping
from ftckpt.memory.record import EMPTY, HEADER_BYTES, RECORD_BYTES, WRITING, Format, Header, Record, Records, Stores
from ftckpt.model.manifest import MAX_CHUNKS
from ftckpt.model.snapshot import SnapshotId

CHECKS_NAME = "checks"
MAX_LEASE_SECS = 60.0
"""A lease that ends later than this from now counts as none: whoever wrote it is not to be believed."""

_LEASES = HEADER_BYTES
_COVERED = _LEASES + 8 * MAX_SLOTS
FORMAT = Format("checks file", b"FTCKPTCK", 1, fixed_bytes=8 * MAX_SLOTS + RECORD_BYTES * MAX_SLOTS)
_FIELDS = struct.Struct("<Qd8x")  # sequence, gap in seconds; fields of a record have 24 bytes
_U64 = struct.Struct("<Q")


class CheckState(IntEnum):
    """What the SMP has done to a sealed slot."""

    NONE = 0
    CHECKED = 1
    COVERED = 2


@dataclass(frozen=True)
class Check:
    """What the SMP knows of one slot; it counts only if the control record has the same ``seal_id``.

    ``gap_secs`` is the time from the seal until the hashes were taken.
    """

    state: CheckState
    seal_id: SealId
    gap_secs: float
    chunk_hashes: Hashes

    @property
    def snapshot(self) -> SnapshotId:
        return self.seal_id[0]


class Checks:
    """A mapped ``checks`` file. One process, the node's SMP, writes; any may read at the same time."""

    def __init__(self, path: Path, slots: int, num_chunks: int, digest: bytes, writable: bool) -> None:
        self.path = path
        self.slots = slots
        self.num_chunks = num_chunks
        # Asked before the file is mapped: one that replaces it in between is then taken for another one.
        self._identity = file_id(path)
        self._map = _open(path, slots, num_chunks, digest, writable)
        self._stores = Stores(memoryview(self._map.data))
        self._checked = Records(self._stores, FORMAT.records_offset, slots, num_chunks)
        self._covered = Records(self._stores, _COVERED, slots, 0)

    @classmethod
    def create_or_open(cls, arena_dir: Path, slots: int, num_chunks: int, digest: bytes, writable: bool) -> Checks:
        """Map the file of an arena of ``slots`` slots of ``num_chunks`` chunks and the manifest's ``digest``.

        A writer creates it where it is missing and replaces one that is bad or belongs to another arena.

        Raises:
            ArenaError: not there (readers), or it cannot be created.
            CorruptError: not such a file, or one of another arena (readers).
            MismatchError: of another format version (readers).
            ConfigError: impossible sizes.
            MemoryBudgetError: the file system has no room.
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
        """Whether the file of this name is not the mapped one any more: open it again."""
        return self._identity != file_id(self.path)

    def read(self, slot: int) -> Check | None:
        """A copy of what is known of ``slot``; None if nothing is, or if what is there is not proven."""
        checked, covered = self._checked.read(slot), _seal_id(self._covered.read(slot))
        seal_id = _seal_id(checked)
        if seal_id is None:
            return None
        state = CheckState.COVERED if covered == seal_id else CheckState.CHECKED
        return Check(state, seal_id, _FIELDS.unpack(checked.fields)[1], checked.words)

    def store_checked(self, slot: int, seal_id: SealId, hashes: Hashes, gap_secs: float) -> None:
        """CHECKED, no more: ``hashes`` (one uint64 per chunk) are of what the control record calls ``seal_id``."""
        if hashes.shape != (self.num_chunks,):
            raise ValueError(f"hashes {hashes.shape} of {self.num_chunks} chunks")
        snapshot, sequence = seal_id
        # COVERED first: of the same sealing it would count again as soon as CHECKED does.
        self._covered.give_up(slot, EMPTY)
        self._checked.give_up(slot, WRITING)
        self._checked.put_fields(slot, _FIELDS.pack(sequence, gap_secs))
        self._checked.put_words(slot, hashes.astype("<u8").tobytes())
        self._checked.seal(slot, snapshot)

    def store_covered(self, slot: int, seal_id: SealId) -> None:
        """COVERED: everything this node owes to the protection of that snapshot lies where it should.

        Raises:
            ArenaError: ``slot`` is not CHECKED for ``seal_id``.
        """
        # Refused rather than stored: beside a CHECKED of another sealing it would never count.
        check, (snapshot, sequence) = self.read(slot), seal_id
        if check is None or check.seal_id != seal_id:
            raise ArenaError(f"{self.path}: slot {slot} is not CHECKED for iteration {snapshot.iteration}")
        self._covered.give_up(slot, WRITING)
        self._covered.put_fields(slot, _U64.pack(sequence))
        self._covered.seal(slot, snapshot)

    def uncover(self, slot: int) -> None:
        """COVERED is CHECKED again, which may have the only checksums that were ever taken: it is not touched."""
        self._covered.give_up(slot, EMPTY)

    def clear(self, slot: int) -> None:
        """NONE: what was known of ``slot`` is given up."""
        # In the order of ``store_checked``: a COVERED never stands there without its CHECKED.
        self._covered.give_up(slot, EMPTY)
        self._checked.give_up(slot, EMPTY)

    def lease(self, slot: int, until_ns: int) -> None:
        """Show the trainer that ``slot`` is being read, until ``until_ns`` (``time.monotonic_ns``) at the latest.

        Raises:
            ValueError: that is more than ``MAX_LEASE_SECS`` from now: it would count as none.
        """
        if until_ns > time.monotonic_ns() + MAX_LEASE_SECS * 1e9:
            raise ValueError(f"a lease of slot {slot} for more than {MAX_LEASE_SECS:.0f} s")
        self._stores.store(self._lease_of(slot), _U64.pack(until_ns))

    def leased(self, slot: int) -> bool:
        """Whether the SMP reads ``slot`` now."""
        at = self._lease_of(slot)
        left = int.from_bytes(self._stores.data[at : at + 8], "little") - time.monotonic_ns()
        # Two bounds: the lease of an SMP that was killed runs out, and one that a broken file gives for ever is none.
        return 0 < left <= MAX_LEASE_SECS * 1e9

    def release(self, slot: int) -> None:
        """End the lease of ``slot``."""
        self._stores.store(self._lease_of(slot), bytes(8))

    def close(self) -> None:
        self._stores.data.release()  # before the mapping, which stays mapped while a view lives
        self._map.close()

    def _lease_of(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        return _LEASES + 8 * slot


def checks_bytes(slots: int, num_chunks: int) -> int:
    """Size of the file in bytes."""
    return FORMAT.text_offset(slots, num_chunks)


def _open(path: Path, slots: int, num_chunks: int, digest: bytes, writable: bool) -> Mapping:
    # Of any length: the header says which one it must have.
    mapping = open_mapping(path, None, writable)
    try:
        header = FORMAT.read(mapping.data, str(path))
        if (header.records, header.words, header.digest) != (slots, num_chunks, digest):
            raise CorruptError(f"{path}: made for another arena: {header.records} slots of {header.words} chunks")
    except BaseException:  # nobody else would unmap it
        mapping.close()
        raise
    return mapping


def _create(path: Path, slots: int, num_chunks: int, digest: bytes) -> None:
    """An empty file, built under a temporary name, that replaces what is there."""
    try:
        remove_half_made(path.parent, f"{path.name}*")
        with fresh_name(path) as fresh:
            nbytes = checks_bytes(slots, num_chunks)
            mapping = create_mapping(fresh, nbytes)
            FORMAT.write(mapping.data, Header(slots, num_chunks, nbytes, digest=digest))
            mapping.close()
            # Replaced, never overwritten: readers have the old one mapped, and see by its inode that it is another.
            fresh.rename(path)
    except OSError as error:
        raise ArenaError(f"{path}: cannot be created: {error.strerror}") from None


def _seal_id(record: Record) -> SealId | None:
    if record.snapshot is None:
        return None
    return record.snapshot, _U64.unpack_from(record.fields)[0]
