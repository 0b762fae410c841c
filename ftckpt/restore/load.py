"""The read path: planned reads of all ranks into live tensors, from this node's arenas, storage and other nodes.

Each rank reads the chunks of shards that it can open itself, see ``chunk_reads``. Bytes of other nodes come by
messages, exchanged concurrently. Ranks that need the same bytes of another node fetch a part each, and then exchange
the parts.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ftckpt.errors import ArenaError
from ftckpt.group import Group, gather_bytes, together
from ftckpt.host_memory import host_memory
from ftckpt.memory.image import SlotImage
from ftckpt.memory.locations import Location, OpenArenas, SlotAt, location_of
from ftckpt.model import codec
from ftckpt.model.fragment import Fragment
from ftckpt.model.topology import Topology
from ftckpt.restore.chunk_reads import ChunkPlan, OpenShard, Part, chunks_of, finish_together, land_all
from ftckpt.restore.plan import ReadItem, StridedCopy, in_bytes, plan, run, stream
from ftckpt.restore.progress import Progress
from ftckpt.restore.redistribute import (
    Name,
    Ranks,
    Stream,
    Strip,
    dest_strip,
    exchange,
    name_of,
    part_of,
    sharers,
)
from ftckpt.restore.tensor_index import Index

Loop = tuple[int, Sequence[int], Sequence[int]]
"""Bytes of a source in the order of nested loops: offset, shape, strides."""

Requests = dict[int, list[tuple[Location, list[Loop]]]]
"""Reads that other ranks request from this one, by rank."""


class Item(NamedTuple):
    """Bytes to copy from a source into a live 1-D tensor; ``copies`` are byte offsets from the start of each."""

    copies: tuple[StridedCopy, ...]
    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        return sum(copy.numel for copy in self.copies)


@dataclass(frozen=True)
class Transfer:
    """Items that one rank needs from one source; ``reader`` is the rank itself or a rank of the source's node."""

    source: Location
    reader: int
    items: tuple[Item, ...]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)


@dataclass(frozen=True)
class Traffic:
    """Bytes of one rank, counted on arrival.

    ``read_bytes``: read from arenas for it, of which ``received_bytes`` came from other nodes. ``spread_bytes``: from
    ranks that need the same bytes. ``needed_bytes``: the sum of its transfers, read and spread.
    """

    read_bytes: int
    received_bytes: int
    spread_bytes: int
    needed_bytes: int


def transfer(source: Location, reader: int, reads: Sequence[ReadItem], needs: Sequence[torch.Tensor]) -> Transfer:
    """The transfer in bytes for reads of one source; ``needs`` are the destination tensors, by index."""
    items = []
    for read in reads:
        item_bytes = read.offer.fragment.item_bytes
        copies = tuple(in_bytes(copy, item_bytes, read.offer.offset) for copy in read.copies)
        items.append(Item(copies, needs[read.need]))
    return Transfer(source, reader, tuple(items))


def reader_for(topology: Topology, source: Location) -> int:
    """The rank that reads ``source`` for this one: itself on its own node, otherwise one of the source's node.

    It has the same local index, for every source: so a rank connects to one rank of each node, not to every rank.
    """
    if source.node == topology.me.node:
        return topology.rank
    readers = topology.ranks_on(source.node)
    return readers[topology.ranks_on(topology.me.node).index(topology.rank) % len(readers)]


def transfers_of(
    topology: Topology,
    index: Index,
    needs: Sequence[tuple[Fragment, torch.Tensor]],
    slots: Sequence[SlotAt],
    *,
    padded: frozenset[str] = frozenset(),
    own: SlotAt | None = None,
) -> list[Transfer]:
    """The transfers that fill the tensors of ``needs``; ``slots`` are the sources in ``index``, ``own`` the slot of
    the shard that this rank continues."""
    here = topology.me.node
    # 0: already open; 1: read in place; 2: sent by a rank of another node.
    costs = [0 if at == own else 1 if at.node == here else 2 for at in slots]
    by_slot: dict[int, list[ReadItem]] = {}
    for read in plan(index, [need for need, _ in needs], costs.__getitem__, padded, turn=topology.rank):
        by_slot.setdefault(read.offer.source, []).append(read)
    tensors = [tensor for _, tensor in needs]
    return [
        transfer(slots[number], reader_for(topology, slots[number]), reads, tensors)
        for number, reads in by_slot.items()
    ]


