"""A buffer on the device for mutable state of a step boundary, until it is copied to a slot.

A copy to the host at the boundary would make training wait for all work enqueued on the device, at each snapshot. A
copy within the device is enqueued after training's work, and the host does not wait; later work may change the state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ftckpt.capture.chunks import ChunkCopy, Segment
from ftckpt.capture.copier import by_home, copy_together, segments_of
from ftckpt.capture.driver import device_buffer

ALIGN_BYTES = 64
"""Buffer and slot offsets of a byte are equal modulo this, so that a view as any dtype is aligned."""

_MOST_BYTES = 64 << 20
"""Maximum device memory for the buffer: the device belongs to training."""


class VolatileMemory:
    """A device buffer for the first chunks of mutable state, up to 64 MiB; the others are not buffered.

    ``reserve`` is called once, before training. ``take`` enqueues on the current stream; the copies of ``held`` must
    wait for it and complete before the next ``take``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: torch.Tensor | None = None
        self._begin = 0
        self._copies: dict[int, ChunkCopy] = {}
        self._known: tuple[Sequence[torch.Tensor], list[torch.Tensor], list[torch.Tensor]] | None = None

    def reserve(self, tensors: Sequence[torch.Tensor], copies: Sequence[ChunkCopy]) -> None:
        """Allocates the buffer and warms up ``take``. Raises RuntimeError if the device is out of memory."""
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
        """Enqueues a copy of ``tensors`` to the buffer on the current stream."""
        if self._memory is None:
            return
        # A cache: callers pass the same list at each boundary, and slicing small tensors takes longer than copying.
        if self._known is None or self._known[0] is not tensors:
            begin = self._begin
            self._known = tensors, *segments_of(tensors, list(self._copies.values()), self._memory, begin)
        copy_together(self._known[1], self._known[2])

    def holds(self, chunk: int) -> bool:
        """Whether ``take`` copies the device's part of a chunk."""
        return chunk in self._copies

    def held(self, chunk: int) -> tuple[Sequence[torch.Tensor], ChunkCopy]:
        """The buffered bytes of a chunk, and their copy to a slot."""
        assert self._memory is not None
        segments = [
            Segment(0, one.offset - self._begin, one.nbytes, one.offset, one.nbytes)
            for one in self._copies[chunk].segments
        ]
        return [self._memory], ChunkCopy(chunk, tuple(segments))

    def let_go(self) -> None:
        """Releases the buffer."""
        self._memory = self._known = None
        self._copies = {}


def aligned(offset: int) -> int:
    """The slot offset ``offset``, rounded down to the alignment: a buffer for a copy to it starts there."""
    return offset // ALIGN_BYTES * ALIGN_BYTES
