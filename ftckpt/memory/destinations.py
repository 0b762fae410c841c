"""Where the parts of a file go that is read once: memory that wants them, and between it memory that nobody keeps."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ftckpt.memory.image import Span


class LoadTarget(NamedTuple):
    """Where what a file has from ``begin`` on belongs: memory, of bytes."""

    begin: int
    memory: memoryview


def cover(span: Span, landings: Sequence[LoadTarget], gap: Callable[[int, int], memoryview]) -> Iterator[memoryview]:
    """Memory for all of ``span``, in order: that of ``landings`` in it, ascending and apart from each other, and
    between them what ``gap`` gives for its begin and end. It may give less, and is asked again for the rest."""
    place = span.begin
    for landing in (*landings, LoadTarget(span.end, memoryview(b""))):
        while place < landing.begin:
            memory = gap(place, landing.begin)
            yield memory
            place += len(memory)
        if landing.memory:
            yield landing.memory
        place += len(landing.memory)


_of_thread = threading.local()


def scratch(nbytes: int) -> memoryview:
    """Memory of this thread, until it asks again: new memory would cost a fault for each page.

    It begins with a page. Where memory is not aligned, as that of ``bytes`` and ``bytearray`` is not, some processors
    (AMD EPYC) take more than twice as long for what the system copies there.
    """
    found: memoryview = getattr(_of_thread, "memory", memoryview(b""))
    if len(found) < nbytes:
        # Private: a process that forks would share it with its child.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        found = _of_thread.memory = memoryview(memory)
    return found[:nbytes]
