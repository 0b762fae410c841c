"""The control block: which slot holds which snapshot, and the checksums of its bytes.

Integers are little-endian. All of it fits one file beside the slots::

    header, 512 bytes              mark, 64 bytes, twice      record, one per slot
      0  magic        8 s            0  lineage    16 s         0  state          u8
      8  version      u32            16 iteration  i64          1  flags          u8
      12 slots        u32            24 sequence   u64          2  zeros          6
      16 chunks       u32            32 checksum   u64          8  lineage        16 s
      20 name length  u32                                       24 iteration      i64
      24 chunk bytes  u64                                       32 sequence       u64
      32 digest       16 s                                      40 objects used   u64
      48 shard name   up to 456                                 48 objects hash   u64
      504 checksum    u64                                       56 checksum       u64
                                                                64 chunk hashes   u64 each

Marks begin at 512 (whole), 640 (target) and 768 (protected), records at 4096, each record on a multiple of 64.
Checksums are xxh3-64: of header bytes 0:504; of mark bytes 0:32; of record bytes 8:56 and the chunk hashes,
seeded with the slot's number, plus 256 if the flag ``UNHASHED`` is set: by the seed the checksum covers that
flag, so that no flip of it makes a snapshot without hashes pass for one that has them, or the other way round.

Why a SIGKILL between any two stores (or inside one longer than a byte) is safe:

* ``begin`` stores the state byte first: from that byte on the slot claims nothing. Then the checksum is
  cleared, so that a bit flip cannot turn the state of a slot that is being overwritten into a sealed one.
* ``seal`` stores the fields, without hashes zeros over those of the slot's previous snapshot, the flags, then
  the checksum over all it vouches for, then the state byte: the only store that makes the claim, and one byte
  cannot be torn.
* ``void`` stores the state byte first, as ``begin`` does.
* ``mark_whole``, ``mark_target`` and ``mark_protected`` write the same mark twice, over the older copy first.
  One of the two is whole at every instant, and once both are written a bit flip in either loses nothing.

A killed process loses no store it has made. A reader in another process may see stores out of order on some
processors; it then sees a checksum that does not match, which reads as torn.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import xxhash

from ftckpt.arena.image import MAX_CHUNKS, SlotImage
from ftckpt.arena.marks import NEVER, NOTHING, PROTECTED, TARGET, WHOLE, read_mark, store_mark
from ftckpt.errors import ArenaError, ConfigError, CorruptError, MismatchError
from ftckpt.state.manifest import Manifest

MAGIC = b"FTCKPTCB"
VERSION = 1
MAX_SLOTS = 64
MAX_SHARD_BYTES = 456

_HEADER = struct.Struct("<8sIIIIQ16s")
_HEADER_BYTES = 512
_RECORDS_OFFSET = 4096
_FIELDS = struct.Struct("<16sqQ")  # lineage, iteration, sequence, at 8
_OBJECTS = struct.Struct("<QQ")  # used, hash, at 40
_U64 = struct.Struct("<Q")
_TABLE_OFFSET = 64
_MAX_SEQUENCE = 1 << 48
"""What stands in the record of a slot that holds nothing is not proven: beyond this it is damage, not a number."""

UNHASHED = 1
"""Flag: the trainer took no hashes of the chunks; where there are any they are in the arena's ``checks``."""

Snapshot = tuple[bytes, int]
"""Lineage and iteration."""


class SlotState(IntEnum):
    """What a slot's bytes are; ``SEALED`` and above hold a snapshot."""

    EMPTY = 0
    WRITING = 1
    SEALED = 2
    CHECKED = 3
    PROTECTED = 4


@dataclass(frozen=True)
class SlotRecord:
    """A copy of one slot's record. ``torn``: the state byte claimed more than the checksum proves."""

    state: SlotState
    torn: bool
    flags: int
    lineage: bytes
    iteration: int
    sequence: int
    objects_used: int
    objects_hash: int
    chunk_hashes: npt.NDArray[np.uint64]

    @property
    def sealed(self) -> bool:
        """Whether the slot holds a snapshot."""
        return self.state >= SlotState.SEALED

    @property
    def hashed(self) -> bool:
        """Whether ``chunk_hashes`` are the trainer's; otherwise they are zeros."""
        return not self.flags & UNHASHED


