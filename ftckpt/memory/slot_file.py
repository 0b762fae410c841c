"""A slot's file, read by calls, as a page fault of a mapping costs more than copying the page; and the shard in it,
read chunk by chunk, each verified on its way."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import xxhash

from ftckpt.errors import ArenaError, CorruptError
from ftckpt.memory.arena import Arena
from ftckpt.memory.corruption import Corruption
from ftckpt.memory.destinations import MAX_VECTORS, LoadTarget, TargetPart, TargetParts, cover, fill, scratch
from ftckpt.memory.image import Span
from ftckpt.memory.mapping import FileId
from ftckpt.memory.slots import slot_name
from ftckpt.model.snapshot import SnapshotId

_PIECE_BYTES = 1 << 20
"""Bytes read and hashed at a time: they stay in a core's cache."""


class SlotFile:
    """The file that ``arena`` has mapped for ``slot``. Any thread may read; ``close`` once.

    Raises:
        ArenaError: it cannot be opened, or was replaced since it was mapped.
    """

    def __init__(self, arena: Arena, slot: int) -> None:
        path = arena.path / slot_name(slot)
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ArenaError(f"{path}: cannot be opened: {error.strerror}") from None
        status = os.fstat(self._fd)
        known: FileId | None = arena.slot_id(slot)
        if (status.st_dev, status.st_ino) != known:
            self.close()
            raise ArenaError(f"{path}: was replaced")
        self._path = path

    def take(self, parts: Iterable[TargetPart]) -> int:
        """Read a chunk once and fill the targets of its ``parts``; returns the xxh3-64 of the chunk.

        The hash is computed from the bytes that the targets receive. Raises ArenaError.
        """
        digest = xxhash.xxh3_64()
        for part in parts:
            for begin, memories in self._batches(*part):
                self._fill(begin, memories)
                for memory in memories:
                    digest.update(memory)
        return digest.intdigest()

    def read_into(self, begin: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes from ``begin`` on; raises ArenaError."""
        self._fill(begin, [memory])

    def _fill(self, begin: int, memories: Sequence[memoryview]) -> None:
        """Fill ``memories`` one after the other."""
        try:
            place = fill(self._fd, begin, memories)
        except OSError as error:
            raise ArenaError(f"{self._path}: cannot be read: {error.strerror}") from None
        if place < (end := begin + sum(map(len, memories))):
            raise ArenaError(f"{self._path}: ends before {end}")

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)

    def _batches(self, span: Span, targets: Sequence[LoadTarget]) -> Iterator[tuple[int, list[memoryview]]]:
        """The batches of a part: an offset, and the buffers that one call fills from there, which are targets and,
        between them, scratch memory."""
        place, size, memories = span.begin, 0, list[memoryview]()

        def gap(begin: int, end: int) -> memoryview:
            # Disjoint within a batch: all buffers are hashed after the call.
            return scratch(_PIECE_BYTES)[size : size + end - begin]

        for memory in cover(span, targets, gap):
            rest = memory
            while rest:
                piece, rest = rest[: _PIECE_BYTES - size], rest[_PIECE_BYTES - size :]
                memories.append(piece)
                size += len(piece)
                if size == _PIECE_BYTES or len(memories) == MAX_VECTORS:
                    yield place, memories
                    place, size, memories = place + size, 0, []
        if memories:
            yield place, memories


class SlotShard:
    """The shard in ``slot`` of ``arena``; ``file`` is the slot's. Any thread may read chunks.

    Args:
        snapshot: the expected snapshot; None: the slot was verified, and is not verified again.
        expected: the checksums of chunks; chunks without one are not verified.

    Raises:
        ArenaError: the slot has another snapshot by now, or is corrupt apart from its chunks.
    """

    def __init__(
        self, arena: Arena, slot: int, file: SlotFile, snapshot: SnapshotId | None = None,
        expected: Mapping[int, int] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        record = arena.control.record(slot)
        if snapshot is not None:
            damage = Corruption(reason="record") if record.snapshot != snapshot else arena.damage(slot, record, ())
            if damage:
                raise CorruptError(f"{arena.path}: slot {slot}: {', '.join(damage.names)}")
        self.image = arena.image
        self.objects_used = record.objects_used
        self._arena, self._slot, self._file, self._expected = arena, slot, file, expected

    def stored_bytes(self, number: int) -> int:
        """The bytes that are read for a chunk."""
        return self.image.chunks[number].nbytes

    def scatter(self, number: int, parts: TargetParts) -> None:
        """Fill the targets of ``parts`` from a chunk; of one without a checksum nothing else is read.

        Raises:
            CorruptError: the chunk does not match its checksum; the targets have the corrupt bytes.
            ArenaError: it cannot be read.
        """
        expected = self._expected.get(number)
        if expected is None:
            for part in parts():
                for begin, memory in part.targets:
                    self._file.read_into(begin, memory)
        elif self._file.take(parts()) != expected:
            raise CorruptError(f"{self._arena.path}: slot {self._slot}: chunk {number} does not match its checksum")

    def objects(self) -> bytes:
        """The encoded objects; raises CorruptError if their length exceeds the capacity."""
        with self._arena.read_objects(self._slot) as objects:
            return bytes(objects)
