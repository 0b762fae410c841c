"""Background copies from live tensors into a slot, and the seam that hides where the tensors live."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ftckpt.capture.plan import ChunkCopy
from ftckpt.capture.windows import Windows

Slot = torch.Tensor
"""A slot's file as a 1-D uint8 CPU tensor over the shared mapping."""


class Flight:
    """One snapshot's copies on their way; made by a copier, waited for at the fence.

    ``landed(chunk)`` is called on the copier's thread when the host knows that a chunk's bytes are in the
    slot, ``arrived()`` when all are. Neither is called after ``cancel`` has returned True.
    """

    def __init__(
        self, copies: Sequence[ChunkCopy], slot: Slot, landed: Callable[[int], None], arrived: Callable[[], None]
    ) -> None:
        self.copies = copies
        self.slot = slot
        self._landed = landed
        self._arrived = arrived
        self._cancelled = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.error: BaseException | None = None
        self.hurry = threading.Event()
        """Set when there is no more time to wait for windows."""
        self.copy_secs = 0.0
        self.submitted = threading.Event()
        """Set when the device knows of every copy, so that it can be told to wait for them."""
        self.last_copy: torch.cuda.Event | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing of this flight reads live tensors or writes the slot any more."""
        return self._ended.is_set()

    @property
    def cancelled(self) -> bool:
        """Whether the snapshot was dropped."""
        return self._cancelled

    def wait(self, timeout_secs: float) -> bool:
        """Whether the flight ended within the time."""
        return self._ended.wait(timeout_secs)

    def cancel(self) -> bool:
        """Drop the snapshot; False when it had arrived before."""
        with self._lock:
            if self._ended.is_set() and self.error is None:
                return False
            self._cancelled = True
            self.hurry.set()
            return True

    def chunk_landed(self, chunk: int) -> None:
        """Called by the copier."""
        with self._lock:
            if not self._cancelled:
                self._landed(chunk)

    def end(self, error: BaseException | None = None) -> None:
        """Called by the copier, once, last: seals unless the flight was cancelled or failed."""
        with self._lock:
            self.error = error
            try:
                if error is None and not self._cancelled:
                    self._arrived()
            except Exception as failure:  # noqa: BLE001 - the fence reports it on the training thread
                self.error = failure
            finally:
                self.submitted.set()
                self._ended.set()


class Copier(Protocol):
    """Copies chunks in the background. Calls come from the training thread unless said otherwise."""

    def prepare(self, slots: Sequence[Slot]) -> None:
        """Make the slots fit for copies, in the background where it takes long."""

    def copy_now(self, tensors: Sequence[torch.Tensor], copies: Sequence[ChunkCopy], slot: Slot) -> None:
        """Copy and return when the bytes are in the slot (volatile state at the boundary)."""

    def start(self, tensors: Sequence[torch.Tensor], flight: Flight, windows: Windows) -> None:
        """Begin a flight; ``tensors`` must not change before the fence."""

    def fence(self, flight: Flight, timeout_secs: float) -> bool:
        """Make sure that no later write to the tensors can reach the snapshot; False: drop it."""

    def close(self) -> None:
        """Stop the threads once the flight under way, cancelled by the caller, has ended."""


def make_copier(device: torch.device) -> Copier:
    """The copier for tensors on ``device``."""
    if device.type == "cuda":
        from ftckpt.capture.device_copier import DeviceCopier

        return DeviceCopier(device)
    return HostCopier()


class Worker:
    """One daemon thread that runs flights one after the other."""

    def __init__(self, name: str) -> None:
        self._wake = threading.Condition()
        self._job: Callable[[], None] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job`` on the thread; the previous one must have ended."""
        with self._wake:
            self._job = job
            self._wake.notify()

    def close(self, timeout_secs: float = 10.0) -> None:
        """End the thread; one that is stuck in a copy is left to die with the process."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout_secs)

    def _run(self) -> None:
        while True:
            with self._wake:
                while self._job is None and not self._closed:
                    self._wake.wait()
                job, self._job = self._job, None
            if job is None:
                return
            job()


class HostCopier:
    """For tensors in host memory: one thread copies chunk by chunk."""

    def __init__(self) -> None:
        self._worker = Worker("ftckpt-copy")

    def prepare(self, slots: Sequence[Slot]) -> None:
        """Nothing to do: slots are mapped and pre-faulted."""

    def copy_now(self, tensors: Sequence[torch.Tensor], copies: Sequence[ChunkCopy], slot: Slot) -> None:
        """See Copier."""
        for copy in copies:
            copy_chunk(tensors, copy, slot)

    def start(self, tensors: Sequence[torch.Tensor], flight: Flight, windows: Windows) -> None:
        """See Copier."""
        self._worker.submit(lambda: self._fly(tensors, flight, windows))

    def fence(self, flight: Flight, timeout_secs: float) -> bool:
        """Wait for the copies: host memory has no stream that could wait instead."""
        flight.hurry.set()
        return flight.wait(timeout_secs) and flight.error is None

    def close(self) -> None:
        """See Copier."""
        self._worker.close()

    def _fly(self, tensors: Sequence[torch.Tensor], flight: Flight, windows: Windows) -> None:
        try:
            for copy in flight.copies:
                windows.wait_turn(copy.nbytes, flight.hurry)
                if flight.cancelled:
                    break
                begin = time.perf_counter()
                copy_chunk(tensors, copy, flight.slot)
                flight.copy_secs += time.perf_counter() - begin
                flight.chunk_landed(copy.chunk)
        except Exception as error:  # noqa: BLE001 - the fence reports it on the training thread
            flight.end(error)
        else:
            flight.end()


def copy_chunk(
    tensors: Sequence[torch.Tensor], copy: ChunkCopy, slot: Slot, at: int = 0, non_blocking: bool = False
) -> None:
    """Copy one chunk's segments into ``slot``, a buffer whose first byte is file offset ``at``.

    A module-level function, so that a test can put a slow or failing one in its place.
    """
    for segment in copy.segments:
        source = tensors[segment.piece]
        target = slot[segment.offset - at : segment.offset - at + segment.nbytes].view(source.dtype)
        target.copy_(source[segment.start : segment.start + segment.numel], non_blocking=non_blocking)
