"""Rotating samples of replicated state, compared between ranks with every snapshot.

Each snapshot compares one of N positions: an N-th of each replica set, whose fragments are concatenated. N + 1
consecutive snapshots compare everything at least once. The work is enqueued at the step boundary, and its result is
read when the rank posts its vote.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
import xxhash

from ftckpt.array_types import Integers
from ftckpt.capture.assignment import Assignment, as_bytes
from ftckpt.model.replicas import CUT_BYTES
from ftckpt.model.sampled import Comparison, position_of
from ftckpt.model.training_state import cast_master

Ends: TypeAlias = list[int]

SAMPLE_BYTES = 1 << 20
"""Bytes of the largest replica set that one snapshot compares; more if the number of positions is limited."""

LOOK_BYTES = SAMPLE_BYTES // 64
"""The fixed cost of a piece, as the number of bytes that take as long to compare."""

_BLOCK = 1 << 22
"""Elements that a device reduces at a time; each needs 16 bytes of temporary memory."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR, _MIX = 0x2545F4914F6CDD1D, 0x1B03738712FAD5C9


class Slice(NamedTuple):
    """Bytes ``begin`` to ``end`` of a piece, which is an index."""

    piece: int
    begin: int
    end: int


def num_positions(largest_bytes: int, pieces: int, limit: int) -> int:
    """The number of positions: as many as ``SAMPLE_BYTES`` suggests, at most ``limit`` - 1."""
    return max(1, min(limit - 1, -(-(largest_bytes + pieces * LOOK_BYTES) // SAMPLE_BYTES)))


def ends_of(sizes: Iterable[int]) -> Ends:
    """Cumulative ends of pieces of ``sizes`` bytes, each followed by ``LOOK_BYTES``."""
    return [*accumulate(size + LOOK_BYTES for size in sizes)]


def slices(ends: Ends, position: int, positions: int) -> list[Slice]:
    """The slices of pieces with these ``ends`` that belong to ``position`` of ``positions``.

    Cuts are at multiples of ``CUT_BYTES`` inside each piece. Each byte belongs to exactly one position.
    """
    total = ends[-1] if ends else 0
    begin, end = (total * at // positions for at in (position, position + 1))
    found: list[Slice] = []
    # Starts with the piece in which the previous position ended: some of its bytes may be left.
    for piece in range(bisect_right(ends, begin), len(ends)):
        start = ends[piece - 1] if piece else 0
        if start >= end:
            break
        size = ends[piece] - start - LOOK_BYTES
        one = Slice(piece, _cut(size, begin - start), _cut(size, end - start))
        if one.end > one.begin:
            found.append(one)
    return found


def _cut(size: int, at: int) -> int:
    return size if at >= size else max(0, at) // CUT_BYTES * CUT_BYTES


class _PendingSample(NamedTuple):
    """The sample of snapshot ``number``: words of the host, and of the device once ``done`` has happened."""

    number: int
    host: Integers
    device: torch.Tensor | None
    done: torch.cuda.Event | None


class Sampler:
    """Takes this rank's part of each sample.

    Args:
        limit: maximum number of consecutive snapshots until everything is compared; 0: nothing is compared.
    """

    def __init__(self, assignment: Assignment, rank: int, num_ranks: int, limit: int) -> None:
        assumed = assignment.assumption
        self.positions = (
            num_positions(assumed.largest_bytes, assumed.num_pieces, limit) if limit and assumed.needed else 0
        )
        """The same on all ranks; 0: nothing is compared."""
        # Slicing a memoryview is a hundred times as fast as slicing a tensor.
        self._on_host = {index: held.numpy().data for index, held in assumed.held.items() if not held.is_cuda}
        self._held = assumed.held
        self._items = {index: assignment.pieces[index].fragment.item_bytes for index in assumed.held}
        # The ends are computed once: a boundary has no time to visit each piece.
        self._derived = [
            (piece.derived_from.detach(), piece.tensor.detach(), piece.fragment.nbytes)
            for piece in assignment.derived
            if piece.derived_from is not None
        ]
        self._derived_ends = ends_of(nbytes for _, _, nbytes in self._derived)
        indices = [assumed.of(group).tolist() for group, ranks in enumerate(assumed.members) if rank in ranks]
        self._groups = [(each, ends_of(self._held[index].numel() for index in each)) for each in indices]
        self.comparison = Comparison.of(assumed.members, num_ranks)
        self._pinned: torch.Tensor | None = None
        self._pending: _PendingSample | None = None

    def take(self, number: int) -> None:
        """Takes the sample for snapshot ``number``. Does not wait for a device."""
        if not self.positions:
            return
        position = position_of(number, self.positions)
        host = np.zeros(self.comparison.width, np.int64)
        on_device: dict[int, torch.Tensor | None] = {}
        host[0], on_device[0] = self._mismatches(position)
        for word, (indices, ends) in enumerate(self._groups, start=1):
            host[word], on_device[word] = self._digest(indices, ends, position)
        self._pending = _PendingSample(number, host, *self._fetch(on_device))

    def words(self, number: int) -> Integers | None:
        """This rank's words for snapshot ``number``, sampled or not; None: nothing is compared."""
        if not self.positions:
            return None
        pending, self._pending = self._pending, None
        if pending is None or pending.number != number:
            return self.comparison.unsampled()
        if pending.done is not None and pending.device is not None:
            # If the device is late, a later snapshot compares the same position.
            if not pending.done.query():  # type: ignore[no-untyped-call]
                return self.comparison.unsampled()
            pending.host[: len(pending.device)] ^= pending.device.numpy()
        return pending.host

    def _mismatches(self, position: int) -> tuple[int, torch.Tensor | None]:
        """The number of elements that differ from the cast of their masters, on the host and on a device."""
        pairs: dict[tuple[torch.dtype, torch.device], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for piece, begin, end in slices(self._derived_ends, position, self.positions):
            master, weight, nbytes = self._derived[piece]
            if end - begin < nbytes:  # most small pieces are compared entirely
                part = slice(begin // weight.itemsize, end // weight.itemsize)
                master, weight = master[part], weight[part]
            pairs.setdefault((weight.dtype, weight.device), []).append((master, weight))
        host, device = 0, None
        for sides in pairs.values():
            masters, weights = (one[0] if len(one) == 1 else torch.cat(one) for one in zip(*sides, strict=True))
            integers = _INTEGERS[weights.element_size()]
            cast = cast_master(masters, torch.empty_like(weights))
            num = (as_bytes(cast).view(integers) != as_bytes(weights).view(integers)).sum()
            if num.is_cuda:
                device = num if device is None else device + num
            else:
                host += int(num)
        return host, device

    def _digest(self, indices: Sequence[int], ends: Ends, position: int) -> tuple[int, torch.Tensor | None]:
        """64-bit digests of a group's slices, on the host and on a device."""
        hasher, on_host = xxhash.xxh3_64(), False
        on_device: dict[int, list[torch.Tensor]] = {}
        for piece, begin, end in slices(ends, position, self.positions):
            index = indices[piece]
            if index in self._on_host:
                hasher.update(self._on_host[index][begin:end])
                on_host = True
            else:
                on_device.setdefault(self._items[index], []).append(self._held[index][begin:end])
        host = int(np.uint64(hasher.intdigest()).astype(np.int64)) if on_host else 0
        return host, reduced(on_device) if on_device else None

    def _fetch(self, words: Mapping[int, torch.Tensor | None]) -> tuple[torch.Tensor | None, torch.cuda.Event | None]:
        """Enqueues a copy of the device's words to pinned memory; they are valid once the event has happened."""
        there = {word: tensor for word, tensor in words.items() if tensor is not None}
        if not there:
            return None, None
        device = next(iter(there.values())).device
        zero = torch.zeros((), dtype=torch.int64, device=device)
        joined = torch.stack([there.get(word, zero) for word in range(max(there) + 1)])
        if self._pinned is None:
            self._pinned = torch.empty(self.comparison.width, dtype=torch.int64, pin_memory=True)
        pinned = self._pinned[: len(joined)]
        pinned.copy_(joined, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(device))
        return pinned, done


def reduced(parts: dict[int, list[torch.Tensor]]) -> torch.Tensor:
    """A 64-bit digest of ``parts`` (element size → bytes): a sum, weighted by position, modulo 2**64. A change of one
    element always changes it."""
    total: torch.Tensor | None = None
    for item, tensors in parts.items():
        joined = (tensors[0] if len(tensors) == 1 else torch.cat(tensors)).view(_INTEGERS[item])
        for begin in range(0, len(joined), _BLOCK):
            values = joined[begin : begin + _BLOCK]
            weights = torch.arange(begin + 1, begin + 1 + len(values), device=values.device)
            weights.mul_(_FACTOR)
            # Odd weights are invertible modulo 2**64, so no difference of an element vanishes.
            weights.bitwise_xor_(weights >> 29).mul_(_MIX).bitwise_or_(1)
            # In place on the weights: ``values`` may be training's own memory.
            part = weights.mul_(values).sum()
            total = part if total is None else total * _FACTOR + part
    assert total is not None, "of no bytes"
    return total
