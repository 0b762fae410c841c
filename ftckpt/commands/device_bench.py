"""A state on the device that is here, a slot in the arena's file system, and a job's own copier between them."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ftckpt.capture.chunks import ChunkCopy, Segment
from ftckpt.capture.copier import Copier, Flight, make_copier
from ftckpt.windows.bubbles import Always, Turn, Windows
from ftckpt.windows.clock import Clock
from ftckpt.windows.node_budget import NoBudget

FLIGHT_SECS = 60.0
"""For a flight to end: a copy that takes longer has come to a stop."""
_MEETING_SECS = 10 * FLIGHT_SECS
_CHUNK_BYTES = 16 << 20


class Bench:
    """A state on the device, a slot in the arena's file system, and the copier between them."""

    def __init__(self, clock: Clock, copier: Copier, slot: torch.Tensor, state: list[torch.Tensor]) -> None:
        self.clock, self.copier, self.slot, self.state = clock, copier, slot, state
        self.copies = _plan(state)
        self.volatile = self.copies[-1:]
        """Of these, what can be taken at a boundary."""
        self.slot_bytes = slot.numel()

    def flight(
        self, windows: Windows | None = None, copies: Sequence[ChunkCopy] | None = None,
        taken: Sequence[ChunkCopy] = (),
    ) -> Flight:  # fmt: skip
        """Begun at this moment, of all ``copies`` unless they are given."""
        copies = self.copies if copies is None else copies
        flight = Flight(copies, self.slot, lambda chunk: None, lambda: None, self.clock.mark(), taken=taken)
        self.copier.start(self.state, flight, windows or Always())
        return flight

    def wait(self, flight: Flight) -> None:
        """Raises TimeoutError, or what the copy failed with."""
        if not flight.wait(FLIGHT_SECS):
            raise TimeoutError(f"copies have not ended after {FLIGHT_SECS:.0f} s")
        if flight.error is not None:
            raise flight.error

    def differing(self, wanted: Sequence[torch.Tensor], copies: Sequence[ChunkCopy] | None = None) -> int:
        """Bytes of the slot that are not those of ``wanted``, host tensors; it is empty for the next flight."""
        differing = sum(
            int((self.slot[s.offset : s.offset + s.nbytes] != bytes_of(wanted[s.piece], s)).sum())
            for copy in (self.copies if copies is None else copies)
            for s in copy.segments
        )
        self.slot.zero_()
        return differing

    def on_host(self) -> list[torch.Tensor]:
        """The state as it is now."""
        return [tensor.cpu().clone() for tensor in self.state]

    def write(self) -> None:
        """As an optimizer does, in place and in the order of the current stream."""
        for tensor in self.state:
            tensor.add_(1)

    def finish(self) -> None:
        """Wait for what the current stream was given, and not for copies, which have a stream of their own."""
        if self.clock.on_device:
            torch.cuda.current_stream(self.clock.device).synchronize()

    def synchronize(self) -> None:
        if self.clock.on_device:
            torch.cuda.synchronize(self.clock.device)


class NoWindow(Always):
    """No window comes before the fence hurries."""

    def __init__(self) -> None:
        self.held = threading.Event()

    def wait_turn(self, nbytes: int, hurry: threading.Event) -> Turn:
        self.held.set()
        hurry.wait(FLIGHT_SECS)
        return Turn()


@contextmanager
def bench_on(arena: Path, clock: Clock, nbytes: int) -> Iterator[Bench]:
    state = [
        torch.randn(nbytes // 8, device=clock.device), torch.randn(nbytes // 8, device=clock.device).bfloat16(),
        torch.arange(nbytes // 32, device=clock.device), torch.ones(3, device=clock.device),
    ]  # fmt: skip
    size = -(-sum(tensor.nbytes + 64 for tensor in state) // mmap.PAGESIZE) * mmap.PAGESIZE
    with tempfile.TemporaryFile(dir=arena) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        slot = torch.frombuffer(memoryview(mmap.mmap(file.fileno(), size)), dtype=torch.uint8)
        copier = make_copier(clock, NoBudget())
        try:
            bench = Bench(clock, copier, slot, state)
            copier.prepare([slot])
            copier.warm_up(state, bench.copies, bench.volatile)
            yield bench
        finally:
            copier.close()


def all_have(mine: bool) -> bool:
    """Whether it is so on every rank. Collective, through host memory: where it is not the device may be full."""
    have = torch.tensor([int(mine)], device="cpu")
    dist.all_reduce(have, dist.ReduceOp.MIN)
    return bool(have.item())


def meet(more_secs: float = 0.0) -> None:
    """Where ranks look together, wait for those that have more to look at.

    One whose look has failed at once would else be at their next collective so early that it gives that up.
    """
    if dist.is_available() and dist.is_initialized():
        with suppress(RuntimeError):  # of a rank that is gone the next collective tells
            dist.monitored_barrier(timeout=timedelta(seconds=_MEETING_SECS + more_secs))


def _plan(state: Sequence[torch.Tensor]) -> list[ChunkCopy]:
    """Tensors end to end, in chunks that cut them at elements."""
    copies: dict[int, list[Segment]] = {}
    offset = 0
    for piece, tensor in enumerate(state):
        item, done = tensor.element_size(), 0
        offset = -(-offset // 64) * 64
        while done < tensor.nbytes:
            chunk = (offset + done) // _CHUNK_BYTES
            nbytes = min(tensor.nbytes - done, (chunk + 1) * _CHUNK_BYTES - offset - done)
            copies.setdefault(chunk, []).append(Segment(piece, done // item, nbytes // item, offset + done, nbytes))
            done += nbytes
        offset += tensor.nbytes
    return [ChunkCopy(chunk, tuple(segments)) for chunk, segments in sorted(copies.items())]


def bytes_of(tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    return tensor.reshape(-1)[segment.start : segment.start + segment.numel].view(torch.uint8)
