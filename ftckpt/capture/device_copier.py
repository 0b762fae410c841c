"""Copies from a CUDA or ROCm device into host-registered slots on a side stream.

Registering pins the slot's own pages (``cudaHostRegister``), so copies need no staging buffer. It takes
seconds for tens of GB, hence runs piece by piece in the background; chunks that are not registered yet go
through one pinned buffer of a chunk's size. Parity is made in a few MiB of the device's memory. ROCm builds of
torch keep the CUDA names.

Streams never wait for each other in a circle: whoever makes one wait does so for an event that was recorded
before, so every wait points back in the order in which work was given to the device. For a gate the training
thread records the event before it hands it over; for the fence all copies are submitted before it returns.

State that an offloaded optimizer keeps in host memory takes no detour: it is read when its chunk is submitted, and
the fence, which waits on the host for that, stands before the optimizer.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import torch

from ftckpt.capture.affinity import pin
from ftckpt.capture.chunks import ChunkCopy, Segment, combine, divided, xor_onto, xor_parts
from ftckpt.capture.copier import Cores, Finisher, Flight, Slot, Worker, by_home, copy_chunk, copy_host_state
from ftckpt.events import log
from ftckpt.windows.bubbles import Windows
from ftckpt.windows.clock import Clock, Moment
from ftckpt.windows.node_budget import Budget

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, hipStreamCaptureModeThreadLocal
_CAPTURE_MODES = (
    (("libcuda.so.1",), "cuThreadExchangeStreamCaptureMode"),
    (tuple(f"libamdhip64.so{version}" for version in (".7", ".6", ".5", "")), "hipThreadExchangeStreamCaptureMode"),
)


def work_beside_captures() -> None:
    """Let the calling thread register, copy and wait while another thread captures a graph.

    By default a driver answers such calls with an error and spoils the graph as well: torch begins captures in
    the mode that forbids them to all threads of a process which do not say that they have no part in it.
    """
    exchange = exchange_capture_mode()
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


@lru_cache(maxsize=1)
def exchange_capture_mode() -> Any:
    """The driver's function that sets a thread's capture mode; None where there is none."""
    libraries, function = _CAPTURE_MODES[bool(torch.version.hip)]
    for library in libraries:
        with suppress(OSError, AttributeError):
            return getattr(ctypes.CDLL(library), function)
    return None


ALIGN_BYTES = 64
"""Staged bytes lie as in the slot, modulo this: a view of them as any dtype is aligned."""
_REGISTER_BYTES = 64 << 20
"""One registration: long enough to be cheap, short enough that ``close`` need not wait for one."""
_XOR_BYTES = 8 << 20
"""Parity is made in so much of the device's memory at a time."""
_JOIN_SECS = 10.0
"""How long ``close`` waits for pages to be unregistered."""


