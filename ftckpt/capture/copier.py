"""Background copies from live tensors into a slot: the interface of copiers, and the copier for host memory."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Protocol

import torch

from ftckpt.capture.affinity import pin
from ftckpt.capture.chunks import ChunkCopy, combine, xor_parts
from ftckpt.capture.registration import Slot, touch
from ftckpt.errors import CaptureError
from ftckpt.host_memory import host_memory
from ftckpt.idle_cores import has_idle_core
from ftckpt.schedule.bubbles import Windows
from ftckpt.schedule.clock import DeviceEvent, HostClock, Moment

_POLL_SECS = 0.005
"""Pause between two polls for an idle core."""

_PATIENCE = 10
"""Maximum number of such polls per snapshot: copies left at the fence delay training."""

_JOIN_SECS = 10.0
"""Deadline for joining a thread."""

Cores = Set[int] | None
"""Cores for background threads; None: any core."""

TellCopying = Callable[[bool], None]
"""Called when copies start and end, with whether any is running."""


def tell_nobody(_copying: bool) -> None:
    """Ignores the notification."""


class Worker:
    """One daemon thread, optionally bound to cores, that runs jobs in order, all within ``context``.

    ``yields``: the thread does not preempt others (SCHED_BATCH). With fewer cores than threads, ranks would otherwise
    wait at the step boundary for the copies of ranks that have passed it.
    """

    def __init__(
        self, name: str, cores: Cores = None, *, yields: bool = False,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:  # fmt: skip
        self._cores, self._yields, self._context = cores, yields, context
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon: a copy that is stuck in a driver must not prevent the process from exiting.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queues ``job``, which must not raise."""
        self._jobs.put(job)

    def call(self, job: Callable[[], None], timeout_secs: float) -> None:
        """Runs ``job`` on the thread and waits for it.

        Raises:
            CaptureError: it did not finish in time.
            Exception: the job's own error.
        """
        future: Future[None] = Future()

        def run() -> None:
            try:
                job()
                future.set_result(None)
            except Exception as error:  # noqa: BLE001 - raised by the caller
                future.set_exception(error)

        self.submit(run)
        try:
            future.result(timeout_secs)
        except TimeoutError:
            raise CaptureError(f"thread {self._thread.name}: a job did not finish within {timeout_secs} s") from None

    @property
    def waits(self) -> bool:
        """Whether a job is queued behind the running one."""
        return not self._jobs.empty()

    def close(self, timeout_secs: float = _JOIN_SECS) -> bool:
        """Ends the thread; False if it is stuck in a copy, so that it ends with the process."""
        self._jobs.put(None)
        self._thread.join(timeout_secs)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pin(self._cores)
        if self._yields:
            with suppress(OSError):  # the current policy may forbid a change
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        with self._context():
            while (job := self._jobs.get()) is not None:
                job()
                del job  # releases what it references, such as a slot's memory


_XOR_BYTES = 1 << 20
"""Bytes per step of an XOR in host memory: they fit into a core's cache."""

_NO_SLOT = host_memory(0)


class Flight:
    """The copies of one snapshot, executed by a copier and awaited at the fence.

    ``arrived()`` is called on a thread of the copier when all bytes are in the slot, and never after ``cancel`` has
    returned True. ``base`` is the boundary's moment on the copier's clock. ``taken`` are the copies of mutable state,
    already passed to ``Copier.take``.
    """

    def __init__(
        self,
        copies: Sequence[ChunkCopy],
        slot: Slot,
        arrived: Callable[[], None],
        base: Moment = None,
        *,
        taken: Sequence[ChunkCopy] = (),
    ) -> None:
        self.copies = copies
        self.taken = taken
        self.slot = slot
        self.base = base
        self._arrived = arrived
        self._cancelled = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.error: BaseException | None = None
        self.hurry = threading.Event()
        """Set when copies must not wait for windows any more."""
        self.timed: list[tuple[float, float, int]] = []
        """(begin, end, bytes) of each turn's copies, in seconds since ``base``."""
        self.submitted = threading.Event()
        """Set when every copy is complete or enqueued, so that a stream can wait for it."""
        self.last_copy: DeviceEvent | None = None

    @property
    def ended(self) -> bool:
        """Whether this flight has stopped reading live tensors and writing the slot."""
        return self._ended.is_set()

    @property
    def cancelled(self) -> bool:
        """Whether the snapshot was dropped."""
        return self._cancelled

    def wait(self, timeout_secs: float) -> bool:
        """Returns True if the flight ended within the time."""
        return self._ended.wait(timeout_secs)

    def cancel(self) -> bool:
        """Drops the snapshot; False if it is sealed already."""
        with self._lock:
            if self._ended.is_set() and self.error is None:
                return False
            self._cancelled = True
            self.hurry.set()
            return True

    def end(self, error: BaseException | None = None) -> None:
        """Seals the snapshot unless the flight was cancelled or failed; the copier's last call, exactly once."""
        with self._lock:
            self.error = error or self.error
            try:
                if self.error is None and not self._cancelled:
                    self._arrived()
            except Exception as failure:  # noqa: BLE001 - the fence reports it on the training thread
                self.error = failure
            finally:
                self.slot = _NO_SLOT  # a flight whose times are still read must not keep the memory mapped
                # Last: a waiting thread may write to the tensors, or unmap the slot, at once.
                self.submitted.set()
                self._ended.set()


