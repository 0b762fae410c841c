"""Checksums of what trainers sealed: each byte is hashed once, and proven to be of the snapshot that is named."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ftckpt.arena.control import SlotRecord, Snapshot
from ftckpt.errors import ArenaError
from ftckpt.events import Events
from ftckpt.smp.held import Held, HeldArenas
from ftckpt.smp.pace import Pace
from ftckpt.smp.work import Work


class _Key(NamedTuple):
    """What a slot holds; ``file`` tells one file of a slot from the next."""

    arena: str
    slot: int
    file: tuple[int, int] | None
    snapshot: Snapshot
    sequence: int


@dataclass(frozen=True)
class _Seal:
    held: Held
    slot: int
    record: SlotRecord
    seen: float

    @property
    def key(self) -> _Key:
        return _key(self.held, self.slot, self.record)


class Checker:
    """Finds sealed slots that nobody has checked, and checks them.

    A slot whose bytes are not those that the trainer hashed is told once, as an event ``corrupt``, and left.
    """

    def __init__(self, held: HeldArenas, pace: Pace, events: Events) -> None:
        self.pace = pace
        self.checked = 0
        self._held = held
        self._events = events
        self._seen: dict[_Key, float] = {}
        self._bad: set[_Key] = set()

    def refused(self, snapshot: Snapshot) -> str:
        """The arena whose slot of ``snapshot`` is not as the trainer left it; "" if none is known."""
        return next((key.arena for key in self._bad if key.snapshot == snapshot), "")

    def forget(self) -> None:
        """What was bad may have been put right: it is looked at again."""
        self._bad.clear()

    def next(self, first: Snapshot | None) -> Work[None] | None:
        """The work on the slot to check next, or None: those of ``first`` before others, then newest first."""
        seals = list(self._seals())
        self._seen = {seal.key: seal.seen for seal in seals}
        self._bad &= self._seen.keys()
        waiting = [seal for seal in seals if seal.key not in self._bad]
        if not waiting:
            return None
        return self._check(max(waiting, key=lambda seal: _order(seal, first)))

    def _seals(self) -> Iterator[_Seal]:
        now = time.monotonic()
        for held in self._held.all:
            for slot in range(held.arena.control.slots):
                record = held.arena.control.record(slot)
                # One whose file is not the one that is mapped here is checked when that is.
                if record.sealed and not _checked(held, slot, record) and held.same(slot, record):
                    yield _Seal(held, slot, record, self._seen.get(_key(held, slot, record), now))

    def _check(self, seal: _Seal) -> Work[None]:
        held, slot, record = seal.held, seal.slot, seal.record
        with held.lease(slot):
            try:
                hashes = yield from self._hash(seal)
                if hashes is None or not held.same(slot, record):
                    return
                bad = _bad_parts(held, slot, record, hashes)
            except ArenaError as error:
                hashes, bad = np.empty(0, np.uint64), [str(error)]
            if not held.same(slot, record):
                return
            if bad:
                self._bad.add(seal.key)
                self._events.emit("corrupt", arena=held.name, slot=slot, iteration=record.iteration, what=bad[:20])
                return
            gap_secs = time.monotonic() - seal.seen
            held.checks.store_checked(slot, record.lineage, record.iteration, record.sequence, hashes, gap_secs)
        self.checked += 1
        nbytes = sum(span.nbytes for span in held.arena.image.chunks)
        self._events.emit(
            "checked", shard=held.shard, iteration=record.iteration, gap_secs=round(gap_secs, 4), bytes=nbytes
        )

    def _hash(self, seal: _Seal) -> Work[npt.NDArray[np.uint64] | None]:
        """Returns the checksums, or None where the slot was given up meanwhile."""
        held, slot = seal.held, seal.slot
        chunks = held.arena.image.chunks
        hashes = np.zeros(len(chunks), np.uint64)
        for chunk, span in enumerate(chunks):
            yield from self.pace.memory(span.nbytes)
            held.renew(slot)
            if not held.same(slot, seal.record):
                return None
            hashes[chunk] = held.arena.hash_chunk(slot, chunk)
            yield 0.0
        return hashes


def _bad_parts(held: Held, slot: int, record: SlotRecord, hashes: npt.NDArray[np.uint64]) -> list[str]:
    """Names of what is not as the trainer left it."""
    bad = [] if held.arena.header_good(slot) else ["header"]
    with held.arena.slot(slot) as data:
        if any(bytes(data[pad.begin : pad.end]).strip(b"\0") for pad in held.arena.image.pads):
            bad.append("padding")
    if record.hashed:
        bad += [f"chunk {chunk}" for chunk in np.flatnonzero(hashes != record.chunk_hashes).tolist()]
    with held.arena.read_objects(slot) as objects:
        if xxhash.xxh3_64_intdigest(objects) != record.objects_hash:
            bad.append("objects")
    return bad


def _checked(held: Held, slot: int, record: SlotRecord) -> bool:
    check = held.checks.read(slot)
    return check is not None and check.key == (record.lineage, record.iteration, record.sequence)


def _key(held: Held, slot: int, record: SlotRecord) -> _Key:
    return _Key(held.name, slot, held.identity(slot), (record.lineage, record.iteration), record.sequence)


def _order(seal: _Seal, first: Snapshot | None) -> tuple[bool, int, int]:
    return (seal.record.lineage, seal.record.iteration) == first, seal.record.iteration, seal.record.sequence
