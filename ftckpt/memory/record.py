"""Record files: what lies beside the slots, behind one header and with one rule for kills, flips and strangers.

Control, checks, parity and package files are lists of fields in this frame. Integers are little-endian, checksums
are xxh3-64::

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

Behind the header comes what the format has of fixed length, then records, text, and the format's body.

Why a SIGKILL between any two stores, or inside one that is longer than a byte, is safe:

* A killed process loses no store that it has made, and one byte cannot be half stored. So the state byte alone
  claims, and it is stored last: fields and words come first, ``seal`` stores snapshot and flags, then the checksum
  over all of them, then the state.
* ``give_up`` stores the state first: from that byte on nothing is claimed. Then it clears the checksum, for what
  follows overwrites what was sealed, and a flip of the state byte must not claim it.
* So whatever has the state *sealed* without its checksum is a flip or a stranger, and reads as torn.
* A header is written once, into a file that has no name yet or a temporary one.

Why a reader beside the writer is safe: it believes a copy, and that only with the checksum over all of it. Stores
that it sees in another order than they were made give a checksum that does not match.

A mark is a snapshot that is replaced while the one before must stay known: a record twice. Each copy is overwritten
by one store, the older copy first. Who dies inside it leaves a checksum that does not match, and the other copy
counts; of two sealed ones that with the higher sequence does. So one of the two is sealed at every instant, and a
flip in either loses nothing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ftckpt.errors import CorruptError, MismatchError
from ftckpt.model.snapshot import SnapshotId

Words = npt.NDArray[np.uint64]

HEADER_BYTES = 512
RECORD_BYTES = 64
"""Of a record without words: a cache line."""
EMPTY, WRITING, SEALED = 0, 1, 2

_HEADER = struct.Struct("<8sIIIIQQ16s3Q")
_U64 = struct.Struct("<Q")
_STAMP, _SNAPSHOT, _FIELDS, _CHECKSUM, _WORDS = 2, 8, 32, 56, 64
_NO_SNAPSHOT = bytes(16) + b"\xff" * 8
"""Instead of a snapshot in a mark that names none."""


@dataclass(frozen=True)
class Header:
    """Counts and sizes of a file. ``numbers`` and ``text`` are the format's, ``digest`` names what it belongs to."""

    records: int
    words: int
    file_bytes: int
    text: bytes = b""
    digest: bytes = bytes(16)
    numbers: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True)
