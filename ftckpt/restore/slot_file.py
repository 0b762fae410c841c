"""A slot's file, read by calls, as a page fault of a mapping costs more than copying the page; and the shard in it,
read chunk by chunk, each verified on its way."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import xxhash

from ftckpt.errors import ArenaError, CorruptError
from ftckpt.memory.arena import Arena
from ftckpt.memory.corruption import Corruption
from ftckpt.memory.destinations import LoadTarget, cover, scratch
from ftckpt.memory.image import Span
from ftckpt.memory.mapping import FileId
from ftckpt.memory.slots import slot_name
from ftckpt.model.snapshot import SnapshotId

_PIECE_BYTES = 1 << 20
"""Bytes read and hashed at a time: they stay in a core's cache."""

_MOST_VECTORS = os.sysconf("SC_IOV_MAX")
"""Maximum buffers that one call fills."""


class SlotFile:
    """The file that ``arena`` has mapped for ``slot``. Any thread may read; ``close`` once.

    Raises:
        ArenaError: it cannot be opened, or was replaced since it was mapped.
    """

    def __init__(self, arena: Arena, slot: int) -> None:
        path = arena.path / slot_name(slot)
        self._spans = arena.image.chunks
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

    def take(self, chunk: int, landings: Sequence[LoadTarget] = ()) -> int:
        """Read a chunk once and fill ``landings``, ascending and disjoint; returns the xxh3-64 of the chunk.

        The hash is computed from the bytes that the landings receive. Raises ArenaError.
        """
        digest = xxhash.xxh3_64()
        for begin, memories in self._batches(self._spans[chunk], landings):
            self._fill(begin, memories)
            for memory in memories:
                digest.update(memory)
        return digest.intdigest()

    def read_into(self, begin: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes from ``begin`` on; raises ArenaError."""
        self._fill(begin, [memory])

    def _fill(self, begin: int, memories: Sequence[memoryview]) -> None:
        """Fill ``memories`` one after the other."""
        place, left = begin, deque(filter(len, memories))
        while left:
            try:
                count = os.preadv(self._fd, [*left], place)
            except OSError as error:
                raise ArenaError(f"{self._path}: cannot be read: {error.strerror}") from None
            if count == 0:
                raise ArenaError(f"{self._path}: ends before {place + sum(map(len, left))}")
            place += count
            while left and count >= len(left[0]):
                count -= len(left.popleft())
            if count:
                left[0] = left[0][count:]

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)

    def _batches(self, span: Span, landings: Sequence[LoadTarget]) -> Iterator[tuple[int, list[memoryview]]]:
        """The batches of a chunk: an offset, and the buffers that one call fills from there, which are landings and,
        between them, scratch memory."""
        place, size, memories = span.begin, 0, list[memoryview]()

        def gap(begin: int, end: int) -> memoryview:
            # Disjoint within a batch: all buffers are hashed after the call.
            return scratch(_PIECE_BYTES)[size : size + end - begin]

        for memory in cover(span, landings, gap):
            rest = memory
            while rest:
                piece, rest = rest[: _PIECE_BYTES - size], rest[_PIECE_BYTES - size :]
                memories.append(piece)
                size += len(piece)
                if size == _PIECE_BYTES or len(memories) == _MOST_VECTORS:
                    yield place, memories
                    place, size, memories = place + size, 0, []
        if memories:
            yield place, memories


class SlotShard:
    """The shard of ``snapshot`` in ``slot`` of ``arena``; ``file`` is the slot's. Any thread may read chunks.

    Args:
        expected: the checksums of chunks; chunks without one are not verified.

    Raises:
        ArenaError: the slot has another snapshot by now, or is corrupt apart from its chunks.
    """

    def __init__(
        self, arena: Arena, slot: int, snapshot: SnapshotId, file: SlotFile, expected: Mapping[int, int]
    ) -> None:
        record = arena.control.record(slot)
        damage = Corruption(reason="record") if record.snapshot != snapshot else arena.damage(slot, record, ())
        if damage:
            raise CorruptError(f"{arena.path}: slot {slot}: {', '.join(damage.names)}")
        self.image = arena.image
        self._arena, self._slot, self._file, self._expected = arena, slot, file, expected

    def stored_bytes(self, number: int) -> int:
        """The bytes that are read for a chunk."""
        return self.image.chunks[number].nbytes

    def scatter(self, number: int, landings: Sequence[LoadTarget]) -> None:
        """Fill ``landings``, ascending and disjoint, from a chunk.

        Raises:
            CorruptError: the chunk does not match its checksum; the landings have the corrupt bytes.
            ArenaError: it cannot be read.
        """
        found = self._file.take(number, landings)
        if found != self._expected.get(number, found):
            raise CorruptError(f"{self._arena.path}: slot {self._slot}: chunk {number} does not match its checksum")

    def objects(self) -> bytes:
        """The encoded objects, verified by the constructor."""
        with self._arena.read_objects(self._slot) as objects:
            return bytes(objects)
