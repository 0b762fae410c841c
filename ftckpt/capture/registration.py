"""Registers slots with a device driver (``cudaHostRegister``) during training, so that copies need no staging buffer.

Pinning tens of GB takes seconds, and blocks training in the driver and the node's other ranks in the page tables. So
it is done in pieces with pauses, by one rank of a node at a time, on pages that are already mapped, and not before
training has warmed up. Unpinning may wait for all work on the device, so it is left to the end.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from ftckpt.capture.affinity import pin
from ftckpt.capture.driver import on_device, pin_pages, unpin_pages
from ftckpt.errors import ArenaError
from ftckpt.events import log
from ftckpt.memory.locks import FileLock

PIECE_BYTES = 64 << 20
"""Size of one registration: large enough to be cheap, small enough that ``halt`` need not wait for one."""
_TURN_SECS = 10.0
"""Maximum wait for the node's other ranks. After it one of them is probably stuck, and taking turns is optional."""
_POLL_SECS = 0.02
_JOIN_SECS, _JOIN_BYTES_PER_SEC = 10.0, 1 << 30
"""How long ``close`` waits for pages to be unpinned: a constant plus their bytes at this rate, which is a tenth of
reported pinning rates."""

Slot = torch.Tensor
"""A slot's file as a 1-D uint8 CPU tensor over the shared mapping."""


class Registrar:
    """Maps the pages of slots and, with ``pins``, pins them, on its own thread.

    ``turns`` is the lock file with which the ranks of a node take turns.
    """

    def __init__(
        self, device: torch.device, cores: Set[int] | None, turns: Path | None = None, pins: bool = True
    ) -> None:
        self._device = device
        self._cores = cores
        self._turns = turns
        self._pins = pins
        self._pinned: dict[int, int] = {}
        """Address of a slot → the number of its leading bytes that are pinned."""
        self._through: set[int] = set()
        """Addresses of slots whose registration has finished or failed."""
        self._jobs: queue.Queue[Sequence[Slot] | None] = queue.Queue()
        self._settled, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, slots: Sequence[Slot]) -> None:
        """Queues slots: their pages are mapped now, and pinned in ascending order after ``begin``."""
        if not slots:
            return
        self._pinned.update({slot.data_ptr(): 0 for slot in slots})
        self._jobs.put(list(slots))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ftckpt-register", daemon=True)
            self._thread.start()

    def begin(self) -> None:
        """Starts pinning; called once training has settled."""
        self._settled.set()

    def covers(self, slot: Slot, end: int) -> bool:
        """Whether the device may write to the slot's bytes before ``end``."""
        return end <= self._pinned.get(slot.data_ptr(), 0)

    def is_through(self, slot: Slot) -> bool:
        """Whether the slot is pinned, or never will be."""
        return slot.data_ptr() in self._through

    @property
    def idle(self) -> bool:
        """Whether all slots have been processed."""
        return not self._jobs.unfinished_tasks

    def halt(self) -> None:
        """Stops pinning."""
        self._closing.set()
        self._settled.set()

    def close(self) -> None:
        """Unpins all pages. No copy may be in flight: the device would write to memory that may have a new owner."""
        self.halt()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_JOIN_SECS + sum(self._pinned.values()) / _JOIN_BYTES_PER_SEC)
            if self._thread.is_alive():
                log.warning("ftckpt: unpinning host memory is slow; the memory stays allocated until it is done")

    def _run(self) -> None:
        """Pins, and unpins at the end; ``mapped`` keeps the memory mapped until then.

        All driver calls are on this thread: a failed one stays the calling thread's last error, which the training
        thread's next kernel launch would report.
        """
        addresses: list[int] = []
        mapped: list[Sequence[Slot]] = []
        pin(self._cores)
        with on_device(self._device):
            while (slots := self._jobs.get()) is not None:
                mapped.append(slots)
                try:
                    self._deal_with(slots, addresses)
                except Exception as error:  # noqa: BLE001 - the thread must survive to unpin what is already pinned
                    log.warning("ftckpt: registering host memory failed (%s); copies are staged, slower", error)
                self._through |= {slot.data_ptr() for slot in slots}
                self._jobs.task_done()
            for address in addresses:
                unpin_pages(address)

    def _deal_with(self, slots: Sequence[Slot], addresses: list[int]) -> None:
        for slot in slots:
            touch(slot, self._closing.is_set)
        self._settled.wait()
        for slot in slots if self._pins else ():
            if not self._pin(slot, addresses):
                break
            self._through.add(slot.data_ptr())

    def _pin(self, slot: Slot, addresses: list[int]) -> bool:
        base, size = slot.data_ptr(), slot.numel()
        for offset in range(0, size, PIECE_BYTES):
            length = min(PIECE_BYTES, size - offset)
            with self._turn():
                begin = time.perf_counter()
                if self._closing.is_set() or not pin_pages(base + offset, length):
                    return False
                spent_secs = time.perf_counter() - begin
            addresses.append(base + offset)
            self._pinned[base] = offset + length  # last: the copier's thread reads it without a lock
            self._closing.wait(spent_secs)  # leaves half of the time to others
        return True

    def _turn(self) -> AbstractContextManager[object]:
        deadline = time.monotonic() + _TURN_SECS
        while self._turns is not None:
            try:
                return FileLock(self._turns, 0, "the registration of host memory", "end it")
            except ArenaError as error:
                if self._closing.wait(_POLL_SECS):
                    break
                if time.monotonic() >= deadline:
                    log.warning("ftckpt: %s; this rank registers memory concurrently", error)
                    self._turns = None
        return nullcontext()


TOUCH_BYTES = 32 << 20
"""Bytes whose pages are touched between two checks for more urgent work."""


def touch(slot: torch.Tensor, stop: Callable[[], bool]) -> None:
    """Reads a byte of each page of ``slot``, 1-D and uint8, until ``stop`` returns True; other threads can run."""
    for begin in range(0, slot.numel(), TOUCH_BYTES):
        if stop():
            return
        # A read is enough for the kernel to clear and map a page that was only allocated.
        slot.numpy()[begin : begin + TOUCH_BYTES : mmap.PAGESIZE].max()
