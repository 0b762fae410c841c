"""The copies from a device to slots as arrays for batched driver calls, built once per layout.

Copying tensor by tensor holds the interpreter lock, which the training thread needs to launch kernels; a batched call
releases it. Small tensors are first gathered into a device buffer, because each copy has a fixed cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from ftckpt.array_types import Words
from ftckpt.capture.chunks import ChunkCopy, Segment, divided
from ftckpt.capture.copier import by_home, copy_together
from ftckpt.capture.driver import Call, device_buffer
from ftckpt.capture.registration import PIECE_BYTES
from ftckpt.capture.volatile_memory import ALIGN_BYTES, aligned

CALL_COPIES, CALL_BYTES = 128, 256 << 20
"""Maximum number of copies, and bytes, per call. A driver queues about a thousand copies; then every calling thread
blocks, the training thread included. Training's own copies wait for the bytes of a call."""
_SMALL_BYTES, _MOST_SMALL_BYTES = 64 << 10, 32 << 20
"""Tensors below the first size are gathered, up to the second in total."""


class _Entry(NamedTuple):
    source: int  # an address; if gathered, an offset in the buffer
    offset: int  # in the slot's file
    nbytes: int
    gathered: bool
    storage: int  # address of the allocation: a driver refuses a copy that spans two, even adjacent ones

    def until(self, end: int) -> _Entry:
        """The copy extended to ``end`` in the slot's file."""
        return self._replace(nbytes=end - self.offset)


class CopyPlan:
    """The copies of all chunks, in the order of the slot.

    A chunk is planned unless it is an XOR, is partly in host memory, or reads a tensor that is not contiguous. The
    plan keeps the tensors allocated.

    Args:
        tensors: 1-D, on the device.
        copies: one per chunk; the methods below identify a chunk by its index here.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], copies: Sequence[ChunkCopy], device: torch.device) -> None:
        self.sizes = [copy.nbytes for copy in copies]
        """Bytes of each chunk."""
        entries: list[_Entry] = []
        firsts = [0]
        small, places = list[Segment](), list[int]()
        end = 0  # of the gathered bytes
        for copy in copies:
            for segment in divided(copy, PIECE_BYTES).segments if _is_planned(tensors, copy) else ():
                source = tensors[segment.piece]
                address = source.data_ptr() + segment.start * source.element_size()
                gathers = segment.nbytes < _SMALL_BYTES and end + segment.nbytes + ALIGN_BYTES <= _MOST_SMALL_BYTES
                before = entries[-1] if len(entries) > firsts[-1] else None
                if gathers:
                    address = _place(before, segment, end)
                    end = address + segment.nbytes
                    small.append(segment)
                    places.append(address)
                storage = 0 if gathers else source.untyped_storage().data_ptr()
                entry = _Entry(address, segment.offset, segment.nbytes, gathers, storage)
                if before is not None and _continues(before, entry):
                    entries[-1] = before.until(entry.offset + entry.nbytes)
                else:
                    entries.append(entry)
            firsts.append(len(entries))
        # Zero, because padding between two tensors is zero in a new slot as well.
        buffer = device_buffer(end, device).zero_() if end else torch.empty(0)
        self._sources = np.array([one.source + buffer.data_ptr() * one.gathered for one in entries], np.uint64)
        self._offsets = np.array([one.offset for one in entries], np.uint64)
        self._nbytes = np.array([one.nbytes for one in entries], np.uint64)
        self._firsts = firsts
        self._stops = _stops(firsts, self._nbytes)
        self._targets: dict[int, Words] = {}
        live = [tensors[one.piece].detach()[one.start : one.start + one.numel].view(torch.uint8) for one in small]
        self._gathered = [buffer[at : at + one.nbytes] for at, one in zip(places, small, strict=True)], live
        self._kept = [tensor.detach() for tensor in tensors]

    def covers(self, at: int) -> bool:
        """Whether chunk ``at`` is planned."""
        return self._stops[at] > at

    def stop(self, at: int) -> int:
        """The end (exclusive) of the chunks that one call may copy together with the planned chunk ``at``."""
        return self._stops[at]

    def trial(self, target: torch.Tensor) -> Call:
        """A call that copies a few bytes to ``target`` to warm up the driver."""
        self._trial = np.array([[target.data_ptr()], self._sources[:1], [min(8, int(self._nbytes[0]))]], np.uint64)
        targets, sources, sizes = (row.ctypes.data for row in self._trial)
        return Call(targets, sources, sizes, 1)

    def gather(self) -> None:
        """Enqueues the gather on the current stream; must precede all calls of a snapshot."""
        copy_together(*self._gathered)

    def calls(self, slot: torch.Tensor, at: int, stop: int) -> Iterator[Call]:
        """The calls that copy chunks ``at`` to ``stop`` (exclusive) to ``slot``."""
        base = slot.data_ptr()
        if base not in self._targets:
            self._targets[base] = self._offsets + np.uint64(base)
        arrays = self._targets[base], self._sources, self._nbytes
        targets, sources, sizes = (array.ctypes.data for array in arrays)
        end, word = self._firsts[stop], self._nbytes.itemsize
        for begin in range(self._firsts[at], end, CALL_COPIES):
            skipped = begin * word
            yield Call(targets + skipped, sources + skipped, sizes + skipped, min(CALL_COPIES, end - begin))


def _is_planned(tensors: Sequence[torch.Tensor], copy: ChunkCopy) -> bool:
    here, left = by_home(tensors, copy)
    is_plain = all(tensors[segment.piece].is_contiguous() for segment in left.segments)
    return bool(left.segments) and not here.segments and not copy.xor and is_plain


def _place(before: _Entry | None, segment: Segment, end: int) -> int:
    """The buffer offset of a segment; its distance from a direct neighbour is that in the slot: both are one copy."""
    if before is not None and before.gathered:
        gap = segment.offset - before.offset - before.nbytes
        if 0 <= gap < ALIGN_BYTES:
            return end + gap
    return aligned(end + ALIGN_BYTES - 1) + segment.offset % ALIGN_BYTES


def _continues(before: _Entry, entry: _Entry) -> bool:
    """Whether both can be one copy: the same distance in source and slot, and within one registration of the slot."""
    gap, most = entry.offset - before.offset - before.nbytes, ALIGN_BYTES if entry.gathered else 1
    is_next = 0 <= gap < most and entry.source == before.source + before.nbytes + gap
    is_same = (before.gathered, before.storage) == (entry.gathered, entry.storage)
    return is_next and is_same and before.offset // PIECE_BYTES == entry.offset // PIECE_BYTES


def _stops(firsts: Sequence[int], sizes: Words) -> list[int]:
    """For each chunk, the end (exclusive) of the consecutive planned chunks that one call may copy from it on, at
    least one even beyond the limits; for a chunk that is not planned, its own index."""
    ends = [0, *np.cumsum(sizes, dtype=np.int64).tolist()]
    stops: list[int] = []
    for at, (first, behind) in enumerate(pairwise(firsts)):
        stop = at + (behind > first)
        while (
            stop > at
            and stop + 1 < len(firsts)
            and firsts[stop + 1] > firsts[stop]
            and firsts[stop + 1] - first <= CALL_COPIES
            and ends[firsts[stop + 1]] - ends[first] <= CALL_BYTES
        ):
            stop += 1
        stops.append(stop)
    return stops
