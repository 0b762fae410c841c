"""A slot's file, read by calls: through its mapping each page asks for a fault, which costs more than to copy it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import xxhash

from ftckpt.errors import ArenaError
from ftckpt.store.arena import Arena
from ftckpt.store.landings import Landing, cover, scratch
from ftckpt.store.mapping import FileId
from ftckpt.store.slots import slot_name

_PIECE_BYTES = 1 << 20
"""Hashed at a time: it stays in a core's own cache."""


class SlotFile:
    """The file that ``arena`` has mapped for ``slot``. Any thread may read; ``close`` once.

    Raises:
        ArenaError: it cannot be opened, or another file has its name by now.
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

    def take(self, chunk: int, landings: Sequence[Landing] = ()) -> int:
        """Read a chunk once: fill ``landings`` in it, ascending and apart from each other; xxh3-64 of all of it.

        What the landings have is what was hashed. Raises ArenaError.
        """
        digest = xxhash.xxh3_64()
        for begin, memory in self._pieces(chunk, landings):
            self.read_into(begin, memory)
            digest.update(memory)
        return digest.intdigest()

    def read_into(self, begin: int, memory: memoryview) -> None:
        """Fill ``memory``, of bytes, from ``begin`` on; raises ArenaError."""
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self._fd, [memory[done:]], begin + done)
            except OSError as error:
                raise ArenaError(f"{self._path}: cannot be read: {error.strerror}") from None
            if count == 0:
                raise ArenaError(f"{self._path}: ends before {begin + len(memory)}")
            done += count

    def close(self) -> None:
        """Give the descriptor up."""
        os.close(self._fd)

    def _pieces(self, chunk: int, landings: Sequence[Landing]) -> Iterator[Landing]:
        """All of a chunk in order, in pieces: of the landings, and between them of memory that is used again."""
        place = self._spans[chunk].begin
        for memory in cover(self._spans[chunk], landings, _gap):
            for begin in range(0, len(memory), _PIECE_BYTES):
                yield Landing(place + begin, memory[begin : begin + _PIECE_BYTES])
            place += len(memory)


def _gap(begin: int, end: int) -> memoryview:
    return scratch(min(end - begin, _PIECE_BYTES))
