"""Record files: the common format of control, checks, parity and package files.

A header, then checksummed records that stay consistent after a kill at any store, a bit flip, or foreign writes.
Integers are little-endian, checksums are xxh3-64::

    header, 512 bytes               record, a multiple of 64
      0  magic          8 s           0  state       u8    0 empty, 1 being written, 2 sealed
      8  version        u32           1  flags       u8    of the format
      12 records        u32           2  stamp       u48   of the format
      16 words          u32           8  snapshot    24 s  see ``SnapshotId.pack``
      20 text bytes     u32           32 fields      24 s  of the format
      24 file bytes     u64           56 checksum    u64   of 1:56 and 64:end, seeded with the record's place
      32 text checksum  u64           64 words       u64 each, then zeros
      40 digest         16 s
      56 numbers        u64, 3 times  of the format
      80 zeros
      504 checksum      u64           of 0:504

The header is followed by the format's fixed-length part, the records, the text, and the format's body.

Why a SIGKILL between any two stores, or inside one that is longer than a byte, is safe:

* A killed process loses no completed store, and a one-byte store is atomic. So only the state byte declares a record
  sealed, and it is stored last: fields and words come first, ``seal`` stores snapshot and flags, then the checksum
  over all of them, then the state.
* ``give_up`` stores the state first, which unseals the record. Then it clears the checksum: later stores overwrite
  the sealed contents, and a flip of the state byte must not seal them.
* So a record with the state *sealed* and a wrong checksum results from a flip or a foreign write, and reads as torn.
* A header is written once, into a file without a name or with a temporary one.

Why a concurrent reader is safe: it takes a copy and checks the checksum over all of it. If it sees stores in another
order than the writer made them, the checksum does not match.

A mark names a snapshot and is replaced without a moment in which neither the old nor the new one is readable: it is a
record in two copies. Each copy is overwritten by one store, the older copy first. A kill inside that store leaves a
wrong checksum, and the other copy counts. If both are sealed, the higher sequence counts. So one copy is sealed at
every instant, and a flip in either loses nothing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

from ftckpt.array_types import Words
from ftckpt.errors import CorruptError, MismatchError
from ftckpt.model.snapshot import SnapshotId

HEADER_BYTES = 512
RECORD_BYTES = 64
"""Size of a record without words: a cache line."""
EMPTY, WRITING, SEALED = 0, 1, 2

_HEADER = struct.Struct("<8sIIIIQQ16s3Q")
_U64 = struct.Struct("<Q")
_STAMP, _SNAPSHOT, _FIELDS, _CHECKSUM, _WORDS = 2, 8, 32, 56, 64
_NO_SNAPSHOT = bytes(16) + b"\xff" * 8
"""The snapshot field of a mark that names no snapshot."""


@dataclass(frozen=True)
class Header:
    """Counts and sizes of a file. Each format defines ``numbers`` and ``text``; ``digest`` identifies the owner."""

    records: int
    words: int
    file_bytes: int
    text: bytes = b""
    digest: bytes = bytes(16)
    numbers: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True)
class Format:
    """One kind of record file: its ``name`` in errors, and ``fixed_bytes`` between header and records."""

    name: str
    magic: bytes
    version: int
    fixed_bytes: int = 0

    @property
    def records_offset(self) -> int:
        """Offset of the first record."""
        return HEADER_BYTES + self.fixed_bytes

    def text_offset(self, records: int, words: int) -> int:
        """Offset of the text, which follows the last record."""
        return self.records_offset + records * record_bytes(words)

    def body_offset(self, header: Header) -> int:
        """Offset of the format's body, which follows the text."""
        return self.text_offset(header.records, header.words) + len(header.text)

    def write(self, data: memoryview, header: Header) -> None:
        """Format zeroed ``data``, which no process reads yet, as an empty file; the header is stored last."""
        begin = self.text_offset(header.records, header.words)
        data[begin : begin + len(header.text)] = header.text
        packed = _HEADER.pack(
            self.magic, self.version, header.records, header.words, len(header.text), header.file_bytes,
            xxhash.xxh3_64_intdigest(header.text), header.digest, *header.numbers,
        ).ljust(HEADER_BYTES - 8, b"\0")  # fmt: skip
        data[:HEADER_BYTES] = packed + _U64.pack(xxhash.xxh3_64_intdigest(packed))

    def read(self, data: memoryview, where: str = "") -> Header:
        """Read the header of ``data``; every size is checked against the length of ``data`` before it is used.

        Raises:
            CorruptError: another kind of file, a wrong checksum, or contradictory sizes.
            MismatchError: of another format version.
        """
        name = where or self.name
        raw = bytes(data[:HEADER_BYTES])
        if len(raw) < HEADER_BYTES:
            raise CorruptError(f"{name}: truncated to {len(raw)} bytes")
        if raw[:8] != self.magic:
            raise CorruptError(f"{name}: bad magic, not a {self.name}")
        if xxhash.xxh3_64_intdigest(raw[:-8]) != _U64.unpack(raw[-8:])[0]:
            raise CorruptError(f"{name}: header checksum does not match")
        _, version, records, words, text_bytes, file_bytes, text_hash, digest, *numbers = _HEADER.unpack_from(raw)
        if version != self.version:
            raise MismatchError(f"{name} has format version {version}, this ftckpt reads {self.version}")
        begin = self.text_offset(records, words)
        if file_bytes != len(data) or begin + text_bytes > file_bytes:
            raise CorruptError(
                f"{name}: truncated or impossible sizes: the file has {len(data)} bytes, its header says "
                f"{file_bytes} with {records} records of {words} words and {text_bytes} bytes of text"
            )
        text = bytes(data[begin : begin + text_bytes])
        if xxhash.xxh3_64_intdigest(text) != text_hash:
            raise CorruptError(f"{name}: text checksum does not match")
        return Header(records, words, file_bytes, text, digest, (numbers[0], numbers[1], numbers[2]))


