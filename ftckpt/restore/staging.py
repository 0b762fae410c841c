"""Bytes of the host on their way to a device: a thread reads the next ones while a copy engine takes the last ones.

Memory that is not pinned the driver would copy once more by itself, one thread at a time: a small part of what the
link gives. What is pinned here is given back in the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ftckpt.host_memory import pinned_memory
from ftckpt.store.landings import scratch

_MOST = 2
"""Memories of a thread: one is read into while the other is taken. Mostly one will do, as devices take faster."""


class _Memory:
    """Pinned memory, and where on the stream the last copy from it stands."""

    def __init__(self, nbytes: int) -> None:
        self.data = pinned_memory(nbytes)
        self.taken: torch.cuda.Event | None = None

    @property
    def is_free(self) -> bool:
        return self.taken is None or bool(self.taken.query())  # type: ignore[no-untyped-call]


class _ThreadMemories(threading.local):
    """Of one thread, that of the last ``Staging.memory`` at the end."""

    def __init__(self) -> None:
        self.memories: list[_Memory] = []


class Staging:
    """For the threads of one reading; made by the thread on whose stream the copies are to stand, which ``settle``s.

    A thread asks for ``memory``, fills it and sends parts of it by ``send``; it may have another then.
    """

    def __init__(self) -> None:
        has_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.current_stream() if has_device else None
        self._local = _ThreadMemories()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """For a thread that copies to the device without ``send``, too."""
        if self._stream is None:
            yield
            return
        # Both: a thread begins on the first device, and to go back there from a stream alone opens a context on it.
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            yield

    def memory(self, nbytes: int) -> torch.Tensor:
        """1-D uint8, this thread's until it asks again; waits until what was sent from it before has come."""
        if self._stream is None:
            return torch.frombuffer(scratch(nbytes), dtype=torch.uint8)
        memories = self._local.memories
        with self.on_stream():
            free = next((one for one in memories if one.is_free), None)
            if free is None and len(memories) == _MOST:
                free = memories[0]
                assert free.taken is not None, "what was never sent from is free"
                free.taken.synchronize()
            if free is not None:
                memories.remove(free)
            if free is None or free.data.numel() < nbytes:
                free = _Memory(nbytes)
            memories.append(free)
        return free.data[:nbytes]

    def send(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy from ``memory`` to where it belongs, pairs of a target and a source; returns before the bytes are
        there."""
        with self.on_stream():
            try:
                for target, source in copies:
                    copy_later(target, source)
            finally:  # what was sent before an error is on its way
                if self._stream is not None:
                    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    event.record(self._stream)
                    self._local.memories[-1].taken = event

    def settle(self) -> None:
        """Everything that was sent has come. Threads that have sent are over, or send no more."""
        if self._stream is None:
            return
        self._stream.synchronize()
        self._local = _ThreadMemories()
        empty: Callable[[], None] | None = getattr(torch._C, "_host_emptyCache", None)
        if empty is not None:
            with suppress(RuntimeError):  # it is memory that is kept for later, and no harm
                empty()


def copy_later(target: torch.Tensor, source: torch.Tensor) -> None:
    """Enqueue it on the current stream; a module-level function for tests, whose devices are not real."""
    target.copy_(source, non_blocking=True)
