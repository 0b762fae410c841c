"""Copies from a CUDA or ROCm device into host-registered slots on a side stream.

Registering pins the slot's own pages (``cudaHostRegister``), so copies need no staging buffer. It takes
seconds for tens of GB, hence runs piece by piece in the background; chunks that are not registered yet go
through one pinned buffer of a chunk's size.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from ftckpt.capture.copier import Flight, Slot, Worker, copy_chunk
from ftckpt.capture.plan import ChunkCopy
from ftckpt.capture.windows import Windows
from ftckpt.errors import CaptureError

ALIGN_BYTES = 64
_REGISTER_BYTES = 64 << 20
_ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered


class DeviceCopier:
    """See ``ftckpt.capture.copier.Copier`` for the contract of each method."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._worker = Worker("ftckpt-copy")
        self._registered: dict[int, int] = {}
        self._pinned: list[tuple[int, int]] = []
        self._closing = threading.Event()
        self._registrar: threading.Thread | None = None
        self._staging: torch.Tensor | None = None
        self.register_secs = 0.0

    def prepare(self, slots: Sequence[Slot]) -> None:
        """Register the slots' pages, from the first byte on, on a thread of its own."""
        self._registered.update({slot.data_ptr(): 0 for slot in slots})
        self._registrar = threading.Thread(
            target=self._register, args=(list(slots),), name="ftckpt-register", daemon=True
        )
        self._registrar.start()

    def copy_now(self, tensors: Sequence[torch.Tensor], copies: Sequence[ChunkCopy], slot: Slot) -> None:
        """A blocking copy; pageable memory makes it synchronous by itself."""
        for copy in copies:
            copy_chunk(tensors, copy, slot)

    def start(self, tensors: Sequence[torch.Tensor], flight: Flight, windows: Windows) -> None:
        """The side stream first waits for the boundary: all that the current stream holds by now."""
        boundary = torch.cuda.Event()
        boundary.record(torch.cuda.current_stream(self._device))
        self._worker.submit(lambda: self._fly(tensors, flight, boundary, windows))

    def fence(self, flight: Flight, timeout_secs: float) -> bool:
        """Enqueue a device-side wait, once every copy it waits for has been submitted."""
        flight.hurry_at = time.monotonic()
        if not flight.submitted.wait(timeout_secs) or flight.error is not None:
            return False
        if flight.last_copy is not None:
            torch.cuda.current_stream(self._device).wait_event(flight.last_copy)
        return True

    def close(self) -> None:
        """Stop and unpin; the slots may be unmapped afterwards."""
        self._closing.set()
        self._worker.close()
        if self._registrar is not None:
            self._registrar.join(10.0)
        for address, _ in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()

    def _register(self, slots: list[Slot]) -> None:
        begin = time.perf_counter()
        with torch.cuda.device(self._device):
            for slot in slots:
                base, size = slot.data_ptr(), slot.numel()
                for offset in range(0, size, _REGISTER_BYTES):
                    length = min(_REGISTER_BYTES, size - offset)
                    if self._closing.is_set() or not _pin(base + offset, length):
                        return
                    self._pinned.append((base + offset, length))
                    self._registered[base] = offset + length
        self.register_secs = time.perf_counter() - begin

    def _fly(
        self, tensors: Sequence[torch.Tensor], flight: Flight, boundary: torch.cuda.Event, windows: Windows
    ) -> None:
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._stream.wait_event(boundary)
                landing = self._submit(tensors, flight, windows)
            flight.submitted.set()
            for chunk, event in landing:
                event.synchronize()
                flight.chunk_landed(chunk)
        except Exception as error:  # noqa: BLE001 - the fence reports it on the training thread
            flight.end(error)
        else:
            flight.end()

    def _submit(
        self, tensors: Sequence[torch.Tensor], flight: Flight, windows: Windows
    ) -> list[tuple[int, torch.cuda.Event]]:
        landing: list[tuple[int, torch.cuda.Event]] = []
        for copy in flight.copies:
            windows.wait_turn(copy.nbytes, flight.hurry_at)
            if flight.cancelled:
                break
            if self._is_registered(flight.slot, copy):
                copy_chunk(tensors, copy, flight.slot, non_blocking=True)
            else:
                self._through_ring(tensors, copy, flight.slot)
            event = torch.cuda.Event()
            event.record(self._stream)
            landing.append((copy.chunk, event))
            flight.last_copy = event
        return landing

    def _is_registered(self, slot: Slot, copy: ChunkCopy) -> bool:
        end = max((segment.offset + segment.nbytes for segment in copy.segments), default=0)
        return end <= self._registered.get(slot.data_ptr(), 0)

    def _through_ring(self, tensors: Sequence[torch.Tensor], copy: ChunkCopy, slot: Slot) -> None:
        """Device → pinned buffer → slot, waiting for the device: only until registration is through."""
        begin = copy.segments[0].offset // ALIGN_BYTES * ALIGN_BYTES
        size = copy.segments[-1].offset + copy.segments[-1].nbytes - begin
        if self._staging is None or self._staging.numel() < size:
            self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        copy_chunk(tensors, copy, self._staging, at=begin, non_blocking=True)
        self._stream.synchronize()
        for segment in copy.segments:
            staged = self._staging[segment.offset - begin :][: segment.nbytes]
            slot[segment.offset : segment.offset + segment.nbytes].copy_(staged)


def _pin(address: int, nbytes: int) -> bool:
    """Register host memory; False when the driver has no more to give (copies then stay staged)."""
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if code not in (0, _ALREADY_REGISTERED):
        if code == 2:  # cudaErrorMemoryAllocation: a limit on locked memory
            return False
        raise CaptureError(f"cudaHostRegister of {nbytes} bytes failed with error {code}")
    return True
