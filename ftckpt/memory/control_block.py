"""The control block: the snapshot in each slot, and the checksums of its bytes. ``FORMAT.md`` has the byte map.

A record file (``record``) with one record per slot: fields are the sequence, the bytes of objects in use and their
checksum; words are the checksums of the chunks. Its text is the shard's name, its first number the chunk size. Five
marks follow the header. ``record`` explains why kills and bit flips are safe.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ftckpt.errors import ArenaError, ConfigError, CorruptError
from ftckpt.memory import record
from ftckpt.memory.atomic_files import fresh_name
from ftckpt.memory.directory import require_own
from ftckpt.memory.image import SlotImage
from ftckpt.memory.mapping import Mapping, create_mapping, open_mapping
from ftckpt.memory.record import MARK_BYTES, Format, Header, Mark, Records, Stores
from ftckpt.model.manifest import MAX_CHUNKS
from ftckpt.model.snapshot import SnapshotId

CONTROL_NAME = "control"
"""File name of an arena's control block."""
MAX_SLOTS = 64
"""``checks`` has room for this many ENCODED records."""
MAX_SHARD_BYTES = 256
"""Room for the shard's name, which has at most 200 characters."""
FORMAT = Format("control block", b"FTCKPTCB", 5, fixed_bytes=5 * MARK_BYTES)

_PLACES = tuple(record.HEADER_BYTES + MARK_BYTES * place for place in range(5))
_WHOLE, _TARGET, _PROTECTED, _, _FLUSH = _PLACES  # the fourth is unused
_FIELDS = struct.Struct("<QQQ")  # sequence, bytes of objects used, their hash
_OBJECTS = struct.Struct("<QQ")  # the last two of them, at byte 8
_U64 = struct.Struct("<Q")
_MAX_SEQUENCE = 1 << 48
"""The sequence in an unsealed record is unverified: larger values count as corruption."""

UNHASHED = 1
"""Flag: the snapshot was sealed without checksums of its chunks; the arena's ``checks`` may have them."""

_STAMPS_PER_SEC = 1000
"""The stamp of a record is CLOCK_MONOTONIC in ms; no arena outlives the boot that the clock counts from."""

SealId = tuple[SnapshotId, int]
"""A snapshot and the sequence of its record: it identifies one seal."""


class SlotState(IntEnum):
    """State of a slot. A record says ``SEALED`` at most; the higher states follow from checks and marks."""

    EMPTY = record.EMPTY
    WRITING = record.WRITING
    SEALED = record.SEALED
    CHECKED = 3
    PROTECTED = 4


@dataclass(frozen=True)
class SlotRecord:
    """A copy of one slot's record. ``torn``: its state is sealed but it does not verify.

    ``snapshot``: only of a ``SEALED`` slot. ``sealed_secs``: ``time.monotonic`` at the seal.
    """

    state: SlotState
    torn: bool
    flags: int
    snapshot: SnapshotId | None
    sequence: int
    objects_used: int
    objects_hash: int
    chunk_hashes: npt.NDArray[np.uint64]
    sealed_secs: float = 0.0

    @property
    def sealed(self) -> bool:
        """Whether the slot has a snapshot."""
        return self.snapshot is not None

    @property
    def seal_id(self) -> SealId | None:
        """The identity of the seal; None if the slot has no snapshot."""
        return None if self.snapshot is None else (self.snapshot, self.sequence)

    @property
    def hashed(self) -> bool:
        """Whether ``chunk_hashes`` were stored before the seal; otherwise they are zeros."""
        return not self.flags & UNHASHED


