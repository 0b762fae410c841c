"""A snapshot that storage alone has, read straight into the live state of a job of its own layout.

Each chunk comes to a buffer, is proven there, and goes where it belongs. To give slots their memory costs more than
all of that: they get it beside training, and the next snapshot is the first that they hold.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

import torch

from ftckpt.events import Events, Progress
from ftckpt.group import Group, gather_all
from ftckpt.model.topology import Topology, layouts_differ
from ftckpt.persist.shard_file import ShardFile
from ftckpt.persist.shards import StoredSnapshot
from ftckpt.restore.load import Traffic, Transfer
from ftckpt.restore.locations import Location, SlotAt
from ftckpt.restore.offers import SlotContents
from ftckpt.restore.rebuild import NEW_SLOT

READERS = 4
"""Chunks of a rank that are on their way at a time: storage answers late, and then much at once."""

TURN_SECS = 10.0
"""After which a rank that reads tells the others that it lives."""

_FOREIGN_SHARE = 0.125
"""Of its own bytes a rank reads at most so many of other ranks' files: more is read once, and handed on in memory."""

_FOREIGN_BYTES = 64 << 20
"""So many it may read in any case: a chunk is read as a whole."""


class _Part(NamedTuple):
    """Bytes ``begin`` to ``end`` of a shard's image, and the memory that they go to."""

    begin: int
    end: int
    to: torch.Tensor


class _Chunk(NamedTuple):
    """A chunk that is wanted, ``begin`` being its first byte in the image, and what it has parts of."""

    file: ShardFile
    number: int
    begin: int
    parts: Sequence[_Part]


class _Turn(NamedTuple):
    """How far one rank has come: whether it has all; chunks and their bytes."""

    done: bool
    chunks: int
    bytes: int


class StraightFetch:
    """Reads shards of one snapshot. ``begin`` and ``bring`` are collective, ``close`` in any case.

    Args:
        open_file: the file of a shard; raises StorageError.
    """

    def __init__(
        self, group: Group, topology: Topology, events: Events, stored: StoredSnapshot,
        open_file: Callable[[str], ShardFile],
    ) -> None:  # fmt: skip
        self._group = group
        self._topology = topology
        self._events = events
        self._open_file = open_file
        self._files: dict[str, ShardFile] = {}
        self._shards: dict[Location, str] = {}
        self._chunks: list[_Chunk] = []
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="ftckpt-fetch")
        self._begin_secs = time.perf_counter()
        self.stored = stored
        self.usage: dict[str, int] = {"chunks": 0, "bytes": 0}
        """What was read: of this rank until ``bring`` has ended, then of all ranks."""

    @staticmethod
    def fits(topology: Topology, stored: StoredSnapshot) -> bool:
        """Whether each rank continues a shard of the snapshot."""
        return not layouts_differ(topology.layout, stored.layout)

    def begin(self) -> Mapping[str, SlotAt]:
        """Names for where each shard lies.

        Raises:
            StorageError: a file is not there, or not what it should be; on all ranks together.
        """
        mine = self._topology.me.shard
        gather_all(self._group, lambda: bool(self._file(mine)), bool)
        places = {member.shard: SlotAt(member.node, member.shard, NEW_SLOT) for member in self._topology.members}
        self._shards = {at: shard for shard, at in places.items()}
        return places

    def contents(self, at: SlotAt) -> SlotContents:
        """What this rank's own shard holds."""
        file = self._file(self._topology.me.shard)
        image, rank = file.image, self._group.rank
        return SlotContents.of(at, rank, image, file.entry.objects_used, image.manifest.capacity)

    def objects(self) -> bytes:
        """The encoded objects of the shard that this rank continues; raises StorageError."""
        return bytes(self._file(self._topology.me.shard).objects())

    def plan(self, transfers: Sequence[Transfer]) -> bool:
        """Know what is to be read; whether it can be, by chunks that each rank reads by itself.

        Raises:
            StorageError: as ``begin``.
        """
        parts: dict[str, list[_Part]] = {}
        for one in transfers:
            for item in one.items:
                live = item.tensor.view(torch.uint8)
                for copy in item.copies:
                    if copy.source_strides != (1,) or copy.dest_strides != (1,):
                        return False
                    to = live[copy.dest : copy.dest + copy.numel]
                    parts.setdefault(self._shards[one.source], []).append(
                        _Part(copy.source, copy.source + copy.numel, to)
                    )
        by_shard = {shard: list(_chunks(self._file(shard), sorted(of, key=_begin))) for shard, of in parts.items()}
        nbytes = {shard: sum(_nbytes(chunk) for chunk in chunks) for shard, chunks in by_shard.items()}
        own = self._topology.me.shard
        # Its own first: those of others are mostly small, and may be read by many ranks at a time.
        self._chunks = [chunk for shard in sorted(by_shard, key=lambda one: one != own) for chunk in by_shard[shard]]
        foreign = sum(of for shard, of in nbytes.items() if shard != own)
        return foreign <= max(_FOREIGN_BYTES, _FOREIGN_SHARE * nbytes.get(own, 0))

    def bring(self) -> Traffic:
        """Read all that was planned.

        Raises:
            StorageError: something on storage is bad, or away; on all ranks together, and some bytes have arrived.
        """
        filling, done, turns = self._fill(), False, list[_Turn]()

        def turn() -> _Turn:
            deadline = time.monotonic() + TURN_SECS
            ended = all(time.monotonic() < deadline for _ in filling)
            return _Turn(ended, **self.usage)

        while not done:
            # In turns: ranks have more and less to read, and wait for each other only so long.
            turns = gather_all(self._group, turn, _Turn)
            done = all(one.done for one in turns)
        self.usage.update({name: sum(getattr(one, name) for one in turns) for name in self.usage})
        self._events.emit(
            "fetched", iteration=self.stored.snapshot.iteration, shards=len(self._shards),
            bytes=self.usage["bytes"], secs=time.perf_counter() - self._begin_secs,
        )  # fmt: skip
        needed = sum(part.to.numel() for chunk in self._chunks for part in _within(chunk))
        return Traffic(needed, 0, 0, needed)

    def close(self) -> None:
        """Read no more; a second call does nothing."""
        self._readers.shutdown(cancel_futures=True)
        self._chunks = []

    def _file(self, shard: str) -> ShardFile:
        if shard not in self._files:
            self._files[shard] = self._open_file(shard)
        return self._files[shard]

    def _fill(self) -> Iterator[None]:
        """Bring all chunks, and stop for a moment after each."""
        total = sum(map(_nbytes, self._chunks))
        progress = Progress(f"rank {self._group.rank} reads iteration {self.stored.snapshot.iteration} from storage")
        wanted, coming = iter(self._chunks), deque[Future[int]]()

        def order(count: int) -> None:
            coming.extend(self._readers.submit(_bring, chunk) for chunk in islice(wanted, count))

        order(READERS)
        while coming:
            self.usage["bytes"] += coming.popleft().result()
            self.usage["chunks"] += 1
            order(1)
            progress(self.usage["bytes"], total)
            yield


