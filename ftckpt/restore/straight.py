"""A snapshot that storage alone has, read straight into the live state, in its own layout or another.

Each chunk comes to a buffer, is proven there, and what a rank wants of it goes where it belongs. To give slots their
memory costs more than all of that: they get it beside training, and the next snapshot is the first that they hold.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch

from ftckpt.events import Events
from ftckpt.group import Group, gather_all
from ftckpt.model.topology import Topology, layouts_differ
from ftckpt.persist.shard_file import ShardFile
from ftckpt.persist.storage import Bytes
from ftckpt.restore.chunk_reader import ChunkReader, Job, ShardFiles, chunk_buffer
from ftckpt.restore.exchange import dest_strip, source_strip
from ftckpt.restore.load import Traffic, Transfer
from ftckpt.restore.locations import SlotAt
from ftckpt.restore.offers import SlotContents
from ftckpt.restore.plan import StridedCopy, reading, run
from ftckpt.restore.rebuild import NEW_SLOT
from ftckpt.restore.threads import here
from ftckpt.store.image import Span

_TWICE_SHARE = 0.125
"""Of all bytes of the snapshot at most so many are read by several ranks: more is read once, to slots, and handed on
in memory."""

_TWICE_BYTES = 64 << 20
"""So many for each rank in any case: a chunk is read as a whole."""


class _Part(NamedTuple):
    """Bytes that are wanted of a shard's image, and the memory that they go to."""

    copy: StridedCopy
    to: torch.Tensor


class _Chunk(NamedTuple):
    """A chunk that is wanted, where it lies in the image, and what has parts in it."""

    file: ShardFile
    number: int
    span: Span
    parts: Sequence[_Part]


class StraightFetch:
    """Reads one snapshot. ``begin``, ``plan`` and ``bring`` are collective, ``close`` in any case."""

    def __init__(self, group: Group, topology: Topology, events: Events, files: ShardFiles) -> None:
        self._group = group
        self._topology = topology
        self._files = files
        self._chunks: list[_Chunk] = []
        self._needed_bytes = 0
        self._reader = ChunkReader(group, events, files)
        self.places: Mapping[str, SlotAt] = self._deal()
        """Names for where each shard lies: on the node of a rank that tells of it."""

    @property
    def usage(self) -> dict[str, int]:
        """What was read, see ``ChunkReader``."""
        return self._reader.usage

    def begin(self, mine: Collection[str]) -> None:
        """Open the files of the shards that this rank tells of.

        Raises:
            StorageError: one is not there, or not what it should be; on all ranks together.
        """
        gather_all(self._group, lambda: all([self._files.get(shard) for shard in mine]), bool)

    def contents(self, shard: str) -> SlotContents:
        """What a shard holds."""
        file = self._files.get(shard)
        image, used = file.image, file.entry.objects_used
        return SlotContents.of(self.places[shard], self._group.rank, image, used, image.manifest.capacity)

    def objects(self, shard: str) -> bytes:
        """The encoded objects of a shard; raises StorageError."""
        return bytes(self._files.get(shard).objects())

    def read(self, shard: str, begin: int, end: int) -> Bytes:
        """Bytes of a shard's image, outside its objects; raises StorageError."""
        data = torch.empty(end - begin, dtype=torch.uint8)
        for chunk in _chunks(self._files.get(shard), [_Part(run(begin, 0, end - begin), data)]):
            _bring(chunk, nullcontext)
        return data.numpy().data

    def plan(self, transfers: Sequence[Transfer]) -> int:
        """Know what this rank reads; returns its bytes on storage. Raises StorageError."""
        shards = {at: shard for shard, at in self.places.items()}
        parts: dict[str, list[_Part]] = {}
        for one in transfers:
            of = parts.setdefault(shards[_slot(one)], [])
            for item in one.items:
                live = item.tensor.view(torch.uint8)
                of += (_Part(copy, live) for copy in item.copies)
        order = sorted(self.places)
        # Each rank begins elsewhere, at its own shard where it has one: what several read is asked for once.
        first = order.index(own) if (own := self._topology.me.shard) in parts else self._group.rank
        rank_order = [*order[first % len(order) :], *order[: first % len(order)]]
        self._chunks = [
            chunk
            for shard in rank_order
            if shard in parts
            for chunk in _chunks(self._files.get(shard), sorted(parts[shard], key=_begin))
        ]
        self._needed_bytes = sum(one.nbytes for one in transfers)
        return sum(chunk.file.stored_bytes(chunk.number) for chunk in self._chunks)

    def fits(self, read_bytes: Sequence[int]) -> bool:
        """Whether what all ranks have planned to read is for this way."""
        return reads_little_twice(read_bytes, sum(one.nbytes for one in self._files.stored.shards.values()))

    def bring(self) -> Traffic:
        """Read all that was planned.

        Raises:
            StorageError: something on storage is bad, or away; on all ranks together, and some bytes have arrived.
        """
        jobs = [Job(chunk.span.nbytes, partial(_bring, chunk, here())) for chunk in self._chunks]
        self._reader.bring(jobs, len(self.places))
        return Traffic(self._needed_bytes, 0, 0, self._needed_bytes)

    def close(self) -> None:
        """Read no more; a second call does nothing."""
        self._reader.close()
        self._chunks = []

    def _deal(self) -> dict[str, SlotAt]:
        topology, stored = self._topology, self._files.stored
        if layouts_differ(topology.layout, stored.layout):
            nodes = [member.node for member in topology.members]
            homes = {shard: nodes[number % len(nodes)] for number, shard in enumerate(sorted(stored.shards))}
        else:
            homes = {member.shard: member.node for member in topology.members}
        return {shard: SlotAt(node, shard, NEW_SLOT) for shard, node in homes.items()}


def reads_little_twice(read_bytes: Sequence[int], there_bytes: int) -> bool:
    """Whether ranks that read so much each read little of what is there several times."""
    return sum(read_bytes) - there_bytes <= max(_TWICE_BYTES * len(read_bytes), _TWICE_SHARE * there_bytes)


def _slot(transfer: Transfer) -> SlotAt:
    assert isinstance(transfer.source, SlotAt)
    return transfer.source


def _bring(chunk: _Chunk, on_stream: Callable[[], AbstractContextManager[object]]) -> None:
    """Read a chunk, prove it, and put its bytes where they belong."""
    begin, end = chunk.span.begin, chunk.span.end
    memory = chunk_buffer(chunk.span.nbytes)
    chunk.file.fill(chunk.number, memory)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    with on_stream():
        for part in chunk.parts:
            for copy in reading(part.copy, begin, end):
                source = source_strip(copy._replace(source=copy.source - begin), data)
                dest_strip(copy, part.to).view.copy_(source.view)


def _chunks(file: ShardFile, parts: Sequence[_Part]) -> Iterator[_Chunk]:
    """The chunks of an image that have something of ``parts``, which are sorted by their begin."""
    begins = [part.copy.source for part in parts]
    first = 0
    for number, span in enumerate(file.image.chunks):
        while first < len(parts) and parts[first].copy.source_end <= span.begin:
            first += 1
        near = parts[first : bisect_right(begins, span.end - 1)]
        # Asked of each: one around the others keeps ``first`` where it is, and loops may step over a chunk.
        if of := [part for part in near if next(reading(part.copy, span.begin, span.end), None) is not None]:
            yield _Chunk(file, number, span, of)


def _begin(part: _Part) -> int:
    return part.copy.source
