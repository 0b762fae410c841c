"""States, slots, flights and captures for tests of copies from a device."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftckpt.capture import capture as capture_module
from ftckpt.capture.capture import Capture
from ftckpt.capture.chunks import ChunkCopy, Segment
from ftckpt.capture.copier import Flight
from ftckpt.capture.device_copier import DeviceCopier
from ftckpt.memory.control_block import SlotState
from ftckpt.model.snapshot import SnapshotId
from ftckpt.schedule.bubbles import Always, Bubbles, Turn, WindowPlan
from ftckpt.schedule.clock import DeviceClock, Moment
from ftckpt.schedule.iteration import IterationForecast
from tests.gpu.fake_device import PAGE, SECS, FakeDevice

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
    """The part of a tensor that fits into one chunk from an element on; small tensors do not begin with the chunk."""
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
def prepared(slots: Sequence[torch.Tensor], device: torch.device, own_stream: bool = True) -> Iterator[DeviceCopier]:
    """A copier whose registration is through, one way or the other."""
    copier = DeviceCopier(DeviceClock(device), own_stream)
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
    """Starts a flight of these copies; without ``windows`` none waits for its turn."""
    seen = Landings(copies, slot)
    copier.start(tensors, seen.flight, windows or Always())
    return seen


SNAPSHOT = SnapshotId(b"l" * 16, 7)


class Control:
    """The control block of a capture: its calls for the one slot, in order."""

    slots = 1

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.state = SlotState.EMPTY

    def snapshot(self, _slot: int) -> SnapshotId | None:
        return SNAPSHOT if self.state == SlotState.SEALED else None

    def begin(self, _slot: int) -> None:
        self._record("begin", SlotState.WRITING)

    def set_objects(self, _slot: int, nbytes: int, digest: int) -> None: ...

    def seal(self, _slot: int, _snapshot: SnapshotId, hashed: bool) -> None:
        self._record("seal", SlotState.SEALED)

    def void(self, _slot: int) -> None:
        self._record("void", SlotState.EMPTY)

    def _record(self, what: str, state: SlotState) -> None:
        self.calls.append(what)
        self.state = state


class DeviceSnapshots:
    """A capture of ``live_state`` into one slot. ``copier`` is the device's, ``slot`` the bytes in host memory; the
    last ``volatile`` chunks are of volatile state."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        windows: Any = None,
        tensors: Sequence[torch.Tensor] = (),
        settled: bool = True,
        volatile: int = 0,
    ) -> None:
        self.tensors = list(tensors) or live_state()
        self.boundary = [tensor.clone() for tensor in self.tensors]
        self.copies, size = plan(self.tensors, 3 * PAGE, parity=not volatile)
        self.slot, self.control = shared_slot(size), Control()
        arena: Any = SimpleNamespace(
            control=self.control,
            image=SimpleNamespace(
                num_stepped_chunks=len(self.copies) - volatile,
                objects=SimpleNamespace(begin=0, end=PAGE, nbytes=PAGE),
                manifest=None,
            ),
            slot=lambda _slot: memoryview(self.slot.numpy()),
            slot_error=lambda _slot: None,
            checks=None,
            hash_chunk=lambda _slot, _chunk: 0,
        )
        monkeypatch.setattr(capture_module, "chunk_copies", lambda image, parts: self.copies)
        pieces: Any = [
            SimpleNamespace(tensor=tensor, counted=None, fragment=SimpleNamespace(key=str(at)))
            for at, tensor in enumerate(self.tensors)
        ]
        self.copier = DeviceCopier(DeviceClock(CPU), own_stream=True)
        self.capture = Capture(arena, pieces, [], self.copier, windows)
        if settled:
            assert self.copier.pin_now(SECS)
        FakeDevice.now.copies = 0  # of the warm-up
        FakeDevice.now.log.clear()

    def begin(self) -> None:
        self.capture.at_boundary()
        self.capture.begin(SNAPSHOT, (), {})

    def take(self) -> None:
        """One sealed snapshot, with an optimizer's step after its fence."""
        self.boundary = [tensor.clone() for tensor in self.tensors]
        self.begin()
        self.capture.fence(SECS)
        for tensor in self.tensors:
            FakeDevice.now.compute.enqueue(lambda tensor=tensor: tensor.add_(1))
        self.capture.settle(SECS)
        FakeDevice.now.compute.synchronize()
        assert self.control.calls[-1] == "seal"
        self.assert_boundary()

    def assert_boundary(self) -> None:
        assert_holds(self.slot, self.copies, self.boundary, begin=PAGE)  # the first page is that of the objects


KINDS = ("start", "window", "forward", "window", "backward", "window", "forward", "tail", "fence", "optimizer")
SECS_OF = (0.0, 3.0, 2.0, 2.0, 4.0, 0.0, 1.0, 1.0, 0.0, 1.0)
"""Seconds of each place, in units of one copy. The windows take 6."""


class Run:
    """One iteration of training with a snapshot of ``num`` chunks, each of a page."""

    def __init__(self, fake: FakeDevice, copier: DeviceCopier, slot: torch.Tensor, num: int) -> None:
        self.fake, self.copier = fake, copier
        self.tensors = [torch.arange(num * PAGE // 4, dtype=torch.float32)]
        self.boundary = [self.tensors[0].clone()]
        self.copies, _ = plan(self.tensors, PAGE)
        self.slot, self.clock, self.bubbles = slot, DeviceClock(CPU), Bubbles(queued=True)
        self.plan = WindowPlan.of(IterationForecast(KINDS, SECS_OF), PAGE, PAGE)
        base = self.clock.mark()
        self.marks = [base]
        self.bubbles.begin(num * PAGE, self.plan)
        self.bubbles.enter(0, "start", base)
        self.seen = Landings(self.copies, slot, base)
        self.flight = self.seen.flight

    @property
    def planned(self) -> list[int]:
        """Chunks per place, if the iteration goes by the plan."""
        left, chunks = len(self.copies) * PAGE, []
        for place in range(len(KINDS)):
            nbytes = self.plan.allowed(place, left)
            left -= nbytes
            chunks.append(nbytes // PAGE)
        return chunks

    @property
    def done(self) -> list[int]:
        """Chunks that the device copied at each place."""
        chunks, place = [0] * len(KINDS), 0
        for entry in self.fake.log:
            if isinstance(entry, str):
                place = int(entry)
            else:
                chunks[place] += 1
        return chunks

    def start(self) -> None:
        self.copier.start(self.tensors, self.flight, self.bubbles)

    def enter(self, places: range) -> None:
        """The host passes these places, and the device has to do later what each takes."""
        for place in places:
            self.fake.compute_step(str(place))
            mark = self.clock.mark()
            self.marks.append(mark)
            self.bubbles.enter(place, KINDS[place], mark)
            self.fake.compute.enqueue(millis=SECS_OF[place])

    def fence_and_step(self) -> None:
        assert self.copier.fence(self.flight, SECS)
        self.fake.compute.enqueue(self.tensors[0].zero_)

    def finish(self) -> None:
        self.fake.go.set()
        self.seen.wait()
        self.fake.compute.synchronize()
        assert self.seen.arrived
        assert_holds(self.slot, self.copies, self.boundary)
        assert not self.tensors[0].any()


def slot_for(num: int) -> torch.Tensor:
    return shared_slot((num + 1) * PAGE)
