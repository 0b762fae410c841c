"""Copies from a device to slots, as arrays that one call of the driver takes: made once for each layout.

A copy that a thread of the trainer makes tensor by tensor holds the interpreter's lock, which a trainer that launches
kernels needs; a call that takes arrays lets go of it. Small tensors are gathered in a buffer on the device first, as
each copy takes the driver and the link a moment whatever its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ftckpt.capture.chunks import ChunkCopy, Segment, divided
from ftckpt.capture.copier import by_home, copy_together
from ftckpt.capture.driver import Call, device_buffer
from ftckpt.capture.registration import PIECE_BYTES
from ftckpt.capture.volatile_memory import ALIGN_BYTES, aligned

CALL_COPIES, CALL_BYTES = 128, 256 << 20
"""Of one call, at most. A driver takes about a thousand copies ahead of its device, and at one more every thread
waits, the one that launches kernels too; and what training copies itself waits behind the bytes of a call."""
_SMALL_BYTES, _MOST_SMALL_BYTES = 64 << 10, 32 << 20
"""What is gathered: tensors of fewer bytes, so much in all."""

Addresses = npt.NDArray[np.uint64]


class _Entry(NamedTuple):
    source: int  # an address, or, of what is gathered, a place in the buffer
    offset: int  # in the slot's file
    nbytes: int
    gathered: bool
    storage: int  # a copy may not reach from one allocation into the next, however near


class CopyPlan:
    """The copies of all chunks, in the order of the slot. A chunk is planned unless it is an XOR, or some of it is in
    host memory. The tensors stay allocated as long as this lives.

    Args:
        tensors: 1-D, on the device.
        copies: of the chunks; positions below are those in it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], copies: Sequence[ChunkCopy], device: torch.device) -> None:
        self.sizes = [copy.nbytes for copy in copies]
        """Bytes of each chunk."""
        entries: list[_Entry] = []
        firsts = [0]
        small, places = list[Segment](), list[int]()
        end = 0  # of what is gathered
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
                    entries[-1] = before._replace(nbytes=entry.offset + entry.nbytes - before.offset)
                else:
                    entries.append(entry)
            firsts.append(len(entries))
        # Zero, as what lies between two tensors is in a new slot.
        buffer = device_buffer(end, device).zero_() if end else torch.empty(0)
        self._sources = np.array([one.source + buffer.data_ptr() * one.gathered for one in entries], np.uint64)
        self._offsets = np.array([one.offset for one in entries], np.uint64)
        self._nbytes = np.array([one.nbytes for one in entries], np.uint64)
        self._firsts = firsts
        self._stops = _stops(firsts, self._nbytes)
        self._targets: dict[int, Addresses] = {}
        live = [tensors[one.piece].detach()[one.start : one.start + one.numel].view(torch.uint8) for one in small]
        self._gathered = [buffer[at : at + one.nbytes] for at, one in zip(places, small, strict=True)], live
        self._kept = [tensor.detach() for tensor in tensors]

    def covers(self, at: int) -> bool:
        """Returns True if chunk ``at`` is planned."""
        return self._stops[at] > at

    def stop(self, at: int) -> int:
        """Behind the last chunk that one call may take together with chunk ``at``, which is planned."""
        return self._stops[at]

    def trial(self, target: torch.Tensor) -> Call:
        """A call that copies a few bytes to ``target``, so that the driver loads what its first call needs."""
        self._trial = np.array([[target.data_ptr()], self._sources[:1], [min(8, int(self._nbytes[0]))]], np.uint64)
        targets, sources, sizes = (row.ctypes.data for row in self._trial)
        return Call(targets, sources, sizes, 1)

    def gather(self) -> None:
        """Enqueue, on the current stream, what must come before any of a snapshot's calls."""
        copy_together(*self._gathered)

    def calls(self, slot: torch.Tensor, at: int, stop: int) -> Iterator[Call]:
        """Those that bring chunks ``at`` to ``stop`` to ``slot``."""
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
    """Where in the buffer a segment goes: as far from the one before as in the slot, if nothing lies between them."""
    if before is not None and before.gathered:
        gap = segment.offset - before.offset - before.nbytes
        if 0 <= gap < ALIGN_BYTES:
            return end + gap
    return aligned(end + ALIGN_BYTES - 1) + segment.offset % ALIGN_BYTES


def _continues(before: _Entry, entry: _Entry) -> bool:
    """Whether both are one copy: as far from each other there as here, and within one registration of the slot."""
    gap, most = entry.offset - before.offset - before.nbytes, ALIGN_BYTES if entry.gathered else 1
    is_next = 0 <= gap < most and entry.source == before.source + before.nbytes + gap
    is_same = (before.gathered, before.storage) == (entry.gathered, entry.storage)
    return is_next and is_same and before.offset // PIECE_BYTES == entry.offset // PIECE_BYTES


def _stops(firsts: Sequence[int], sizes: Addresses) -> list[int]:
    """For each chunk the end of what one call may take from it on: planned chunks that follow each other, within its
    limits, but at least one; the chunk itself where it is not planned."""
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
