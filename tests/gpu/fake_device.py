"""A device that does nothing until somebody waits, and then runs queued work in the order a test asks for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftckpt.capture import copier, device_copier
from ftckpt.capture.plan import ChunkCopy

PAGE = 4096
SECS = 20.0


class FakeEvent:
    def __init__(self, **_options: Any) -> None:
        self.done = True  # an event that was never recorded holds nobody back

    def record(self, stream: FakeStream) -> None:
        self.done = False
        stream.enqueue(lambda: setattr(self, "done", True))

    def synchronize(self) -> None:
        FakeDevice.now.run(lambda: self.done)


class FakeStream:
    def __init__(self, _device: Any = None) -> None:
        self.queue: deque[tuple[Callable[[], Any], Callable[[], bool]]] = deque()
        FakeDevice.now.streams.append(self)

    def enqueue(self, work: Callable[[], Any], ready: Callable[[], bool] = lambda: True) -> None:
        self.queue.append((work, ready))

    def wait_event(self, event: FakeEvent) -> None:
        self.enqueue(lambda: None, ready=lambda: event.done)

    def synchronize(self) -> None:
        FakeDevice.now.run(lambda: not self.queue)


class FakeDevice:
    """Nothing runs until somebody waits, then the stream named ``first`` runs as far as it may."""

    now: FakeDevice

    def __init__(self) -> None:
        FakeDevice.now = self
        self.lock = threading.RLock()
        self.streams: list[FakeStream] = []
        self.current = threading.local()
        self.compute = FakeStream()
        self.first = self.compute
        self.go = threading.Event()
        self.go.set()
        self.refuse_pinning = False
        self.pinned: dict[int, int] = {}
        self.unpinned_by: set[str] = set()

    def run(self, until: Callable[[], bool]) -> None:
        assert self.go.wait(SECS)
        with self.lock:
            while not until():
                order = sorted(self.streams, key=lambda stream: stream is not self.first)
                ready = next(stream for stream in order if stream.queue and stream.queue[0][1]())
                ready.queue.popleft()[0]()

    def current_stream(self, _device: Any = None) -> FakeStream:
        stream: FakeStream = getattr(self.current, "stream", self.compute)
        return stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.current.stream = stream
        yield
        del self.current.stream

    @contextmanager
    def device(self, _device: Any) -> Iterator[None]:
        yield

    def copy_chunk(
        self, tensors: Any, copy: ChunkCopy, slot: torch.Tensor, at: int = 0, non_blocking: bool = False
    ) -> None:
        """Queued, and refused as a driver does where it touches registered memory and leaves it."""
        for segment in copy.segments:
            begin = slot.data_ptr() + segment.offset - at
            end = begin + segment.nbytes
            touched = [(a, n) for a, n in self.pinned.items() if a < end and begin < a + n]
            assert all(a <= begin and end <= a + n for a, n in touched), "copy across registrations"
        self.current_stream().enqueue(lambda: copier.copy_chunk(tensors, copy, slot, at))

    def register(self, address: int, nbytes: int, _flags: int) -> int:
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
    }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(device_copier, "copy_chunk", made.copy_chunk)
    monkeypatch.setattr(device_copier, "_REGISTER_BYTES", 4 * PAGE)
    return made
