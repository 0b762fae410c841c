"""Checksums of sealed slots, computed on several cores, for snapshots that are needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np

from ftckpt.array_types import Hashes
from ftckpt.errors import ArenaError
from ftckpt.events import Events
from ftckpt.memory.control_block import SealId
from ftckpt.memory.corruption import Corruption
from ftckpt.memory.mapping import FileId
from ftckpt.model.snapshot import SnapshotId
from ftckpt.smp.arenas import MonitoredArenas, SealedSlot
from ftckpt.smp.work import Throttle, Work


class _Key(NamedTuple):
    """The contents of a slot; ``file`` distinguishes successive files of a slot."""

    arena: str
    slot: int
    file: FileId | None
    seal_id: SealId | None

    @classmethod
    def of(cls, sealed: SealedSlot) -> _Key:
        arena, slot = sealed.arena, sealed.slot
        return cls(arena.name, slot, arena.identity(slot), sealed.record.seal_id)


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
        self.checked = 0
        self._arenas = arenas
        self._pace = pace
        self._events = events
        self._threads = threads
        self._bad: dict[_Key, SnapshotId] = {}

    def refused(self, snapshot: SnapshotId) -> str:
        """The arena whose slot of ``snapshot`` does not match its checksums; "" if none is known."""
        return next((key.arena for key, bad in self._bad.items() if bad == snapshot), "")

    def forget(self) -> None:
        """Check corrupt slots again: they may have been repaired."""
        self._bad.clear()

    def next(self, first: SnapshotId | None, needed: Callable[[SnapshotId], bool]) -> Work[None] | None:
        """The work on the next slot, or None. Slots of ``first`` come first, then the newest.

        ``needed``: whether the checksums of a snapshot are needed.
        """
        unchecked = {_Key.of(sealed): sealed for sealed in self._unchecked()}
        self._bad = {key: snapshot for key, snapshot in self._bad.items() if key in unchecked}
        waiting = [one for key, one in unchecked.items() if key not in self._bad and needed(one.snapshot)]
        if not waiting:
            return None

        # Newest first: trainers overwrite the oldest, and a restart prefers the newest.
        def order(one: SealedSlot) -> tuple[bool, int, int]:
            return one.snapshot == first, one.snapshot.iteration, one.record.sequence

        return self._check(max(waiting, key=order))

    def _unchecked(self) -> Iterator[SealedSlot]:
        for arena in self._arenas.all:
            for sealed in arena.sealed():
                check = arena.checks.read(sealed.slot)
                is_checked = check is not None and check.seal_id == sealed.record.seal_id
                # A slot whose file was replaced is checked once the new file is mapped.
                if not is_checked and sealed.still_holds():
                    yield sealed

    def _check(self, sealed: SealedSlot) -> Work[None]:
        arena, slot, record = sealed.arena, sealed.slot, sealed.record
        try:
            hashes = yield from self._hash(sealed)
            # Verified after the last byte: a trainer takes a slot over without a lock.
            if hashes is None or not sealed.still_holds():
                return
            # A slot without earlier checksums cannot mismatch: these become its checksums.
            bad_chunks = np.flatnonzero(hashes != record.chunk_hashes).tolist() if record.hashed else []
            damage = arena.mapped.damage(slot, record, bad_chunks)
        except ArenaError as error:
            hashes, damage = np.empty(0, np.uint64), Corruption(reason=str(error))
        if not sealed.still_holds():
            return
        iteration = sealed.snapshot.iteration
        if damage:
            # By file and seal: a new snapshot in the slot, or a repaired file, is checked again.
            self._bad[_Key.of(sealed)] = sealed.snapshot
            self._events.emit("corrupt", arena=arena.name, slot=slot, iteration=iteration, what=damage.names[:20])
            return
        # A restart that reconstructs a slot has its checksums before the seal: no gap.
        gap_secs = 0.0 if record.hashed else max(0.0, time.monotonic() - record.sealed_secs)
        arena.checks.store_checked(slot, (sealed.snapshot, record.sequence), hashes, gap_secs)
        self.checked += 1
        nbytes = sum(span.nbytes for span in arena.mapped.image.chunks)
        self._events.emit(
            "checked", shard=arena.shard, iteration=iteration, gap_secs=round(gap_secs, 4), bytes=nbytes
        )

    def _hash(self, sealed: SealedSlot) -> Work[Hashes | None]:
        """Returns the checksums, or None if the slot was reused meanwhile."""
        chunks = sealed.arena.mapped.image.chunks
        hashes = np.zeros(len(chunks), np.uint64)
        threads = self._threads(sum(span.nbytes for span in chunks))
        hash_chunk = partial(sealed.arena.mapped.hash_chunk, sealed.slot)
        with ThreadPoolExecutor(threads - 1, "smp-hash") if threads > 1 else nullcontext() as pool:
            for first in range(0, len(chunks), threads):
                batch = range(first, min(first + threads, len(chunks)))
                yield from self._pace.memory(sum(chunks[chunk].nbytes for chunk in batch))
                if not sealed.still_holds():
                    return None
                others = pool.map(hash_chunk, batch[1:]) if pool is not None else ()
                hashes[first] = hash_chunk(first)
                hashes[first + 1 : batch.stop] = [*others]
                # Between batches the loop answers requests and beats.
                yield 0.0
        return hashes