class Format:
    """One kind of record file: ``name`` as errors call it, ``fixed_bytes`` between header and records."""

    name: str
    magic: bytes
    version: int
    fixed_bytes: int = 0

    @property
    def records_offset(self) -> int:
        """Where the first record begins."""
        return HEADER_BYTES + self.fixed_bytes

    def text_offset(self, records: int, words: int) -> int:
        """Where the text begins, behind the last record."""
        return self.records_offset + records * record_bytes(words)

    def body_offset(self, header: Header) -> int:
        """Where the format's own bytes begin, behind the text."""
        return self.text_offset(header.records, header.words) + len(header.text)

    def write(self, data: memoryview, header: Header) -> None:
        """Make an empty file of zeroed ``data``, which nobody reads yet: the header comes last."""
        begin = self.text_offset(header.records, header.words)
        data[begin : begin + len(header.text)] = header.text
        packed = _HEADER.pack(
            self.magic, self.version, header.records, header.words, len(header.text), header.file_bytes,
            xxhash.xxh3_64_intdigest(header.text), header.digest, *header.numbers,
        ).ljust(HEADER_BYTES - 8, b"\0")  # fmt: skip
        data[:HEADER_BYTES] = packed + _U64.pack(xxhash.xxh3_64_intdigest(packed))

    def read(self, data: memoryview, where: str = "") -> Header:
        """The header of ``data``; every size is compared with the bytes at hand before it is used.

        Raises:
            CorruptError: not such a file, damaged, or sizes that contradict each other.
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
                f"{name}: truncated or impossible sizes: {len(data)} bytes, {file_bytes} are announced, "
                f"with {records} records of {words} words and {text_bytes} bytes of text"
            )
        text = bytes(data[begin : begin + text_bytes])
        if xxhash.xxh3_64_intdigest(text) != text_hash:
            raise CorruptError(f"{name}: the checksum of its text does not match")
        return Header(records, words, file_bytes, text, digest, (numbers[0], numbers[1], numbers[2]))


class Record(NamedTuple):
    """A copy of one record. ``torn``: it claims to be sealed without a proof. ``snapshot`` only where it is."""

    state: int
    torn: bool
    flags: int
    stamp: int
    snapshot: SnapshotId | None
    fields: bytes
    words: Words

    @property
    def sealed(self) -> bool:
        """Whether what it holds is proven."""
        return self.state == SEALED


class Stores:
    """A buffer that is shared with other processes, which the caller owns and keeps mapped."""

    def __init__(self, data: memoryview) -> None:
        self.data = data

    def store(self, offset: int, data: bytes | memoryview) -> None:
        """Every store after creation goes through here, in program order."""
        self.data[offset : offset + len(data)] = data


class Records:
    """``count`` records of ``words`` words each, from ``offset`` on. One process writes, any may read."""

    def __init__(self, stores: Stores, offset: int, count: int, words: int) -> None:
        self._stores = stores
        self._offset = offset
        self.count = count
        self.num_words = words

    def read(self, index: int) -> Record:
        """A checked copy; what is not proven reads as EMPTY, and as ``torn`` if it claims anything."""
        begin = self._begin_of(index)
        # A copy: the writer may change the record between the checksum and its use.
        raw = bytes(self._stores.data[begin : begin + record_bytes(self.num_words)])
        state, snapshot, torn = raw[0], None, False
        # A state above SEALED is none: torn as well.
        if state >= SEALED:
            proven = state == SEALED and _U64.pack(_checksum(raw, begin)) == raw[_CHECKSUM:_WORDS]
            named = raw[_SNAPSHOT:_FIELDS]
            try:
                snapshot = SnapshotId.unpack(named) if proven and named != _NO_SNAPSHOT else None
            except ValueError:  # sealed by a stranger
                proven = False
            torn = not proven
        words = np.frombuffer(raw, "<u8", self.num_words, _WORDS).astype(np.uint64, copy=False)
        stamp = int.from_bytes(raw[_STAMP:_SNAPSHOT], "little")
        return Record(EMPTY if torn else state, torn, raw[1], stamp, snapshot, raw[_FIELDS:_CHECKSUM], words)

    def word(self, index: int, word: int) -> int:
        """One word as it stands there, proven or not."""
        begin = self._begin_of(index) + _WORDS + 8 * word
        value: int = _U64.unpack_from(self._stores.data, begin)[0]
        return value

    def give_up(self, index: int, state: int) -> None:
        """EMPTY or WRITING: the record claims nothing any more."""
        begin = self._begin_of(index)
        # In this order: the first store ends the claim; after the second a flip of the state makes none.
        self._stores.store(begin, bytes([state]))
        self._stores.store(begin + _CHECKSUM, bytes(8))

    def writing(self, index: int) -> bool:
        """Whether the record is being written."""
        return bool(self._stores.data[self._begin_of(index)] == WRITING)

    def put_fields(self, index: int, fields: bytes, at: int = 0) -> None:
        """Store ``fields`` from byte ``at`` of the format's own on, in a record that is being written."""
        self._stores.store(self._begin_of(index) + _FIELDS + at, fields)

    def put_words(self, index: int, words: bytes, first: int = 0) -> None:
        """Store whole words, in a record that is being written."""
        self._stores.store(self._begin_of(index) + _WORDS + 8 * first, words)

    def seal(self, index: int, snapshot: SnapshotId | None, flags: int = 0, stamp: int = 0) -> None:
        """SEALED: fields and words are in place and belong to ``snapshot``."""
        begin, stores = self._begin_of(index), self._stores
        stores.store(begin + _SNAPSHOT, _NO_SNAPSHOT if snapshot is None else snapshot.pack())
        stores.store(begin + 1, bytes([flags]) + stamp.to_bytes(_SNAPSHOT - _STAMP, "little"))
        # Over what stands in memory: fields and words came by many stores.
        raw = bytes(stores.data[begin : begin + record_bytes(self.num_words)])
        stores.store(begin + _CHECKSUM, _U64.pack(_checksum(raw, begin)))
        # The claim, last: who dies before it leaves a record that is WRITING.
        stores.store(begin, bytes([SEALED]))

    def replace(self, index: int, snapshot: SnapshotId | None, fields: bytes) -> bytes:
        """Overwrite a record without words by one store: what was sealed is lost if it dies inside. Returns it."""
        begin = self._begin_of(index)
        named = _NO_SNAPSHOT if snapshot is None else snapshot.pack()
        # With the state in it, unlike ``seal``: the other copy of a mark counts while this one is half stored.
        raw = bytes([SEALED]).ljust(_SNAPSHOT, b"\0") + (named + fields).ljust(_CHECKSUM - _SNAPSHOT, b"\0")
        raw += _U64.pack(_checksum(raw, begin))
        self._stores.store(begin, raw)
        return raw

    def _begin_of(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise IndexError(f"slot {index} of {self.count}")
        return self._offset + index * record_bytes(self.num_words)


class Mark:
    """A snapshot, and a number beside it, that are replaced while what was before stays known: a record twice."""

    def __init__(self, stores: Stores, offset: int) -> None:
        self._stores = stores
        self._offset = offset
        self._copies = Records(stores, offset, 2, 0)
        self._written: tuple[int, bytes] = 0, b""  # the sequence, and what both copies were then

    def read(self) -> tuple[SnapshotId | None, int] | None:
        """What was marked last, None of no snapshot; None instead: nothing ever was, or both copies are bad."""
        newest = self._newest()
        return None if newest is None else (newest[2].snapshot, _U64.unpack_from(newest[2].fields, 8)[0])

    def write(self, snapshot: SnapshotId | None, number: int = 0) -> None:
        """Mark ``snapshot``, or that none is meant any more."""
        copies = [b"", b""]
        # Where neither copy is sealed, or both are what was written here, any order will do: copy 0 is written first.
        (sequence, written), newest = self._written, 1
        if bytes(self._stores.data[self._offset : self._offset + MARK_BYTES]) != written:
            sequence, newest, _ = self._newest() or (0, 1, None)
        fields = _U64.pack(sequence + 1) + _U64.pack(number)
        # The older copy first: the newer one counts until this one is complete.
        for copy in (1 - newest, newest):
            copies[copy] = self._copies.replace(copy, snapshot, fields)
        self._written = sequence + 1, b"".join(copies)

    def _newest(self) -> tuple[int, int, Record] | None:
        """Sequence, index and copy of the one that counts."""
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
    """Over all but the state, so that this changes by one store; by the seed no record passes for another one."""
    return xxhash.xxh3_64_intdigest(raw[1:_CHECKSUM] + raw[_WORDS:], seed=place)
