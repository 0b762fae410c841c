"""The file ``checks`` of an arena: what a node's SMP found out about sealed slots, and which slots it reads.

Integers are little-endian::

    header, 512 bytes             record, one per slot
      0  magic        8 s           0  state        u8
      8  version      u32           1  zeros        7
      12 slots        u32           8  lineage      16 s
      16 chunks       u32           24 iteration    i64
      20 zeros        12            32 sequence     u64
      32 digest       16 s          40 gap          f64
      48 zeros                      48 proof        u64
      504 checksum    u64           56 checksum     u64
                                    64 chunk hashes u64 each

Leases (u64 each, nanoseconds of CLOCK_MONOTONIC; 0: none) begin at 512, records at 4096, each record on a
multiple of 64. Checksums are xxh3-64: of header bytes 0:504; of record bytes 8:48 and the chunk hashes,
seeded with the slot's number. The proof is xxh3-64 of the checksum and ``COVERED``, seeded likewise.

Why a SIGKILL between any two stores is safe: ``store_checked`` stores the state byte first, then clears proof
and checksum, so that nothing is claimed while fields and hashes are written; checksum and state byte come last.
``store_covered`` stores the proof, then the state byte. Why a reader that runs beside the writer is safe: what
it copied is believed only with a checksum over all of it, and COVERED only with a proof of that checksum, so
that the state of one record and the fields of another never combine.
"""

from __future__ import annotations

import os
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from ftckpt.arena.control import MAX_SLOTS
from ftckpt.arena.image import MAX_CHUNKS
from ftckpt.arena.mapping import Mapping, create_mapping, open_mapping
from ftckpt.errors import ArenaError, ConfigError, CorruptError, MismatchError

Hashes = npt.NDArray[np.uint64]

CHECKS_NAME = "checks"
MAGIC = b"FTCKPTCK"
VERSION = 1
MAX_LEASE_SECS = 60.0
"""A lease that ends later than this from now counts as none: whoever wrote it is not to be believed."""

_HEADER = struct.Struct("<8sIII12x16s")
_HEADER_BYTES = 512
_LEASES_OFFSET = 512
_RECORDS_OFFSET = 4096
_FIELDS = struct.Struct("<16sqQd")  # lineage, iteration, sequence, gap, at 8
_PROOF_OFFSET = 48
_CHECKSUM_OFFSET = 56
_TABLE_OFFSET = 64
_U64 = struct.Struct("<Q")


class CheckState(IntEnum):
    """What the SMP has done to a sealed slot. No flip of one bit makes one claim of another."""

    NONE = 0
    CHECKED = 1
    COVERED = 2


@dataclass(frozen=True)
class Check:
    """What the SMP knows of one slot; it counts only if the control record has the same ``key``.

    ``gap_secs`` is the time from the seal, as the SMP saw it, until the hashes were taken.
    """

    state: CheckState
    lineage: bytes
    iteration: int
    sequence: int
    gap_secs: float
    chunk_hashes: Hashes

    @property
    def key(self) -> tuple[bytes, int, int]:
        """Lineage, iteration and sequence of the record that was checked."""
        return self.lineage, self.iteration, self.sequence


