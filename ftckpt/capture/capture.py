"""One rank's snapshots: from the boundary, through the fence, to a sealed slot."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from ftckpt.arena.control import SlotState
from ftckpt.arena.segment import Arena
from ftckpt.capture.clock import Mark
from ftckpt.capture.copier import Copier, Flight
from ftckpt.capture.plan import Part, chunk_copies
from ftckpt.capture.windows import Always, Windows
from ftckpt.errors import CaptureError
from ftckpt.state import objects
from ftckpt.state.piece import Piece

SnapshotId = tuple[bytes, int]
"""Lineage and iteration: with the job's name they name a snapshot."""


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
        parts: Sequence[Part],
        copier: Copier,
        windows: Windows | None = None,
    ) -> None:
        self.arena = arena
        self._pieces = pieces
        self._tensors = [piece.tensor for piece in pieces]
        self._versions: list[int] = []
        self._fenced = False
        copies = chunk_copies(arena.image, parts)
        self._stepped = copies[: arena.image.num_stepped_chunks]
        self._volatile = copies[arena.image.num_stepped_chunks :]
        self._watched = sorted({segment.piece for copy in self._stepped for segment in copy.segments})
        self._copier = copier
        self._windows = windows or Always()
        self._slots: dict[int, torch.Tensor] = {}
        self._flight: Flight | None = None
        self._flying: tuple[int, SnapshotId] | None = None
        self.use_slots(slot for slot in range(arena.control.slots) if arena.slot_error(slot) is None)

    def use_slots(self, slots: Iterable[int]) -> None:
        """Slots of the arena that can be written from now on."""
        fresh = {slot: torch.frombuffer(self.arena.slot(slot), dtype=torch.uint8) for slot in slots}
        self._slots.update(fresh)
        self._copier.prepare(list(fresh.values()))

    @property
    def flight(self) -> Flight | None:
        """The copies of the last snapshot that began."""
        return self._flight

    @property
    def unit_bytes(self) -> int:
        """The size of the largest single copy."""
        return max((copy.nbytes for copy in self._stepped), default=1) or 1

    @property
    def stepped_bytes(self) -> int:
        """Bytes that each snapshot copies in the background."""
        return sum(copy.nbytes for copy in self._stepped)

    @property
    def busy(self) -> bool:
        """Whether copies of the last snapshot still run, so that no new one can begin."""
        return self._flight is not None and not self._flight.ended

    @property
    def flying(self) -> bool:
        """Whether the last snapshot's copies run and it may yet be sealed."""
        return self.busy and self._flying is not None

    @property
    def newest(self) -> SnapshotId | None:
        """The newest snapshot sealed in this arena."""
        sealed = [(r.lineage, r.iteration) for r in self._records() if r.state >= SlotState.SEALED]
        return max(sealed, key=lambda snapshot: snapshot[1], default=None)

    def has_room(self, keep: Collection[SnapshotId]) -> bool:
        """Whether a slot can be written without losing what ``keep`` names."""
        return bool(self._candidates(keep))

    def begin(
        self,
        snapshot: SnapshotId,
        keep: Collection[SnapshotId],
        state_objects: Mapping[str, Any],
        base: Mark = None,
        hashed: bool = True,
    ) -> int:
        """Start a snapshot at the boundary: volatile state and objects now, stepped state in the background.

        The slots of the snapshots in ``keep`` are not touched. ``base`` is the boundary's moment. ``hashed``:
        checksums are taken here, as the bytes arrive; otherwise the SMP takes them. Returns the slot.

        Raises:
            CaptureError: no slot is free, or the objects do not fit.
            UnsupportedError: an object cannot be encoded.
        """
        if self.busy:
            raise CaptureError("the copies of the previous snapshot have not ended")
        encoded = objects.encode(dict(state_objects))
        room = self.arena.image.objects
        if len(encoded) > room.end - room.begin:
            raise CaptureError(
                f"objects need {len(encoded)} bytes, objects_mib gives {room.end - room.begin}; raise objects_mib"
            )
        slot = self._free_slot(keep)
        control = self.arena.control
        control.begin(slot)
        self._flight, self._flying = None, (slot, snapshot)
        self.arena.slot(slot)[room.begin : room.begin + len(encoded)] = encoded
        control.set_objects(slot, len(encoded), xxhash.xxh3_64_intdigest(encoded))
        self._copier.copy_now(self._tensors, self._volatile, self._slots[slot])
        for copy in self._volatile if hashed else ():
            control.set_chunk_hash(slot, copy.chunk, self.arena.hash_chunk(slot, copy.chunk))
        self._versions, self._fenced = self._written(), False
        self._flight = self._start(slot, snapshot, base, hashed)
        return slot

    def fence(self, timeout_secs: float) -> float:
        """Before stepped state changes: make the snapshot safe or drop it; returns seconds waited.

        Raises:
            CaptureError: the snapshot was dropped; its slot is void.
        """
        if self._flight is None or self._flying is None:
            return 0.0
        begin = time.perf_counter()
        flight = self._flight
        torn, self._fenced = self._torn(), True
        if torn is not None and not flight.ended:
            self._drop(torn)
        safe = self._copier.fence(flight, timeout_secs)
        waited = time.perf_counter() - begin
        if not safe:
            late = f"copy not done after {timeout_secs} s"
            self._drop(f"copy failed: {flight.error!r}" if flight.error else late)
        return waited

    def settle(self, timeout_secs: float) -> None:
        """Wait for the host's knowledge that the copies of a fenced snapshot are there, or drop it.

        Raises:
            CaptureError: the snapshot was dropped.
        """
        if self._flight is None or self._flying is None:
            return
        if not self._flight.wait(timeout_secs):
            self._drop(f"copies not there after {timeout_secs} s")
        elif self._flight.error is not None:
            self._drop(f"copy failed: {self._flight.error!r}")

    def forget(self, iteration: int) -> None:
        """Training went back to before ``iteration``: what it undid must not come back at a restart."""
        control = self.arena.control
        for slot, record in enumerate(self._records()):
            if record.iteration >= iteration:
                control.void(slot)
        whole = control.whole()
        if whole is not None and whole[1] >= iteration:
            control.mark_whole(bytes(16), -1)
        control.mark_target(bytes(16), -1)
        control.mark_protected(bytes(16), -1)

    def close(self) -> None:
        """Stop copying; a snapshot is dropped unless all of its copies were submitted, as they are at the fence."""
        if self._flight is not None and self._flight.submitted.is_set():
            self._flight.wait(_SEAL_SECS)
        if self._flight is not None and self._flight.cancel() and self._flying is not None:
            self.arena.control.void(self._flying[0])
        self._copier.close()
        self._flight = None
        self._slots.clear()

    def _written(self) -> list[int]:
        """Of each tensor whose copies run in the background, torch's count of the writes to it."""
        return [self._tensors[index]._version for index in self._watched]

    def _torn(self) -> str | None:
        """Who wrote to stepped state before the fence, where none stands: it may be below a copy."""
        now = self._written()
        if now == self._versions or self._fenced:  # in this order: what was read before the fence counts
            return None
        moved = next(i for i, *pair in zip(self._watched, self._versions, now, strict=True) if pair[0] != pair[1])
        key = self._pieces[moved].fragment.key
        return f"{key} was written before the fence; call fence() of the checkpointer before the script writes to it"

    def _drop(self, cause: str) -> None:
        """Void the snapshot under way, unless it was sealed in this instant."""
        if self._flight is None or self._flying is None or not self._flight.cancel():
            return
        (slot, (_, iteration)), self._flying = self._flying, None
        self.arena.control.void(slot)
        raise CaptureError(f"snapshot of iteration {iteration} dropped: {cause}")

    def _start(self, slot: int, snapshot: SnapshotId, base: Mark, hashed: bool) -> Flight:
        control, arena = self.arena.control, self.arena

        def landed(chunk: int) -> None:
            if hashed:
                control.set_chunk_hash(slot, chunk, arena.hash_chunk(slot, chunk))

        arrived = lambda: self._seal(slot, snapshot, hashed)  # noqa: E731
        flight = Flight(self._stepped, self._slots[slot], landed, arrived, base)
        self._copier.start(self._tensors, flight, self._windows)
        return flight

    def _seal(self, slot: int, snapshot: SnapshotId, hashed: bool) -> None:
        """Called by the copier when the host knows that all bytes are there."""
        torn = self._torn()
        if torn is not None:
            raise CaptureError(torn)
        self.arena.control.seal(slot, *snapshot, hashed=hashed)

    def _free_slot(self, keep: Collection[SnapshotId]) -> int:
        """The slot to write: an empty one, otherwise the oldest, if nobody reads it, that is not in ``keep``."""
        candidates = self._candidates(keep)
        if not candidates:
            raise CaptureError("every slot holds a snapshot that must be kept")
        return min(candidates)[2]

    def _candidates(self, keep: Collection[SnapshotId]) -> list[tuple[bool, int, int]]:
        """Slots that may be written: whether the SMP reads it now, its iteration, its index."""
        candidates, checks = [], self.arena.checks
        for index, record in enumerate(self._records()):
            sealed = record.state >= SlotState.SEALED
            if index not in self._slots or (sealed and (record.lineage, record.iteration) in keep):
                continue
            leased = sealed and checks is not None and checks.leased(index)
            candidates.append((leased, record.iteration if sealed else -1, index))
        return candidates

    def _records(self) -> list[Any]:
        return [self.arena.control.record(index) for index in range(self.arena.control.slots)]