class Copier(Protocol):
    """Copies chunks in the background.

    All calls come from the training thread, in this order: ``prepare`` and ``warm_up`` before training; per snapshot
    ``take``, ``start`` and ``fence``; ``stop`` or ``close`` at the end.
    """

    @property
    def in_graph(self) -> bool:
        """Whether training is capturing a device graph now."""

    def prepare(self, slots: Sequence[Slot]) -> None:
        """Prepares the slots for copies, in the background if it takes long."""

    def at_boundary(self) -> None:
        """Must be called at every step boundary."""

    def is_prepared(self, slot: Slot) -> bool:
        """Whether copies to the slot do not delay training."""

    @property
    def takes_fresh_slots(self) -> bool:
        """Whether slots can be used without preparation."""

    def warm_up(
        self, tensors: Sequence[torch.Tensor], copies: Sequence[ChunkCopy], volatile: Sequence[ChunkCopy]
    ) -> None:
        """Allocates and loads everything that copies need; called once, before training.

        Raises:
            CaptureError, RuntimeError: the device is out of memory, or does not respond.
        """

    def take(self, tensors: Sequence[torch.Tensor], copies: Sequence[ChunkCopy], slot: Slot) -> None:
        """Copies mutable state, which is never XORed, as it is now; training may change it from here on.

        No flight may be running. The bytes are in the slot when the next flight ends."""

    def start(self, tensors: Sequence[torch.Tensor], flight: Flight, windows: Windows) -> None:
        """Starts a flight; ``tensors`` must not change before the fence."""

    def fence(self, flight: Flight, timeout_secs: float) -> bool:
        """Ensures that no later write to the tensors reaches the snapshot; False: it must be dropped."""

    def stop(self) -> None:
        """Stops the threads once the current flight, cancelled by the caller, has ended; training may continue."""

    def close(self) -> None:
        """Stops, so that the slots may be unmapped afterwards. Training must be idle or finished."""


