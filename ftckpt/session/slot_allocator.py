"""Background allocation of slots on a thread: tens of GB take seconds."""

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
"""Maximum wait of ``close`` for the thread, which polls for its end about every 100 MB."""


class SlotAllocator:
    """Allocates the missing slots of an arena, once ``free`` has made room for them.

    The thread creates unnamed files; only ``take``, on the training thread, turns them into slots. So an arena that
    has been closed, or belongs to another process, never receives a stray slot.

    It starts when all ranks are ``through`` with their restart, or after ``_GIVE_WAY_SECS``: allocation takes CPU
    time and kernel locks from the ranks for which the others wait.
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
        """Whether the next ``take`` is the last that returns slots."""
        return not self._thread.is_alive()

    def wait(self, timeout_secs: float) -> None:
        """Wait until ``take`` has a slot to return, or the thread has ended."""
        deadline = time.monotonic() + timeout_secs
        while self._ready.empty() and not self.ended and time.monotonic() < deadline:
            self._thread.join(_POLL_SECS)

    def take(self) -> list[int]:
        """Add the slots that are ready to the arena; returns their numbers. Never waits.

        Raises:
            FtckptError: no room for the next slot, or it cannot be created; raised once no ready slot is left.
        """
        ended, taken = self.ended, list[int]()  # ``ended`` first: a slot that is put afterwards must not be missed
        while not self._ready.empty():
            slot, fresh = self._ready.get()
            self._arena.put(slot, fresh)
            taken.append(slot)
        if not taken and ended and self._error is not None:
            error, self._error = self._error, None
            raise error
        return taken

    def close(self) -> None:
        """Stop the thread and free the slots that were not taken."""
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
                # ``require`` waits: memory that ``free`` deleted is returned once the SMP has unmapped it.
                require(self._arena.path.parent, self._arena.image.file_bytes)
                self._ready.put((slot, self._arena.build(slot, self._closing.is_set)))
        except Exception as error:  # noqa: BLE001 - raised by ``take``
            self._error = error
        if self._closing.is_set():
            self._discard()  # the wait in ``close`` may have timed out

    def _give_way(self) -> None:
        deadline = time.monotonic() + _GIVE_WAY_SECS
        while self._through is not None and not self._through() and time.monotonic() < deadline:
            if self._closing.wait(_POLL_SECS):
                return

    def _discard(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._ready.get_nowait()[1].discard()