class Checks:
    """A mapped ``checks`` file. One process, the node's SMP, writes; any may read at the same time."""

    def __init__(self, path: Path, slots: int, num_chunks: int, digest: bytes, writable: bool) -> None:
        self.path = path
        self.slots = slots
        self.num_chunks = num_chunks
        # Asked before the file is mapped: one that replaces it in between is then taken for another one.
        self._identity = _identity(path)
        self._map = _open(path, slots, num_chunks, digest, writable)
        self._data = memoryview(self._map.data)

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
        return self._identity != _identity(self.path)

    def read(self, slot: int) -> Check | None:
        """A copy of what is known of ``slot``; None if nothing is, or if what is there is not proven."""
        begin = self._begin_of(slot)
        raw = bytes(self._data[begin : begin + _record_bytes(self.num_chunks)])
        checksum = raw[_CHECKSUM_OFFSET:_TABLE_OFFSET]
        if raw[0] not in (CheckState.CHECKED, CheckState.COVERED) or checksum != _checksum(raw, slot):
            return None
        state = CheckState(raw[0])
        if state == CheckState.COVERED and raw[_PROOF_OFFSET:_CHECKSUM_OFFSET] != _proof(checksum, slot):
            return None
        lineage, iteration, sequence, gap_secs = _FIELDS.unpack_from(raw, 8)
        table = np.frombuffer(raw, "<u8", self.num_chunks, _TABLE_OFFSET)
        return Check(state, lineage, iteration, sequence, gap_secs, table.astype(np.uint64, copy=False))

    def store_checked(  # noqa: PLR0917 - the snapshot's key comes first, as in store_covered
        self, slot: int, lineage: bytes, iteration: int, sequence: int, hashes: Hashes, gap_secs: float
    ) -> None:
        """CHECKED: ``hashes`` (one uint64 per chunk) are of the snapshot that the control record names so."""
        if len(lineage) != 16 or hashes.shape != (self.num_chunks,):
            raise ValueError(f"a lineage of {len(lineage)} bytes (16), hashes {hashes.shape} ({self.num_chunks},)")
        begin = self._begin_of(slot)
        self.clear(slot)
        self._store(begin + 8, _FIELDS.pack(lineage, iteration, sequence, gap_secs))
        self._store(begin + _TABLE_OFFSET, hashes.astype("<u8").tobytes())
        raw = bytes(self._data[begin : begin + _record_bytes(self.num_chunks)])
        self._store(begin + _CHECKSUM_OFFSET, _checksum(raw, slot))
        self._store(begin, bytes([CheckState.CHECKED]))

    def store_covered(self, slot: int, lineage: bytes, iteration: int, sequence: int) -> None:
        """COVERED: everything this node owes to the protection of that snapshot lies where it should.

        Raises:
            ArenaError: ``slot`` is not CHECKED for that snapshot.
        """
        check = self.read(slot)
        if check is None or check.key != (lineage, iteration, sequence):
            raise ArenaError(f"{self.path}: slot {slot} is not CHECKED for iteration {iteration}")
        begin = self._begin_of(slot)
        checksum = bytes(self._data[begin + _CHECKSUM_OFFSET : begin + _TABLE_OFFSET])
        self._store(begin + _PROOF_OFFSET, _proof(checksum, slot))
        self._store(begin, bytes([CheckState.COVERED]))

    def clear(self, slot: int) -> None:
        """NONE: what was known of ``slot`` is given up."""
        begin = self._begin_of(slot)
        self._store(begin, bytes([CheckState.NONE]))
        self._store(begin + _PROOF_OFFSET, bytes(16))

    def lease(self, slot: int, until_ns: int) -> None:
        """Tell the trainer that ``slot`` is being read until ``until_ns`` (``time.monotonic_ns``) at the latest.

        Raises:
            ValueError: that is more than ``MAX_LEASE_SECS`` from now: it would count as none.
        """
        if until_ns > time.monotonic_ns() + MAX_LEASE_SECS * 1e9:
            raise ValueError(f"a lease of slot {slot} for more than {MAX_LEASE_SECS:.0f} s")
        self._store(self._lease_of(slot), _U64.pack(until_ns))

    def leased(self, slot: int) -> bool:
        """Whether the SMP reads ``slot`` now."""
        at = self._lease_of(slot)
        left = int.from_bytes(self._data[at : at + 8], "little") - time.monotonic_ns()
        return 0 < left <= MAX_LEASE_SECS * 1e9

    def release(self, slot: int) -> None:
        """End the lease of ``slot``."""
        self._store(self._lease_of(slot), bytes(8))

    def close(self) -> None:
        """Unmap."""
        self._data.release()
        self._map.close()

    def _store(self, offset: int, data: bytes) -> None:
        """Every store after creation goes through here, in program order."""
        self._data[offset : offset + len(data)] = data

    def _begin_of(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        return _RECORDS_OFFSET + slot * _record_bytes(self.num_chunks)

    def _lease_of(self, slot: int) -> int:
        self._begin_of(slot)
        return _LEASES_OFFSET + 8 * slot


def checks_bytes(slots: int, num_chunks: int) -> int:
    """Size of the file in bytes."""
    return _RECORDS_OFFSET + slots * _record_bytes(num_chunks)


def _open(path: Path, slots: int, num_chunks: int, digest: bytes, writable: bool) -> Mapping:
    mapping = open_mapping(path, None, writable)
    try:
        header = bytes(mapping.data[:_HEADER_BYTES])
        if len(header) < _HEADER_BYTES or header[:8] != MAGIC:
            raise CorruptError(f"{path}: bad magic, not a checks file")
        if _U64.pack(xxhash.xxh3_64_intdigest(header[:-8])) != header[-8:]:
            raise CorruptError(f"{path}: header checksum does not match")
        _, version, *found = _HEADER.unpack_from(header)
        if version != VERSION:
            raise MismatchError(f"{path}: has format version {version}, this ftckpt reads {VERSION}")
        if found != [slots, num_chunks, digest]:
            raise CorruptError(f"{path}: made for another arena: {found[0]} slots of {found[1]} chunks")
        if len(mapping.data) != checks_bytes(slots, num_chunks):
            raise CorruptError(f"{path}: {len(mapping.data)} bytes, {checks_bytes(slots, num_chunks)} are announced")
    except BaseException:
        mapping.close()
        raise
    return mapping


def _create(path: Path, slots: int, num_chunks: int, digest: bytes) -> None:
    """An empty file, built under a temporary name, that replaces what is there."""
    fresh = path.with_name(f".{CHECKS_NAME}.new")
    header = _HEADER.pack(MAGIC, VERSION, slots, num_chunks, digest).ljust(_HEADER_BYTES - 8, b"\0")
    try:
        fresh.unlink(missing_ok=True)
        mapping = create_mapping(fresh, checks_bytes(slots, num_chunks))
        mapping.data[:_HEADER_BYTES] = header + _U64.pack(xxhash.xxh3_64_intdigest(header))
        mapping.close()
        fresh.rename(path)
    except BaseException as error:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ArenaError(f"{path}: cannot be created: {error.strerror}") from None
        raise


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _record_bytes(num_chunks: int) -> int:
    return -(-(_TABLE_OFFSET + 8 * num_chunks) // 64) * 64


def _checksum(raw: bytes, slot: int) -> bytes:
    """Over fields and hashes (and the zeros that fill the record), without state, proof and checksum."""
    return _U64.pack(xxhash.xxh3_64_intdigest(raw[8:_PROOF_OFFSET] + raw[_TABLE_OFFSET:], seed=slot))


def _proof(checksum: bytes, slot: int) -> bytes:
    return _U64.pack(xxhash.xxh3_64_intdigest(checksum + bytes([CheckState.COVERED]), seed=slot))
