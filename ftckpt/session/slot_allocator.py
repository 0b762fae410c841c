"""Slots of a rank's arena: a forecast of their memory, and their allocation in the background, as tens of GB take
seconds."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ftckpt.capture.affinity import pin
from ftckpt.capture.copier import Cores
from ftckpt.memory.arena import Arena
from ftckpt.memory.image import SlotImage
from ftckpt.memory.ledger import Ledger, MemoryNeeds, leaving_bytes, require, slots_to_allocate
from ftckpt.memory.slots import FreshSlot
from ftckpt.model.manifest import Manifest
from ftckpt.model.snapshot import SnapshotId

_POLL_SECS = 0.005
# A rank that hangs in its load must not keep the others without slots.
_GIVE_WAY_SECS = 1.0
_END_SECS = 10.0
"""Maximum wait of ``close`` for the thread, which polls for its end about every 100 MB."""


class MemoryForecast(NamedTuple):
    """``needs`` of a rank's arena; ``freed_bytes`` before it allocates; ``most`` slots while old arenas exist; the
    ``image`` of a slot; the ``existing`` arena, if any; snapshots ``needed`` from old arenas; their protected ones
    (``marks``; None if irrelevant)."""

    needs: MemoryNeeds
    freed_bytes: int
    most: int
    image: SlotImage
    existing: Arena | None
    needed: frozenset[SnapshotId]
    marks: tuple[SnapshotId, ...] | None


def foresee_arena(
    there: Ledger, old: Sequence[Path], existing: Arena | None, *, slots: int, keep: SnapshotId | None,
    manifest: Manifest,
) -> MemoryForecast:  # fmt: skip
    """Forecast for ``manifest``'s arena, of ``slots`` unless it is ``existing``, and for the memory that the ``old``
    arenas free before. ``there``: the content of all arenas; ``keep``: the snapshot that a restart would use."""
    spare = there.spare(there.needed(keep)) if keep is not None else Ledger()
    num_old = num_slots(old) - spare.free_slots if keep is not None else 0
    have, new, lacks = count_slots(slots, existing, keep, num_old)
    image = existing.image if existing is not None else SlotImage.of(manifest)
    old_bytes = leaving_bytes(old)
    kept = old and keep is not None
    return MemoryForecast(
        MemoryNeeds(new * image.file_bytes, lacks * image.file_bytes - old_bytes),
        spare.given_back_bytes if keep is not None else old_bytes, have + new,
        image, existing, needed=there.needed(keep) if keep is not None else frozenset(),
        marks=tuple(sorted(there.protected)) if kept else None,
    )  # fmt: skip


def count_slots(most: int, existing: Arena | None, keep: SnapshotId | None, num_old: int) -> tuple[int, int, int]:
    """The numbers of allocated slots, of slots to allocate while ``num_old`` are in old arenas, and of all missing
    slots."""
    slots = most if existing is None else existing.control.slots
    there = 0 if existing is None else slots - len(absent_slots(existing))
    lacks = max(0, min(slots, most) - there)
    if not num_old:
        return there, lacks, lacks
    needed = 0 if existing is None or existing.find(keep) is None else 1
    return there, slots_to_allocate(there, slots, needed, most - num_old), lacks


def absent_slots(arena: Arena) -> list[int]:
    """The slots of ``arena`` that are not allocated yet."""
    return [slot for slot in range(arena.control.slots) if not arena.allocated(slot)]


def num_slots(paths: Sequence[Path]) -> int:
    """The number of slots in the arenas at ``paths``, readable or not."""
    return sum(len(list(path.glob("slot*"))) for path in paths)


class SlotAllocator:
    """Allocates the missing slots of an arena, once ``free`` has made room for them.

    The thread creates unnamed files; only ``take``, on the training thread, turns them into slots. So an arena that
    has been closed, or belongs to another process, never receives a stray slot.

    It starts when all ranks are ``through`` with their restart, or after ``_GIVE_WAY_SECS``: allocation takes CPU
    time and kernel locks from the ranks for which the others wait. ``is_of_start``: the start left these slots to it.
    """

    def __init__(
        self, arena: Arena, slots: Sequence[int], cores: Cores, free: Callable[[], None] | None = None,
        through: Callable[[], bool] | None = None, *, is_of_start: bool = False,
    ) -> None:  # fmt: skip
        self._arena, self.is_of_start = arena, is_of_start
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
