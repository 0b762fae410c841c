"""When things happen where training happens: wall time on a CPU, events of the device's streams elsewhere."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

Moment = Any
"""A moment; what it is made of is the clock's own business. None where no moment can be taken."""


class Clock(Protocol):
    """Takes moments without waiting, and knows later how far they are apart."""

    device: torch.device
    on_device: bool
    """Whether work is queued, so that the host may be ahead of the moments it takes."""

    def mark(self) -> Moment:
        """The moment at which all work that was given to the current stream so far is done."""

    def secs(self, begin: Moment, end: Moment) -> float | None:
        """Seconds from ``begin`` to ``end``; None while one of them lies ahead."""

    def provide(self, moments: int) -> None:
        """Before training: so many moments more will be held at a time."""


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
        """See Clock. None while the stream is captured into a graph, which an event would spoil."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = self.events.take()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def secs(self, begin: Moment, end: Moment) -> float | None:
        # Asked for before both have come, the device answers with an error.
        if begin is None or end is None or not (begin.query() and end.query()):
            return None
        return float(begin.secs_until(end))

    def provide(self, moments: int) -> None:
        self.events.grow(moments, torch.cuda.current_stream(self.device))


def make_clock(device: torch.device) -> Clock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()


class DeviceEvent:
    """A place in a stream's work, from ``record`` on. It goes back to its pool when nobody holds it any more."""

    __slots__ = ("_pool", "raw")

    def __init__(self, raw: torch.cuda.Event, pool: list[torch.cuda.Event]) -> None:
        self.raw = raw
        """What a stream can wait for."""
        self._pool = pool

    def __del__(self) -> None:
        # Whoever waits for it on the device does so for what was recorded when the wait was enqueued.
        self._pool.append(self.raw)

    def record(self, stream: torch.cuda.Stream) -> None:
        """Stand behind all that ``stream`` has by now."""
        self.raw.record(stream)

    def query(self) -> bool:
        """Whether the device has come to it."""
        return bool(self.raw.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Sleep until the device has come to it: cores are for training."""
        self.raw.synchronize()

    def secs_until(self, end: DeviceEvent) -> float:
        """Seconds to ``end``; an error unless the device has come to both."""
        return float(self.raw.elapsed_time(end.raw)) / 1e3


class EventPool:
    """Events that any thread takes, made before training and used again: making one may wait for the whole device."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def grow(self, number: int, stream: torch.cuda.Stream) -> None:
        """Have ``number`` events more; they are recorded once on ``stream``, as torch makes them only then."""
        for _ in range(number):
            event = _make()
            event.record(stream)
            self._free.append(event)

    def take(self) -> DeviceEvent:
        """One that nobody holds, or a new one where the pool was made too small."""
        try:
            raw = self._free.pop()  # one step to other threads, as ``append`` is
        except IndexError:
            raw = _make()
        return DeviceEvent(raw, self._free)


def _make() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
