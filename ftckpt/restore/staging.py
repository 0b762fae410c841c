"""Bytes of the host on their way to a device: a thread reads the next ones while a copy engine takes the last ones.

Memory that is not pinned the driver would copy once more by itself, one thread at a time: a small part of what the
link gives. ``PinnedCache`` allocates it before the first read, and frees it after the last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from ftckpt.capture.driver import BatchCopy, Call, batch_copy, separate_stream
from ftckpt.events import log
from ftckpt.host_memory import pinned_memory
from ftckpt.restore.exchange import MESSAGE_BYTES, Strip
from ftckpt.store.landings import scratch

_MOST = 2
"""Memories of a thread: one is read into while the other is taken. Mostly one will do, as devices take faster."""


class _Memory:
    """Pinned memory, and where on the stream the last copy from it stands."""

    def __init__(self, nbytes: int) -> None:
        self.data = pinned_memory(nbytes)
        self.is_pinned = self.data.is_pinned()
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
        self._stream: torch.cuda.Stream | None = None
        self._copy_all: BatchCopy | None = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            current = torch.cuda.current_stream()
            # The driver accepts batches on no default stream.
            self._stream, self._copy_all = separate_stream(current.device), batch_copy()
            self._stream.wait_stream(current)
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
                    self._local.memories[-1].taken = event

    def settle(self) -> None:
        """Everything that was sent has come. Threads that have sent are over, or send no more."""
        if self._stream is None:
            return
        self._stream.synchronize()
        self._local = _ThreadMemories()

    def _copy(self, copies: Iterable[tuple[Strip, Strip]]) -> None:
        batches = self._copy_all is not None and self._local.memories[-1].is_pinned
        runs: list[tuple[Strip, Strip]] = []
        for target, source in copies:
            if batches and target.is_run and source.is_run and is_on_device(target.memory):
                runs.append((target, source))
            else:
                copy_later(target.view, source.view)
        if runs and not self._call(runs):
            for target, source in runs:
                copy_later(target.view, source.view)

    def _call(self, runs: list[tuple[Strip, Strip]]) -> bool:
        """Whether the driver accepts these copies as one call."""
        copy_all, stream = self._copy_all, self._stream
        if copy_all is None or stream is None:  # another thread's call was refused
            return False
        words = np.array([[target.address, source.address, target.nbytes] for target, source in runs], np.uint64)
        targets, sources, sizes = words.T.copy()  # the driver reads them during the call
        call = Call(targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(runs))
        code = copy_all(call, stream.cuda_stream)
        if code:
            self._copy_all = None
            log.warning("ftckpt: driver refuses many copies per call (error %d): they go one by one, slower", code)
        return not code


class PinnedCache:
    """Pinned memory for a ``Staging`` on ``device``, in the cache of torch: a thread allocates it, another frees it.

    To free pinned memory a driver may wait for all work of the device, with a lock that launches need. So nothing of
    training may run before ``wait`` returns: it could wait for another rank that waits for a launch of this one.

    Args:
        nbytes: to be read; 0 where nothing is.
        threads: of the reading.
    """

    def __init__(self, device: torch.device, nbytes: int, threads: int) -> None:
        self._device = device
        self._thread: threading.Thread | None = None
        number = min(_MOST * threads, -(-nbytes // MESSAGE_BYTES))
        if number:
            # All of them at the same time: a block that is freed is the next one's.
            self._start(lambda: [pinned_memory(MESSAGE_BYTES) for _ in range(number)])

    def wait(self) -> None:
        """Until the memory is there, or, after ``free``, is freed."""
        if self._thread is not None:
            self._thread.join()

    def free(self) -> None:
        """Free it, and whatever else of pinned memory nobody uses; ``Staging`` has settled."""
        self.wait()
        if (empty := getattr(torch._C, "_host_emptyCache", None)) is not None:
            self._start(empty)

    def _start(self, action: Callable[[], object]) -> None:
        def run() -> None:
            # It is only slower without.
            with suppress(RuntimeError), torch.cuda.device(self._device):
                action()

        if self._device.type == "cuda":
            self._thread = threading.Thread(target=run, name="ftckpt-pinned", daemon=True)
            self._thread.start()


def is_on_device(memory: torch.Tensor) -> bool:
    """A module-level function for tests, as ``copy_later``."""
    return memory.is_cuda


def copy_later(target: torch.Tensor, source: torch.Tensor) -> None:
    """Enqueue it on the current stream; a module-level function for tests, whose devices are not real."""
    target.copy_(source, non_blocking=True)
