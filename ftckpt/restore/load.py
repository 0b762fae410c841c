"""Execution of planned reads: from this node's arenas into live tensors, and from other nodes by messages.

All pairs of ranks exchange messages concurrently, and local bytes are copied meanwhile. Ranks that need the same
bytes of another node fetch a part each, and then exchange the parts.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from ftckpt.errors import ArenaError
from ftckpt.events import Progress
from ftckpt.group import Group, gather_bytes, together
from ftckpt.host_memory import host_memory
from ftckpt.model import codec
from ftckpt.model.fragment import Fragment
from ftckpt.model.topology import Topology
from ftckpt.restore import redistribute as wire
from ftckpt.restore.locations import Location, OpenArenas, SlotAt, location_of
from ftckpt.restore.plan import ReadItem, StridedCopy, in_bytes, plan, run, stream
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
    source_strip,
)
from ftckpt.restore.slot_file import SlotFile
from ftckpt.restore.staging import StagingBuffers
from ftckpt.restore.tensor_index import Index
from ftckpt.restore.threads import in_order

Loop = tuple[int, Sequence[int], Sequence[int]]
"""Bytes of a source in the order of nested loops: offset, shape, strides."""

Requests = dict[int, list[tuple[Location, list[Loop]]]]
"""Reads that other ranks request from this one, by rank."""

Pair = tuple[Strip, Strip]
"""A copy within this node: source and destination."""

Files = dict[int, SlotFile]
"""The slot files of mapped sources, by the id of the mapping's tensor."""


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


def execute(group: Group, plan: Callable[[], Sequence[Transfer]], arenas: OpenArenas, threads: int = 1) -> Traffic:
    """Perform the transfers of all ranks; ``plan`` gives this rank's, and ``threads`` copy local bytes. Collective.

    Takes up to 2 · ``OPEN_STEPS`` · ``MESSAGE_BYTES`` (of ``exchange``) of host memory in addition to the tensors.

    Raises:
        ArenaError: on all ranks; one cannot open a source, or a request exceeds its source.
        FtckptError: on all ranks; an error of ``plan``.
        RuntimeError: a rank has exited, or does not answer within the group's deadline.
    """
    transfers: list[Transfer] = []
    pairs: list[Pair] = []
    files: Files = {}

    def remote() -> list[Transfer]:
        transfers[:] = plan()
        pairs[:] = _open([t for t in transfers if t.reader == group.rank], arenas, files)
        return [t for t in transfers if t.reader != group.rank]

    # Every source is opened on all ranks before the first message: a rank that failed later would leave the receivers
    # of its bytes waiting.
    wants, any_remote = _shared(group, remote)
    outgoing: dict[int, Stream] = {}
    if any_remote:
        requests = _request(group, wants)
        outgoing = together(group, lambda: _open_for_others(requests, arenas))
    counter = _Counter(group.rank, sum(t.nbytes for t in transfers))
    # In the order of the requests, in which the reader sends: messages have no headers.
    incoming = {reader: Stream([s for want in of for s in want.fetched]) for reader, of in wants.items()}
    copies = _copy(pairs, files, counter.count("copied"), threads)
    exchange(group, outgoing, incoming, copies, counter.count("received"))
    # After the exchange: only then does this rank have the parts that it passes on.
    _spread(group, [want for of in wants.values() for want in of if want.ranks], counter)
    return counter.traffic


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


def _shared(group: Group, remote: Callable[[], Sequence[Transfer]]) -> tuple[dict[int, list[_Want]], bool]:
    """Divide fetches from other nodes among the ranks that need the same bytes. Collective.

    Returns this rank's fetches, by reader, and whether any rank fetches anything.
    """
    named: dict[Name, tuple[Transfer, Item]] = {}
    wants: dict[int, list[_Want]] = {}

    def name_all() -> bytes:
        for wanted in remote():
            source = codec.encode(wanted.source)
            for item in wanted.items:
                name = name_of(source, item.copies)
                if named.setdefault(name, (wanted, item))[1] is not item:  # a duplicate is not shared
                    wants.setdefault(wanted.reader, []).append(_Want(wanted.source, item, name, (), 0, item.nbytes))
        return b"".join(sorted(named))

    names = gather_bytes(group, name_all)
    shared = sharers(names, group.rank)
    for name, (wanted, item) in named.items():
        ranks = shared.get(name, ())
        begin, end = part_of(name, item.nbytes, ranks, group.rank) if ranks else (0, item.nbytes)
        wants.setdefault(wanted.reader, []).append(_Want(wanted.source, item, name, ranks, begin, end))
    # Any rank: ranks without needs may have to read for others.
    return wants, any(names)


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


def _open(local: Sequence[Transfer], arenas: OpenArenas, files: Files) -> list[Pair]:
    """Open the sources that this rank reads for itself, so that errors occur before any message. Adds to ``files``
    the slots that can be read without their mapping."""
    pairs: list[Pair] = []
    for wanted in local:
        memory = _memory(arenas, wanted.source)
        if isinstance(wanted.source, SlotAt):
            files[id(memory)] = arenas.file(wanted.source)
        for item in wanted.items:
            live = item.tensor.view(torch.uint8)
            pairs += [(source_strip(one, memory), dest_strip(one, live)) for one in item.copies]
    _require_fit(chain.from_iterable(pairs))
    return pairs


