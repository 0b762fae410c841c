"""States, slots and flights for the tests of copies from a device."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ftckpt.capture.chunks import ChunkCopy, Segment
from ftckpt.capture.copier import Flight, TellCopying, tell_nobody
from ftckpt.capture.device_copier import DeviceCopier
from ftckpt.schedule.bubbles import Always, Turn
from ftckpt.schedule.clock import DeviceClock, Moment
from tests.support.fake_device import PAGE, SECS

CPU = torch.device("cpu")


def plan(
    tensors: Sequence[torch.Tensor], chunk_bytes: int, begin: int = PAGE, parity: bool = False
) -> tuple[list[ChunkCopy], int]:
    """Chunks that lay the tensors end to end from file offset ``begin`` on, and the size of the slot.

    ``parity`` adds a chunk that is the XOR of parts of all of them, two of the first one.
    """
    segments: dict[int, list[Segment]] = {}
    offset = begin
    for piece, tensor in enumerate(tensors):
        item, done = tensor.element_size(), 0
        offset = -(-offset // 64) * 64
        while done < tensor.nbytes:
            chunk = (offset + done - begin) // chunk_bytes
            end = begin + (chunk + 1) * chunk_bytes
            nbytes = min(tensor.nbytes - done, end - offset - done)
            segment = Segment(piece, done // item, nbytes // item, offset + done, nbytes)
            segments.setdefault(chunk, []).append(segment)
            done += nbytes
        offset += tensor.nbytes
    copies = [ChunkCopy(chunk, tuple(found)) for chunk, found in sorted(segments.items())]
    offset = -(-offset // PAGE) * PAGE
    if not parity:
        return copies, offset
    strips = [_strip(tensors, piece, 0, offset, chunk_bytes) for piece in range(len(tensors))]
    strips.append(_strip(tensors, 0, tensors[0].numel() // 2, offset, chunk_bytes))
    copies.append(ChunkCopy(len(copies), tuple(strips), xor=True))
    return copies, offset + -(-chunk_bytes // PAGE) * PAGE


def _strip(tensors: Sequence[torch.Tensor], piece: int, start: int, offset: int, nbytes: int) -> Segment:
    """What of a tensor fits into one chunk from an element on; small tensors do not begin with the chunk."""
    item = tensors[piece].element_size()
    offset += 3 * item if tensors[piece].nbytes < PAGE else 0
    numel = min(tensors[piece].numel() - start, nbytes // item)
    return Segment(piece, start, numel, offset, numel * item)


def shared_slot(size: int) -> torch.Tensor:
    """Zeros in shared memory, as a slot is."""
    return torch.frombuffer(memoryview(mmap.mmap(-1, size)), dtype=torch.uint8)


def assert_holds(
    slot: torch.Tensor, copies: Sequence[ChunkCopy], tensors: Sequence[torch.Tensor], begin: int = 0
) -> None:
    """From ``begin`` on every planned byte is there, and no other byte was written."""
    expected = torch.zeros_like(slot)
    for segment in (segment for copy in copies for segment in copy.segments):
        source = tensors[segment.piece].cpu()[segment.start : segment.start + segment.numel]
        expected[segment.offset : segment.offset + segment.nbytes] ^= source.view(torch.uint8)
    assert torch.equal(slot[begin:], expected[begin:])


class Landings:
    """A flight, and whether it has arrived."""

    def __init__(
        self,
        copies: Sequence[ChunkCopy],
        slot: torch.Tensor,
        base: Moment = None,
        arrived: Callable[[], None] | None = None,
        taken: Sequence[ChunkCopy] = (),
    ) -> None:
        self.arrived = False
        self.flight = Flight(copies, slot, arrived or self._arrive, base, taken=taken)

    def _arrive(self) -> None:
        self.arrived = True

    def wait(self) -> None:
        assert self.flight.wait(SECS), "the flight did not end"


class Blocked(Always):
    """The copier's thread is stuck before its first copy."""

    def __init__(self) -> None:
        self.asked, self.leave = threading.Event(), threading.Event()

    def wait_turn(self, sizes: Sequence[int], hurry: threading.Event) -> Turn:
        self.asked.set()
        assert self.leave.wait(SECS)
        return Turn()


@contextmanager
def prepared(
    slots: Sequence[torch.Tensor],
    device: torch.device,
    own_stream: bool = True,
    tell_copying: TellCopying = tell_nobody,
) -> Iterator[DeviceCopier]:
    """A copier whose registration is through, one way or the other."""
    copier = DeviceCopier(DeviceClock(device), own_stream, tell_copying=tell_copying)
    copier.prepare(slots)
    assert copier.pin_now(SECS)
    try:
        yield copier
    finally:
        copier.close()


def live_state() -> list[torch.Tensor]:
    return [torch.arange(9000, dtype=torch.float32), torch.arange(77, dtype=torch.int64), torch.ones(1)]


def laid_out(
    chunk_bytes: int = 3 * PAGE, parity: bool = False
) -> tuple[list[torch.Tensor], list[ChunkCopy], torch.Tensor]:
    """A live state, its plan, and a slot of its size."""
    tensors = live_state()
    copies, size = plan(tensors, chunk_bytes, parity=parity)
    return tensors, copies, shared_slot(size)


def started(
    copier: DeviceCopier,
    tensors: Sequence[torch.Tensor],
    copies: Sequence[ChunkCopy],
    slot: torch.Tensor,
    windows: Any = None,
) -> Landings:
    """A flight of these copies, which has begun; without ``windows`` none waits for its turn."""
    seen = Landings(copies, slot)
    copier.start(tensors, seen.flight, windows or Always())
    return seen
