"""Checksums of sealed slots, computed on several cores, for snapshots that are needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ftckpt.errors import ArenaError
from ftckpt.events import Events
from ftckpt.memory.control_block import SealId, SlotRecord
from ftckpt.memory.corruption import Corruption
from ftckpt.model.snapshot import SnapshotId
from ftckpt.smp.arenas import MonitoredArena, MonitoredArenas
from ftckpt.smp.work import Throttle, Work


class _Key(NamedTuple):
    """The contents of a slot; ``file`` distinguishes successive files of a slot."""

    arena: str
    slot: int
    file: tuple[int, int] | None
    seal_id: SealId


@dataclass(frozen=True)
class _Seal:
    arena: MonitoredArena
    slot: int
    record: SlotRecord
    seal_id: SealId

    @property
    def key(self) -> _Key:
        return _key(self.arena, self.slot, self.seal_id)

    @property
    def snapshot(self) -> SnapshotId:
        return self.seal_id[0]


class Checker:
    """Finds sealed slots without checksums and computes them.

    A slot that a restart has reconstructed has checksums already. A mismatch with them is reported once, as an event
    ``corrupt``, and the slot stays as it is.

    Args:
        threads: the number of threads for a slot of so many bytes.
    """

    def __init__(
        self, arenas: MonitoredArenas, pace: Throttle, events: Events, threads: Callable[[int], int]
    ) -> None:
        self.pace = pace
        self.checked = 0
        self._arenas = arenas
        self._events = events
        self._threads = threads
        self._bad: set[_Key] = set()

    def refused(self, snapshot: SnapshotId) -> str:
        """The arena whose slot of ``snapshot`` does not match its checksums; "" if none is known."""
        return next((key.arena for key in self._bad if key.seal_id[0] == snapshot), "")

    def forget(self) -> None:
        """Check corrupt slots again: they may have been repaired."""
        self._bad.clear()

    def next(self, first: SnapshotId | None, needed: Callable[[SnapshotId], bool]) -> Work[None] | None:
        """The work on the next slot, or None. Slots of ``first`` come first, then the newest.

        ``needed``: whether the checksums of a snapshot are needed.
        """
        seals = list(self._seals())
        self._bad &= {seal.key for seal in seals}
        waiting = [seal for seal in seals if seal.key not in self._bad and needed(seal.snapshot)]
        if not waiting:
            return None
        # Newest first: trainers overwrite the oldest, and a restart prefers the newest.
        return self._check(max(waiting, key=lambda seal: _order(seal, first)))

    def _seals(self) -> Iterator[_Seal]:
        for arena in self._arenas.all:
            for slot in range(arena.mapped.control.slots):
                record = arena.mapped.control.record(slot)
                # A slot whose file was replaced is checked once the new file is mapped.
                seal_id = record.seal_id
                if seal_id is not None and not _checked(arena, slot, seal_id) and arena.still_holds(slot, record):
                    yield _Seal(arena, slot, record, seal_id)

    def _check(self, seal: _Seal) -> Work[None]:
        arena, slot, record = seal.arena, seal.slot, seal.record
        with arena.lease(slot):
            try:
                hashes = yield from self._hash(seal)
                # Verified after the last byte: a trainer takes a slot over without a lock.
                if hashes is None or not arena.still_holds(slot, record):
                    return
                # A slot without earlier checksums cannot mismatch: these become its checksums.
                bad_chunks = np.flatnonzero(hashes != record.chunk_hashes).tolist() if record.hashed else []
                damage = arena.mapped.damage(slot, record, bad_chunks)
            except ArenaError as error:
                hashes, damage = np.empty(0, np.uint64), Corruption(reason=str(error))
            if not arena.still_holds(slot, record):
                return
            if damage:
                # By file and seal: a new snapshot in the slot, or a repaired file, is checked again.
                self._bad.add(seal.key)
                iteration = seal.snapshot.iteration
                self._events.emit("corrupt", arena=arena.name, slot=slot, iteration=iteration, what=damage.names[:20])
                return
            # A restart that reconstructs a slot has its checksums before the seal: no gap.
            gap_secs = 0.0 if record.hashed else max(0.0, time.monotonic() - record.sealed_secs)
            arena.checks.store_checked(slot, seal.seal_id, hashes, gap_secs)
        self.checked += 1
        nbytes = sum(span.nbytes for span in arena.mapped.image.chunks)
        self._events.emit(
            "checked", shard=arena.shard, iteration=seal.snapshot.iteration, gap_secs=round(gap_secs, 4), bytes=nbytes
        )

    def _hash(self, seal: _Seal) -> Work[npt.NDArray[np.uint64] | None]:
        """Returns the checksums, or None if the slot was reused meanwhile."""
        arena, slot = seal.arena, seal.slot
        chunks = arena.mapped.image.chunks
        hashes = np.zeros(len(chunks), np.uint64)
        threads = self._threads(sum(span.nbytes for span in chunks))
        hash_chunk = partial(arena.mapped.hash_chunk, slot)
        with ThreadPoolExecutor(threads - 1, "smp-hash") if threads > 1 else nullcontext() as pool:
            for first in range(0, len(chunks), threads):
                batch = range(first, min(first + threads, len(chunks)))
                yield from self.pace.memory(sum(chunks[chunk].nbytes for chunk in batch))
                # Per batch: hashing a slot may take longer than a lease lasts.
                arena.renew(slot)
                if not arena.still_holds(slot, seal.record):
                    return None
                others = pool.map(hash_chunk, batch[1:]) if pool is not None else ()
                hashes[first] = hash_chunk(first)
                hashes[first + 1 : batch.stop] = [*others]
                # Between batches the loop answers requests and beats.
                yield 0.0
        return hashes


def _checked(arena: MonitoredArena, slot: int, seal_id: SealId) -> bool:
    check = arena.checks.read(slot)
    return check is not None and check.seal_id == seal_id


def _key(arena: MonitoredArena, slot: int, seal_id: SealId) -> _Key:
    return _Key(arena.name, slot, arena.identity(slot), seal_id)


def _order(seal: _Seal, first: SnapshotId | None) -> tuple[bool, int, int]:
    return seal.snapshot == first, seal.snapshot.iteration, seal.record.sequence
