"""Background copies from live tensors into a slot, and the seam that hides where the tensors live."""

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
from ftckpt.capture.registration import touch
from ftckpt.errors import CaptureError
from ftckpt.host_memory import host_memory
from ftckpt.idle_cores import has_idle_core
from ftckpt.schedule.bubbles import Windows
from ftckpt.schedule.clock import DeviceEvent, HostClock, Moment

_POLL_SECS = 0.005
"""Between two looks for a core that nobody computes on."""

_PATIENCE = 10
"""Of these looks, all in one snapshot: who waited for the fence would have training wait for all of the copies."""

_JOIN_SECS = 10.0
"""For a thread that ends."""

Cores = Set[int] | None
"""Cores for background threads; None: any core."""

TellCopying = Callable[[bool], None]
"""Called as copies begin and end: whether any is under way."""


def tell_nobody(_copying: bool) -> None:
    """For a copier whose copies nobody makes room for."""


class Worker:
    """One daemon thread, on some cores if they are given, that runs jobs one after the other, all within ``context``.

    ``yields``: it takes no core from a thread that runs at the moment when a job comes. Ranks with fewer cores than
    they have threads would otherwise wait in the boundary for the copies of those that have passed it.
    """

    def __init__(
        self, name: str, cores: Cores = None, *, yields: bool = False,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:  # fmt: skip
        self._cores, self._yields, self._context = cores, yields, context
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon: a copy that is stuck in a driver must not keep a process that ends.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job``, which must not raise, on the thread."""
        self._jobs.put(job)

    def call(self, job: Callable[[], None], timeout_secs: float) -> None:
        """Run ``job`` on the thread and wait for it.

        Raises:
            CaptureError: it has not ended within the time.
            Exception: what it raised.
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
            raise CaptureError(f"{self._thread.name} has not done in {timeout_secs} s what it was told") from None

    @property
    def waits(self) -> bool:
        """True if a job waits for the running one."""
        return not self._jobs.empty()

    def close(self, timeout_secs: float = _JOIN_SECS) -> bool:
        """End the thread; False when it is stuck in a copy, and left to die with the process."""
        self._jobs.put(None)
        self._thread.join(timeout_secs)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pin(self._cores)
        if self._yields:
            with suppress(OSError):  # of a policy that may not be left
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        with self._context():
            while (job := self._jobs.get()) is not None:
                job()
                del job  # and what it holds, such as the memory of a slot


Slot = torch.Tensor
"""A slot's file as a 1-D uint8 CPU tensor over the shared mapping."""

_XOR_BYTES = 1 << 20
"""The XOR in host memory is made of so many bytes at a time, which stay in a core's cache."""

_NO_SLOT = host_memory(0)


class Flight:
    """One snapshot's copies on their way; made by a copier, waited for at the fence.

    ``arrived()`` is called on a thread of the copier when the host knows that all bytes are in the slot, and never
    after ``cancel`` has returned True. ``base`` is the boundary's moment on the copier's clock. ``taken`` are the
    copies of volatile state, for which ``Copier.take`` was called.
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
        """Set when there is no more time to wait for windows."""
        self.timed: list[tuple[float, float, int]] = []
        """(begin, end, bytes) of each turn's copies, in seconds since ``base``."""
        self.submitted = threading.Event()
        """Set when every copy is done, or the device knows of it, so that one of its streams can wait for them."""
        self.last_copy: DeviceEvent | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing of this flight reads live tensors or writes the slot any more."""
        return self._ended.is_set()

    @property
    def cancelled(self) -> bool:
        """True if the snapshot was dropped."""
        return self._cancelled

    def wait(self, timeout_secs: float) -> bool:
        """Returns True if the flight ended within the time."""
        return self._ended.wait(timeout_secs)

    def cancel(self) -> bool:
        """Drop the snapshot; False when it had arrived before."""
        with self._lock:
            # Sealed already: there is nothing left to drop.
            if self._ended.is_set() and self.error is None:
                return False
            self._cancelled = True
            self.hurry.set()
            return True

    def end(self, error: BaseException | None = None) -> None:
        """Called by the copier, once, last: seals unless the flight was cancelled or failed."""
        with self._lock:
            self.error = error or self.error
            try:
                if self.error is None and not self._cancelled:
                    self._arrived()
            except Exception as failure:  # noqa: BLE001 - the fence reports it on the training thread
                self.error = failure
            finally:
                self.slot = _NO_SLOT  # whoever still looks at the times must not keep the memory mapped
                # Last: who waits for these may write to the tensors, or give the slot's memory back, at once.
                self.submitted.set()
                self._ended.set()


class Copier(Protocol):
    """Copies chunks in the background. Calls come from the training thread."""

    @property
    def in_graph(self) -> bool:
        """Whether what training enqueues now is captured, to be replayed later without any call."""

    def prepare(self, slots: Sequence[Slot]) -> None:
        """Make the slots fit for copies, in the background where it takes long."""

    def at_boundary(self) -> None:
        """Training is at a boundary; at each."""

    def is_prepared(self, slot: Slot) -> bool:
        """Whether a snapshot can go to the slot now: until that is prepared copies may stand in training's way."""

    @property
    def takes_fresh_slots(self) -> bool:
        """Whether slots need not be prepared."""

    def warm_up(
        self, tensors: Sequence[torch.Tensor], copies: Sequence[ChunkCopy], volatile: Sequence[ChunkCopy]
    ) -> None:
        """Before training, once: whatever copies will ask for the first time is asked for now.

        Raises:
            CaptureError, RuntimeError: the device has no memory for it, or does not answer.
        """

    def take(self, tensors: Sequence[torch.Tensor], copies: Sequence[ChunkCopy], slot: Slot) -> None:
        """Volatile state, which is never XORed, as it is now: training may change it from here on. No flight is under
        way. It is in the slot when the flight has it landed that begins next."""

    def start(self, tensors: Sequence[torch.Tensor], flight: Flight, windows: Windows) -> None:
        """Begin a flight; ``tensors`` must not change before the fence."""

    def fence(self, flight: Flight, timeout_secs: float) -> bool:
        """Make sure that no later write to the tensors can reach the snapshot; False: drop it."""

    def stop(self) -> None:
        """Stop the threads once the flight under way, cancelled by the caller, has ended; training may go on."""

    def close(self) -> None:
        """As ``stop``, and the slots may be unmapped afterwards. Training stands still, or is over."""


class HostCopier:
    """For tensors in host memory: one thread copies chunk by chunk."""

    in_graph = False

    def __init__(self, cores: Cores = None, tell_copying: TellCopying = tell_nobody) -> None:
        self._clock = HostClock()
        self._tell_copying = tell_copying
        self._worker = Worker("ftckpt-copy", cores, yields=True)
        self._at_once: dict[int, tuple[Sequence[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]] = {}

    def prepare(self, slots: Sequence[Slot]) -> None:
        """Have the kernel clear and map the slots' pages before the first copies need them."""

        def touch_all() -> None:
            # Copies that come meanwhile do without it.
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
        """Straight to the slot: nothing is nearer."""
        known = self._at_once.get(slot.data_ptr())
        # The same at each boundary: what is small takes longer to be found than to be copied.
        if known is None or known[0] is not tensors:
            known = self._at_once[slot.data_ptr()] = tensors, *segments_of(tensors, copies, slot)
        copy_together(known[1], known[2])

    def start(self, tensors: Sequence[torch.Tensor], flight: Flight, windows: Windows) -> None:
        self._worker.submit(lambda: self._fly(tensors, flight, windows))

    def fence(self, flight: Flight, timeout_secs: float) -> bool:
        """Wait for the copies: host memory has no stream that could wait instead."""
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
                # Looked at after the wait, which is where a snapshot is dropped most of the time.
                if flight.cancelled:
                    break
                self._copy(tensors, copy, flight)
        except Exception as error:  # noqa: BLE001 - the fence reports it on the training thread
            flight.error = error
        flight.submitted.set()  # before the end: the fence needs no seal
        flight.end()

    @staticmethod
    def _wait_for_core(hurry: threading.Event, patience: int) -> int:
        """Until one is idle, or so many looks have found none; returns how many have."""
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
    """Copy one chunk's segments into ``slot``, a buffer whose first byte is file offset ``at``.

    The XOR of segments is made in place, so all of them and the slot must be in host memory. A module-level
    function, so that a test can put a slow or failing one in its place.
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
    """Where segments, of no XOR, go in ``to``, whose first byte is file offset ``at``, and where they come from."""
    segments = [segment for copy in copies for segment in copy.segments]
    places = [to[one.offset - at : one.offset - at + one.nbytes] for one in segments]
    sources = [tensors[one.piece].detach()[one.start : one.start + one.numel] for one in segments]
    # As bytes: a device copies all that have one type by one kernel.
    return places, [source.view(torch.uint8) for source in sources]


def copy_together(places: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy many small tensors by few calls, on one device; a module-level function for tests."""
    if places:
        torch._foreach_copy_(places, sources)


def copy_host_state(tensors: Sequence[torch.Tensor], copy: ChunkCopy, slot: Slot) -> ChunkCopy:
    """Copy what an offloaded optimizer keeps in host memory, now; returns what is left for the device to copy."""
    here, left = by_home(tensors, copy)
    if here.segments:
        copy_chunk(tensors, here, slot)
    return left


def by_home(tensors: Sequence[torch.Tensor], copy: ChunkCopy) -> tuple[ChunkCopy, ChunkCopy]:
    """What of a chunk is in host memory, and what is not."""
    here = tuple(segment for segment in copy.segments if in_host_memory(tensors[segment.piece]))
    if not here:
        return ChunkCopy(copy.chunk, (), copy.xor), copy
    left = tuple(segment for segment in copy.segments if not in_host_memory(tensors[segment.piece]))
    return ChunkCopy(copy.chunk, here, copy.xor), ChunkCopy(copy.chunk, left, copy.xor)


def in_host_memory(tensor: torch.Tensor) -> bool:
    """Whether the host holds the bytes; a module-level function for tests, whose devices are not real."""
    return tensor.device.type == "cpu"
