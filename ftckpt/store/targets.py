"""Where the parts of a file go that is read once: memory that wants them, and between it memory that nobody keeps."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ftckpt.store.image import Span


class Target(NamedTuple):
    """Memory, of bytes, for what a file has from ``begin`` on."""

    begin: int
    memory: memoryview


def cover(
    span: Span, targets: Sequence[Target], spare: Callable[[int, int], memoryview]
) -> Iterator[memoryview]:  # fmt: skip
    """Memory for all of ``span``, in order: that of ``targets`` in it, ascending and apart from each other, and
    between them what ``spare`` gives for the bytes from … to, or for the first of them."""
    place = span.begin
    for target in (*targets, Target(span.end, memoryview(b""))):
        while place < target.begin:
            memory = spare(place, target.begin)
            yield memory
            place += len(memory)
        if target.memory:
            yield target.memory
        place += len(target.memory)


_memory = threading.local()


def scratch(nbytes: int) -> memoryview:
    """Memory of this thread, until it asks again: new memory would cost a fault for each page.

    It begins with a page. Where memory is not aligned, as that of ``bytes`` and ``bytearray`` is not, some processors
    (AMD EPYC) take more than twice as long for what the system copies there.
    """
    found: memoryview = getattr(_memory, "scratch", memoryview(b""))
    if len(found) < nbytes:
        found = _memory.scratch = memoryview(mmap.mmap(-1, nbytes))
    return found[:nbytes]
