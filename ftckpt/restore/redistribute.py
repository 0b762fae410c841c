"""Exchange of bytes between ranks: messages of bounded size, several in flight, from and into strided memory.

A stream of bytes from one rank to another is cut into messages of at most ``MESSAGE_BYTES``, at offsets that both
know, so messages need no header. Messages are ordered by (distance, number): at distance d, from 1 to the number of
ranks - 1, rank i sends to i + d and receives from i - d. Every rank posts its sends and receives in this order and
keeps ``OPEN_STEPS`` steps in flight. This cannot deadlock: take the first unfinished message in this order. Neither
its sender nor its receiver can wait for an earlier one, so both have posted it.

Ranks that need the same bytes of another node fetch a part each and pass it on, so that the bytes cross once:
``sharers`` finds these ranks by the names of their reads, ``part_of`` divides the bytes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from ftckpt.group import Group, Message
from ftckpt.host_memory import host_memory
from ftckpt.model.fragment import Shape
from ftckpt.restore.plan import StridedCopy, cut

MESSAGE_BYTES = 16 << 20
"""Maximum size of a message, and of the local copies between two steps of the exchange."""

ALONE_BYTES = 1 << 20
"""Minimum size of strips that get messages of their own."""

OPEN_STEPS = 2
"""Steps in flight, each with one message sent and one received; a message may need a buffer."""

# Of xxh3-128.
NAME_BYTES = 16
GRAIN_BYTES = 4096
"""Parts of shared bytes are multiples of this, except for the last part."""

Name = bytes
"""Identifier of the bytes that a read from another node takes, in their order."""
Ranks = tuple[int, ...]


class Strip(NamedTuple):
    """Bytes of a 1-D uint8 tensor in the order of nested loops: one side of a ``StridedCopy`` of bytes."""

    memory: torch.Tensor
    begin: int
    shape: Shape
    strides: Shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape)

    @property
    def is_run(self) -> bool:
        """Whether the bytes are contiguous."""
        return self.strides == (1,)

    @property
    def fits(self) -> bool:
        """Whether all bytes are inside the memory."""
        # Loops come from other ranks, and a bad one would read past the mapping.
        memory, begin, shape, strides = self
        if strides == (1,):  # the fast path, for most of thousands
            return begin >= 0 and shape[0] >= 0 and begin + shape[0] <= memory.numel()
        return min(begin, *shape, *strides) >= 0 and self.end <= memory.numel()

    @property
    def end(self) -> int:
        """One past the last byte."""
        return (
            self.begin + 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        )

    @property
    def view(self) -> torch.Tensor:
        """The bytes, in the shape of the loops."""
        if self.is_run:
            return self.memory[self.begin : self.begin + self.shape[0]]
        return self.memory[self.begin :].as_strided(self.shape, self.strides)

    def part(self, begin: int, end: int) -> Iterator[Strip]:
        """Bytes ``begin`` to ``end``, in the order of the loops."""
        copy = StridedCopy(self.begin, self.begin, self.shape, self.strides, self.strides)
        for piece in cut(copy, begin, end):
            yield Strip(self.memory, piece.source, piece.shape, piece.source_strides)


def source_strip(copy: StridedCopy, memory: torch.Tensor, at: int) -> Strip:
    """The bytes that ``copy`` (of bytes) reads; the memory begins with byte ``at`` of its source."""
    return Strip(memory, copy.source - at, copy.shape, copy.source_strides)


def dest_strip(copy: StridedCopy, memory: torch.Tensor) -> Strip:
    """The bytes that ``copy`` (of bytes) writes."""
    return Strip(memory, copy.dest, copy.shape, copy.dest_strides)


@dataclass(frozen=True)
class Stream:
    """All bytes that one rank sends to another, in an order that both know."""

    strips: Sequence[Strip]

    @property
    def nbytes(self) -> int:
        return sum(strip.nbytes for strip in self.strips)

    def messages(self) -> Iterator[list[Strip]]:
        """The strips of each message. Long strips are not joined with others, so that a run needs no buffer.

        The cuts follow from the lengths of the strips, which are the same on both sides.
        """
        message: list[Strip] = []
        room = MESSAGE_BYTES
        for strip in self.strips:
            begin, nbytes = 0, strip.nbytes
            if nbytes >= ALONE_BYTES and message:
                yield message
                message, room = [], MESSAGE_BYTES
            while begin < nbytes:
                end = min(nbytes, begin + room)
                message += strip.part(begin, end)
                room -= end - begin
                begin = end
                if room == 0 or (begin == nbytes and nbytes >= ALONE_BYTES):
                    yield message
                    message, room = [], MESSAGE_BYTES
        if message:
            yield message


def exchange(
    group: Group,
    outgoing: Mapping[int, Stream],
    incoming: Mapping[int, Stream],
    meanwhile: Iterator[object] | None = None,
    landed: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Send and receive streams, by destination and source rank. Collective: both sides pass the same streams.

    ``meanwhile`` is other work of this rank: one item is done between messages. ``landed`` is called with the size of
    each received message once its bytes are in place.

    Raises:
        RuntimeError: a rank has exited, or does not answer within the deadline of ``group``.
    """
    work = meanwhile or iter(())
    open_steps: deque[_Step] = deque()
    buffers = [_Buffers() for _ in range(OPEN_STEPS)]
    for number, messages in enumerate(_steps(group, outgoing, incoming)):
        if len(open_steps) == OPEN_STEPS:
            landed(open_steps.popleft().finish())
        # The step that used these buffers before was finished above.
        open_steps.append(_Step(group, messages, buffers[number % OPEN_STEPS]))
        next(work, None)
    while open_steps:
        landed(open_steps.popleft().finish())
        next(work, None)


