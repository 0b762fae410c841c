"""A device that does nothing until somebody waits, and then runs queued work in the order a test asks for.

Its clock is logical: it counts the milliseconds that work was said to take, one piece after the other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftckpt.capture import copier, device_copier
from ftckpt.capture import device_copier as graphs
from ftckpt.capture.chunks import ChunkCopy, combine

PAGE = 4096
SECS = 20.0


class Recorded:
    """What one call of ``record`` waits for."""

    done = False
    millis = 0.0


class FakeEvent:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.timing, self.blocking = enable_timing, blocking
        self.recorded: Recorded | None = None

    def record(self, stream: FakeStream) -> None:
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
    """``held`` work is not ready because the device is slow, not because it waits for other work."""

    run: Callable[[], Any]
    ready: Callable[[], bool]
    millis: float
    held: bool


class FakeStream:
    def __init__(self, _device: Any = None) -> None:
        self.queue: deque[Work] = deque()
        self.waits: list[int] = []
        """For each wait that was enqueued: how many copies had been enqueued by then."""
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

    def synchronize(self) -> None:
        FakeDevice.now.check_thread()
        FakeDevice.now.run(lambda: not self.queue)


class FakeDevice:
    """Nothing runs until somebody waits, then the stream named ``first`` runs as far as it may."""

    now: FakeDevice

    def __init__(self) -> None:
        FakeDevice.now = self
        self.lock = threading.RLock()
        self.millis = 0.0
        self.copies = 0
        """Copies of chunks that were enqueued."""
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
        """Threads that said they have no part in captures."""
        self.refuse_pinning = False
        self.pinned: dict[int, int] = {}
        self.unpinned_by: set[str] = set()

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
            begin = slot.data_ptr() + segment.offset - at
            end = begin + segment.nbytes
            touched = [(a, n) for a, n in self.pinned.items() if a < end and begin < a + n]
            assert all(a <= begin and end <= a + n for a, n in touched), "copy across registrations"

        def run() -> None:
            self.log.append(copy.chunk)
            copier.copy_chunk(tensors, copy, slot, at)

        self.copies += 1
        self.current_stream().enqueue(run, millis=1.0)

    def combine(self, *args: Any, **options: Any) -> None:
        """Queued like a copy, of which one follows."""
        self.current_stream().enqueue(lambda: combine(*args, **options), millis=0.1)

    def register(self, address: int, nbytes: int, _flags: int) -> int:
        self.check_thread()
        if self.refuse_pinning:
            return 2
        self.pinned[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        self.unpinned_by.add(threading.current_thread().name)
        del self.pinned[address]
        return 0


def install(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """``FakeDevice`` in the place of torch.cuda, registrations of 16 KiB."""
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
    monkeypatch.setattr(device_copier, "combine", made.combine)
    monkeypatch.setattr(copier, "in_host_memory", lambda tensor: False)
    monkeypatch.setattr(device_copier, "_REGISTER_BYTES", 4 * PAGE)
    monkeypatch.setattr(
        graphs,
        "exchange_capture_mode",
        lambda: lambda _mode: made.beside_captures.add(threading.current_thread().name),
    )
    return made
