"""Pinned staging buffers between host and device: a thread reads into one while a copy engine empties another.

From unpinned memory the driver would copy through its own buffer, one thread at a time, at a fraction of the link's
bandwidth. ``pin_ahead`` fills torch's cache of pinned memory before the first read, ``free_pinned`` frees it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from ftckpt.capture.driver import BatchCopy, Call, batch_copy, separate_stream
from ftckpt.host_memory import pinned_memory
from ftckpt.memory.destinations import scratch
from ftckpt.restore.redistribute import MESSAGE_BYTES, Strip

_MOST = 2
"""Buffers of a thread: one is filled while the other is copied."""

PINNED_SECS = 30.0
"""Deadline for a thread that allocates or frees pinned memory: a hung device must not hang a restore."""

_pinning = threading.Lock()
"""Held while pinned memory is allocated or freed."""


class _Memory:
    """A pinned buffer, and the event of the last copy from it."""

    def __init__(self, nbytes: int) -> None:
        self.data = pinned_memory(nbytes)
        self.taken: torch.cuda.Event | None = None


class StagingBuffers:
    """The staging buffers of one read. The thread that creates them also calls ``settle``; copies are ordered after
    the work on its current stream. Each reading thread repeats: get ``memory``, fill it, and ``send`` parts of it."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._copy_all: BatchCopy | None = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            current = torch.cuda.current_stream()
            # The driver accepts batches on no default stream.
            self._stream, self._copy_all = separate_stream(current.device), batch_copy()
            self._stream.wait_stream(current)
            if _pinning.acquire(timeout=PINNED_SECS):  # wait for ``pin_ahead``; after the deadline allocate anyway
                _pinning.release()
        # Referenced until ``settle``: a thread may end before its copies, and torch, which does not see the driver's
        # batches, would reuse freed buffers.
        self._memories: dict[int, list[_Memory]] = {}

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run this thread's copies on the common stream, also those made without ``send``."""
        if self._stream is None:
            yield
            return
        # Both: a thread starts on device 0, and leaving the stream context alone would create a CUDA context there.
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            yield

    def memory(self, nbytes: int) -> torch.Tensor:
        """A 1-D uint8 buffer, this thread's until its next call; waits for earlier copies from the buffer."""
        if self._stream is None:
            return torch.frombuffer(scratch(nbytes, "staging"), dtype=torch.uint8)
        memories = self._memories.setdefault(threading.get_ident(), [])
        with self.on_stream():
            memory = memories.pop(0) if len(memories) == _MOST else _Memory(nbytes)
            if memory.taken is not None:
                memory.taken.synchronize()
            memories.append(memory if memory.data.numel() >= nbytes else _Memory(nbytes))
            if not memories[-1].data.is_pinned():  # the limit of locked memory is reached
                self._copy_all = None
        return memories[-1].data[:nbytes]

    def send(self, copies: Iterable[tuple[Strip, Strip]]) -> None:
        """Copy asynchronously from ``memory``, by pairs of a target and a source. Runs of bytes are one call of the
        driver, in any order."""
        with self.on_stream():
            try:
                self._copy(copies)
            finally:  # copies enqueued before an error are in flight
                if self._stream is not None:
                    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    event.record(self._stream)
                    self._memories[threading.get_ident()][-1].taken = event

    def settle(self) -> None:
        """Wait for all copies. Called after the last ``send`` of any thread."""
        if self._stream is None:
            return
        self._stream.synchronize()
        self._memories.clear()

    def _copy(self, copies: Iterable[tuple[Strip, Strip]]) -> None:
        copy_all, runs = self._copy_all, list[tuple[Strip, Strip]]()
        for target, source in copies:
            if copy_all is not None and target.is_run and source.is_run and not target.memory.is_cpu:
                runs.append((target, source))
            else:
                copy_later(target.view, source.view)
        if copy_all is None or self._stream is None or not runs:
            return
        words = [[to.memory.data_ptr() + to.begin, of.memory.data_ptr() + of.begin, to.nbytes] for to, of in runs]
        arrays = np.array(words, np.uint64).T.copy()  # the driver reads them during the call
        targets, sources, sizes = (row.ctypes.data for row in arrays)
        call = Call(targets, sources, sizes, len(runs))
        if copy_all(call, self._stream.cuda_stream):  # refused
            self._copy_all = None
            self._copy(runs)


def pin_ahead(nbytes: int, threads: int) -> threading.Thread:
    """Allocate in torch's cache the buffers that ``threads`` need to read ``nbytes``. ``StagingBuffers`` waits."""
    number = min(_MOST * threads, -(-nbytes // MESSAGE_BYTES))
    # All are referenced at the same time: a freed one would be returned again.
    return _beside(lambda: [pinned_memory(MESSAGE_BYTES) for _ in range(number)])


def free_pinned() -> threading.Thread:
    """Free unused pinned memory; ``join`` the thread before training starts. The driver may wait for all work of the
    device with a lock that launches need, while kernels wait for those that another rank has yet to launch."""
    return _beside(getattr(torch._C, "_host_emptyCache", lambda: None))


def _beside(action: Callable[[], object]) -> threading.Thread:
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def run() -> None:
        with _pinning, suppress(RuntimeError), torch.cuda.device(device):  # an optimization only
            action()

    thread = threading.Thread(target=run if device is not None else None, name="ftckpt-pinned", daemon=True)
    thread.start()
    return thread


def copy_later(target: torch.Tensor, source: torch.Tensor) -> None:
    """Enqueue a copy on the current stream; a module-level function that tests with simulated devices replace."""
    target.copy_(source, non_blocking=True)
