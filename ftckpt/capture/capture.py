"""One rank's snapshots: from the step boundary, through the fence, to a sealed slot."""

from __future__ import annotations

import atexit
import math
import time
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from ftckpt.capture.boundary import Counts, LastBoundary, WriteCounts
from ftckpt.capture.chunks import CopyPart, chunk_copies
from ftckpt.capture.copier import Copier, Flight
from ftckpt.errors import CaptureError
from ftckpt.forks import off_in_children
from ftckpt.memory.arena import Arena
from ftckpt.model import objects
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.training_state import Piece
from ftckpt.schedule.bubbles import Always, Windows
from ftckpt.schedule.clock import Moment

_SEAL_SECS = 10.0
"""Maximum time for which ``stop`` waits for the seal of a snapshot whose copies are submitted."""


@dataclass
class _Taken:
    """The snapshot that was started last.

    A copier thread that seals it reads ``is_fenced`` and, if that is True, ``torn``: the fence stores ``torn`` first.
    """

    slot: int
    snapshot: SnapshotId
    counts: Counts
    flight: Flight
    is_fenced: bool = False
    fenced_secs: float = math.inf
    torn: str | None = None
    """The error text if optimizer-updated state was written before the fence; set by the fence."""
    is_dropped: bool = False


class Capture:
    """Copies one rank's parts into the slots of its arena, one snapshot at a time.

    Calls per snapshot: ``begin`` at the step boundary, ``fence`` before the optimizer writes, ``poll`` or ``settle``
    until it is ``sealed``; all from the training thread. ``pieces`` and ``parts`` have the order of
    ``arena.manifest.fragments``; the trainer owns the pieces. This process must hold the arena's lock.
    """

    def __init__(
        self,
        arena: Arena,
        pieces: Sequence[Piece],
        parts: Sequence[CopyPart],
        copier: Copier,
        windows: Windows | None = None,
    ) -> None:
        self.arena = arena
        self._tensors = [piece.tensor for piece in pieces]
        copies = chunk_copies(arena.image, parts)
        self._stepped = copies[: arena.image.num_stepped_chunks]
        self._volatile = copies[arena.image.num_stepped_chunks :]
        sizes = [copy.nbytes for copy in self._stepped]
        # Never 0: the schedule divides by it.
        self.unit_bytes = max(sizes, default=1) or 1
        """The size of the largest single copy."""
        self.stepped_bytes = sum(sizes)
        """Bytes that each snapshot copies in the background."""
        # Mutable state is not watched: it is copied at the boundary, and training may write to it at any time after.
        watched = sorted({segment.piece for copy in self._stepped for segment in copy.segments})
        self._writes = WriteCounts(pieces[index] for index in watched)
        self._copier = copier
        self._windows = windows or Always()
        self._slots: dict[int, torch.Tensor] = {}
        # A cache of the slots' records: only this process writes them, and reading them at each boundary is slow.
        self._held: dict[int, SnapshotId | None] = {}
        self._taken: _Taken | None = None
        _open.add(self)
        try:
            self.use_slots(slot for slot in range(arena.control.slots) if arena.slot_error(slot) is None)
            copier.warm_up(self._tensors, self._stepped, self._volatile)
        except BaseException:  # the caller has no object to close
            self.close()
            raise

    def use_slots(self, slots: Iterable[int]) -> None:
        """Adds slots of the arena that can be written from now on."""
        fresh = {slot: torch.frombuffer(self.arena.slot(slot), dtype=torch.uint8) for slot in slots}
        self._slots.update(fresh)
        self._held.update((slot, self.arena.control.snapshot(slot)) for slot in fresh)
        if fresh:  # most boundaries add none, and waking the copier's thread costs more than the rest of this method
            self._copier.prepare(list(fresh.values()))

    @property
    def flight(self) -> Flight | None:
        """The copies of the last snapshot that was started."""
        return self._taken.flight if self._taken is not None else None

    @property
    def busy(self) -> bool:
        """Whether copies of the last snapshot still run, so that no new one can start."""
        return self._taken is not None and not self._taken.flight.ended

    def at_boundary(self) -> None:
        """Must be called at every step boundary, whether a snapshot is due or not."""
        self._copier.at_boundary()

    def is_ready(self, keep: Collection[SnapshotId]) -> bool:
        """Whether the next snapshot can start: no copies run, there are slots, and if any slot holds none of
        ``keep``, at least one of these is prepared."""
        free = [slot for slot, held in self._held.items() if held not in keep]
        return not self.busy and bool(self._slots) and (not free or bool(self.prepared(free)))

    def prepared(self, slots: Sequence[int]) -> list[int]:
        """The subset of ``slots`` to which copies do not delay training."""
        return [slot for slot in slots if self._copier.is_prepared(self._slots[slot])]

    @property
    def takes_fresh_slots(self) -> bool:
        """Whether a slot can be written as soon as its memory is allocated."""
        return self._copier.takes_fresh_slots

    @property
    def flying(self) -> bool:
        """Whether the last snapshot's copies run and it can still be sealed."""
        return self._taken is not None and not self._taken.flight.ended and not self._taken.is_dropped

    @property
    def sealed(self) -> bool:
        """Whether the last snapshot that was started is sealed."""
        taken = self._taken
        return taken is not None and not taken.is_dropped and taken.flight.ended and taken.flight.error is None

    @property
    def in_graph(self) -> bool:
        """Whether training is capturing a device graph now."""
        return self._copier.in_graph

    @property
    def newest(self) -> SnapshotId | None:
        """The newest snapshot sealed in this arena."""
        return max((held for held in self._held.values() if held is not None), default=None)

    @property
    def lacks_slots(self) -> bool:
        """Whether some slots cannot be written because their memory is not allocated yet."""
        return self.num_slots < self.arena.control.slots

    @property
    def num_slots(self) -> int:
        """The number of slots that can be written."""
        return len(self._slots)

    def has_room(self, keep: Collection[SnapshotId]) -> bool:
        """Whether a slot can be written without losing a snapshot of ``keep``."""
        return bool(self.writable(keep))

    def begin(
        self,
        snapshot: SnapshotId,
        keep: Collection[SnapshotId],
        state_objects: Mapping[str, Any],
        base: Moment = None,
        *,
        kept: LastBoundary | None = None,
        slots: Sequence[int] | None = None,
    ) -> int:
        """Starts a snapshot at the step boundary and returns its slot.

        Mutable state and objects are copied now, optimizer-updated state in the background.

        Args:
            keep: snapshots whose slots are not touched; ``base``: the boundary's moment.
            kept: source of objects and mutable state; None: the live state.
            slots: the result of ``writable`` at this boundary, if known.

        Raises:
            CaptureError: no slot is free, copies of the previous snapshot run, or the objects do not fit.
            UnsupportedError: an object cannot be encoded.
            Exception: the error that ``kept`` recorded when it saved the objects.
        """
        if self.busy:
            raise CaptureError("the copies of the previous snapshot have not ended")
        encoded, room = self._encoded(state_objects, kept), self.arena.image.objects
        if not (writable := self.writable(keep) if slots is None else slots):
            raise CaptureError("no free slot: every slot holds a snapshot that is still needed")
        slot, control = writable[0], self.arena.control
        self._held[slot] = self._taken = None
        control.begin(slot)  # before the first byte: a kill from here on must not leave the old snapshot sealed
        # An error below leaves the slot in state WRITING, which is free: the next ``begin`` uses it again.
        self.arena.slot(slot)[room.begin : room.begin + len(encoded)] = encoded
        # Of the encoded bytes, not of the slot's: verification then detects a faulty copy.
        control.set_objects(slot, len(encoded), xxhash.xxh3_64_intdigest(encoded))
        sources = self._tensors if kept is None else kept.in_place_of(self._tensors)
        self._copier.take(sources, self._volatile, self._slots[slot])
        self._start(slot, snapshot, base)
        return slot

    def fence(self, timeout_secs: float) -> float:
        """Protects the snapshot from the optimizer's next write, or drops it; returns the seconds waited.

        Raises:
            CaptureError: the snapshot was dropped; its slot is invalidated.
        """
        taken = self._taken
        if taken is None or taken.is_dropped:
            return 0.0
        flight = taken.flight
        # An ended flight reads nothing more and has checked for torn writes itself: later writes cannot reach it.
        if flight.ended and flight.error is None:
            taken.is_fenced = True
            return 0.0
        begin = time.perf_counter()
        torn = None if flight.ended else self._torn(taken)
        # After ``_torn``: writes that torch counts from here on are the optimizer's own. ``torn`` is stored before
        # ``is_fenced``: a copier thread that seals concurrently uses the result as soon as it sees ``is_fenced``.
        taken.torn = torn
        taken.is_fenced, taken.fenced_secs = True, min(taken.fenced_secs, time.monotonic())
        if torn is not None and not flight.ended:
            self._drop(torn)
        safe = self._copier.fence(flight, timeout_secs)
        if flight.error is not None:
            # It submits no more copies. Waiting for its end here keeps the next snapshot from being skipped as well.
            flight.wait(max(0.0, timeout_secs - (time.perf_counter() - begin)))
        waited = time.perf_counter() - begin
        if not safe:
            late = f"copy not done after {timeout_secs} s"
            self._drop(f"copy failed: {flight.error!r}" if flight.error else late)
        return waited

    def poll(self, timeout_secs: float, wait_secs: float) -> None:
        """Waits at most ``wait_secs`` for the copies of a fenced snapshot; drops it if they failed or have not
        completed ``timeout_secs`` after the fence.

        Raises:
            CaptureError: the snapshot was dropped.
        """
        taken = self._taken
        if taken is None or taken.is_dropped or not taken.is_fenced:
            return
        if taken.flight.wait(wait_secs):
            self.settle(0.0)
        elif time.monotonic() - taken.fenced_secs > timeout_secs:
            self._drop(f"copies not complete {timeout_secs} s after the fence")

    def settle(self, timeout_secs: float) -> None:
        """Waits until the copies of a fenced snapshot have completed and it is sealed, or drops it.

        Raises:
            CaptureError: the snapshot was dropped.
        """
        if self._taken is None or self._taken.is_dropped:
            return
        flight = self._taken.flight
        flight.hurry.set()  # the caller blocks until then
        # The fence returned when all copies were submitted; a slot is sealed only when they have completed.
        if not flight.ended and not flight.wait(timeout_secs):
            self._drop(f"copies not complete after {timeout_secs} s")
        elif flight.error is not None:
            self._drop(f"copy failed: {flight.error!r}")

    def forget(self, iteration: int) -> None:
        """Invalidates all snapshots of ``iteration`` and later, after training rolled back to before it."""
        control = self.arena.control
        for slot in range(control.slots):
            snapshot = control.record(slot).snapshot
            if snapshot is None or snapshot.iteration >= iteration:
                self._void(slot)
        whole = control.whole()
        if whole is not None and whole.iteration >= iteration:
            control.mark_whole(None)
        control.mark_target(None)
        control.mark_protected(None)

    def stop(self) -> None:
        """Stops copying and releases training's tensors; training may continue.

        The current snapshot is dropped unless all of its copies are submitted, as they are after the fence.
        """
        # The last snapshot of a job is worth the wait.
        taken = self._taken
        if taken is not None and taken.flight.submitted.is_set():
            taken.flight.wait(_SEAL_SECS)
        # Cancelled first: the copier would otherwise copy to the end of the flight before it stops.
        if taken is not None and taken.flight.cancel() and not taken.is_dropped:
            self._void(taken.slot)
        self._copier.stop()
        self._taken = None
        self._tensors = []
        self._writes.forget()

    def close(self) -> None:
        """Stops and releases the slots; training must be idle or finished."""
        self.stop()
        # Before the slots are released: the copier unpins their pages, which must still be mapped.
        self._copier.close()
        self._slots.clear()

    def _encoded(self, state_objects: Mapping[str, Any], kept: LastBoundary | None) -> bytes:
        encoded = kept.encoded if kept is not None else objects.encode(dict(state_objects))
        room = self.arena.image.objects.nbytes
        if len(encoded) > room:
            raise CaptureError(
                f"objects need {len(encoded)} bytes, only {room} are reserved: raise --ftckpt-objects-size"
            )
        return encoded

    def _torn(self, taken: _Taken) -> str | None:
        """An error text if optimizer-updated state was written before the fence: a copy may be torn."""
        if taken.is_fenced:  # the fence's result is final
            return taken.torn
        key = self._writes.written(taken.counts)
        if taken.is_fenced:  # again: the fence passed meanwhile, so ``key`` may be the optimizer's own write
            return taken.torn
        if not key:
            return None
        return f"{key} was written before the fence; call fence() of the checkpointer before the script writes to it"

    def _drop(self, cause: str) -> None:
        """Invalidates the current snapshot and raises, unless a copier thread has sealed it concurrently."""
        taken = self._taken
        if taken is None or taken.is_dropped or not taken.flight.cancel():
            return
        taken.is_dropped = True
        self._void(taken.slot)
        raise CaptureError(f"snapshot of iteration {taken.snapshot.iteration} dropped: {cause}")

    def _start(self, slot: int, snapshot: SnapshotId, base: Moment) -> None:
        flight = Flight(self._stepped, self._slots[slot], lambda: self._seal(taken), base, taken=self._volatile)
        # Before the first copy starts: a later write may reach some copied bytes and not others.
        taken = _Taken(slot, snapshot, self._writes.read(), flight)
        self._copier.start(self._tensors, flight, self._windows)
        self._taken = taken

    def _seal(self, taken: _Taken) -> None:
        """Seals the slot; called by a copier thread when all bytes are in it."""
        torn = self._torn(taken)
        if torn is not None:
            raise CaptureError(torn)
        self.arena.control.seal(taken.slot, taken.snapshot, hashed=False)
        self._held[taken.slot] = taken.snapshot

    def _void(self, slot: int) -> None:
        self.arena.control.void(slot)
        if slot in self._held:
            self._held[slot] = None

    def writable(self, keep: Collection[SnapshotId]) -> list[int]:
        """Slots that can be written without losing a snapshot of ``keep``, the best one first."""
        return writable_slots(self._held, keep)


def writable_slots(snapshots: Mapping[int, SnapshotId | None], keep: Collection[SnapshotId]) -> list[int]:
    """Slots of ``snapshots`` that hold none of ``keep``, the best one to write first: empty, then oldest."""
    ranks = sorted(
        (-1 if snapshot is None else snapshot.iteration, slot)
        for slot, snapshot in snapshots.items()
        if snapshot not in keep
    )
    return [slot for _, slot in ranks]


_open = weakref.WeakSet[Capture]()
off_in_children(_open.clear)


@atexit.register
def _stop_all() -> None:
    # For scripts that exit without close(): Python terminates a daemon thread that returns to the interpreter after
    # finalization, and inside a torch call that aborts the process.
    for capture in list(_open):
        with suppress(Exception):  # a failure must neither skip the others nor change the script's exit
            capture.stop()
