"""A snapshot that is read straight into the live state, in its own layout or another: one that storage alone has, or
one whose every shard lies in memory.

Each chunk is proven on its way to where it belongs, and read once. From storage nothing comes to slots: to give those
their memory costs more than all else. They get it beside training, and the next snapshot is the first that they hold.
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
"""Of all bytes of the snapshot at most so many are read by several ranks: more is read once, to slots, and handed on
in memory."""

_TWICE_BYTES = 64 << 20
"""So many for each rank in any case: a chunk is read as a whole."""


class SlotAge(NamedTuple):
    """How far the snapshot in a slot had come, a ``SlotState`` in lower case, and see ``Arena.gap_secs``."""

    state: str
    gap_secs: float = 0.0


class ReadEstimate(NamedTuple):
    """What one rank is going to read: bytes, those of the shards that it tells of, whether all of it is near, how far
    the snapshot had come in slots of these shards."""

    nbytes: int
    there_bytes: int
    near: bool
    states: tuple[SlotAge, ...] = ()


class Part(NamedTuple):
    """Bytes that are wanted of a shard's image, and the memory that they go to."""

    copy: StridedCopy
    to: torch.Tensor


class _Chunk(NamedTuple):
    """A chunk that is wanted, where it lies in the image, and what has parts in it."""

    file: Source
    number: int
    span: Span
    parts: Sequence[Part]


class DirectReader:
    """Reads one snapshot. ``begin`` and ``bring`` are collective, ``close`` in any case.

    Args:
        open_shard: gives a shard, opened once; raises StorageError or ArenaError where it is not there, or not what
            it should be.
        places: where each shard lies; of storage names for that.
        mine: the shards that this rank tells of.
        in_slots: each node reads its own alone, and of ``mine`` every chunk is proven, wanted or not.
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
        """Open the files of the shards that this rank tells of.

        Raises:
            StorageError: one is not there, or not what it should be; on all ranks together.
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
        """Know what this rank reads; raises as ``open_shard``."""
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
        """Read all that was planned. Parts of a restart end: ``pin``, ``read``, ``copy``.

        Raises:
            StorageError, ArenaError: something is bad, or away; on all ranks together, and some bytes have arrived.
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
        """Read no more; a second call does nothing."""
        self.reader.close()
        self._chunks = []

    def _order(self, shards: Collection[str]) -> list[str]:
        """Each rank begins elsewhere, at its own shard where it has one: what several read is asked for once."""
        order = sorted(self.places)
        first = order.index(own) if (own := self._topology.me.shard) in shards else self._group.rank % len(order)
        return [shard for shard in (*order[first:], *order[:first]) if shard in shards]

    def _chunks_of(self, shard: str, parts: Sequence[Part]) -> Iterator[_Chunk]:
        every = self._in_slots and shard in self._mine
        return chunks_of(self._open(shard), sorted(parts, key=begin_of), every)


def reads_little_twice(read_bytes: Sequence[int], there_bytes: int) -> bool:
    """Whether ranks that read so much each read little of what is there several times."""
    return sum(read_bytes) - there_bytes <= max(_TWICE_BYTES * len(read_bytes), _TWICE_SHARE * there_bytes)


def fits(readings: Sequence[ReadEstimate]) -> bool:
    """Whether what all ranks are going to read is for this way."""
    there_bytes = sum(one.there_bytes for one in readings)
    return all(one.near for one in readings) and reads_little_twice([one.nbytes for one in readings], there_bytes)


def _slot(transfer: Transfer) -> SlotAt:
    assert isinstance(transfer.source, SlotAt)
    return transfer.source


def bring(chunk: _Chunk, staging: StagingBuffers) -> None:
    """Read a chunk, prove it, and put its bytes where they belong, or send them there."""
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
    """Where a chunk's bytes go, in its order; None where they do not simply lie side by side in host memory."""
    landings, place = list[LoadTarget](), chunk.span.begin
    for copy, to in chunk.parts:
        if copy.source_strides != (1,) or copy.dest_strides != (1,) or not to.is_cpu:
            return None
        begin, end = max(copy.source, chunk.span.begin), min(copy.source + copy.shape[0], chunk.span.end)
        if begin < place:  # what two want is not read into both
            return None
        at = copy.dest + begin - copy.source
        landings.append(LoadTarget(begin, to.numpy().data[at : at + end - begin]))
        place = end
    return landings


def chunks_of(file: Source, parts: Sequence[Part], every: bool = False) -> Iterator[_Chunk]:
    """The chunks of an image that have something of ``parts``, which are sorted by their begin, or ``every`` one."""
    begins = [part.copy.source for part in parts]
    first = 0
    for number, span in enumerate(file.image.chunks):
        while first < len(parts) and parts[first].copy.source_end <= span.begin:
            first += 1
        near = parts[first : bisect_right(begins, span.end - 1)]
        # Asked of each: one around the others keeps ``first`` where it is, and loops may step over a chunk.
        of = [part for part in near if _wants(part.copy, span)]
        if of or every:
            yield _Chunk(file, number, span, of)


def _wants(copy: StridedCopy, span: Span) -> bool:
    """Whether ``copy`` reads anything there."""
    if copy.source_strides == (1,):  # thousands are
        return copy.shape[0] > 0 and copy.source < span.end and copy.source + copy.shape[0] > span.begin
    return next(reading(copy, span.begin, span.end), None) is not None


def begin_of(part: Part) -> int:
    return part.copy.source