class _Messages(NamedTuple):
    """The messages sent and received in one step; None for no message."""

    number: int
    to: int
    sent: list[Strip] | None
    source: int
    received: list[Strip] | None


def _steps(group: Group, outgoing: Mapping[int, Stream], incoming: Mapping[int, Stream]) -> Iterator[_Messages]:
    """This rank's steps, in the order common to all ranks."""
    distances = {(to - group.rank) % group.size for to in outgoing}
    distances |= {(group.rank - source) % group.size for source in incoming}
    nothing = Stream(())
    for distance in sorted(distances):
        to, source = (group.rank + distance) % group.size, (group.rank - distance) % group.size
        sent, received = outgoing.get(to, nothing), incoming.get(source, nothing)
        for number, (message, landing) in enumerate(zip_longest(sent.messages(), received.messages())):
            yield _Messages(number, to, message, source, landing)


class _Buffers:
    """Memory for one message in each direction, allocated on first use."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def get(self, direction: str, nbytes: int) -> torch.Tensor:
        """A buffer of ``nbytes``; its earlier content may be overwritten."""
        have = self._memory.get(direction)
        if have is None or have.numel() < nbytes:
            have = self._memory[direction] = host_memory(nbytes)
        return have[:nbytes]


class _Step:
    """One step in flight. Contiguous host memory is sent and received in place, without a buffer."""

    def __init__(self, group: Group, messages: _Messages, buffers: _Buffers) -> None:
        self._works: list[Message] = []
        self._received = messages.received or []
        self._landing: torch.Tensor | None = None
        if messages.received is not None:
            self._landing = _direct(messages.received)
            if self._landing is None:
                self._landing = buffers.get("in", _nbytes(messages.received))
            # The number is the tag: two ranks meet at one distance of an exchange only, so it identifies the message.
            self._works.append(group.start_receive(self._landing, messages.source, messages.number))
        if messages.sent is not None:
            data = _direct(messages.sent)
            if data is None:
                data = buffers.get("out", _nbytes(messages.sent))
                # gloo sends only contiguous host memory.
                _pack(messages.sent, data)
            self._works.append(group.start_send(data, messages.to, messages.number))

    def finish(self) -> int:
        """Wait for both messages and put the received bytes in place; returns their number."""
        for work in self._works:
            work.wait()
        if self._landing is not None and _direct(self._received) is None:
            _unpack(self._landing, self._received)
        return _nbytes(self._received)


def _direct(strips: Sequence[Strip]) -> torch.Tensor | None:
    """The memory of the message if it is a single run of host memory, else None."""
    if len(strips) == 1 and strips[0].is_run and strips[0].memory.device.type == "cpu":
        return strips[0].view
    return None


def _nbytes(strips: Iterable[Strip]) -> int:
    return sum(strip.nbytes for strip in strips)


def _pack(strips: Sequence[Strip], into: torch.Tensor) -> None:
    position = 0
    for strip in strips:
        into[position : position + strip.nbytes].view(strip.shape).copy_(strip.view)
        position += strip.nbytes


def _unpack(data: torch.Tensor, strips: Sequence[Strip]) -> None:
    position = 0
    for strip in strips:
        strip.view.copy_(data[position : position + strip.nbytes].view(strip.shape))
        position += strip.nbytes


def name_of(place: bytes, copies: Iterable[StridedCopy]) -> Name:
    """The identifier of the bytes that ``copies`` read, in order, from the source ``place`` (canonical text)."""
    digest = xxhash.xxh3_128(place)
    for copy in copies:
        loops = (copy.source, len(copy.shape), *copy.shape, *copy.source_strides)
        digest.update(np.array(loops, np.int64).tobytes())
    return digest.digest()


def sharers(names: Sequence[bytes], rank: int) -> dict[Name, Ranks]:
    """The ranks that need the same bytes as ``rank``, by name; itself included, ascending, at least two.

    ``names`` are the concatenated names of each rank, without duplicates. Pure: every rank computes the same from the
    same gathered names.
    """
    counts = [len(joined) // NAME_BYTES for joined in names]
    every = _words(b"".join(names))
    mine = _words(names[rank])
    if len(mine) == 0:
        return {}
    owner = np.repeat(np.arange(len(names)), counts)
    # A prefilter by the first of the two words; full names are compared below.
    common = np.flatnonzero(np.isin(every[:, 0], mine[:, 0]))
    own = {names[rank][at : at + NAME_BYTES] for at in range(0, len(names[rank]), NAME_BYTES)}
    by_name: dict[Name, list[int]] = {}
    for index in common.tolist():
        name = every[index].tobytes()
        if name in own:
            by_name.setdefault(name, []).append(int(owner[index]))
    return {name: tuple(ranks) for name, ranks in by_name.items() if len(ranks) > 1}


def part_of(name: Name, nbytes: int, ranks: Ranks, rank: int) -> tuple[int, int]:
    """The range (begin, end) of ``nbytes`` that ``rank``, one of ``ranks``, fetches; may be empty.

    The ranges of all ranks cover all bytes. Items too small for all ranks go to a few, which depend on the name.
    """
    # A byte of the digest, practically random: it chooses who gets a larger part, or any part of a small item.
    place = (ranks.index(rank) + name[0]) % len(ranks)
    grains = -(-nbytes // GRAIN_BYTES)
    begin, end = (grains * edge // len(ranks) * GRAIN_BYTES for edge in (place, place + 1))
    return min(begin, nbytes), min(end, nbytes)


def _words(names: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(names, np.uint64).reshape(-1, 2)