def fetch(source: Location, reader: int, *parts: tuple[int, torch.Tensor]) -> Transfer:
    """The transfer that fills each contiguous 1-D tensor with the bytes of ``source`` from an offset on."""
    items = (Item((run(offset, 0, into.nbytes),) if into.numel() else (), into) for offset, into in parts)
    return Transfer(source, reader, tuple(items))


@dataclass(frozen=True)
class Reads:
    """One rank's reads: the chunks that it reads itself, ``local_bytes`` of its tensors, and the transfers from ranks
    of other nodes (``remote``)."""

    chunks: Sequence[ChunkPlan]
    remote: Sequence[Transfer]
    local_bytes: int

    @classmethod
    def of(
        cls, rank: int, transfers: Sequence[Transfer], open_shard: OpenShard, every: Collection[SlotAt] = ()
    ) -> Reads:
        """The reads of ``transfers``, and of every chunk of the shards at ``every``, needed or not; opens the shards.

        Raises:
            ArenaError, StorageError: a shard cannot be opened, or a read exceeds it.
        """
        local = [one for one in transfers if one.reader == rank]
        parts: dict[SlotAt, list[Part]] = {at: [] for at in every}
        for one in local:
            assert isinstance(one.source, SlotAt), "packages, chunks and blocks of this node are read in place"
            of = parts.setdefault(one.source, [])
            for item in one.items:
                live = item.tensor.view(torch.uint8)
                of += (Part(copy, live) for copy in item.copies)
        # Each rank starts at another shard, to spread the load.
        order = sorted(parts)
        first = rank % max(1, len(order))
        chunks: list[ChunkPlan] = []
        for at in (*order[first:], *order[:first]):
            source = open_shard(at)
            _require_inside(source.image, parts[at])
            chunks += chunks_of(source, parts[at], at in every)
        remote = [one for one in transfers if one.reader != rank]
        return cls(chunks, remote, sum(one.nbytes for one in local))


def execute(
    group: Group, plan: Callable[[], Reads], arenas: OpenArenas, threads: int = 1, *, what: str = "loads",
    end_part: Callable[[str], None] = lambda part: None,
) -> Traffic:  # fmt: skip
    """Perform the reads of all ranks; ``plan`` gives this rank's, and ``threads`` read its chunks. Collective.

    Takes up to 2 · ``OPEN_STEPS`` · ``MESSAGE_BYTES`` (of ``exchange``) of host memory in addition to the tensors.

    Args:
        arenas: the arenas of this node, for the reads of other ranks.
        what: the name of the operation in logs; ``end_part``: see ``land_all``.

    Raises:
        ArenaError, StorageError: on all ranks; one cannot open a source, a request exceeds its source, or a chunk is
            corrupt.
        FtckptError: on all ranks; an error of ``plan``.
        RuntimeError: a rank has exited, or does not answer within the group's deadline.
    """
    # Every source is opened on all ranks before the first message: a rank that failed later would leave the receivers
    # of its bytes waiting.
    reads, wants, (any_local, any_remote) = _shared(group, plan)
    outgoing: dict[int, Stream] = {}
    if any_remote:
        requests = _request(group, wants)
        outgoing = together(group, lambda: _open_for_others(requests, arenas))
    needed_bytes = reads.local_bytes + sum(one.nbytes for one in reads.remote)
    landed = progress_of(f"rank {group.rank} {what}", needed_bytes)
    # In the order of the requests, in which the reader sends: messages have no headers.
    incoming = {reader: Stream([s for want in of for s in want.fetched]) for reader, of in wants.items()}
    with closing(land_all(reads.chunks, threads, end_part)) as chunks:
        local = map(landed, chunks)
        exchange(group, outgoing, incoming, local, landed)
        if any_local:
            finish_together(group, local)
    every_want = [want for of in wants.values() for want in of]
    # After the exchange: only then does this rank have the parts that it passes on.
    _spread(group, [want for want in every_want if want.ranks], landed)
    received_bytes = sum(want.end - want.begin for want in every_want)
    read_bytes = reads.local_bytes + received_bytes
    return Traffic(read_bytes, received_bytes, needed_bytes - read_bytes, needed_bytes)