class DeviceCopier:
    """See ``ftckpt.capture.copier.Copier`` for the contract of each method.

    Copies go to a side stream, or behind training's own work on its stream.
    """

    def __init__(self, clock: Clock, budget: Budget, own_stream: bool, cores: Cores = None) -> None:
        device = self._device = clock.device
        self._clock = clock
        self._budget = budget
        current = torch.cuda.current_stream(device)
        self._stream = torch.cuda.Stream(device) if own_stream else current  # type: ignore[no-untyped-call]
        self._cores = cores
        self._worker = Worker("ftckpt-copy", cores)
        self._finisher = Finisher(cores)
        self._flight: Flight | None = None
        self._registered: dict[int, int] = {}
        """Address of a slot → how many of its bytes, from the first on, are registered."""
        self._closing = threading.Event()
        self._to_register: queue.SimpleQueue[Sequence[Slot] | None] = queue.SimpleQueue()
        self._registrar: threading.Thread | None = None
        self._staging: torch.Tensor | None = None
        self._mixed: torch.Tensor | None = None
        self.register_secs = 0.0
        """What registering took so far."""

    def prepare(self, slots: Sequence[Slot]) -> None:
        """Register the slots' pages, from the first byte on, on a thread of its own."""
        if not slots:
            return
        self._registered.update({slot.data_ptr(): 0 for slot in slots})
        self._to_register.put(list(slots))
        if self._registrar is None:
            self._registrar = threading.Thread(target=self._keep_registered, name="ftckpt-register", daemon=True)
            self._registrar.start()

    def copy_now(self, tensors: Sequence[torch.Tensor], copies: Sequence[ChunkCopy], slot: Slot) -> None:
        """A blocking copy behind all that the current stream has; no flight uses the staging buffer now."""
        stream = torch.cuda.current_stream(self._device)
        for copy in copies:
            self._through_staging(tensors, copy_host_state(tensors, copy, slot), slot, stream)

    def start(self, tensors: Sequence[torch.Tensor], flight: Flight, windows: Windows) -> None:
        """The side stream first waits for the boundary: all that the current stream has by now."""
        # Here and now: recorded later it would stand behind work of the next iteration, and copies with it.
        boundary = torch.cuda.Event()  # type: ignore[no-untyped-call]
        boundary.record(torch.cuda.current_stream(self._device))
        self._flight = flight
        self._worker.submit(lambda: self._fly(tensors, flight, boundary, windows))

    def fence(self, flight: Flight, timeout_secs: float) -> bool:
        """Enqueue a device-side wait, once every copy it waits for has been submitted."""
        flight.hurry.set()
        if not flight.submitted.wait(timeout_secs) or flight.error is not None:
            return False
        # Nothing to wait for on the device: all copies have arrived, or none had anything for it to do.
        if flight.ended or flight.last_copy is None:
            return flight.error is None
        if torch.cuda.is_current_stream_capturing():
            # A wait for work outside of the graph would spoil it.
            flight.error = RuntimeError("the fence stands inside a graph capture, where no stream can be made wait")
            return False
        # The host goes on: the optimizer's kernels, enqueued behind this wait, cannot overtake the copies.
        torch.cuda.current_stream(self._device).wait_event(flight.last_copy)
        return True

    def close(self) -> None:
        """Stop and unpin; the slots may be unmapped afterwards.

        Where the device does not come to rest the pages stay registered and their slots mapped.
        """
        self._closing.set()
        if self._worker.close():  # otherwise its flight has still to end
            self._finisher.close()
        # Nothing is unpinned under a copy that still runs: the device would write to what may be somebody else's.
        if self._flight is None or self._flight.ended:
            self._to_register.put(None)
            if self._registrar is not None:
                self._registrar.join(_JOIN_SECS)

    def _keep_registered(self) -> None:
        """Register, and unregister at the end; ``mapped`` keeps the memory mapped for as long.

        On this thread from first to last, because a refusal stays behind as the calling thread's last
        error, and the training thread's next kernel launch would take it for its own.
        """
        addresses: list[int] = []
        mapped: list[Sequence[Slot]] = []
        pin(self._cores)
        with self._on_device():
            while (slots := self._to_register.get()) is not None:
                begin = time.perf_counter()
                mapped.append(slots)
                self._register(slots, addresses)
                self.register_secs += time.perf_counter() - begin
            for address in addresses:
                torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def _register(self, slots: Sequence[Slot], addresses: list[int]) -> None:
        for slot in slots:
            base, size = slot.data_ptr(), slot.numel()
            for offset in range(0, size, _REGISTER_BYTES):
                length = min(_REGISTER_BYTES, size - offset)
                if self._closing.is_set() or not _pin(base + offset, length):
                    return
                addresses.append(base + offset)
                self._registered[base] = offset + length  # last: the copying thread goes by it without a lock

    def _fly(
        self, tensors: Sequence[torch.Tensor], flight: Flight, boundary: torch.cuda.Event, windows: Windows
    ) -> None:
        try:
            with self._on_device(), torch.cuda.stream(self._stream):
                self._stream.wait_event(boundary)
                self._submit(tensors, flight, windows)
        except Exception as error:  # noqa: BLE001 - the fence reports it on the training thread
            flight.error = error
            flight.submitted.set()  # the fence has nothing to wait for: it drops the snapshot
            with suppress(RuntimeError), self._on_device():
                _sleep_until_done(self._stream)  # an ended flight writes nothing any more
        flight.submitted.set()
        self._finisher.end(flight)

    def _submit(self, tensors: Sequence[torch.Tensor], flight: Flight, windows: Windows) -> None:
        gate = None
        for copy in flight.copies:
            turn = windows.wait_turn(copy.nbytes, flight.hurry)
            if flight.cancelled or flight.error is not None:
                break
            if turn.gate is not None and turn.gate is not gate:
                # The event was recorded by the training thread before this turn: the wait points back, no circle.
                gate = turn.gate
                self._stream.wait_event(gate)
            self._enqueue(tensors, copy, flight)

    def _enqueue(self, tensors: Sequence[torch.Tensor], copy: ChunkCopy, flight: Flight) -> None:
        if self._budget.limited:
            # What is enqueued ahead cannot be slowed down any more: go along with the device.
            _sleep_until_done(self._stream)
        self._budget.start()
        begin = self._clock.mark()
        if copy.xor:
            for part in xor_parts(copy, _XOR_BYTES):
                self._xor(tensors, part, flight.slot)
        else:
            self._to_slot(tensors, copy_host_state(tensors, copy, flight.slot), flight.slot)
        end = self._clock.mark()
        # Behind both marks: when the event has come the copy's times can be read.
        event = flight.last_copy = _done_event(self._stream)
        self._finisher.chunk(flight, copy.chunk, lambda: self._landed(flight, copy.nbytes, begin, end, event))
        if self._budget.limited:
            event.synchronize()
            secs = self._clock.secs(begin, end) or 0.0
            self._budget.pace(copy.nbytes, time.perf_counter() - secs, flight.hurry)

    def _landed(self, flight: Flight, nbytes: int, begin: Moment, end: Moment, event: torch.cuda.Event) -> None:
        with self._on_device():
            event.synchronize()
            self._budget.stop()
            begin_secs, end_secs = self._clock.secs(flight.base, begin), self._clock.secs(flight.base, end)
        if begin_secs is not None and end_secs is not None:
            flight.timed.append((begin_secs, end_secs, nbytes))

    def _xor(self, tensors: Sequence[torch.Tensor], part: ChunkCopy, slot: Slot) -> None:
        """Make the XOR in device memory that this stream alone uses, and copy it to the slot.

        What is in host memory is read now, as ever: into the slot, from where the device takes it up. Where the
        device cannot, it comes last, behind a staged copy that is in the slot when its call returns.
        """
        (here, left), registered = by_home(tensors, part), self._is_registered(slot, part)
        begin, end = part.begin, part.end
        first = bool(here.segments) and (registered or not left.segments)
        if first:
            slot[begin:end].zero_()
            xor_onto(tensors, here.segments, slot)
        if not left.segments:
            return
        if self._mixed is None:
            # One will do: what makes the next part in it comes behind the copy of this part on the same stream.
            self._mixed = torch.empty(_XOR_BYTES, dtype=torch.uint8, device=self._device)
        if first:
            copy_chunk([slot], _within_registrations(_bytes(part, begin)), self._mixed, begin, non_blocking=True)
        combine(tensors, left.segments, self._mixed, begin, end, onto=first)
        if here.segments and not registered:
            self._through_staging([self._mixed], _bytes(part, 0), slot, self._stream)
            xor_onto(tensors, here.segments, slot)
        else:
            self._to_slot([self._mixed], _bytes(part, 0), slot)

    def _to_slot(self, tensors: Sequence[torch.Tensor], copy: ChunkCopy, slot: Slot) -> None:
        if self._is_registered(slot, copy):
            copy_chunk(tensors, _within_registrations(copy), slot, non_blocking=True)
        else:
            self._through_staging(tensors, copy, slot, self._stream)

    def _is_registered(self, slot: Slot, copy: ChunkCopy) -> bool:
        return copy.end <= self._registered.get(slot.data_ptr(), 0)

    def _through_staging(
        self, tensors: Sequence[torch.Tensor], copy: ChunkCopy, slot: Slot, stream: torch.cuda.Stream
    ) -> None:
        """Device → pinned buffer → slot, waiting for the device; ``stream`` is the thread's current one.

        The device never writes to a slot's pages that this copier has not registered itself: the driver
        refuses copies that cross into registered memory, and may know the address from an older mapping.
        """
        if not copy.segments:
            return
        begin = copy.segments[0].offset // ALIGN_BYTES * ALIGN_BYTES
        staging = self._staging_of(copy.segments[-1].offset + copy.segments[-1].nbytes - begin)
        copy_chunk(tensors, copy, staging, at=begin, non_blocking=True)
        _sleep_until_done(stream)
        for segment in copy.segments:
            # By segments: what lies between them may be another chunk's, or come from host memory.
            staged = staging[segment.offset - begin :][: segment.nbytes]
            slot[segment.offset : segment.offset + segment.nbytes].copy_(staged)

    def _staging_of(self, size: int) -> torch.Tensor:
        if self._staging is None or self._staging.numel() < size:
            try:
                self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError:  # no more memory may be locked: slower, and right as well
                self._staging = torch.empty(size, dtype=torch.uint8)
        return self._staging

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """For threads of this copier: a call on another than the current device would open a context there."""
        work_beside_captures()
        with torch.cuda.device(self._device):
            yield


def _done_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Behind all that ``stream`` has by now. Whoever waits for it sleeps: cores are for training."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _sleep_until_done(stream: torch.cuda.Stream) -> None:
    _done_event(stream).synchronize()


def _within_registrations(copy: ChunkCopy) -> ChunkCopy:
    """The same bytes in segments that each lie in one registration: drivers refuse copies across two."""
    return divided(copy, _REGISTER_BYTES)


def _bytes(part: ChunkCopy, start: int) -> ChunkCopy:
    """All bytes of ``part`` from one tensor of bytes, where the first is at ``start``."""
    nbytes = part.end - part.begin
    return ChunkCopy(part.chunk, (Segment(0, start, nbytes, part.begin, nbytes),))


def _pin(address: int, nbytes: int) -> bool:
    """Register host memory; after a refusal (a limit on locked memory, a sandbox) copies stay staged.

    "Already registered" is a refusal too: it may be an older mapping's registration, of other pages.
    """
    # 0 is cudaHostRegisterDefault: pinned, which is all that copies need.
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))  # type: ignore[no-untyped-call]
    if code != 0:
        log.warning("ftckpt: registering host memory failed with error %d; copies are staged, slower", code)
    return code == 0
