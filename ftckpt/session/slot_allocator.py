"""Slots get their memory while training runs, on a thread of their own: tens of GB take seconds."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ftckpt.capture.affinity import pin
from ftckpt.capture.copier import Cores
from ftckpt.memory.arena import Arena
from ftckpt.memory.ledger import require
from ftckpt.memory.slots import FreshSlot

_POLL_SECS = 0.005
_GIVE_WAY_SECS = 1.0
_END_SECS = 10.0
"""How long ``close`` waits for the thread, which looks every some 100 MB whether it is to end."""


class SlotAllocator:
    """Memory for slots that an arena lacks, once ``free`` has made room for it.

    The thread makes files that have no name yet; only ``take``, called by the training thread, makes slots of them.
    So an arena that is closed, or another process's, never gets a slot that nobody waits for.

    It begins when all ranks are ``through`` with their restart, or have taken long: memory that is made for the first
    takes cores, and the kernel's locks, from those that the others wait for.
    """

    def __init__(
        self, arena: Arena, slots: Sequence[int], cores: Cores, free: Callable[[], None] | None = None,
        through: Callable[[], bool] | None = None,
    ) -> None:  # fmt: skip
        self._arena = arena
        self._through = through
        self._ready: queue.SimpleQueue[tuple[int, FreshSlot]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(slots, cores, free), name="ftckpt-slots", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether nothing follows what ``take`` gives next."""
        return not self._thread.is_alive()

    def wait(self, timeout_secs: float) -> None:
        """Return when ``take`` gives something, or nothing follows."""
        deadline = time.monotonic() + timeout_secs
        while self._ready.empty() and not self.ended and time.monotonic() < deadline:
            self._thread.join(_POLL_SECS)

    def take(self) -> list[int]:
        """The slots that have become ready; never waits.

        Raises:
            FtckptError: there was no room for the next one, or it cannot be created; those that had it are taken.
        """
        ended, taken = self.ended, list[int]()  # in this order: what comes behind a look is not lost
        while not self._ready.empty():
            slot, fresh = self._ready.get()
            self._arena.put(slot, fresh)
            taken.append(slot)
        if not taken and ended and self._error is not None:
            error, self._error = self._error, None
            raise error
        return taken

    def close(self) -> None:
        """Give back what was not taken."""
        self._closing.set()
        self._thread.join(_END_SECS)
        self._discard()

    def _run(self, slots: Sequence[int], cores: Cores, free: Callable[[], None] | None) -> None:
        pin(cores)
        self._give_way()
        try:
            if free is not None:
                free()
            for slot in slots:
                # With patience: what ``free`` has deleted comes back when the SMP has unmapped it.
                require(self._arena.path.parent, self._arena.image.file_bytes)
                self._ready.put((slot, self._arena.build(slot, self._closing.is_set)))
        except Exception as error:  # noqa: BLE001 - told on the training thread
            self._error = error
        if self._closing.is_set():
            self._discard()  # ``close`` may have waited in vain

    def _give_way(self) -> None:
        deadline = time.monotonic() + _GIVE_WAY_SECS
        while self._through is not None and not self._through() and time.monotonic() < deadline:
            if self._closing.wait(_POLL_SECS):
                return

    def _discard(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._ready.get_nowait()[1].discard()
