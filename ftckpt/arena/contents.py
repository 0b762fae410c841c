"""What the slots of an arena hold: their bytes, how far each snapshot has come, and whether every byte is good."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from ftckpt.arena.checks import Check, Checks, CheckState
from ftckpt.arena.control import ControlBlock, SlotRecord, SlotState
from ftckpt.arena.image import SlotImage
from ftckpt.arena.mapping import Mapping
from ftckpt.arena.slots import SlotFiles
from ftckpt.errors import ArenaError, CorruptError, MismatchError
from ftckpt.state.manifest import Manifest

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

Hashes = npt.NDArray[np.uint64]


class Contents:
    """The mapped files of one shard, as they are read; ``Arena`` makes and closes them.

    The checksums of a snapshot's chunks are in the control block, or, where the trainer took none, in the
    file ``checks`` as soon as the node's SMP has taken them. What is in ``checks`` counts for a slot only if it
    names lineage, iteration and sequence of the slot's record.
    """

    def __init__(self, path: Path, image: SlotImage, control: Mapping, slots: SlotFiles) -> None:
        self.path = path
        self.image = image
        self.control = ControlBlock(control.data)
        self._control_map = control
        self._slots = slots
        self._checks: Checks | None = None

    @property
    def manifest(self) -> Manifest:
        """What every slot holds."""
        return self.image.manifest

    def slot(self, slot: int) -> memoryview:
        """The whole file of ``slot``; raises CorruptError if it is damaged, ArenaError if not allocated."""
        return self._slots.view(slot)

    def slot_error(self, slot: int) -> str | None:
        """Why ``slot`` cannot be used, or None."""
        return self._slots.error(slot)

    def allocated(self, slot: int) -> bool:
        """Whether ``slot`` has memory; one that has none is no damage."""
        return self._slots.allocated(slot)

    @property
    def checks(self) -> Checks | None:
        """What the node's SMP has found out, read-only; None while there is no such file, or none to be believed."""
        if self._checks is None or self._checks.replaced:
            block = self.control
            try:
                self._checks = Checks.create_or_open(
                    self.path, block.slots, block.num_chunks, block.digest, writable=False
                )
            except (ArenaError, MismatchError):  # missing or bad: what it would tell is not known, nothing is lost
                self._checks = None
        return self._checks

    def check(self, slot: int) -> Check | None:
        """What the SMP knows of the snapshot that ``slot`` holds now."""
        return self._check(slot, self.control.record(slot))

    def state(self, slot: int) -> SlotState:
        """How far the snapshot in ``slot`` has come.

        CHECKED: the SMP has checksums of it. PROTECTED: this node has done its part and the control block
        says that all nodes have.
        """
        record = self.control.record(slot)
        check = self._check(slot, record)
        if check is None:
            return record.state
        covered = check.state == CheckState.COVERED
        if covered and self.control.protected() == (record.lineage, record.iteration):
            return SlotState.PROTECTED
        return max(record.state, SlotState.CHECKED)

    def hashes(self, slot: int) -> Hashes | None:
        """xxh3-64 of each chunk of the snapshot in ``slot``; None if there is no snapshot, or no hashes yet."""
        return self._hashes(slot, self.control.record(slot))

    def unchecked(self, slot: int) -> bool:
        """Whether ``slot`` holds a snapshot without hashes: ``verify`` knows nothing of its chunks."""
        record = self.control.record(slot)
        return record.sealed and self._hashes(slot, record) is None

    def hash_chunk(self, slot: int, chunk: int) -> int:
        """xxh3-64 of the bytes of ``chunk``, read in place; other threads run meanwhile."""
        span = self.image.chunks[chunk]
        with self.slot(slot) as data, data[span.begin : span.end] as piece:
            return xxhash.xxh3_64_intdigest(piece)

    def read_objects(self, slot: int) -> memoryview:
        """The objects in use, not verified; raises CorruptError if their length passes the capacity."""
        return self._objects(slot, self.control.record(slot))

    def verify(self, slot: int, on_progress: Progress | None = None) -> list[str]:
        """Names of what is bad in ``slot``; an empty list means that every byte with a checksum is verified.

        Those are all bytes of the snapshot, or, of one that is ``unchecked``, all but its chunks. Names are
        ``header``, ``chunk N``, ``objects``, ``padding``, ``record`` (no snapshot, or a torn record), or the
        slot's error. Room for objects behind those in use holds nothing and is not looked at.
        """
        error = self.slot_error(slot)
        if error is not None:
            return [error]
        record = self.control.record(slot)
        if not record.sealed:
            return ["record"]
        bad = [] if self.header_good(slot) else ["header"]
        with self.slot(slot) as data:
            if any(bytes(data[pad.begin : pad.end]).strip(b"\0") for pad in self.image.pads):
                bad.append("padding")
        hashes = self._hashes(slot, record)
        for chunk, expected in enumerate([] if hashes is None else hashes.tolist()):
            if self.hash_chunk(slot, chunk) != expected:
                bad.append(f"chunk {chunk}")
            if on_progress is not None:
                on_progress(self.image.chunks[chunk].end, self.image.file_bytes)
        if not self._objects_good(slot, record):
            bad.append("objects")
        if on_progress is not None:
            on_progress(self.image.file_bytes, self.image.file_bytes)
        return bad

    def header_good(self, slot: int) -> bool:
        """Whether ``slot`` is mapped and begins with the header that its manifest gives."""
        if self.slot_error(slot) is not None:
            return False
        with self.slot(slot) as data:
            return bytes(data[: len(self.image.header)]) == self.image.header

    def _check(self, slot: int, record: SlotRecord) -> Check | None:
        """None, too, where ``checks`` speaks of another snapshot than ``record``: the slot was written since."""
        checks = self.checks if record.sealed else None
        check = None if checks is None else checks.read(slot)
        matches = check is not None and check.key == (record.lineage, record.iteration, record.sequence)
        return check if matches else None

    def _hashes(self, slot: int, record: SlotRecord) -> Hashes | None:
        if not record.sealed:
            return None
        if record.hashed:
            return record.chunk_hashes
        check = self._check(slot, record)
        return None if check is None else check.chunk_hashes

    def _objects(self, slot: int, record: SlotRecord) -> memoryview:
        span = self.image.objects
        if record.objects_used > span.nbytes:
            raise CorruptError(f"slot {slot}: {record.objects_used} bytes of objects, room for {span.nbytes}")
        return self.slot(slot)[span.begin : span.begin + record.objects_used]

    def _objects_good(self, slot: int, record: SlotRecord) -> bool:
        try:
            with self._objects(slot, record) as objects:
                return xxhash.xxh3_64_intdigest(objects) == record.objects_hash
        except CorruptError:
            return False
