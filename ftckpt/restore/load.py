"""Executes reads: from this node's arenas straight into live tensors, from other nodes by messages, from replicas.

All pairs of ranks exchange messages at the same time, and what lies on a rank's own node is read while they are on
their way. Then ranks that need the same bytes of other nodes, of which each has fetched a part, hand them on.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ftckpt.comm import Group, together
from ftckpt.errors import ArenaError
from ftckpt.events import Progress
from ftckpt.restore import wire
from ftckpt.restore.arenas import OpenArenas
from ftckpt.restore.blocks import Block, in_bytes, run, stream
from ftckpt.restore.plan import Read
from ftckpt.restore.source import Place, place_of_json
from ftckpt.restore.spread import Name, Ranks, name_of, part_of, sharers
from ftckpt.restore.wire import Stream, Strip, dest_strip, exchange, source_strip

__all__ = ["Item", "Moved", "OpenArenas", "Transfer", "execute", "fetch", "transfer"]


@dataclass(frozen=True)
class Item:
    """Bytes that go from a place into a live 1-D tensor; ``blocks``, of bytes, count from the begin of each."""

    blocks: tuple[Block, ...]
    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return sum(block.numel for block in self.blocks)


@dataclass(frozen=True)
class Transfer:
    """What one rank wants of one place, which ``reader`` reads: the rank itself, or one of the place's node."""

    source: Place
    reader: int
    items: tuple[Item, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return sum(item.nbytes for item in self.items)


class Moved(NamedTuple):
    """Bytes of one rank, counted where they arrived.

    ``read_bytes`` were read from arenas for it, ``received_bytes`` of these by ranks of other nodes; ``spread_bytes``
    came from ranks that need the same. ``needed_bytes`` is what its transfers ask for: read and spread together.
    """

    read_bytes: int
    received_bytes: int
    spread_bytes: int
    needed_bytes: int


def transfer(source: Place, reader: int, reads: Sequence[Read], needs: Sequence[torch.Tensor]) -> Transfer:
    """Turn reads of one source into bytes of it and the tensors that take them."""
    items = []
    for read in reads:
        item = read.have.fragment.item_bytes
        blocks = tuple(in_bytes(block, item, read.have.offset) for block in read.blocks)
        items.append(Item(blocks, needs[read.need]))
    return Transfer(source, reader, tuple(items))


def fetch(source: Place, reader: int, offset: int, into: torch.Tensor) -> Transfer:
    """Fill a contiguous 1-D uint8 tensor with the bytes from ``offset`` on."""
    blocks = (run(offset, 0, into.numel()),) if into.numel() else ()
    return Transfer(source, reader, (Item(blocks, into),))


def execute(group: Group, transfers: Sequence[Transfer], arenas: OpenArenas) -> Moved:
    """Perform all transfers of all ranks. Collective.

    Takes up to ``wire.EXTRA_BYTES`` of host memory beside the tensors.

    Raises:
        ArenaError: on all ranks together, if one cannot open what it is to read, or is asked for more than there is.
        RuntimeError: a rank is gone, or does not answer within the group's deadline.
    """
    local = [t for t in transfers if t.reader == group.rank]
    wants, anywhere = _shared(group, [t for t in transfers if t.reader != group.rank])
    asked = _ask(group, wants) if anywhere else {}
    copies, outgoing = together(group, lambda: _open(local, asked, arenas))
    moved = _Counter(group.rank, sum(t.nbytes for t in transfers))
    incoming = {reader: Stream([s for want in found for s in want.fetched]) for reader, found in wants.items()}
    exchange(group, outgoing, incoming, _copy(copies, moved.count("copied")), moved.count("received"))
    _spread(group, [want for found in wants.values() for want in found if want.ranks], moved)
    return moved.moved


@dataclass(frozen=True)
class _Want:
    """An item of another node: the bytes of it that this rank fetches, and the ``ranks`` that share it, if any."""

    place: Place
    item: Item
    name: Name
    ranks: Ranks
    begin: int
    end: int

    @property
    def asked(self) -> list[list[Any]]:
        """What to read: begin, shape, strides in bytes."""
        blocks = stream(self.item.blocks, self.begin, self.end)
        return [[block.source, block.shape, block.source_strides] for block in blocks]

    @property
    def fetched(self) -> list[Strip]:
        """Where it goes."""
        return self.strips(self.begin, self.end)

    def strips(self, begin: int, end: int) -> list[Strip]:
        """Where bytes ``begin`` to ``end`` go."""
        memory = self.item.tensor.view(torch.uint8)
        return [dest_strip(block, memory) for block in stream(self.item.blocks, begin, end)]


def _shared(group: Group, remote: Sequence[Transfer]) -> tuple[dict[int, list[_Want]], bool]:
    """Agree with the ranks that lack the same bytes who fetches which.

    Returns what this rank fetches, by reader, and whether any rank fetches anything.
    """
    named: dict[Name, tuple[Transfer, Item]] = {}
    wants: dict[int, list[_Want]] = {}
    for wanted in remote:
        place = json.dumps(wanted.source.to_json()).encode()
        for item in wanted.items:
            name = name_of(place, item.blocks)
            if named.setdefault(name, (wanted, item))[1] is not item:  # the second time here: not shared again
                wants.setdefault(wanted.reader, []).append(_Want(wanted.source, item, name, (), 0, item.nbytes))
    told = group.gather(b"".join(sorted(named)))
    shared = sharers(told, group.rank)
    for name, (wanted, item) in named.items():
        ranks = shared.get(name, ())
        begin, end = part_of(name, item.nbytes, ranks, group.rank) if ranks else (0, item.nbytes)
        wants.setdefault(wanted.reader, []).append(_Want(wanted.source, item, name, ranks, begin, end))
    return wants, any(told)


def _ask(group: Group, wants: dict[int, list[_Want]]) -> dict[int, list[tuple[Place, list[Any]]]]:
    """Tell each reader what to send; returns what this rank is asked for, by the rank that asks."""
    texts = {}
    for reader, found in wants.items():
        request = json.dumps([[want.place.to_json(), want.asked] for want in found])
        texts[reader] = torch.from_numpy(np.frombuffer(bytearray(request.encode()), np.uint8))
    sizes = np.array([[reader, len(text)] for reader, text in texts.items()], np.int64).reshape(-1, 2)
    incoming: dict[int, torch.Tensor] = {}
    for asker, data in enumerate(group.gather(sizes.tobytes())):
        told = np.frombuffer(data, np.int64).reshape(-1, 2)
        for _, nbytes in told[told[:, 0] == group.rank].tolist():
            incoming[asker] = torch.empty(nbytes, dtype=torch.uint8)
    exchange(group, _whole(texts), _whole(incoming))
    requests = {asker: json.loads(text.numpy().tobytes()) for asker, text in incoming.items()}
    return {asker: [(place_of_json(place), loops) for place, loops in found] for asker, found in requests.items()}


def _whole(texts: dict[int, torch.Tensor]) -> dict[int, Stream]:
    return {rank: Stream([Strip(text, 0, (text.numel(),), (1,))]) for rank, text in texts.items()}


Copies = list[tuple[Strip, Strip]]


def _open(
    local: Sequence[Transfer], asked: dict[int, list[tuple[Place, list[Any]]]], arenas: OpenArenas
) -> tuple[Copies, dict[int, Stream]]:
    """Open all that is read here: what can fail does so before any message."""
    copies: Copies = []
    for found in local:
        memory = _memory(arenas, found.source)
        for item in found.items:
            live = item.tensor.view(torch.uint8)
            copies += [(source_strip(block, memory), dest_strip(block, live)) for block in item.blocks]
    outgoing: dict[int, Stream] = {}
    for asker, request in asked.items():
        strips: list[Strip] = []
        for place, loops in request:
            memory = _memory(arenas, place)
            strips += [Strip(memory, begin, tuple(shape), tuple(strides)) for begin, shape, strides in loops]
        outgoing[asker] = Stream(strips)
    for strip in [*(strip for pair in copies for strip in pair), *(s for o in outgoing.values() for s in o.strips)]:
        if not strip.fits:
            raise ArenaError(f"{strip.nbytes} bytes from {strip.begin} on: {strip.memory.numel()} are there")
    return copies, outgoing


def _memory(arenas: OpenArenas, place: Place) -> torch.Tensor:
    view = arenas.view(place)
    if len(view) == 0:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():  # the mapping is read-only, and so is every use of this tensor
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(view, dtype=torch.uint8)


def _copy(copies: Copies, landed: Callable[[int], None]) -> Iterator[int]:
    """Copy, and stop for a moment after each ``MESSAGE_BYTES``."""
    room = wire.MESSAGE_BYTES
    for source, dest in copies:
        begin, nbytes = 0, source.nbytes
        while begin < nbytes:
            end = min(nbytes, begin + room)
            # The same cut of both sides: loops of the one may be joined where those of the other are not.
            for from_, to in _pairs(source, dest, begin, end):
                to.view.copy_(from_.view)
            landed(end - begin)
            room -= end - begin
            begin = end
            if room == 0:
                yield end
                room = wire.MESSAGE_BYTES


def _pairs(source: Strip, dest: Strip, begin: int, end: int) -> Iterator[tuple[Strip, Strip]]:
    block = Block(source.begin, dest.begin, source.shape, source.strides, dest.strides)
    for part in stream((block,), begin, end):
        yield source_strip(part, source.memory), dest_strip(part, dest.memory)


def _spread(group: Group, shared: Sequence[_Want], moved: _Counter) -> None:
    """Hand the part that this rank has fetched of each item to those that share it, and take theirs."""
    outgoing: dict[int, list[Strip]] = {}
    incoming: dict[int, list[Strip]] = {}
    for want in sorted(shared, key=lambda want: want.name):  # the order on both sides
        for other in want.ranks:
            if other == group.rank:
                continue
            outgoing.setdefault(other, []).extend(want.fetched)
            begin, end = part_of(want.name, want.item.nbytes, want.ranks, other)
            incoming.setdefault(other, []).extend(want.strips(begin, end))
    sent, taken = ({rank: Stream(strips) for rank, strips in found.items()} for found in (outgoing, incoming))
    exchange(group, sent, taken, landed=moved.count("spread"))


class _Counter:
    """Counts bytes as they arrive, and tells how far this rank is."""

    def __init__(self, rank: int, needed_bytes: int) -> None:
        self._needed = needed_bytes
        self._done = dict.fromkeys(("copied", "received", "spread"), 0)
        self._told = Progress("loading") if rank == 0 else None

    def count(self, how: str) -> Callable[[int], None]:
        """Adds to what came in this way."""

        def add(nbytes: int) -> None:
            self._done[how] += nbytes
            if self._told is not None:
                self._told(sum(self._done.values()), self._needed)

        return add

    @property
    def moved(self) -> Moved:
        """All that was counted."""
        received = self._done["received"]
        return Moved(self._done["copied"] + received, received, self._done["spread"], self._needed)
