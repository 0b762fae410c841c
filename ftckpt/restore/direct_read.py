"""Direct reads of a snapshot into the live state, without staging in slots, on its own or another layout.

The source is storage, or slots that have every shard. Each chunk is read once, and verified on its way. After a read
from storage slots are empty: allocating them would take longer than the read. They are allocated during training.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ftckpt.array_types import Buffer
from ftckpt.group import Group, gather_all
from ftckpt.host_memory import host_memory
from ftckpt.memory.destinations import LoadTarget
from ftckpt.memory.image import Span
from ftckpt.model.topology import Topology
from ftckpt.restore.chunk_reader import ChunkReader, Job, Source
from ftckpt.restore.load import Traffic, Transfer
from ftckpt.restore.locations import SlotAt
from ftckpt.restore.plan import StridedCopy, reading, run
from ftckpt.restore.redistribute import dest_strip, source_strip
from ftckpt.restore.staging import StagingBuffers

_TWICE_SHARE = 0.125
"""Maximum share of the snapshot's bytes to be read more than once, by several ranks: else it is read once, to slots,
and redistributed from memory."""

_TWICE_BYTES = 64 << 20
"""Bytes read more than once that are accepted per rank in any case: chunks are read completely."""


class SlotAge(NamedTuple):
    """The ``SlotState`` of a snapshot in lower case, and its time without checksums, see ``Arena.gap_secs``."""

    state: str
    gap_secs: float = 0.0


class ReadEstimate(NamedTuple):
    """The planned read of one rank: its bytes, the stored bytes of the shards that it opens for all ranks, whether
    all sources are ``near`` (on its node, or on storage), and the slot states of these shards."""

    nbytes: int
    there_bytes: int
    near: bool
    states: tuple[SlotAge, ...] = ()


class Part(NamedTuple):
    """Bytes to read from a shard's image, and the memory that they go to."""

    copy: StridedCopy
    to: torch.Tensor


class _Chunk(NamedTuple):
    """A chunk to read, its span in the image, and the parts that overlap it."""

    file: Source
    number: int
    span: Span
    parts: Sequence[Part]


class DirectReader:
    """One direct read: ``begin`` (storage only), ``plan``, ``bring``, and ``close`` in any case.

    ``begin`` and ``bring`` are collective.

    Args:
        open_shard: opens a shard once; raises StorageError or ArenaError if it is missing or not as expected.
        places: the slot of each shard; placeholders for shards on storage.
        mine: the shards that this rank opens for all ranks.
        in_slots: read only slots of this node, and verify every chunk of ``mine``, needed or not.
    """

    def __init__(
        self, group: Group, topology: Topology, open_shard: Callable[[str], Source], reader: ChunkReader, *,
        places: Mapping[str, SlotAt], mine: Collection[str], in_slots: bool = False,
    ) -> None:  # fmt: skip
        self._group = group
        self._topology = topology
        self._open = open_shard
        self._mine, self._in_slots = mine, in_slots
        self._chunks: list[_Chunk] = []
        self._needed_bytes = 0
        self.reader = reader
        self.places = places

    def begin(self) -> None:
        """Open the files of ``mine``.

        Raises:
            StorageError: one is missing or not as expected; on all ranks together.
        """
        gather_all(self._group, lambda: all([self._open(shard) for shard in self._mine]), bool)

    def objects(self, shard: str) -> bytes:
        """The encoded objects of a shard; raises as ``open_shard``."""
        return bytes(self._open(shard).objects())

    def read(self, shard: str, begin: int, end: int) -> Buffer:
        """Bytes of a shard's image, outside its objects; raises as ``open_shard``."""
        data, staging = host_memory(end - begin), StagingBuffers()
        for chunk in chunks_of(self._open(shard), [Part(run(begin, 0, end - begin), data)]):
            bring(chunk, staging)
        return data.numpy().data

    def plan(self, transfers: Sequence[Transfer]) -> ReadEstimate:
        """Plan this rank's reads; raises as ``open_shard``."""
        near = not self._in_slots or all(_slot(one).node == self._topology.me.node for one in transfers)
        mine = [self._open(shard) for shard in self._mine]
        there_bytes = sum(sum(map(file.stored_bytes, range(len(file.image.chunks)))) for file in mine)
        if not near:
            return ReadEstimate(0, there_bytes, near)
        shards = {at: shard for shard, at in self.places.items()}
        parts: dict[str, list[Part]] = {shard: [] for shard in self._mine if self._in_slots}
        for one in transfers:
            of = parts.setdefault(shards[_slot(one)], [])
            for item in one.items:
                live = item.tensor.view(torch.uint8)
                of += (Part(copy, live) for copy in item.copies)
        self._chunks = [chunk for shard in self._order(parts) for chunk in self._chunks_of(shard, parts[shard])]
        self._needed_bytes = sum(one.nbytes for one in transfers)
        return ReadEstimate(sum(chunk.file.stored_bytes(chunk.number) for chunk in self._chunks), there_bytes, near)

    def bring(self, end_part: Callable[[str], None]) -> Traffic:
        """Perform the planned reads. ``end_part`` is called with ``pin``, ``read`` and ``copy``, parts of a restart.

        Raises:
            StorageError, ArenaError: a chunk is corrupt or unavailable; on all ranks, after some bytes were written.
        """
        staging = StagingBuffers()
        end_part("pin")
        try:
            self.reader.bring([Job(chunk.span.nbytes, partial(bring, chunk, staging)) for chunk in self._chunks])
        finally:
            self.reader.close()
            end_part("read")
            staging.settle()
            end_part("copy")
        return Traffic(self._needed_bytes, 0, 0, self._needed_bytes)

    def close(self) -> None:
        """Stop reading; a second call does nothing."""
        self.reader.close()
        self._chunks = []

    def _order(self, shards: Collection[str]) -> list[str]:
        """The order of ``shards``: each rank starts at another one, its own if it reads it, to spread the load."""
        order = sorted(self.places)
        first = order.index(own) if (own := self._topology.me.shard) in shards else self._group.rank % len(order)
        return [shard for shard in (*order[first:], *order[:first]) if shard in shards]

    def _chunks_of(self, shard: str, parts: Sequence[Part]) -> Iterator[_Chunk]:
        every = self._in_slots and shard in self._mine
        return chunks_of(self._open(shard), sorted(parts, key=begin_of), every)


