"""Copies from a device on a side stream: bytes, order, the seal, registration.

Tests marked ``gpu`` run on a CUDA or ROCm device. The others replace the device by ``FakeDevice``, which runs
queued work in the worst order that streams and events allow, and pin what no timing can hit for certain.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fake_device import PAGE, SECS, FakeDevice, install

from ftckpt.capture import device_copier
from ftckpt.capture.copier import Flight
from ftckpt.capture.device_copier import DeviceCopier
from ftckpt.capture.plan import ChunkCopy, Segment
from ftckpt.capture.windows import Always

# Asked while tests are collected: later the CPU stand-in may answer for torch.cuda.
HAS_DEVICE = bool(torch.version.cuda or torch.version.hip) and torch.cuda.device_count() > 0
needs_device = pytest.mark.skipif(not HAS_DEVICE, reason="needs a CUDA or ROCm device")
MIB = 1 << 20


def plan(tensors: Sequence[torch.Tensor], chunk_bytes: int, begin: int = PAGE) -> tuple[list[ChunkCopy], int]:
    """Chunks that lay the tensors end to end from file offset ``begin`` on, and the size of the slot."""
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
    return copies, -(-offset // PAGE) * PAGE


def shared_slot(size: int) -> torch.Tensor:
    """Zeros in shared memory, as a slot is."""
    return torch.frombuffer(memoryview(mmap.mmap(-1, size)), dtype=torch.uint8)


def assert_holds(slot: torch.Tensor, copies: Sequence[ChunkCopy], tensors: Sequence[torch.Tensor]) -> None:
    """Every planned byte is there, and no other byte was written."""
    expected = torch.zeros_like(slot)
    for segment in (segment for copy in copies for segment in copy.segments):
        source = tensors[segment.piece].cpu()[segment.start : segment.start + segment.numel]
        expected[segment.offset : segment.offset + segment.nbytes] = source.view(torch.uint8)
    assert torch.equal(slot, expected)


class Landings:
    """A flight and what it said: chunks in order, then whether it arrived."""

    def __init__(self, copies: Sequence[ChunkCopy], slot: torch.Tensor) -> None:
        self.chunks: list[int] = []
        self.arrived = False
        self.flight = Flight(copies, slot, self.chunks.append, self._arrive)

    def _arrive(self) -> None:
        self.arrived = True

    def wait(self) -> None:
        assert self.flight.wait(SECS), "the flight did not end"


@contextmanager
def prepared(slots: Sequence[torch.Tensor], device: torch.device) -> Iterator[DeviceCopier]:
    """A copier whose registration is through, one way or the other."""
    copier = DeviceCopier(device)
    copier.prepare(slots)
    deadline = time.monotonic() + SECS
    while not copier.register_secs and time.monotonic() < deadline:
        time.sleep(0.001)
    try:
        yield copier
    finally:
        copier.close()


# On a device.


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def state(device: torch.device) -> list[torch.Tensor]:
    """Large and small tensors of several types on the device, and one in host memory (Adam's ``step``)."""
    numbers = [(18 * MIB, torch.float32), (1001, torch.bfloat16), (7, torch.uint8), (3 * MIB, torch.bfloat16)]
    tensors = [torch.randint(0, 100, (n,), device=device).to(dtype) for n, dtype in numbers]
    return [*tensors, torch.tensor([41.0])]


def host_pages(slot: torch.Tensor) -> int:
    """What the driver says of registering the slot's first page: 0, or an error; undone at once."""
    code = int(torch.cuda.cudart().cudaHostRegister(slot.data_ptr(), PAGE, 0))
    if code == 0:
        torch.cuda.cudart().cudaHostUnregister(slot.data_ptr())
    return code


def delay(stream: Any, secs: float) -> None:
    """Keep a stream busy for about ``secs``; how long a cycle is differs from device to device."""
    cycles, millis = 1_000_000, 0.0
    with torch.cuda.stream(stream):
        for _ in range(2):  # the first loads the kernel
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
            millis = begin.elapsed_time(end)
        torch.cuda._sleep(int(cycles * secs * 1e3 / millis))


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("registered", [True, False])
def test_bytes_arrive_exactly(registered: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tensor alone is longer than one registration, so some copies touch two of them."""
    tensors = state(device)
    copies, size = plan(tensors, 16 * MIB)
    slot = shared_slot(size)
    if not registered:
        monkeypatch.setattr(device_copier, "_pin", lambda address, nbytes: False)
    with prepared([slot], device) as copier:
        seen = Landings(copies, slot)
        copier.start(tensors, seen.flight, Always())
        seen.wait()
        assert seen.flight.error is None
        assert (copier._staging is None) == registered
    assert seen.arrived
    assert seen.chunks == [copy.chunk for copy in copies]
    assert_holds(slot, copies, tensors)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("registered", [True, False])
def test_copy_now_returns_with_the_bytes(
    registered: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = state(device)
    copies, size = plan(tensors, 16 * MIB)
    slot = shared_slot(size)
    if not registered:
        monkeypatch.setattr(device_copier, "_pin", lambda address, nbytes: False)
    with prepared([slot], device) as copier:
        delay(torch.cuda.current_stream(), 0.1)
        tensors[1].fill_(3)
        copier.copy_now(tensors, copies, slot)
        snapshot = slot.clone()
    assert_holds(snapshot, copies, tensors)


@pytest.mark.gpu
@needs_device
def test_seal_waits_for_the_device(device: torch.device) -> None:
    tensors = state(device)
    copies, size = plan(tensors, 16 * MIB)
    slot = shared_slot(size)
    with prepared([slot], device) as copier:
        seen = Landings(copies, slot)
        delay(copier._stream, 0.3)
        copier.start(tensors, seen.flight, Always())
        assert seen.flight.submitted.wait(SECS)
        assert not seen.flight.ended
        assert not seen.chunks
        seen.wait()
    assert seen.arrived
    assert_holds(slot, copies, tensors)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("fenced", [True, False])
def test_fence_holds_back_writes_on_the_device(fenced: bool, device: torch.device) -> None:
    """The host runs ahead of a slow copy. Without the fence the write comes first, which shows it can."""
    tensors = [torch.empty(8 * MIB, device=device).fill_(1)]  # loads the kernel, which waits for the device
    copies, size = plan(tensors, 16 * MIB)
    slot = shared_slot(size)
    with prepared([slot], device) as copier:
        torch.cuda.synchronize()
        seen = Landings(copies, slot)
        delay(copier._stream, 0.5)
        copier.start(tensors, seen.flight, Always())
        assert seen.flight.submitted.wait(SECS)
        begin = time.perf_counter()
        if fenced:
            assert copier.fence(seen.flight, SECS)
        tensors[0].fill_(2)
        assert time.perf_counter() - begin < 0.1, "the host waited for the device"
        assert not seen.flight.ended
        seen.wait()
        torch.cuda.synchronize()
    assert int(tensors[0][0]) == 2
    first = slot[PAGE : PAGE + 4].clone().view(torch.float32)
    assert float(first) == (1.0 if fenced else 2.0)
    if fenced:
        assert_holds(slot, copies, [torch.ones(8 * MIB)])


@pytest.mark.gpu
@needs_device
def test_close_unregisters(device: torch.device) -> None:
    slot = shared_slot(80 * MIB)
    with prepared([slot], device):
        assert host_pages(slot) != 0, "the slot was not registered"
    assert host_pages(slot) == 0
    torch.ones(1, device=device).add_(1)  # no error was left behind for the next kernel


# On a fake device.


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return install(monkeypatch)


def live_state() -> list[torch.Tensor]:
    return [torch.arange(9000, dtype=torch.float32), torch.arange(77, dtype=torch.int64), torch.ones(1)]


@pytest.mark.parametrize("first", ["compute", "side"])
@pytest.mark.parametrize("pinned", [True, False])
def test_snapshot_is_the_boundary_in_any_order(fake: FakeDevice, first: str, pinned: bool) -> None:
    """A write before ``start`` is in the snapshot and one after the fence is not, whoever runs first."""
    fake.refuse_pinning = not pinned
    tensors = live_state()
    copies, size = plan(tensors, 3 * PAGE)
    slot = shared_slot(size)
    with prepared([slot], torch.device("cpu")) as copier:
        fake.first = fake.compute if first == "compute" else copier._stream
        fake.compute.enqueue(lambda: tensors[0].add_(1))
        boundary = [tensors[0] + 1, tensors[1].clone(), tensors[2].clone()]
        seen = Landings(copies, slot)
        if pinned:
            fake.go.clear()  # the device is slow: the host passes the fence long before any byte is copied
        copier.start(tensors, seen.flight, Always())
        assert copier.fence(seen.flight, SECS)
        fake.compute.enqueue(tensors[0].zero_)
        assert seen.arrived is False or not pinned
        fake.go.set()
        seen.wait()
        fake.compute.synchronize()
    assert seen.arrived
    assert not tensors[0].any()
    assert_holds(slot, copies, boundary)


def test_nothing_lands_before_the_device_is_done(fake: FakeDevice) -> None:
    tensors = live_state()
    copies, size = plan(tensors, 3 * PAGE)
    with prepared([shared_slot(size)], torch.device("cpu")) as copier:
        slot = shared_slot(size)
        copier._registered[slot.data_ptr()] = size
        fake.go.clear()
        seen = Landings(copies, slot)
        copier.start(tensors, seen.flight, Always())
        assert seen.flight.submitted.wait(SECS)
        assert not seen.flight.wait(0.05)
        assert not seen.chunks
        fake.go.set()
        seen.wait()
    assert seen.chunks == [copy.chunk for copy in copies]


def test_failed_flight_ends_only_when_the_device_is_at_rest(fake: FakeDevice) -> None:
    """Ended means that nothing writes the slot any more: it is unmapped or written anew after that."""
    tensors = live_state()
    copies, size = plan(tensors, 3 * PAGE)
    slot = shared_slot(size)

    class Failing(Always):
        turns = 0

        def wait_turn(self, nbytes: int, hurry: threading.Event) -> None:
            self.turns += 1
            if self.turns == 3:
                raise ValueError("no third turn")

    with prepared([slot], torch.device("cpu")) as copier:
        fake.go.clear()
        seen = Landings(copies, slot)
        copier.start(tensors, seen.flight, Failing())
        assert not seen.flight.wait(0.05), "ended while two copies were still queued"
        fake.go.set()
        assert not copier.fence(seen.flight, SECS)
        seen.wait()
        assert not copier._stream.queue
    assert isinstance(seen.flight.error, ValueError)
    assert not seen.arrived


def test_fence_gives_up_at_its_deadline(fake: FakeDevice) -> None:
    tensors = live_state()
    copies, size = plan(tensors, 3 * PAGE)
    slot = shared_slot(size)
    leave = threading.Event()

    class Endless(Always):
        def wait_turn(self, nbytes: int, hurry: threading.Event) -> None:
            assert leave.wait(SECS)

    with prepared([slot], torch.device("cpu")) as copier:
        seen = Landings(copies, slot)
        copier.start(tensors, seen.flight, Endless())
        assert not copier.fence(seen.flight, 0.05)
        assert seen.flight.cancel()
        leave.set()
        seen.wait()
    assert len(fake.compute.queue) == 1, "behind the boundary the device was told to wait for nothing"
    assert not slot.any()


def test_registration_is_undone_where_it_was_made(fake: FakeDevice) -> None:
    slot = shared_slot(10 * PAGE)
    with prepared([slot], torch.device("cpu")):
        assert sum(fake.pinned.values()) == slot.numel()
        assert len(fake.pinned) == 3
    assert not fake.pinned
    assert fake.unpinned_by == {"ftckpt-register"}


def test_stuck_flight_keeps_its_pages_registered(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unregistering pages that a device still writes to would be worse than leaving them."""
    tensors = live_state()
    copies, size = plan(tensors, 3 * PAGE)
    slot = shared_slot(size)
    with prepared([slot], torch.device("cpu")) as copier:
        monkeypatch.setattr(copier._worker, "close", lambda: None)
        fake.go.clear()
        seen = Landings(copies, slot)
        copier.start(tensors, seen.flight, Always())
        copier.close()
        assert fake.pinned
        fake.go.set()
        seen.wait()
    assert not fake.pinned