def progress_of(what: str, needed_bytes: int) -> Callable[[int], None]:
    """A function that is called with the size of each piece that has arrived, and logs the progress."""
    progress, done_bytes = Progress(what), 0

    def landed(nbytes: int) -> None:
        nonlocal done_bytes
        done_bytes += nbytes
        progress(done_bytes, needed_bytes)

    return landed


def _require_inside(image: SlotImage, parts: Iterable[Part]) -> None:
    begin, end = (image.chunks[0].begin, image.chunks[-1].end) if image.chunks else (0, 0)
    for copy, _ in parts:
        if copy.source < begin or copy.source_end > end:
            raise ArenaError(f"{copy.numel} bytes at offset {copy.source} of a shard with bytes {begin} to {end}")


@dataclass(frozen=True)
class _Want:
    """An item from another node: the part (``begin`` to ``end``) that this rank fetches, and the ``ranks`` that share
    the item, if any."""

    source: Location
    item: Item
    name: Name
    ranks: Ranks
    begin: int
    end: int

    @property
    def loops(self) -> list[Loop]:
        copies = stream(self.item.copies, self.begin, self.end)
        return [(copy.source, copy.shape, copy.source_strides) for copy in copies]

    @property
    def fetched(self) -> list[Strip]:
        """The destinations of the part that this rank fetches."""
        return self.strips(self.begin, self.end)

    def strips(self, begin: int, end: int) -> list[Strip]:
        """The destinations of bytes ``begin`` to ``end``."""
        memory = self.item.tensor.view(torch.uint8)
        return [dest_strip(copy, memory) for copy in stream(self.item.copies, begin, end)]

    def neighbours(self, rank: int) -> tuple[int, int]:
        """The ranks after and before ``rank`` in the ring of ``ranks``."""
        place = self.ranks.index(rank)
        return self.ranks[(place + 1) % len(self.ranks)], self.ranks[place - 1]

    def part_from(self, rank: int, back: int) -> list[Strip]:
        """The destinations of the part fetched by the rank that is ``back`` places before ``rank`` in the ring."""
        fetcher = self.ranks[(self.ranks.index(rank) - back) % len(self.ranks)]
        return self.strips(*part_of(self.name, self.item.nbytes, self.ranks, fetcher))


def _shared(group: Group, plan: Callable[[], Reads]) -> tuple[Reads, dict[int, list[_Want]], tuple[bool, bool]]:
    """Plan, and divide fetches from other nodes among the ranks that need the same bytes. Collective.

    Returns this rank's reads, and its fetches, by reader; and whether any rank reads chunks itself, and whether any
    fetches.
    """
    named: dict[Name, tuple[Transfer, Item]] = {}
    wants: dict[int, list[_Want]] = {}
    planned: list[Reads] = []

    def name_all() -> bytes:
        planned.append(plan())
        for wanted in planned[0].remote:
            source = codec.encode(wanted.source)
            for item in wanted.items:
                name = name_of(source, item.copies)
                if named.setdefault(name, (wanted, item))[1] is not item:  # a duplicate is not shared
                    wants.setdefault(wanted.reader, []).append(_Want(wanted.source, item, name, (), 0, item.nbytes))
        return bytes([bool(planned[0].chunks)]) + b"".join(sorted(named))

    reports = gather_bytes(group, name_all)
    names = [report[1:] for report in reports]
    shared = sharers(names, group.rank)
    for name, (wanted, item) in named.items():
        ranks = shared.get(name, ())
        begin, end = part_of(name, item.nbytes, ranks, group.rank) if ranks else (0, item.nbytes)
        wants.setdefault(wanted.reader, []).append(_Want(wanted.source, item, name, ranks, begin, end))
    # Any rank: ranks without needs may have to read for others.
    return planned[0], wants, (any(report[0] for report in reports), any(names))


