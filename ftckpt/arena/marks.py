"""Marks of a control block: each names a snapshot, and is kept twice so that one copy is good at every instant.

A mark is 40 bytes in a place of 64: lineage, iteration, sequence, and the checksum (xxh3-64) of those.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import xxhash

WHOLE = (512, 576)
TARGET = (640, 704)
PROTECTED = (768, 832)
"""Where the two copies of each mark lie in a control block, in bytes."""

NO_LINEAGE = bytes(16)
NOTHING = (NO_LINEAGE, -1)
"""Marked to say that no snapshot is meant any more."""

_FIELDS = struct.Struct("<16sqQ")
_CHECKSUM = struct.Struct("<Q")
_MARK_BYTES = 40


class Mark(NamedTuple):
    """``lineage`` has 16 bytes. Of two valid copies that with the higher ``sequence`` counts; 0: never marked."""

    sequence: int
    lineage: bytes
    iteration: int

    def pack(self) -> bytes:
        """The 40 bytes."""
        fields = _FIELDS.pack(self.lineage, self.iteration, self.sequence)
        return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


NEVER = Mark(0, *NOTHING)


def read_mark(data: memoryview, places: tuple[int, int]) -> tuple[int, Mark] | None:
    """Which of the two copies counts, and the mark; None if neither is valid."""
    valid: list[tuple[int, int, Mark]] = []
    for index, place in enumerate(places):
        raw = bytes(data[place : place + _MARK_BYTES])
        lineage, iteration, sequence = _FIELDS.unpack_from(raw)
        mark = Mark(sequence, lineage, iteration)
        if raw == mark.pack():
            valid.append((sequence, index, mark))
    if not valid:
        return None
    _, index, mark = max(valid)
    return index, mark


def store_mark(
    store: Callable[[int, bytes], None],
    data: memoryview,
    places: tuple[int, int],
    snapshot: tuple[bytes, int],
) -> None:
    """Write lineage and iteration over the older copy, then over the newer, by ``store(offset, bytes)``.

    Raises:
        ValueError: the lineage has not 16 bytes.
    """
    lineage, iteration = snapshot
    if len(lineage) != len(NO_LINEAGE):
        raise ValueError(f"a lineage has 16 bytes, not {len(lineage)}")
    newest, mark = read_mark(data, places) or (0, NEVER)
    packed = Mark(mark.sequence + 1, lineage, iteration).pack()
    store(places[1 - newest], packed)
    store(places[newest], packed)