def _open_for_others(requests: Requests, arenas: OpenArenas) -> dict[int, Stream]:
    """Open the sources that this rank reads for others."""
    outgoing: dict[int, Stream] = {}
    for rank, request in requests.items():
        strips: list[Strip] = []
        for source, loops in request:
            memory = _memory(arenas, source)
            strips += [Strip(memory, begin, tuple(shape), tuple(strides)) for begin, shape, strides in loops]
        _require_fit(strips)
        outgoing[rank] = Stream(strips)
    return outgoing


def _require_fit(strips: Iterable[Strip]) -> None:
    for strip in strips:
        if not strip.fits:
            raise ArenaError(f"{strip.nbytes} bytes at offset {strip.begin} of a source with {strip.memory.numel()}")


def _memory(arenas: OpenArenas, source: Location) -> torch.Tensor:
    view = arenas.view(source)
    if len(view) == 0:
        return host_memory(0)
    with warnings.catch_warnings():  # the mapping is read-only, and so is every use of this tensor
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(view, dtype=torch.uint8)


def _copy(pairs: Iterable[Pair], files: Files, landed: Callable[[int], None], threads: int) -> Iterator[int]:
    """Copy, and yield the size of each batch of at most ``MESSAGE_BYTES``."""
    staging = StagingBuffers()

    def copy(batch: Sequence[Pair]) -> int:
        staged: list[Pair] = []
        with staging.on_stream():
            for source, dest in batch:
                file = files.get(id(source.memory))
                if file is None or not (source.is_run and dest.is_run):
                    dest.view.copy_(source.view)
                elif dest.memory.is_cpu:
                    file.read_into(source.begin, dest.view.numpy().data)
                else:
                    staged.append((source, dest))
        if staged:
            staging.send(_staged(staged, files, staging.memory(sum(source.nbytes for source, _ in staged))))
        return sum(source.nbytes for source, _ in batch)

    try:
        with closing(in_order(copy, _batches(pairs), threads)) as copied:  # ends its threads
            for nbytes in copied:
                landed(nbytes)
                yield nbytes
    finally:
        staging.settle()


def _staged(pairs: Sequence[Pair], files: Files, memory: torch.Tensor) -> list[Pair]:
    """The runs of ``pairs``, read contiguously into ``memory``, as pairs of destination and source in ``memory``."""
    parts: Sequence[torch.Tensor] = memory.split([source.nbytes for source, _ in pairs])  # type: ignore[no-untyped-call]
    for (source, _), part in zip(pairs, parts, strict=True):
        files[id(source.memory)].read_into(source.begin, part.numpy().data)
    return [(dest, source._replace(memory=part, begin=0)) for (source, dest), part in zip(pairs, parts, strict=True)]


def _batches(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """The pairs, split and joined into batches of ``MESSAGE_BYTES``; the last may be smaller."""
    batch: list[Pair] = []
    room = wire.MESSAGE_BYTES
    for source, dest in pairs:
        begin, nbytes = 0, source.nbytes
        if nbytes < room:  # the fast path, for most of thousands
            batch.append((source, dest))
            room -= nbytes
            continue
        while begin < nbytes:
            end = min(nbytes, begin + room)
            # Both sides are cut together: their loops may be merged differently.
            batch += _pairs(source, dest, begin, end)
            room -= end - begin
            begin = end
            if room == 0:
                yield batch
                batch, room = [], wire.MESSAGE_BYTES
    if batch:
        yield batch


def _pairs(source: Strip, dest: Strip, begin: int, end: int) -> Iterator[Pair]:
    copy = StridedCopy(source.begin, dest.begin, source.shape, source.strides, dest.strides)
    for part in stream((copy,), begin, end):
        yield source_strip(part, source.memory), dest_strip(part, dest.memory)


def _spread(group: Group, shared: Sequence[_Want], counter: _Counter) -> None:
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
        exchange(group, outgoing, incoming, landed=counter.count("spread"))


class _Counter:
    """Counts arriving bytes; rank 0 logs its progress."""

    def __init__(self, rank: int, needed_bytes: int) -> None:
        self._needed_bytes = needed_bytes
        self._done_bytes = dict.fromkeys(("copied", "received", "spread"), 0)
        self._progress = Progress("loading") if rank == 0 else None

    def count(self, how: str) -> Callable[[int], None]:
        """A function that adds to the bytes that arrived this way: ``copied``, ``received`` or ``spread``."""

        def add(nbytes: int) -> None:
            self._done_bytes[how] += nbytes
            if self._progress is not None:
                self._progress(sum(self._done_bytes.values()), self._needed_bytes)

        return add

    @property
    def traffic(self) -> Traffic:
        """The bytes counted so far."""
        received = self._done_bytes["received"]
        read = self._done_bytes["copied"] + received
        return Traffic(read, received, self._done_bytes["spread"], self._needed_bytes)