class Record(NamedTuple):
    """A copy of one record. ``torn``: its state is sealed but its checksum is wrong. ``snapshot``: only if sealed."""

    state: int
    torn: bool
    flags: int
    stamp: int
    snapshot: SnapshotId | None
    fields: bytes
    words: Words

    @property
    def sealed(self) -> bool:
        """Whether the checksum confirms the contents."""
        return self.state == SEALED


class Stores:
    """A buffer shared with other processes. The caller owns it and keeps it mapped."""

    def __init__(self, data: memoryview) -> None:
        self.data = data

    def store(self, offset: int, data: bytes | memoryview) -> None:
        """Store ``data``. Every store after creation uses this method, in program order."""
        self.data[offset : offset + len(data)] = data


class Records:
    """``count`` records of ``words`` words each, starting at ``offset``. One process writes, any process may read."""

    def __init__(self, stores: Stores, offset: int, count: int, words: int) -> None:
        self._stores = stores
        self._offset = offset
        self.count = count
        self.num_words = words

    def read(self, index: int) -> Record:
        """A verified copy. A record that is declared sealed with a wrong checksum reads as EMPTY and ``torn``."""
        begin = self._begin_of(index)
        # A copy: the writer may change the record between the checksum and its use.
        raw = bytes(self._stores.data[begin : begin + record_bytes(self.num_words)])
        state, snapshot, torn = raw[0], None, False
        # States above SEALED are undefined and read as torn too.
        if state >= SEALED:
            proven = state == SEALED and _U64.pack(_checksum(raw, begin)) == raw[_CHECKSUM:_WORDS]
            named = raw[_SNAPSHOT:_FIELDS]
            try:
                snapshot = SnapshotId.unpack(named) if proven and named != _NO_SNAPSHOT else None
            except ValueError:  # a foreign write with a valid checksum
                proven = False
            torn = not proven
        words = np.frombuffer(raw, "<u8", self.num_words, _WORDS).astype(np.uint64, copy=False)
        stamp = int.from_bytes(raw[_STAMP:_SNAPSHOT], "little")
        return Record(EMPTY if torn else state, torn, raw[1], stamp, snapshot, raw[_FIELDS:_CHECKSUM], words)

    def word(self, index: int, word: int) -> int:
        """One word, unverified."""
        begin = self._begin_of(index) + _WORDS + 8 * word
        value: int = _U64.unpack_from(self._stores.data, begin)[0]
        return value

    def give_up(self, index: int, state: int) -> None:
        """Unseal the record: ``state`` is EMPTY or WRITING."""
        begin = self._begin_of(index)
        # In this order: the first store unseals; after the second a flip of the state byte cannot seal.
        self._stores.store(begin, bytes([state]))
        self._stores.store(begin + _CHECKSUM, bytes(8))

    def writing(self, index: int) -> bool:
        """Whether the record is being written."""
        return bool(self._stores.data[self._begin_of(index)] == WRITING)

    def put_fields(self, index: int, fields: bytes, at: int = 0) -> None:
        """Store ``fields`` at byte ``at`` of the fields of a record that is WRITING."""
        self._stores.store(self._begin_of(index) + _FIELDS + at, fields)

    def put_words(self, index: int, words: bytes, first: int = 0) -> None:
        """Store ``words`` from word ``first`` of a record that is WRITING."""
        self._stores.store(self._begin_of(index) + _WORDS + 8 * first, words)

    def seal(self, index: int, snapshot: SnapshotId | None, flags: int = 0, stamp: int = 0) -> None:
        """Seal the record: its fields and words are complete and belong to ``snapshot``."""
        begin, stores = self._begin_of(index), self._stores
        stores.store(begin + _SNAPSHOT, _NO_SNAPSHOT if snapshot is None else snapshot.pack())
        stores.store(begin + 1, bytes([flags]) + stamp.to_bytes(_SNAPSHOT - _STAMP, "little"))
        # Read back from memory: fields and words arrived in many stores.
        raw = bytes(stores.data[begin : begin + record_bytes(self.num_words)])
        stores.store(begin + _CHECKSUM, _U64.pack(_checksum(raw, begin)))
        # The state comes last: a kill before this store leaves the record WRITING.
        stores.store(begin, bytes([SEALED]))

    def replace(self, index: int, snapshot: SnapshotId | None, fields: bytes) -> bytes:
        """Overwrite a record without words by one store and return its bytes. A kill inside the store loses it."""
        begin = self._begin_of(index)
        named = _NO_SNAPSHOT if snapshot is None else snapshot.pack()
        # One store, state included, unlike ``seal``: the other copy of a mark counts while this one is incomplete.
        raw = bytes([SEALED]).ljust(_SNAPSHOT, b"\0") + (named + fields).ljust(_CHECKSUM - _SNAPSHOT, b"\0")
        raw += _U64.pack(_checksum(raw, begin))
        self._stores.store(begin, raw)
        return raw

    def _begin_of(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise IndexError(f"slot {index} of {self.count}")
        return self._offset + index * record_bytes(self.num_words)


class Mark:
    """A snapshot or none in two copies, so that a kill during ``write`` leaves the old or the new value."""

    def __init__(self, stores: Stores, offset: int) -> None:
        self._stores = stores
        self._offset = offset
        self._copies = Records(stores, offset, 2, 0)
        self._written: tuple[int, bytes] = 0, b""  # sequence and bytes of both copies after the last ``write``

    def read(self) -> tuple[SnapshotId | None] | None:
        """The last snapshot (None: marked as none); None if never written or both copies are corrupt."""
        newest = self._newest()
        return None if newest is None else (newest[2].snapshot,)

    def write(self, snapshot: SnapshotId | None) -> None:
        """Mark ``snapshot``; None marks that there is none."""
        copies = [b"", b""]
        # If neither copy is sealed, or both are as this object wrote them, any order is safe: copy 0 is first.
        (sequence, written), newest = self._written, 1
        if bytes(self._stores.data[self._offset : self._offset + MARK_BYTES]) != written:
            sequence, newest, _ = self._newest() or (0, 1, None)
        fields = _U64.pack(sequence + 1) + _U64.pack(0)
        # The older copy first: the newer one counts until this one is complete.
        for copy in (1 - newest, newest):
            copies[copy] = self._copies.replace(copy, snapshot, fields)
        self._written = sequence + 1, b"".join(copies)

    def _newest(self) -> tuple[int, int, Record] | None:
        """Sequence, index and contents of the copy that counts; None if neither is sealed."""
        copies = [self._copies.read(index) for index in range(2)]
        sealed = [(_U64.unpack_from(copy.fields)[0], index) for index, copy in enumerate(copies) if copy.sealed]
        if not sealed:
            return None
        sequence, index = max(sealed)
        return sequence, index, copies[index]


MARK_BYTES = 2 * RECORD_BYTES


def record_bytes(words: int) -> int:
    """Size of a record of ``words`` words."""
    return -(-(_WORDS + 8 * words) // RECORD_BYTES) * RECORD_BYTES


def _checksum(raw: bytes, place: int) -> int:
    """Excludes the state, which one store changes. The seed is the record's offset: no record passes for another."""
    return xxhash.xxh3_64_intdigest(raw[1:_CHECKSUM] + raw[_WORDS:], seed=place)
