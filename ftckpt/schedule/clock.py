"""Clocks of the training device: wall time on a CPU, stream events on a GPU."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

Moment = Any
"""A moment, opaque to all but its clock. None if no moment can be taken."""


class Clock(Protocol):
    """Takes moments without waiting, and measures the time between them later."""

    device: torch.device
    on_device: bool
    """Whether work is queued on a device: the host may be ahead of the moments it takes."""

    def mark(self) -> Moment:
        """The moment at which all work in the current stream so far is done."""

    def secs(self, begin: Moment, end: Moment) -> float | None:
        """Seconds from ``begin`` to ``end``; None until the device has reached both."""

    def provide(self, moments: int) -> None:
        """Allocate that many more moments, before training."""


class HostClock:
    """For a CPU: a moment is now, in ``time.perf_counter`` seconds."""

    device = torch.device("cpu")
    on_device = False

    def mark(self) -> Moment:
        return time.perf_counter()

    def secs(self, begin: Moment, end: Moment) -> float | None:
        return float(end - begin)

    def provide(self, moments: int) -> None: ...


class DeviceClock:
    """For CUDA and ROCm: a moment is a timing event on the current stream."""

    on_device = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events = EventPool()

    def mark(self) -> Moment:
        """See Clock. None while the stream is captured into a graph: an event would invalidate the capture."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = self.events.take()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def secs(self, begin: Moment, end: Moment) -> float | None:
        # elapsed_time fails until the device has reached both.
        if begin is None or end is None or not (begin.query() and end.query()):
            return None
        return float(begin.secs_until(end))

    def provide(self, moments: int) -> None:
        self.events.grow(moments, torch.cuda.current_stream(self.device))


def make_clock(device: torch.device) -> Clock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()


class DeviceEvent:
    """A position in a stream's work, once recorded. It returns to its pool when the last reference is dropped."""

    __slots__ = ("_pool", "raw")

    def __init__(self, raw: torch.cuda.Event, pool: list[torch.cuda.Event]) -> None:
        self.raw = raw
        """The torch event, which a stream can wait for."""
        self._pool = pool

    def __del__(self) -> None:
        # Safe while a stream still waits for it: the wait refers to the record at the time it was enqueued.
        self._pool.append(self.raw)

    def record(self, stream: torch.cuda.Stream) -> None:
        """Mark the end of all work in ``stream`` so far."""
        self.raw.record(stream)

    def query(self) -> bool:
        """Whether the device has reached it."""
        return bool(self.raw.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Wait until the device has reached it; sleeps, to leave the core to training."""
        self.raw.synchronize()

    def secs_until(self, end: DeviceEvent) -> float:
        """Seconds to ``end``; fails unless the device has reached both."""
        return float(self.raw.elapsed_time(end.raw)) / 1e3


class EventPool:
    """Reusable events, created before training: creating one may synchronize the device. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def grow(self, number: int, stream: torch.cuda.Stream) -> None:
        """Create ``number`` more events; records each once on ``stream``, as torch creates them lazily."""
        for _ in range(number):
            event = _make()
            event.record(stream)
            self._free.append(event)

    def take(self) -> DeviceEvent:
        """Take a free event, or a new one if the pool is empty."""
        try:
            raw = self._free.pop()  # atomic, as ``append`` is
        except IndexError:
            raw = _make()
        return DeviceEvent(raw, self._free)


def _make() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
