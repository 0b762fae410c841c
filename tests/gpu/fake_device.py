"""A device that does nothing until somebody waits, and then runs queued work in the order a test asks for.

Its clock is logical: it counts the milliseconds that each piece of work declares, one after the other.

While training runs (``train``) it is full of kernels that wait for other ranks' kernels. Whatever may wait for such a
device, the first use of a kernel and every allocation, is an error then: on a real one it may never return.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ftckpt.capture import chunks, copier, copy_plan, device_copier, driver, registration, volatile_memory
from ftckpt.capture.chunks import ChunkCopy, Segment, combine
from ftckpt.capture.driver import Call

PAGE = 4096
SECS = 20.0


class Recorded:
    """The place in a stream of one call of ``record``."""

    done = False
    millis = 0.0


class FakeEvent:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.timing, self.blocking = enable_timing, blocking
        self.recorded: Recorded | None = None

    def record(self, stream: FakeStream) -> None:
        if self.recorded is None:
            FakeDevice.now.allocate("an event")  # as torch does: at its first use
        captured = FakeDevice.now.capturing and stream is FakeDevice.now.compute
        assert not captured, "of what is captured the host cannot ask whether it is done"
        recorded = self.recorded = Recorded()

        def reached() -> None:
            recorded.done, recorded.millis = True, FakeDevice.now.millis

        stream.enqueue(reached)

    def query(self) -> bool:
        FakeDevice.now.check_thread()
        return self.recorded is None or self.recorded.done

    def synchronize(self) -> None:
        FakeDevice.now.check_thread()
        recorded = self.recorded
        assert recorded is not None and self.blocking, "whoever waits must sleep, and for something"
        FakeDevice.now.run(lambda: recorded.done)

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.timing and end.timing
        assert self.recorded and self.recorded.done and end.recorded and end.recorded.done
        return end.recorded.millis - self.recorded.millis


@dataclass
class Work:
    """``held``: not ready because the device is slow, not because the work waits for other work."""

    run: Callable[[], Any]
    ready: Callable[[], bool]
    millis: float
    held: bool


class FakeStream:
    device = torch.device("cpu")
    cuda_stream = property(id)

    def __init__(self, _device: Any = None) -> None:
        self.queue: deque[Work] = deque()
        self.waits: list[int] = []
        """For each wait that was enqueued: how many copies had been enqueued by then."""
        FakeDevice.now.allocate("a stream")
        FakeDevice.now.streams.append(self)

    def enqueue(
        self,
        run: Callable[[], Any] = lambda: None,
        ready: Callable[[], bool] = lambda: True,
        millis: float = 0.0,
        held: bool = False,
    ) -> None:
        self.queue.append(Work(run, ready, millis, held))

    def wait_event(self, event: FakeEvent) -> None:
        """A driver passes over a wait for an event that was never recorded; here it is an error."""
        recorded = event.recorded
        assert recorded is not None, "a wait for an event that was not recorded holds nobody back"
        assert not FakeDevice.now.capturing, "a wait for work outside of the graph that is captured"
        self.waits.append(FakeDevice.now.copies)
        self.enqueue(ready=lambda: recorded.done)

    def wait_stream(self, other: FakeStream) -> None:
        event = FakeEvent()
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        FakeDevice.now.check_thread()
        FakeDevice.now.run(lambda: not self.queue)


class FakeDevice:
    """Nothing runs until somebody waits, then the stream named ``first`` runs as far as it may."""

    now: FakeDevice

    def __init__(self) -> None:
        FakeDevice.now = self
        self.training = False
        self.lock = threading.RLock()
        self.millis = 0.0
        self.copies = 0
        """Copies that were enqueued: of chunks, and of tensors by calls that take many."""
        self.calls: list[int] = []
        """The number of copies of each batched call."""
        self.refuse_calls = False
        self.dice = random.Random(3)
        self.log: list[Any] = []
        """Names of steps and numbers of chunks in the order in which the device ran them."""
        self.streams: list[FakeStream] = []
        self.current = threading.local()
        self.compute = FakeStream()
        self.first = self.compute
        self.go = threading.Event()
        self.go.set()
        self.capturing = False
        """Whether the training thread's stream is captured into a graph."""
        self.beside_captures: set[str] = set()
        """Threads that declared that they have no part in captures."""
        self.refuse_pinning = False
        self.pinned: dict[int, int] = {}
        self.unpinned_by: set[str] = set()
        self.buffers: list[torch.Tensor] = []
        """Memory of the device."""
        self.staging: list[torch.Tensor] = []
        """Pinned memory of the host."""
        self.kernels: set[tuple[Any, ...]] = set()
        """Kernels that are loaded."""

    @contextmanager
    def train(self) -> Iterator[None]:
        """Training runs, and nothing may wait for it."""
        self.training = True
        try:
            yield
        finally:
            self.training = False

    def allocate(self, what: str) -> None:
        """Raises while training runs."""
        if self.training:
            raise RuntimeError(f"{what} is allocated while training runs")

    def use(self, kernels: Iterable[tuple[Any, ...]]) -> None:
        """Launch kernels, which are loaded at their first use."""
        for kernel in kernels:
            if self.training and kernel not in self.kernels:
                raise RuntimeError(f"the kernel {kernel} is loaded while training runs")
            self.kernels.add(kernel)

    @property
    def side(self) -> FakeStream:
        """The stream that was made last: the copier's own where it has one."""
        return self.streams[-1]

    def run(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECS
        while True:
            assert self.go.wait(SECS)
            with self.lock:
                if until():
                    return
                if self._step():
                    continue
                waiting = [work.held for stream in self.streams for work in list(stream.queue)[:1]]
            assert any(waiting), "the streams wait for each other"
            if time.monotonic() > deadline:
                raise RuntimeError("the device is stuck")
            time.sleep(0.001)

    def advance(self) -> None:
        """Run all that is ready."""
        with self.lock:
            while self._step():
                pass

    def _step(self) -> bool:
        for stream in sorted(self.streams, key=lambda stream: stream is not self.first):
            if stream.queue and stream.queue[0].ready():
                work = stream.queue.popleft()
                self.millis += work.millis
                work.run()
                return True
        return False

    def hold(self, stream: FakeStream) -> threading.Event:
        """``stream`` gets no further until the event is set."""
        release = threading.Event()
        stream.enqueue(ready=release.is_set, held=True)
        return release

    def compute_step(self, name: Any, millis: float = 0.0) -> None:
        self.compute.enqueue(lambda: self.log.append(name), millis=millis)

    def check_thread(self) -> None:
        """A thread whose current device is another one would open a context there."""
        inside = getattr(self.current, "inside", 0) or not threading.current_thread().name.startswith("ftckpt")
        assert inside, "no current device was set"

    def is_capturing(self) -> bool:
        return self.capturing and self.current_stream() is self.compute

    def current_stream(self, _device: Any = None) -> FakeStream:
        stream: FakeStream = getattr(self.current, "stream", self.compute)
        return stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.current.stream = stream
        try:
            yield
        finally:
            del self.current.stream

    @contextmanager
    def device(self, _device: Any) -> Iterator[None]:
        self.current.inside = getattr(self.current, "inside", 0) + 1
        try:
            yield
        finally:
            self.current.inside -= 1

    def copy_chunk(
        self, tensors: Any, copy: ChunkCopy, slot: torch.Tensor, at: int = 0, non_blocking: bool = False
    ) -> None:
        """Queued, and refused as a driver does where it touches registered memory and leaves it."""
        for segment in copy.segments:
            self._require_one_registration(slot.data_ptr() + segment.offset - at, segment.nbytes)
        to_device = any(slot.data_ptr() == buffer.data_ptr() for buffer in self.buffers)
        self.use([("copy", "to the device" if to_device else "to the host")])

        def run() -> None:
            self.log.append(copy.chunk)
            copier.copy_chunk(tensors, copy, slot, at)

        self.copies += 1
        self.current_stream().enqueue(run, millis=1.0)

    def _require_one_registration(self, begin: int, nbytes: int) -> bool:
        """Whether the bytes are pinned, by one registration."""
        touched = [(a, n) for a, n in self.pinned.items() if a < begin + nbytes and begin < a + n]
        assert all(a <= begin and begin + nbytes <= a + n for a, n in touched), "copy across registrations"
        return bool(touched)

    def copy_batch(self, call: Call, stream: int) -> int:
        """Queued, in any order, and refused where host memory is not pinned. Arrays are read at once, as by a
        driver."""
        (where,) = (one for one in self.streams if id(one) == stream)
        assert where is not self.compute, "the driver accepts no batch on the default stream"
        if self.refuse_calls:
            return 801
        words = [np.ctypeslib.as_array((ctypes.c_uint64 * call.number).from_address(at)) for at in call[:3]]
        copies = list(zip(*(array.tolist() for array in words), strict=True))
        to_device = any(map(self._is_staging, (source for _, source, _ in copies)))
        self.use([("copy", f"many to the {'device' if to_device else 'host'}")])
        for target, source, nbytes in copies:
            assert nbytes, "the driver refuses empty copies"
            host = source if to_device else target
            is_pinned = self._is_staging(host) or self._require_one_registration(host, nbytes)
            assert is_pinned, "copy from or to memory that is not pinned"
        self.dice.shuffle(copies)

        def run() -> None:
            self.log.append("call")
            for target, source, nbytes in copies:
                ctypes.memmove(target, source, nbytes)

        self.calls.append(call.number)
        self.copies += call.number
        where.enqueue(run, millis=1.0)
        return 0

    def _is_staging(self, address: int) -> bool:
        return any(0 <= address - buffer.data_ptr() < buffer.numel() for buffer in self.staging)

    def combine(  # noqa: PLR0917 - as the real one
        self,
        tensors: Any,
        segments: Iterable[Segment],
        target: torch.Tensor,
        begin: int,
        end: int,
        onto: bool = False,
    ) -> None:
        """Queued like a copy; one copy follows."""
        segments = list(segments)
        if not onto:
            self.use([("zero", _kind(target[: end - begin]))])
        for segment in segments:
            live = tensors[segment.piece][segment.start : segment.start + segment.numel]
            place = target[segment.offset - begin : segment.offset - begin + segment.nbytes]
            self.use([("xor", _kind(live, place))])
        self.current_stream().enqueue(lambda: combine(tensors, segments, target, begin, end, onto), millis=0.1)

    def copy_together(self, places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Queued."""
        if places:
            self.use([("copy", "within the device")])
            self.current_stream().enqueue(lambda: copier.copy_together(places, sources), millis=0.1)

    def device_buffer(self, nbytes: int, _device: torch.device) -> torch.Tensor:
        self.allocate("device memory")
        self.buffers.append(torch.empty(nbytes, dtype=torch.uint8))
        return self.buffers[-1]

    def pinned_memory(self, nbytes: int) -> torch.Tensor:
        self.allocate("pinned memory")
        self.staging.append(torch.empty(nbytes, dtype=torch.uint8))
        return self.staging[-1]

    def register(self, address: int, nbytes: int, _flags: int) -> int:
        self.check_thread()
        if self.refuse_pinning:
            return 2
        assert all(pages_present(address, nbytes)), "the driver faults pages in under its lock"
        self.pinned[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        self.unpinned_by.add(threading.current_thread().name)
        del self.pinned[address]
        return 0


def pages_present(address: int, nbytes: int) -> list[bool]:
    """Whether each page in a range of this process's memory is present; the kernel has 8 bytes for each."""
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(address // PAGE * 8)
        entries = np.frombuffer(pagemap.read(-(-nbytes // PAGE) * 8), np.uint64)
    return [bool(entry >> np.uint64(63)) for entry in entries]


def _kind(*operands: torch.Tensor) -> tuple[int, bool]:
    """Torch has a kernel for each width up to which all addresses are aligned, of words and of bytes."""
    width = next(width for width in (16, 8, 4, 2, 1) if all(data.data_ptr() % width == 0 for data in operands))
    return width, all(chunks._in_words(data.view(torch.uint8)) for data in operands)


def install(monkeypatch: pytest.MonkeyPatch, batches: bool = False) -> FakeDevice:
    """Replaces torch.cuda by ``FakeDevice``, registrations of 16 KiB; ``batches``: its calls take many copies."""
    made = FakeDevice()
    runtime = SimpleNamespace(cudaHostRegister=made.register, cudaHostUnregister=made.unregister)
    replaced = {
        "Stream": FakeStream, "Event": FakeEvent, "stream": made.stream, "device": made.device,
        "current_stream": made.current_stream, "cudart": lambda: runtime,
        "is_current_stream_capturing": made.is_capturing,
    }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(device_copier, "copy_chunk", made.copy_chunk)
    for name in ("combine", "device_buffer", "pinned_memory"):
        monkeypatch.setattr(device_copier, name, getattr(made, name))
    for module in (copy_plan, volatile_memory):
        for name in ("copy_together", "device_buffer"):
            monkeypatch.setattr(module, name, getattr(made, name))
    monkeypatch.setattr(device_copier, "batch_copy", lambda: made.copy_batch if batches else None)
    monkeypatch.setattr(copier, "in_host_memory", lambda tensor: False)
    for module in (copy_plan, device_copier, registration):
        monkeypatch.setattr(module, "PIECE_BYTES", 4 * PAGE)
    monkeypatch.setattr(
        driver,
        "exchange_capture_mode",
        lambda: lambda _mode: made.beside_captures.add(threading.current_thread().name),
    )
    return made