def _request(group: Group, wants: dict[int, list[_Want]]) -> Requests:
    """Send requests to the readers; returns the requests that this rank receives."""
    texts = {}
    for reader, of in wants.items():
        text = json.dumps([[codec.to_json(want.source), want.loops] for want in of])
        texts[reader] = torch.from_numpy(np.frombuffer(bytearray(text.encode()), np.uint8))
    sizes = np.array([[reader, len(text)] for reader, text in texts.items()], np.int64).reshape(-1, 2)
    incoming: dict[int, torch.Tensor] = {}
    # Sizes first: a receiver posts a buffer of exactly the message's length.
    for rank, data in enumerate(group.gather(sizes.tobytes())):
        pairs = np.frombuffer(data, np.int64).reshape(-1, 2)
        for _, nbytes in pairs[pairs[:, 0] == group.rank].tolist():
            incoming[rank] = host_memory(nbytes)
    exchange(group, _whole(texts), _whole(incoming))
    # JSON, never pickle: it came over a socket. ``_open_for_others`` checks that all bytes are inside the source.
    requests = {rank: json.loads(text.numpy().tobytes()) for rank, text in incoming.items()}
    return {rank: [(location_of(source), loops) for source, loops in of] for rank, of in requests.items()}


def _whole(texts: dict[int, torch.Tensor]) -> dict[int, Stream]:
    return {rank: Stream([Strip(text, 0, (text.numel(),), (1,))]) for rank, text in texts.items()}


def _open_for_others(requests: Requests, arenas: OpenArenas) -> dict[int, Stream]:
    """Open the sources that this rank reads for others."""
    outgoing: dict[int, Stream] = {}
    for rank, request in requests.items():
        strips: list[Strip] = []
        for source, loops in request:
            memory = _memory(arenas, source)
            strips += [Strip(memory, begin, tuple(shape), tuple(strides)) for begin, shape, strides in loops]
        for strip in strips:
            if not strip.fits:
                raise ArenaError(
                    f"{strip.nbytes} bytes at offset {strip.begin} of a source with {strip.memory.numel()}"
                )
        outgoing[rank] = Stream(strips)
    return outgoing


def _memory(arenas: OpenArenas, source: Location) -> torch.Tensor:
    view = arenas.view(source)
    if len(view) == 0:
        return host_memory(0)
    with warnings.catch_warnings():  # the mapping is read-only, and so is every use of this tensor
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(view, dtype=torch.uint8)


def _spread(group: Group, shared: Sequence[_Want], landed: Callable[[int], None]) -> None:
    """All-gather the parts of shared items.

    Around a ring of each item's ranks: a part received in one turn is sent on in the next. That moves as many bytes
    as sending each part to all sharers, but over two connections instead of one to every rank.
    """
    shared = sorted(shared, key=lambda want: want.name)  # the same order on both sides
    for turn in range(max((len(want.ranks) - 1 for want in shared), default=0)):
        sent: dict[int, list[Strip]] = {}
        received: dict[int, list[Strip]] = {}
        for want in shared:
            if turn < len(want.ranks) - 1:
                to, source = want.neighbours(group.rank)
                sent.setdefault(to, []).extend(want.part_from(group.rank, turn))
                received.setdefault(source, []).extend(want.part_from(group.rank, turn + 1))
        outgoing, incoming = ({rank: Stream(strips) for rank, strips in of.items()} for of in (sent, received))
        exchange(group, outgoing, incoming, landed=landed)