def reads_little_twice(read_bytes: Sequence[int], there_bytes: int) -> bool:
    """Whether ranks that read ``read_bytes`` each read few of the ``there_bytes`` more than once."""
    return sum(read_bytes) - there_bytes <= max(_TWICE_BYTES * len(read_bytes), _TWICE_SHARE * there_bytes)


def fits(readings: Sequence[ReadEstimate]) -> bool:
    """Whether the planned reads of all ranks can be direct."""
    there_bytes = sum(one.there_bytes for one in readings)
    return all(one.near for one in readings) and reads_little_twice([one.nbytes for one in readings], there_bytes)


def _slot(transfer: Transfer) -> SlotAt:
    assert isinstance(transfer.source, SlotAt)
    return transfer.source


def bring(chunk: _Chunk, staging: StagingBuffers) -> None:
    """Read and verify a chunk, and copy its bytes to their destinations, maybe asynchronously."""
    if (landings := _landings(chunk)) is not None:
        chunk.file.scatter(chunk.number, landings)
        return
    begin, end = chunk.span.begin, chunk.span.end
    data = staging.memory(chunk.span.nbytes)
    chunk.file.scatter(chunk.number, [LoadTarget(begin, data.numpy().data)])
    staging.send(
        (dest_strip(copy, part.to), source_strip(copy._replace(source=copy.source - begin), data))
        for part in chunk.parts
        for copy in reading(part.copy, begin, end)
    )


def _landings(chunk: _Chunk) -> list[LoadTarget] | None:
    """The destinations of a chunk's bytes, ascending; None if they overlap or are not runs of host memory."""
    landings, place = list[LoadTarget](), chunk.span.begin
    for copy, to in chunk.parts:
        if copy.source_strides != (1,) or copy.dest_strides != (1,) or not to.is_cpu:
            return None
        begin, end = max(copy.source, chunk.span.begin), min(copy.source + copy.shape[0], chunk.span.end)
        if begin < place:  # two parts overlap
            return None
        at = copy.dest + begin - copy.source
        landings.append(LoadTarget(begin, to.numpy().data[at : at + end - begin]))
        place = end
    return landings


def chunks_of(file: Source, parts: Sequence[Part], every: bool = False) -> Iterator[_Chunk]:
    """The chunks of an image that ``parts``, sorted by their start, overlap, or ``every`` one."""
    begins = [part.copy.source for part in parts]
    first = 0
    for number, span in enumerate(file.image.chunks):
        while first < len(parts) and parts[first].copy.source_end <= span.begin:
            first += 1
        near = parts[first : bisect_right(begins, span.end - 1)]
        # Test each: a long part keeps ``first`` from advancing past short ones, and strides may skip a chunk.
        of = [part for part in near if _wants(part.copy, span)]
        if of or every:
            yield _Chunk(file, number, span, of)


def _wants(copy: StridedCopy, span: Span) -> bool:
    """Whether ``copy`` reads any byte of ``span``."""
    if copy.source_strides == (1,):  # the fast path, for thousands of copies
        return copy.shape[0] > 0 and copy.source < span.end and copy.source + copy.shape[0] > span.begin
    return next(reading(copy, span.begin, span.end), None) is not None


def begin_of(part: Part) -> int:
    return part.copy.source
