"""One rank's snapshots: from the boundary, through the fence, to a sealed slot."""

from __future__ import annotations

import atexit
import math
import time
import weakref
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
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
"""Longest wait of ``close`` for the seal of a snapshot whose copies are on their way."""


class Capture:
    """Copies one rank's parts into the slots of its arena, one snapshot at a time.

    ``pieces`` and ``parts`` follow ``arena.manifest.fragments``; pieces belong to the trainer. All methods
    are called from the training thread. The arena must be locked by this process.
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
        self._parts = parts
        self._tensors = [piece.tensor for piece in pieces]
        self._counts: Counts = array("q")
        self._fenced, self._fenced_secs = False, math.inf
        self._found: str | None = None  # by the fence
        copies = chunk_copies(arena.image, parts)
        self._stepped = copies[: arena.image.num_stepped_chunks]
        self._volatile = copies[arena.image.num_stepped_chunks :]
        sizes = [copy.nbytes for copy in self._stepped]
        # Never 0: windows are counted in these.
        self.unit_bytes = max(sizes, default=1) or 1
        """The size of the largest single copy."""
        self.stepped_bytes = sum(sizes)
        """Bytes that each snapshot copies in the background."""
        # Not the volatile ones: they are copied at the boundary, and written whenever training likes after it.
        watched = sorted({segment.piece for copy in self._stepped for segment in copy.segments})
        self._writes = WriteCounts(pieces[index] for index in watched)
        self._copier = copier
        self._windows = windows or Always()
        self._slots: dict[int, torch.Tensor] = {}
        # What their records hold: nobody else writes these, and to read them at each boundary takes long.
        self._held: dict[int, SnapshotId | None] = {}
        self._flight: Flight | None = None
        self._flying: tuple[int, SnapshotId] | None = None
        _open.add(self)
        try:
            self.use_slots(slot for slot in range(arena.control.slots) if arena.slot_error(slot) is None)
            copier.warm_up(self._tensors, self._stepped, self._volatile)
        except BaseException:  # nobody else would close it
            self.close()
            raise

    def use_slots(self, slots: Iterable[int]) -> None:
        """Slots of the arena that can be written from now on."""
        fresh = {slot: torch.frombuffer(self.arena.slot(slot), dtype=torch.uint8) for slot in slots}
        self._slots.update(fresh)
        self._held.update((slot, self.arena.control.snapshot(slot)) for slot in fresh)
        if fresh:  # at each boundary there are none: to wake a thread takes training longer than all else here
            self._copier.prepare(list(fresh.values()))

    @property
    def flight(self) -> Flight | None:
        """The copies of the last snapshot that began."""
        return self._flight

    @property
    def busy(self) -> bool:
        """Whether copies of the last snapshot still run, so that no new one can begin."""
        return self._flight is not None and not self._flight.ended

    def at_boundary(self) -> None:
        """Training is at a boundary; at each, whether a snapshot is due there or not."""
        self._copier.at_boundary()

    def is_ready(self, keep: Collection[SnapshotId]) -> bool:
        """Whether the next snapshot can begin: no copies run, there are slots, and of those that hold none of
        ``keep`` one is prepared, where there are any."""
        free = [slot for slot, held in self._held.items() if held not in keep]
        return not self.busy and bool(self._slots) and (not free or bool(self.prepared(free)))

    def prepared(self, slots: Sequence[int]) -> list[int]:
        """Those of ``slots`` to which copies go without standing in training's way."""
        return [slot for slot in slots if self._copier.is_prepared(self._slots[slot])]

    @property
    def takes_fresh_slots(self) -> bool:
        """Whether a slot is of use as soon as it has its memory."""
        return self._copier.takes_fresh_slots

    @property
    def flying(self) -> bool:
        """Whether the last snapshot's copies run and it may yet be sealed."""
        return self.busy and self._flying is not None

    @property
    def sealed(self) -> bool:
        """Whether the last snapshot that began has come to be sealed."""
        flight = self._flight
        return self._flying is not None and flight is not None and flight.ended and flight.error is None

    @property
    def in_graph(self) -> bool:
        """Whether what training does now is captured into a graph of the device."""
        return self._copier.in_graph

    @property
    def newest(self) -> SnapshotId | None:
        """The newest snapshot sealed in this arena."""
        return max((held for held in self._held.values() if held is not None), default=None)

    @property
    def lacks_slots(self) -> bool:
        """Whether some slots cannot be written, because they have no memory yet."""
        return self.num_slots < self.arena.control.slots

    @property
    def num_slots(self) -> int:
        """Slots that can be written."""
        return len(self._slots)

    def has_room(self, keep: Collection[SnapshotId]) -> bool:
        """Whether a slot can be written without losing what ``keep`` names."""
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
        """Start a snapshot at the boundary: volatile state and objects now, stepped state in the background.

        The slots of the snapshots in ``keep`` are not touched. ``base`` is the boundary's moment. ``kept``: objects
        and volatile state are taken from there, and not from training. ``slots``: what ``writable`` has said at this
        boundary. Returns the slot.

        Raises:
            CaptureError: no slot is free, or the objects do not fit.
            UnsupportedError: an object cannot be encoded.
            Exception: what kept objects from being kept.
        """
        if self.busy:
            raise CaptureError("the copies of the previous snapshot have not ended")
        encoded, room = self._encoded(state_objects, kept), self.arena.image.objects
        writable = self.writable(keep) if slots is None else slots
        if not writable:
            raise CaptureError("every slot holds a snapshot that must be kept")
        slot, control = writable[0], self.arena.control
        self._held[slot] = None
        control.begin(slot)  # before the first byte: a kill from here on must not find the old snapshot sealed
        # An error below leaves the slot WRITING, which claims nothing: the next ``begin`` takes it again.
        self._flight, self._flying = None, (slot, snapshot)
        self.arena.slot(slot)[room.begin : room.begin + len(encoded)] = encoded
        # Of what was encoded, not of what is in the slot: a copy that went wrong shows when it is verified.
        control.set_objects(slot, len(encoded), xxhash.xxh3_64_intdigest(encoded))
        # What changes elsewhere than in the optimizer belongs to this instant.
        sources = self._tensors if kept is None else kept.in_place_of(self._tensors)
        self._copier.take(sources, self._volatile, self._slots[slot])
        # Before the first copy starts: a write behind this line may be in some bytes and not in others.
        self._counts, self._fenced, self._found = self._writes.read(), False, None
        self._fenced_secs = math.inf
        self._flight = self._start(slot, snapshot, base)
        return slot

    def fence(self, timeout_secs: float) -> float:
        """Before stepped state changes: make the snapshot safe or drop it; returns seconds waited.

        Raises:
            CaptureError: the snapshot was dropped; its slot is void.
        """
        if self._flight is None or self._flying is None:
            return 0.0
        flight = self._flight
        # What has ended reads no more, and has looked for itself: a write behind its end is in none of its bytes.
        if flight.ended and flight.error is None:
            self._fenced = True
            return 0.0
        begin = time.perf_counter()
        torn = None if flight.ended else self._torn()
        # Behind the look: what torch counts from here on are the optimizer's own writes. In this order: who seals in
        # this very instant goes by what was found.
        self._found = torn
        self._fenced, self._fenced_secs = True, min(self._fenced_secs, time.monotonic())
        if torn is not None and not flight.ended:
            self._drop(torn)
        safe = self._copier.fence(flight, timeout_secs)
        if flight.error is not None:
            # It copies nothing more. Were it seen to end yet, all ranks would skip the snapshot that comes next, too.
            flight.wait(max(0.0, timeout_secs - (time.perf_counter() - begin)))
        waited = time.perf_counter() - begin
        if not safe:
            late = f"copy not done after {timeout_secs} s"
            self._drop(f"copy failed: {flight.error!r}" if flight.error else late)
        return waited

    def poll(self, timeout_secs: float, wait_secs: float) -> None:
        """Wait ``wait_secs`` at most for the copies of a fenced snapshot; drop one of which they failed, or are not
        there ``timeout_secs`` after the fence.

        Raises:
            CaptureError: the snapshot was dropped.
        """
        if self._flight is None or self._flying is None or not self._fenced:
            return
        if self._flight.wait(wait_secs):
            self.settle(0.0)
        elif time.monotonic() - self._fenced_secs > timeout_secs:
            self._drop(f"copies not there {timeout_secs} s after the fence")

    def settle(self, timeout_secs: float) -> None:
        """Wait for the host's knowledge that the copies of a fenced snapshot are there, or drop it.

        Raises:
            CaptureError: the snapshot was dropped.
        """
        if self._flight is None or self._flying is None:
            return
        self._flight.hurry.set()  # whoever calls this stands still for it
        # The fence let the host go on once all copies were submitted; a slot is sealed only when they have arrived.
        if not self._flight.ended and not self._flight.wait(timeout_secs):
            self._drop(f"copies not there after {timeout_secs} s")
        elif self._flight.error is not None:
            self._drop(f"copy failed: {self._flight.error!r}")

    def forget(self, iteration: int) -> None:
        """Training went back to before ``iteration``: what it undid must not come back at a restart."""
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
        """Copy nothing more and let go of training's tensors; training may go on.

        A snapshot is dropped unless all of its copies were submitted, as they are at the fence.
        """
        # Past the fence nothing is lost any more: the last snapshot of a job that ends is worth the wait.
        if self._flight is not None and self._flight.submitted.is_set():
            self._flight.wait(_SEAL_SECS)
        # Cancelled first: the copier would otherwise copy to the end of the flight before it stops.
        if self._flight is not None and self._flight.cancel() and self._flying is not None:
            self._void(self._flying[0])
        self._copier.stop()
        self._flight = None
        self._tensors = []
        self._writes.forget()

    def close(self) -> None:
        """Stop, and let go of the slots; training stands still, or is over."""
        self.stop()
        # Before the slots are let go of: the copier unpins their pages, which must be mapped for that.
        self._copier.close()
        self._slots.clear()

    def _encoded(self, state_objects: Mapping[str, Any], kept: LastBoundary | None) -> bytes:
        encoded = kept.encoded if kept is not None else objects.encode(dict(state_objects))
        room = self.arena.image.objects.nbytes
        if len(encoded) > room:
            raise CaptureError(
                f"objects need {len(encoded)} bytes, and {room} are there: raise --ftckpt-objects-size"
            )
        return encoded

    def _torn(self) -> str | None:
        """Who wrote to stepped state before the fence, where none stands: it may be below a copy."""
        if self._fenced:  # one look is enough, of whichever thread
            return self._found
        key = self._writes.written(self._counts)
        if self._fenced:  # in this order: what was read before the fence counts
            return self._found
        if not key:
            return None
        return f"{key} was written before the fence; call fence() of the checkpointer before the script writes to it"

    def _drop(self, cause: str) -> None:
        """Void the snapshot under way, unless it was sealed in this instant."""
        if self._flight is None or self._flying is None or not self._flight.cancel():
            return
        (slot, snapshot), self._flying = self._flying, None
        self._void(slot)
        raise CaptureError(f"snapshot of iteration {snapshot.iteration} dropped: {cause}")

    def _start(self, slot: int, snapshot: SnapshotId, base: Moment) -> Flight:
        arrived = lambda: self._seal(slot, snapshot)  # noqa: E731
        flight = Flight(self._stepped, self._slots[slot], arrived, base, taken=self._volatile)
        self._copier.start(self._tensors, flight, self._windows)
        return flight

    def _seal(self, slot: int, snapshot: SnapshotId) -> None:
        """Called by the copier when the host knows that all bytes are there."""
        torn = self._torn()
        if torn is not None:
            raise CaptureError(torn)
        self.arena.control.seal(slot, snapshot, hashed=False)
        self._held[slot] = snapshot

    def _void(self, slot: int) -> None:
        self.arena.control.void(slot)
        if slot in self._held:
            self._held[slot] = None

    def writable(self, keep: Collection[SnapshotId]) -> list[int]:
        """Slots that can be written without losing what ``keep`` names, the best one first."""

        def leased(slot: int) -> bool:
            checks = self.arena.checks
            return checks is not None and checks.leased(slot)

        return writable_slots(self._held, keep, leased)


def writable_slots(
    snapshots: Mapping[int, SnapshotId | None], keep: Collection[SnapshotId], leased: Callable[[int], bool]
) -> list[int]:
    """Slots that hold nothing of ``keep``, by what each of them holds, the best one to write first.

    Empty ones come first, then those with older snapshots. A slot that the SMP reads now (``leased``) comes last:
    what it computes from bytes that change is of no use.
    """
    ranks = sorted(
        (-1 if snapshot is None else snapshot.iteration, slot)
        for slot, snapshot in snapshots.items()
        if snapshot not in keep
    )
    slots = [slot for _, slot in ranks]
    # Asked only where there is a choice between snapshots: it is a look at a file.
    if len(slots) > 1 and ranks[0][0] >= 0:
        slots.sort(key=leased)
    return slots


_open = weakref.WeakSet[Capture]()
off_in_children(_open.clear)


@atexit.register
def _stop_all() -> None:
    # Of scripts that end without close(): Python ends a thread that comes back to it later, and where that is in a
    # call of torch the process aborts.
    for capture in list(_open):
        with suppress(Exception):  # one that fails must not keep the others from it, nor change how the script ends
            capture.stop()