_buffers = threading.local()


def chunk_buffer(nbytes: int) -> memoryview:
    """Memory of this thread for a chunk, until it asks again: it stays in the processor's cache, where new memory
    costs a fault for each page."""
    buffer: bytearray = getattr(_buffers, "chunk", bytearray())
    if len(buffer) < nbytes:
        buffer = _buffers.chunk = bytearray(nbytes)
    return memoryview(buffer)[:nbytes]


def _bring(chunk: _Chunk) -> int:
    """Read a chunk, prove it, and put its bytes where they belong; returns how many those of the chunk are."""
    memory = chunk_buffer(_nbytes(chunk))
    chunk.file.fill(chunk.number, memory)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    for part in _within(chunk):
        begin = part.begin - chunk.begin
        part.to.copy_(data[begin : begin + part.to.numel()])
    return len(memory)


def _chunks(file: ShardFile, parts: Sequence[_Part]) -> Iterator[_Chunk]:
    """The chunks of an image that have something of ``parts``, which are sorted by their begin."""
    begins = [part.begin for part in parts]
    first = 0
    for number, span in enumerate(file.image.chunks):
        while first < len(parts) and parts[first].end <= span.begin:
            first += 1
        of = parts[first : bisect_right(begins, span.end - 1)]
        if of:
            yield _Chunk(file, number, span.begin, of)


def _within(chunk: _Chunk) -> Iterator[_Part]:
    """What of its parts lies in the chunk."""
    end = chunk.begin + _nbytes(chunk)
    for begin, part_end, to in chunk.parts:
        low, high = max(begin, chunk.begin), min(part_end, end)
        if low < high:  # one that is wanted twice may lie before others that are longer
            yield _Part(low, high, to[low - begin : high - begin])


def _nbytes(chunk: _Chunk) -> int:
    return chunk.file.image.chunks[chunk.number].nbytes


def _begin(part: _Part) -> int:
    return part.begin
