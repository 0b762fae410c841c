"""Reads of chunks that a rank opens itself, in slots of its node or on storage, to any memory. Each chunk is verified
on its way if it has a checksum.

A chunk is read once, whatever number of tensors need a part of it.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple, Protocol

import torch

from ftckpt.array_types import Buffer
from ftckpt.group import Group, gather_all
from ftckpt.host_memory import host_memory
from ftckpt.memory.destinations import LoadTarget, TargetPart, TargetParts
from ftckpt.memory.image import SlotImage, Span
from ftckpt.memory.locations import SlotAt
from ftckpt.restore.plan import StridedCopy, reading, run
from ftckpt.restore.redistribute import MESSAGE_BYTES, dest_strip, source_strip
from ftckpt.restore.staging import StagingBuffers
from ftckpt.restore.threads import in_order

_TURN_SECS = 10.0
"""Interval at which reading ranks gather their progress, so that none times out while it waits."""


class Source(Protocol):
    """One shard in a slot of this node or on storage. Any thread may read."""

    @property
    def image(self) -> SlotImage: ...

    @property
    def objects_used(self) -> int:
        """The bytes of the encoded objects."""

    def stored_bytes(self, number: int) -> int:
        """The bytes that are read for a chunk."""

    def scatter(self, number: int, parts: TargetParts) -> None:
        """Fill the targets of ``parts`` from a chunk; raises if it is corrupt, and may have filled them then."""

    def objects(self) -> Buffer:
        """The encoded objects, verified."""


OpenShard = Callable[[SlotAt], Source]
"""Opens the shard in a slot of this node, or the one on storage that a placeholder stands for, once.

Raises ArenaError or StorageError if it is missing or not as expected."""


class Part(NamedTuple):
    """Bytes to read from a shard's image, and the memory that they go to."""

    copy: StridedCopy
    to: torch.Tensor


class ChunkPlan(NamedTuple):
    """A chunk to read, the span of the image that ``parts``, which overlap it, need of it, and these parts."""

    source: Source
    number: int
    span: Span
    parts: Sequence[Part]

    @property
    def nbytes(self) -> int:
        """The bytes of the chunk."""
        return self.source.image.chunks[self.number].nbytes

    @property
    def stored_bytes(self) -> int:
        """The bytes that are read for the chunk."""
        return self.source.stored_bytes(self.number)


def chunks_of(source: Source, parts: Iterable[Part], every: bool = False) -> Iterator[ChunkPlan]:
    """The chunks of an image that ``parts`` overlap, or ``every`` one."""
    parts = sorted(parts, key=lambda part: part.copy.source)
    begins, first = [part.copy.source for part in parts], 0
    for number, span in enumerate(source.image.chunks):
        while first < len(parts) and parts[first].copy.source_end <= span.begin:
            first += 1
        near = parts[first : bisect_right(begins, span.end - 1)]
        # Test each: a long part keeps ``first`` from advancing past short ones, and strides may skip a chunk.
        of = [part for part in near if _wants(part.copy, span)]
        if of:
            end = max(part.copy.source_end for part in of)
            yield ChunkPlan(source, number, Span(max(span.begin, of[0].copy.source), min(span.end, end)), of)
        elif every:
            yield ChunkPlan(source, number, Span(span.begin, span.begin), ())


def land(chunk: ChunkPlan, staging: StagingBuffers) -> int:
    """Read and verify a chunk, and copy its bytes to their destinations, maybe asynchronously; returns the bytes
    read. It goes through buffers of ``MESSAGE_BYTES`` at most, however large a chunk is."""

    def parts() -> Iterator[TargetPart]:
        for span in chunk.source.image.chunks[chunk.number].cut(MESSAGE_BYTES):
            begin, end = max(span.begin, chunk.span.begin), min(span.end, chunk.span.end)
            targets = _targets(chunk.parts, begin, end) if begin < end else []
            if targets is not None:
                yield TargetPart(span, targets)
                continue
            data = staging.memory(end - begin)
            yield TargetPart(span, [LoadTarget(begin, data.numpy().data)])
            staging.send(
                (dest_strip(copy, part.to), source_strip(copy, data, begin))
                for part in chunk.parts
                for copy in reading(part.copy, begin, end)
            )

    chunk.source.scatter(chunk.number, parts)
    return chunk.span.nbytes


def land_all(
    chunks: Sequence[ChunkPlan], threads: int, end_part: Callable[[str], None] = lambda part: None
) -> Generator[int]:
    """Land the chunks on ``threads``, and yield the bytes of each. ``end_part`` is called with ``pin``, ``read`` and
    ``copy``, parts of a restart."""
    staging = StagingBuffers()
    end_part("pin")
    try:
        with closing(in_order(partial(land, staging=staging), chunks, threads)) as landed:  # ends its threads
            yield from landed
    finally:
        end_part("read")
        staging.settle()
        end_part("copy")


def finish_together(group: Group, work: Iterator[object]) -> None:
    """Exhaust ``work`` of all ranks. Collective.

    In turns: ranks have different amounts to read, and a wait for other ranks has a deadline.

    Raises:
        FtckptError: on all ranks; some work failed.
    """

    def turn() -> bool:
        deadline = time.monotonic() + _TURN_SECS
        return all(time.monotonic() < deadline for _ in work)

    while not all(gather_all(group, turn, bool)):
        pass


def read_range(source: Source, begin: int, end: int) -> Buffer:
    """Bytes of a shard's image; raises as ``Source.scatter``."""
    data, staging = host_memory(end - begin), StagingBuffers()
    for chunk in chunks_of(source, [Part(run(begin, 0, end - begin), data)]):
        land(chunk, staging)
    return data.numpy().data


def _targets(parts: Sequence[Part], first: int, last: int) -> list[LoadTarget] | None:
    """The destinations of bytes ``first`` to ``last``, ascending; None if they overlap or are not runs of host
    memory."""
    targets, place = list[LoadTarget](), first
    for copy, to in parts:
        if copy.source_strides != (1,) or copy.dest_strides != (1,) or not to.is_cpu:
            return None
        begin, end = max(copy.source, first), min(copy.source + copy.shape[0], last)
        if begin >= end:
            continue
        if begin < place:  # two parts overlap
            return None
        at = copy.dest + begin - copy.source
        targets.append(LoadTarget(begin, to.numpy().data[at : at + end - begin]))
        place = end
    return targets


def _wants(copy: StridedCopy, span: Span) -> bool:
    """Whether ``copy`` reads any byte of ``span``."""
    if copy.source_strides == (1,):  # the fast path, for thousands of copies
        return copy.shape[0] > 0 and copy.source < span.end and copy.source + copy.shape[0] > span.begin
    return next(reading(copy, span.begin, span.end), None) is not None
