"""Bytes of the host on their way to a device: a thread reads the next ones while a copy engine takes the last ones.

Memory that is not pinned the driver would copy once more by itself, one thread at a time: a small part of what the
link gives. ``pin_ahead`` has it in torch's cache before the first read, ``free_pinned`` frees it.
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
"""Memories of a thread: one is read into while the other is taken."""

PINNED_SECS = 30.0
"""For a thread that allocates or frees pinned memory: a device that hangs must not hang a restore."""

_pinning = threading.Lock()
"""Held while pinned memory is allocated or freed."""


class _Memory:
    """Pinned memory, and where on the stream the last copy from it stands."""

    def __init__(self, nbytes: int) -> None:
        self.data = pinned_memory(nbytes)
        self.taken: torch.cuda.Event | None = None


class StagingBuffers:
    """For the threads of one reading; made by the thread on whose stream the copies are to stand, which ``settle``s.

    A thread asks for ``memory``, fills it and sends parts of it by ``send``; it may have another then.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._copy_all: BatchCopy | None = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            current = torch.cuda.current_stream()
            # The driver accepts batches on no default stream.
            self._stream, self._copy_all = separate_stream(current.device), batch_copy()
            self._stream.wait_stream(current)
            if _pinning.acquire(timeout=PINNED_SECS):  # else it allocates beside that
                _pinning.release()
        # By thread, which may end before its copies: torch, which knows of none in a call, would lend what is freed.
        self._memories: dict[int, list[_Memory]] = {}

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
        memories = self._memories.setdefault(threading.get_ident(), [])
        with self.on_stream():
            memory = memories.pop(0) if len(memories) == _MOST else _Memory(nbytes)
            if memory.taken is not None:
                memory.taken.synchronize()
            memories.append(memory if memory.data.numel() >= nbytes else _Memory(nbytes))
            if not memories[-1].data.is_pinned():  # no more may be locked
                self._copy_all = None
        return memories[-1].data[:nbytes]

    def send(self, copies: Iterable[tuple[Strip, Strip]]) -> None:
        """Copy from ``memory`` to where it belongs, pairs of a target and a source; returns before the bytes are
        there. Runs of bytes are one call of the driver, in any order."""
        with self.on_stream():
            try:
                self._copy(copies)
            finally:  # what was sent before an error is on its way
                if self._stream is not None:
                    event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    event.record(self._stream)
                    self._memories[threading.get_ident()][-1].taken = event

    def settle(self) -> None:
        """Everything that was sent has come. Threads that have sent are over, or send no more."""
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
    """Allocate what so many threads need to read ``nbytes``, in torch's cache; ``StagingBuffers`` wait for it."""
    number = min(_MOST * threads, -(-nbytes // MESSAGE_BYTES))
    # All at the same time: what is free would be allocated again.
    return _beside(lambda: [pinned_memory(MESSAGE_BYTES) for _ in range(number)])


def free_pinned() -> threading.Thread:
    """Free what of pinned memory nobody uses. Training begins behind ``join``: a driver may wait for all work of its
    device here, with a lock that launches need, and kernels wait for those that another rank has still to launch."""
    return _beside(getattr(torch._C, "_host_emptyCache", lambda: None))


def _beside(action: Callable[[], object]) -> threading.Thread:
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def run() -> None:
        with _pinning, suppress(RuntimeError), torch.cuda.device(device):  # it is only slower without
            action()

    thread = threading.Thread(target=run if device is not None else None, name="ftckpt-pinned", daemon=True)
    thread.start()
    return thread


def copy_later(target: torch.Tensor, source: torch.Tensor) -> None:
    """Enqueue it on the current stream; a module-level function for tests, whose devices are not real."""
    target.copy_(source, non_blocking=True)
