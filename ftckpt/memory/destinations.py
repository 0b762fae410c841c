"""Destinations of a file that is read once: target memory, and scratch memory for the gaps between targets."""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from ftckpt.memory.image import Span


class LoadTarget(NamedTuple):
    """The destination of the file's bytes from ``begin``: ``memory`` with items of one byte."""

    begin: int
    memory: memoryview


class TargetPart(NamedTuple):
    """Consecutive bytes ``span`` of a chunk, and the targets inside it, ascending and disjoint."""

    span: Span
    targets: Sequence[LoadTarget]


TargetParts = Callable[[], Iterable[TargetPart]]
"""Gives all bytes of a chunk in parts, in order. The targets of a part are filled when the next one is requested, so
that parts may share memory; all parts are requested again if the chunk is read again."""


def cover(span: Span, landings: Sequence[LoadTarget], gap: Callable[[int, int], memoryview]) -> Iterator[memoryview]:
    """Yield memory for all of ``span``, in order. ``landings`` are sorted, disjoint targets inside it; for each gap
    between them ``gap`` is called with its begin and end. It may return less, and is called again for the rest."""
    place = span.begin
    for landing in (*landings, LoadTarget(span.end, memoryview(b""))):
        while place < landing.begin:
            memory = gap(place, landing.begin)
            yield memory
            place += len(memory)
        if landing.memory:
            yield landing.memory
        place += len(landing.memory)


MAX_VECTORS = os.sysconf("SC_IOV_MAX")
"""Maximum buffers that one call fills."""


def fill(fd: int, begin: int, memories: Sequence[memoryview]) -> int:
    """Fill ``memories`` one after the other with the bytes of a file from ``begin``; returns one past the last byte
    read, which is less if the file ends before. Raises OSError."""
    place, left = begin, deque(filter(len, memories))
    while left and (count := os.preadv(fd, [*islice(left, MAX_VECTORS)], place)):
        place += count
        while left and count >= len(left[0]):
            count -= len(left.popleft())
        if count:
            left[0] = left[0][count:]
    return place


_of_thread = threading.local()


def scratch(nbytes: int, purpose: str = "gaps") -> memoryview:
    """Scratch memory of the calling thread, valid until its next call for that ``purpose``.

    It is reused to avoid page faults.

    It is page-aligned: into unaligned memory, such as that of ``bytes`` and ``bytearray``, the kernel takes more than
    twice as long to copy on some processors (AMD EPYC).
    """
    found: memoryview = getattr(_of_thread, purpose, memoryview(b""))
    if len(found) < nbytes:
        # Private: shared memory would be shared with forked children.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        found = memoryview(memory)
        setattr(_of_thread, purpose, found)
    return found[:nbytes]