class ControlBlock:
    """A view of a control block in ``buffer``, which the caller owns and keeps mapped.

    One process writes (it holds the arena's lock); any process may read at the same time. ``set_chunk_hash``
    may be called from several threads at once, the rest from one.

    Raises:
        CorruptError: not a control block, a bad header, both whole marks bad, or a buffer that is too short.
        MismatchError: a control block of another format version.
    """

    def __init__(self, buffer: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(buffer).cast("B")
        if len(self._data) < _RECORDS_OFFSET:
            raise CorruptError(f"control block: truncated to {len(self._data)} bytes")
        header = bytes(self._data[:_HEADER_BYTES])
        magic, version, slots, chunks, name_bytes, chunk_bytes, digest = _HEADER.unpack_from(header)
        if magic != MAGIC:
            raise CorruptError("control block: bad magic, not a control block")
        if xxhash.xxh3_64_intdigest(header[:-8]) != _U64.unpack(header[-8:])[0]:
            raise CorruptError("control block: header checksum does not match")
        if version != VERSION:
            raise MismatchError(f"control block has format version {version}, this ftckpt reads {VERSION}")
        if not 1 <= slots <= MAX_SLOTS or chunks > MAX_CHUNKS or name_bytes > MAX_SHARD_BYTES:
            raise CorruptError(f"control block: impossible sizes: {slots} slots of {chunks} chunks")
        if len(self._data) < control_bytes(slots, chunks):
            raise CorruptError(
                f"control block: truncated, {control_bytes(slots, chunks)} bytes are announced "
                f"and {len(self._data)} are there"
            )
        self.slots: int = slots
        self.num_chunks: int = chunks
        self.chunk_bytes: int = chunk_bytes
        self.digest: bytes = digest
        self.shard = header[_HEADER.size : _HEADER.size + name_bytes].decode(errors="replace")
        self.whole()

    @classmethod
    def format_into(cls, buffer: bytearray | memoryview, manifest: Manifest, slots: int) -> ControlBlock:
        """Write an empty control block for ``slots`` slots; the header comes last.

        Raises:
            ConfigError: an impossible number of slots, too long a name, or too short a buffer.
        """
        chunks = len(SlotImage.of(manifest).chunks)
        shard = manifest.shard.encode()
        need = control_bytes(slots, chunks)
        data = memoryview(buffer).cast("B")
        if not 1 <= slots <= MAX_SLOTS or len(shard) > MAX_SHARD_BYTES or len(data) < need:
            raise ConfigError(
                f"control block: {slots} slots (1 to {MAX_SLOTS}), a name of {len(shard)} bytes "
                f"(at most {MAX_SHARD_BYTES}), {len(data)} bytes of room ({need} needed)"
            )
        data[:need] = bytes(need)
        for offset in WHOLE:
            data[offset : offset + len(NEVER.pack())] = NEVER.pack()
        header = _HEADER.pack(MAGIC, VERSION, slots, chunks, len(shard), manifest.chunk_bytes, manifest.digest)
        header = (header + shard).ljust(_HEADER_BYTES - 8, b"\0")
        data[:_HEADER_BYTES] = header + _U64.pack(xxhash.xxh3_64_intdigest(header))
        return cls(data)

    def record(self, slot: int) -> SlotRecord:
        """A checked copy of the record of ``slot``; bad state or checksum reads as EMPTY and ``torn``."""
        begin = self._begin_of(slot)
        raw = bytes(self._data[begin : begin + _record_bytes(self.num_chunks)])
        state, flags = raw[0], raw[1]
        lineage, iteration, sequence = _FIELDS.unpack_from(raw, 8)
        used, objects_hash = _OBJECTS.unpack_from(raw, 40)
        claims = state >= SlotState.SEALED
        proven = state <= max(SlotState) and _record_checksum(raw, slot) == _U64.unpack_from(raw, 56)[0]
        torn = claims and not proven
        table_end = _TABLE_OFFSET + 8 * self.num_chunks
        hashes = np.frombuffer(raw[_TABLE_OFFSET:table_end], dtype="<u8").astype(np.uint64, copy=False)
        shown = SlotState.EMPTY if torn else SlotState(state)
        return SlotRecord(shown, torn, flags, lineage, iteration, sequence, used, objects_hash, hashes)

    def begin(self, slot: int) -> None:
        """WRITING: what the slot held is given up."""
        self._give_up(slot, SlotState.WRITING)

    def void(self, slot: int) -> None:
        """EMPTY: what the slot held is given up."""
        self._give_up(slot, SlotState.EMPTY)

    def set_chunk_hash(self, slot: int, chunk: int, value: int) -> None:
        """Record xxh3-64 of the bytes of ``chunk``."""
        if not 0 <= chunk < self.num_chunks:
            raise IndexError(f"chunk {chunk} of {self.num_chunks}")
        self._store(self._writing(slot) + _TABLE_OFFSET + 8 * chunk, _U64.pack(value))

    def set_objects(self, slot: int, used: int, value: int) -> None:
        """Record the length of the objects in bytes and xxh3-64 of them."""
        self._store(self._writing(slot) + 40, _OBJECTS.pack(used, value))

    def seal(self, slot: int, lineage: bytes, iteration: int, hashed: bool = True) -> None:
        """SEALED: every byte of the slot and every hash is in place and belongs to this snapshot.

        Not ``hashed``: the hash of no chunk is, those set since ``begin`` are dropped.
        """
        begin = self._writing(slot)
        if len(lineage) != 16:
            raise ValueError(f"a lineage has 16 bytes, not {len(lineage)}")
        self._store(begin + 8, _FIELDS.pack(lineage, iteration, self._next_sequence()))
        if not hashed:
            self._store(begin + _TABLE_OFFSET, bytes(8 * self.num_chunks))
        self._store(begin + 1, bytes([0 if hashed else UNHASHED]))
        raw = bytes(self._data[begin : begin + _record_bytes(self.num_chunks)])
        self._store(begin + 56, _U64.pack(_record_checksum(raw, slot)))
        self._store(begin, bytes([SlotState.SEALED]))

    def mark_whole(self, lineage: bytes, iteration: int) -> None:
        """Remember that every rank has sealed ``iteration`` of ``lineage``."""
        store_mark(self._store, self._data, WHOLE, (lineage, iteration))

    def mark_target(self, lineage: bytes, iteration: int) -> None:
        """Remember what all ranks agreed to protect next; 16 zero bytes and -1: nothing."""
        store_mark(self._store, self._data, TARGET, (lineage, iteration))

    def mark_protected(self, lineage: bytes, iteration: int) -> None:
        """Remember what is protected on all nodes; 16 zero bytes and -1: nothing."""
        store_mark(self._store, self._data, PROTECTED, (lineage, iteration))

    def whole(self) -> Snapshot | None:
        """Lineage and iteration of the newest mark, or None if no snapshot was ever whole.

        Raises:
            CorruptError: both marks are bad.
        """
        found = read_mark(self._data, WHOLE)
        if found is None:
            raise CorruptError("control block: both whole marks are bad")
        mark = found[1]
        return (mark.lineage, mark.iteration) if mark.sequence else None

    def target(self) -> Snapshot | None:
        """Lineage and iteration of what is to be protected next; None if nothing is, or the mark is lost."""
        return self._advice(TARGET)

    def protected(self) -> Snapshot | None:
        """Lineage and iteration of what is protected on all nodes; None if nothing is, or the mark is lost."""
        return self._advice(PROTECTED)

    def close(self) -> None:
        """Let go of the buffer."""
        self._data.release()

    def _store(self, offset: int, data: bytes) -> None:
        """Every store after formatting goes through here, in program order."""
        self._data[offset : offset + len(data)] = data

    def _give_up(self, slot: int, state: SlotState) -> None:
        begin = self._begin_of(slot)
        self._store(begin, bytes([state]))
        self._store(begin + 56, bytes(8))

    def _begin_of(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        return _RECORDS_OFFSET + slot * _record_bytes(self.num_chunks)

    def _writing(self, slot: int) -> int:
        begin = self._begin_of(slot)
        if self._data[begin] != SlotState.WRITING:
            raise ArenaError(f"slot {slot} of {self.shard} is not WRITING; call begin first")
        return begin

    def _next_sequence(self) -> int:
        """Above that of every snapshot the arena ever held: what is known of one never fits another."""
        records = [self.record(slot) for slot in range(self.slots)]
        return 1 + max((r.sequence for r in records if r.sealed or r.sequence < _MAX_SEQUENCE), default=0)

    def _advice(self, places: tuple[int, int]) -> Snapshot | None:
        """A mark that may be missing, as zeros are, and without which nothing but a little work is lost."""
        _, mark = read_mark(self._data, places) or (0, NEVER)
        snapshot = (mark.lineage, mark.iteration)
        return None if snapshot == NOTHING else snapshot


def control_bytes(slots: int, num_chunks: int) -> int:
    """Size of a control block in bytes."""
    return _RECORDS_OFFSET + slots * _record_bytes(num_chunks)


def _record_bytes(num_chunks: int) -> int:
    return -(-(_TABLE_OFFSET + 8 * num_chunks) // 64) * 64


def _record_checksum(raw: bytes, slot: int) -> int:
    """Over fields, chunk hashes, the zeros that fill the record and, by the seed, the flag ``UNHASHED``."""
    return xxhash.xxh3_64_intdigest(raw[8:56] + raw[_TABLE_OFFSET:], seed=slot + 256 * (raw[1] & UNHASHED))
