"""Slots pinned for a device (``cudaHostRegister``), so that copies need no staging buffer, beside training.

Pinning tens of GB takes seconds, in which the driver keeps others waiting: training, whose kernels may wait for
other ranks', and through the kernel's page tables the other ranks of the node. So it is done piece by piece, with
pauses, by one rank of a node at a time, of pages that are there already, and not while training still warms up.
Unpinning may wait for all work of the device, and is left to the end.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path

import torch

from ftckpt.capture.affinity import Locality, pin
from ftckpt.capture.driver import on_device, pin_pages, unpin_pages
from ftckpt.errors import ArenaError
from ftckpt.events import log
from ftckpt.memory.locks import FileLock

PIECE_BYTES = 64 << 20
"""One registration: long enough to be cheap, short enough that ``halt`` need not wait for one."""
_TURN_SECS = 10.0
"""How long a rank waits for the others of its node: past that one of them is stuck, and the order is a courtesy."""
_POLL_SECS = 0.02
_JOIN_SECS, _JOIN_BYTES_PER_SEC = 10.0, 1 << 30
"""How long ``close`` waits for pages to be unpinned, and how much longer by their bytes; others have seen pages
pinned ten times as fast."""

Slot = torch.Tensor

FarPages = Callable[[int, Mapping[int, int]], None]
"""Told where a slot lies elsewhere than the device: the device's NUMA node, and sampled pages by theirs."""


class Registrar:
    """Pins slots on a thread of its own. ``turns`` is the lock file by which the ranks of a node take turns.

    Where it does not pin, by ``pins``, it maps their pages alone.
    """

    def __init__(
        self, device: torch.device, locality: Locality, turns: Path | None, tell_far: FarPages | None,
        pins: bool = True,
    ) -> None:  # fmt: skip
        self._device = device
        self._locality = locality
        self._turns = turns
        self._tell_far = tell_far
        self._pins = pins
        self._pinned: dict[int, int] = {}
        """Address of a slot → how many of its bytes, from the first on, are pinned."""
        self._through: set[int] = set()
        """Addresses of slots that are pinned as far as they will be."""
        self._jobs: queue.Queue[Sequence[Slot] | None] = queue.Queue()
        self._settled, self._closing = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, slots: Sequence[Slot]) -> None:
        """Have the slots' pages mapped, and pinned from the first byte on once training has settled."""
        if not slots:
            return
        self._pinned.update({slot.data_ptr(): 0 for slot in slots})
        self._jobs.put(list(slots))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ftckpt-register", daemon=True)
            self._thread.start()

    def begin(self) -> None:
        """Training has settled."""
        self._settled.set()

    def covers(self, slot: Slot, end: int) -> bool:
        """True if the device may write to the slot's bytes before ``end``."""
        return end <= self._pinned.get(slot.data_ptr(), 0)

    def is_through(self, slot: Slot) -> bool:
        """True once the slot is pinned or never will be."""
        return slot.data_ptr() in self._through

    @property
    def idle(self) -> bool:
        """Whether all slots were dealt with."""
        return not self._jobs.unfinished_tasks

    def halt(self) -> None:
        """Pin no more."""
        self._closing.set()
        self._settled.set()

    def close(self) -> None:
        """Unpin all; no copy may be on its way: the device would write to what may be somebody else's."""
        self.halt()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_JOIN_SECS + sum(self._pinned.values()) / _JOIN_BYTES_PER_SEC)
            if self._thread.is_alive():
                log.warning("ftckpt: host memory is not unpinned yet; it stays in memory until it is")

    def _run(self) -> None:
        """Pin, and unpin at the end; ``mapped`` keeps the memory mapped for as long.

        On this thread from first to last, because a refusal stays behind as the calling thread's last
        error, and the training thread's next kernel launch would take it for its own.
        """
        addresses: list[int] = []
        mapped: list[Sequence[Slot]] = []
        pin(self._locality.cores)
        with on_device(self._device):
            while (slots := self._jobs.get()) is not None:
                mapped.append(slots)
                try:
                    self._deal_with(slots, addresses)
                except Exception as error:  # noqa: BLE001 - the thread must be there to unpin what is pinned by now
                    log.warning("ftckpt: registering host memory failed (%s); copies are staged, slower", error)
                self._through |= {slot.data_ptr() for slot in slots}
                self._jobs.task_done()
            for address in addresses:
                unpin_pages(address)

    def _deal_with(self, slots: Sequence[Slot], addresses: list[int]) -> None:
        for slot in slots:
            touch(slot, self._closing.is_set)
            self._look(slot)
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
            self._pinned[base] = offset + length  # last: the copying thread goes by it without a lock
            self._closing.wait(spent_secs)  # as long for the others as for this
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
                    log.warning("ftckpt: %s; this rank goes on beside it", error)
                    self._turns = None
        return nullcontext()

    def _look(self, slot: Slot) -> None:
        """Tell where the slot's pages are not on the device's NUMA node."""
        node = self._locality.node
        if node is None or self._tell_far is None:
            return
        found = nodes_of(slot)
        if any(other != node for other in found):
            self._tell_far(node, found)


_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}
"""Numbers of the system call, which libc has no function for."""
_SAMPLED = 256
TOUCH_BYTES = 32 << 20
"""Pages that are touched between looks at whether there is more important work."""


def touch(slot: torch.Tensor, stop: Callable[[], bool]) -> None:
    """Read a byte of each page of ``slot``, 1-D and uint8, until ``stop`` says so; other threads run meanwhile."""
    for begin in range(0, slot.numel(), TOUCH_BYTES):
        if stop():
            return
        # A read is enough: at it the kernel clears a page that was only allocated, and maps it.
        slot.numpy()[begin : begin + TOUCH_BYTES : mmap.PAGESIZE].max()


def nodes_of(slot: torch.Tensor) -> Counter[int]:
    """Some pages of ``slot``, evenly spread, by their NUMA node; empty where the kernel does not say.

    Pages that this process has not touched yet are left out.
    """
    number = _MOVE_PAGES.get(platform.machine())
    step = max(1, slot.numel() // mmap.PAGESIZE // _SAMPLED) * mmap.PAGESIZE
    addresses = [slot.data_ptr() + offset for offset in range(0, slot.numel(), step)]
    if number is None or not addresses:
        return Counter()
    pages = (ctypes.c_void_p * len(addresses))(*addresses)
    nodes = (ctypes.c_int * len(addresses))()
    # Without nodes to move them to the call says where they are: a node, or an error of the one page.
    failed = _system_call()(number, 0, ctypes.c_ulong(len(addresses)), pages, None, nodes, 0)
    return Counter() if failed else Counter(node for node in nodes if node >= 0)


@lru_cache(maxsize=1)
def _system_call() -> ctypes._NamedFuncPointer:
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    return call