class HostCopier:
    """For tensors in host memory: one thread copies chunk by chunk."""

    in_graph = False

    def __init__(self, cores: Cores = None, tell_copying: TellCopying = tell_nobody) -> None:
        self._clock = HostClock()
        self._tell_copying = tell_copying
        self._worker = Worker("ftckpt-copy", cores, yields=True)
        self._at_once: dict[int, tuple[Sequence[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]] = {}

    def prepare(self, slots: Sequence[Slot]) -> None:
        """Touches the slots' pages, so that the kernel clears and maps them before the first copies."""

        def touch_all() -> None:
            # Stops when copies are queued.
            for slot in slots:
                touch(slot, lambda: self._worker.waits)

        self._worker.submit(touch_all)

    def at_boundary(self) -> None: ...

    def is_prepared(self, slot: Slot) -> bool:
        return True

    takes_fresh_slots = True

    def warm_up(
        self, tensors: Sequence[torch.Tensor], copies: Sequence[ChunkCopy], volatile: Sequence[ChunkCopy]
    ) -> None: ...

    def take(self, tensors: Sequence[torch.Tensor], copies: Sequence[ChunkCopy], slot: Slot) -> None:
        """Copies directly to the slot."""
        known = self._at_once.get(slot.data_ptr())
        # A cache: callers pass the same list at each boundary, and slicing small tensors takes longer than copying.
        if known is None or known[0] is not tensors:
            known = self._at_once[slot.data_ptr()] = tensors, *segments_of(tensors, copies, slot)
        copy_together(known[1], known[2])

    def start(self, tensors: Sequence[torch.Tensor], flight: Flight, windows: Windows) -> None:
        self._worker.submit(lambda: self._fly(tensors, flight, windows))

    def fence(self, flight: Flight, timeout_secs: float) -> bool:
        """Waits on the host: host memory has no stream that could wait instead."""
        flight.hurry.set()
        return flight.submitted.wait(timeout_secs) and flight.error is None

    def stop(self) -> None:
        self._at_once.clear()
        self._worker.close()

    def close(self) -> None:
        self.stop()

    def _fly(self, tensors: Sequence[torch.Tensor], flight: Flight, windows: Windows) -> None:
        patience = _PATIENCE
        try:
            for copy in flight.copies:
                windows.wait_turn([copy.nbytes], flight.hurry)
                patience -= self._wait_for_core(flight.hurry, patience)
                # Checked after the wait, during which most drops occur.
                if flight.cancelled:
                    break
                self._copy(tensors, copy, flight)
        except Exception as error:  # noqa: BLE001 - the fence reports it on the training thread
            flight.error = error
        flight.submitted.set()  # before the end: the fence needs no seal
        flight.end()

    @staticmethod
    def _wait_for_core(hurry: threading.Event, patience: int) -> int:
        """Waits for an idle core, for at most ``patience`` polls; returns the number of polls that found none."""
        looks = 0
        while looks < patience and not (hurry.is_set() or has_idle_core()):
            hurry.wait(_POLL_SECS)
            looks += 1
        return looks

    def _copy(self, tensors: Sequence[torch.Tensor], copy: ChunkCopy, flight: Flight) -> None:
        self._tell_copying(True)
        try:
            begin = self._clock.mark()
            copy_chunk(tensors, copy, flight.slot)
            end = self._clock.mark()
        finally:
            self._tell_copying(False)
        base = flight.base if flight.base is not None else begin
        flight.timed.append((begin - base, end - base, copy.nbytes))


def copy_chunk(
    tensors: Sequence[torch.Tensor], copy: ChunkCopy, slot: Slot, at: int = 0, non_blocking: bool = False
) -> None:
    """Copies one chunk's segments into ``slot``, a buffer whose first byte is file offset ``at``.

    An XOR is computed in place, so its segments and the slot must be in host memory. A module-level function, so that
    tests can replace it.
    """
    if copy.xor:
        for part in xor_parts(copy, _XOR_BYTES):
            combine(tensors, part.segments, slot[part.begin - at :], part.begin, part.end)
        return
    for segment in copy.segments:
        source = tensors[segment.piece]
        target = slot[segment.offset - at : segment.offset - at + segment.nbytes].view(source.dtype)
        target.copy_(source[segment.start : segment.start + segment.numel], non_blocking=non_blocking)


def segments_of(
    tensors: Sequence[torch.Tensor], copies: Sequence[ChunkCopy], to: torch.Tensor, at: int = 0
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Destination and source views of segments (not an XOR); the first byte of ``to`` is file offset ``at``."""
    segments = [segment for copy in copies for segment in copy.segments]
    places = [to[one.offset - at : one.offset - at + one.nbytes] for one in segments]
    sources = [tensors[one.piece].detach()[one.start : one.start + one.numel] for one in segments]
    # As bytes: a device copies all tensors of one type with one kernel.
    return places, [source.view(torch.uint8) for source in sources]


def copy_together(places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies many small tensors on one device with few kernels; a module-level function for tests."""
    if places:
        torch._foreach_copy_(places, sources)


def copy_host_state(tensors: Sequence[torch.Tensor], copy: ChunkCopy, slot: Slot) -> ChunkCopy:
    """Copies the segments in host memory (offloaded optimizer) now; returns those left for the device."""
    here, left = by_home(tensors, copy)
    if here.segments:
        copy_chunk(tensors, here, slot)
    return left


def by_home(tensors: Sequence[torch.Tensor], copy: ChunkCopy) -> tuple[ChunkCopy, ChunkCopy]:
    """Splits a chunk's segments into those in host memory and those on the device."""
    here = tuple(segment for segment in copy.segments if in_host_memory(tensors[segment.piece]))
    if not here:
        return ChunkCopy(copy.chunk, (), copy.xor), copy
    left = tuple(segment for segment in copy.segments if not in_host_memory(tensors[segment.piece]))
    return ChunkCopy(copy.chunk, here, copy.xor), ChunkCopy(copy.chunk, left, copy.xor)


def in_host_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor is in host memory; a module-level function for tests with a stand-in device."""
    return tensor.device.type == "cpu"
