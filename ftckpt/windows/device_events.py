"""Events of a device's streams, made before training and used again: making one may wait for the whole device."""

from __future__ import annotations

import torch


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
    """Events that any thread takes."""

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