class ControlBlock:
    """A view of a control block in ``buffer``, which the caller owns and keeps mapped.

    One thread of the process with the arena's lock writes; any process may read concurrently.

    Raises:
        CorruptError: not a control block, a corrupt header, both copies of the whole mark corrupt, or a wrong length.
        MismatchError: a control block of another format version.
    """

    def __init__(self, buffer: bytes | bytearray | memoryview) -> None:
        self._stores = Stores(memoryview(buffer).cast("B"))
        header = FORMAT.read(self._stores.data)
        if not 1 <= header.records <= MAX_SLOTS or header.words > MAX_CHUNKS:
            raise CorruptError(f"control block: impossible sizes: {header.records} slots of {header.words} chunks")
        self.slots = header.records
        self.num_chunks = header.words
        self.chunk_bytes = header.numbers[0]
        self.digest = header.digest
        self.shard = header.text.rstrip(b"\0").decode(errors="replace")
        self._records = Records(self._stores, FORMAT.records_offset, header.records, header.words)
        self._marks = {place: Mark(self._stores, place) for place in _PLACES}
        # For its error: without a readable mark it is unknown which slots must not be overwritten.
        self.whole()

    @classmethod
    def format_into(cls, buffer: bytearray | memoryview, image: SlotImage, slots: int) -> ControlBlock:
        """Write an empty control block for ``slots`` slots of ``image`` into a buffer of ``control_bytes``.

        Raises:
            ConfigError: an impossible number of slots, a name that is too long, or a buffer of another length.
        """
        manifest, chunks = image.manifest, len(image.chunks)
        shard = manifest.shard.encode()
        data, need = memoryview(buffer).cast("B"), control_bytes(slots, chunks)
        if not 1 <= slots <= MAX_SLOTS or len(shard) > MAX_SHARD_BYTES or len(data) != need:
            raise ConfigError(
                f"control block: {slots} slots (1 to {MAX_SLOTS}), a name of {len(shard)} bytes "
                f"(at most {MAX_SHARD_BYTES}), {len(data)} bytes of room ({need} needed)"
            )
        data[:] = bytes(need)
        # Written now, without a snapshot: "never committed" must not look like "the mark is lost".
        Mark(Stores(data), _WHOLE).write(None)
        # The header comes last: without it readers reject the buffer.
        text = shard.ljust(MAX_SHARD_BYTES, b"\0")
        FORMAT.write(data, Header(slots, chunks, need, text, manifest.digest, (manifest.chunk_bytes, 0, 0)))
        return cls(data)

    def record(self, slot: int) -> SlotRecord:
        """A verified copy of the record of ``slot``; one that does not verify reads as EMPTY and ``torn``."""
        copy = self._records.read(slot)
        # A sealed mark may have no snapshot, a sealed slot must have one.
        torn = copy.torn or (copy.sealed and copy.snapshot is None)
        state = SlotState.EMPTY if torn else SlotState(copy.state)
        sequence, used, objects_hash = _FIELDS.unpack(copy.fields)
        return SlotRecord(
            state, torn, copy.flags, copy.snapshot, sequence, used, objects_hash, copy.words,
            copy.stamp / _STAMPS_PER_SEC,
        )  # fmt: skip

    def snapshot(self, slot: int) -> SnapshotId | None:
        """The snapshot in ``slot``."""
        return self._records.read(slot).snapshot

    def begin(self, slot: int) -> None:
        """Set WRITING, which drops the snapshot in the slot."""
        self._records.give_up(slot, record.WRITING)

    def void(self, slot: int) -> None:
        """Set EMPTY, which drops the snapshot in the slot."""
        self._records.give_up(slot, record.EMPTY)

    def set_chunk_hash(self, slot: int, chunk: int, value: int) -> None:
        """Store the xxh3-64 of ``chunk``."""
        if not 0 <= chunk < self.num_chunks:
            raise IndexError(f"chunk {chunk} of {self.num_chunks}")
        self._require_writing(slot)
        self._records.put_words(slot, _U64.pack(value), chunk)

    def set_objects(self, slot: int, used: int, value: int) -> None:
        """Store the length of the objects in bytes and their xxh3-64."""
        self._require_writing(slot)
        self._records.put_fields(slot, _OBJECTS.pack(used, value), 8)

    def seal(self, slot: int, snapshot: SnapshotId, hashed: bool = True) -> None:
        """Set SEALED: every byte of the slot and every hash is stored and belongs to ``snapshot``.

        Without ``hashed`` there are no chunk hashes; those set since ``begin`` are dropped.
        """
        self._require_writing(slot)
        # The state comes last: a kill before it leaves the record WRITING.
        self._records.put_fields(slot, _U64.pack(self._next_sequence()))
        if not hashed:  # hashes of the slot's previous snapshot must not pass for this one's
            self._records.put_words(slot, bytes(8 * self.num_chunks))
        self._records.seal(slot, snapshot, 0 if hashed else UNHASHED, int(time.monotonic() * _STAMPS_PER_SEC))

    def mark_whole(self, snapshot: SnapshotId | None) -> None:
        """Mark ``snapshot`` as committed: every rank has sealed it. None marks that none is."""
        self._marks[_WHOLE].write(snapshot)

    def mark_target(self, snapshot: SnapshotId | None) -> None:
        """Mark the snapshot that all ranks agreed to protect next."""
        self._marks[_TARGET].write(snapshot)

    def mark_protected(self, snapshot: SnapshotId | None) -> None:
        """Mark the snapshot that is protected on all nodes."""
        self._marks[_PROTECTED].write(snapshot)

    def mark_flush(self, snapshot: SnapshotId | None) -> None:
        """Mark the snapshot that all ranks agreed to flush to storage."""
        self._marks[_FLUSH].write(snapshot)

    def whole(self) -> SnapshotId | None:
        """The newest committed snapshot; None if there is none.

        Raises:
            CorruptError: both copies of the mark are corrupt.
        """
        marked = self._marks[_WHOLE].read()
        if marked is None:
            raise CorruptError("control block: both whole marks are bad")
        return marked[0]

    def target(self) -> SnapshotId | None:
        """The snapshot to protect next; None if there is none, or the mark is lost."""
        return self._advice(_TARGET)

    def protected(self) -> SnapshotId | None:
        """The snapshot that is protected on all nodes; None if there is none, or the mark is lost."""
        return self._advice(_PROTECTED)

    def flush(self) -> SnapshotId | None:
        """The snapshot to flush to storage; None if there is none, or the mark is lost."""
        return self._advice(_FLUSH)

    def close(self) -> None:
        """Release the buffer."""
        self._stores.data.release()

    def _require_writing(self, slot: int) -> None:
        # A store into a sealed record would make it torn.
        if not self._records.writing(slot):
            raise ArenaError(f"slot {slot} of {self.shard} is not WRITING; call begin first")

    def _next_sequence(self) -> int:
        """A sequence above that of every earlier seal in the arena, so that no two seals have the same id."""
        # Sequences of unsealed records count too, although unverified: a reused one would let an entry of ``checks``
        # for the earlier snapshot count for the later one.
        records = [self.record(slot) for slot in range(self.slots)]
        return 1 + max((r.sequence for r in records if r.sealed or r.sequence < _MAX_SEQUENCE), default=0)

    def _advice(self, place: int) -> SnapshotId | None:
        """A mark that may be missing: its loss costs only repeated work."""
        marked = self._marks[place].read()
        return None if marked is None else marked[0]


def control_bytes(slots: int, num_chunks: int) -> int:
    """Size of a control block in bytes."""
    return FORMAT.text_offset(slots, num_chunks) + MAX_SHARD_BYTES


@contextmanager
def open_control(path: Path, writable: bool = False) -> Iterator[ControlBlock]:
    """Map only the control block of the arena at ``path``; the state of its slots does not matter.

    Raises:
        ArenaError: missing, or owned by another user.
        CorruptError, MismatchError: corrupt, or of another format version.
    """
    require_own(path)
    with (
        closing(open_mapping(path / CONTROL_NAME, None, writable)) as mapping,
        closing(ControlBlock(mapping.data)) as block,
    ):
        yield block


def make_control(directory: Path, slots: int, image: SlotImage) -> Mapping:
    """Create the control block of an arena under construction; the caller closes it."""
    with fresh_name(directory / CONTROL_NAME) as fresh:
        control = create_mapping(fresh, control_bytes(slots, len(image.chunks)))
        ControlBlock.format_into(control.data, image, slots).close()
        fresh.rename(directory / CONTROL_NAME)
    return control
