"""Volatile state on a device, held there as it was at a boundary, until it has come to a slot.

To copy it to the host at once, training would wait for all that the device has been given, at each snapshot. So it is
copied within the device, behind what training has enqueued there, and nobody waits; what follows may change it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ftckpt.capture.chunks import ChunkCopy, Segment
from ftckpt.capture.copier import by_home, copy_together, segments_of
from ftckpt.capture.driver import device_buffer

ALIGN_BYTES = 64
"""Copied bytes lie as in the slot, modulo this: a view of them as any dtype is aligned."""

_MOST_BYTES = 64 << 20
"""Of the device's memory, which belongs to training."""


class VolatileMemory:
    """Room for the first chunks of volatile state, up to 64 MiB: the others are not its.

    ``reserve`` once, before training. ``take`` enqueues on the current stream, which the copies of what is ``held``
    must wait for; the next ``take`` must come behind their end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: torch.Tensor | None = None
        self._begin = 0
        self._copies: dict[int, ChunkCopy] = {}
        self._known: tuple[Sequence[torch.Tensor], list[torch.Tensor], list[torch.Tensor]] | None = None

    def reserve(self, tensors: Sequence[torch.Tensor], copies: Sequence[ChunkCopy]) -> None:
        """Have the memory, and all that ``take`` asks of the device. Raises RuntimeError where it has no room."""
        there = [left for copy in copies if (left := by_home(tensors, copy)[1]).segments]
        if not there:
            return
        self._begin = aligned(there[0].begin)
        self._copies = {copy.chunk: copy for copy in there if copy.end - self._begin <= _MOST_BYTES}
        nbytes = max((copy.end for copy in self._copies.values()), default=self._begin) - self._begin
        if nbytes:
            self._memory = device_buffer(nbytes, self._device)
            self.take(tensors)

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hold what ``tensors`` are when the current stream comes to this."""
        if self._memory is None:
            return
        # The same at each boundary: what is small takes longer to be found than to be copied.
        if self._known is None or self._known[0] is not tensors:
            begin = self._begin
            self._known = tensors, *segments_of(tensors, list(self._copies.values()), self._memory, begin)
        copy_together(self._known[1], self._known[2])

    def holds(self, chunk: int) -> bool:
        """Whether ``take`` takes what of a chunk is on the device."""
        return chunk in self._copies

    def held(self, chunk: int) -> tuple[Sequence[torch.Tensor], ChunkCopy]:
        """What was taken of a chunk, and the copy that brings it to a slot."""
        assert self._memory is not None
        segments = [
            Segment(0, one.offset - self._begin, one.nbytes, one.offset, one.nbytes)
            for one in self._copies[chunk].segments
        ]
        return [self._memory], ChunkCopy(chunk, tuple(segments))

    def let_go(self) -> None:
        """Give the memory back."""
        self._memory = self._known = None
        self._copies = {}


def aligned(offset: int) -> int:
    """Where the memory of a copy to ``offset`` of a slot begins."""
    return offset // ALIGN_BYTES * ALIGN_BYTES
