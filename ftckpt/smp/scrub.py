"""Scrubbing: detection of corrupt bytes in memory after their first check."""

from __future__ import annotations

import time
from functools import partial

from ftckpt.errors import CorruptError, MismatchError
from ftckpt.events import Events
from ftckpt.memory import package
from ftckpt.memory.corruption import Corruption
from ftckpt.memory.parity_file import parity_path
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.modes import PARITY_FILES
from ftckpt.setting_checks import MODES
from ftckpt.smp.arenas import MonitoredArena
from ftckpt.smp.encode import Encoder
from ftckpt.smp.work import Work, in_thread

_MAX_NAMED = 20
SCRUB_SECS = 300.0
"""Interval between runs, short enough that two chunks of a stripe rarely become corrupt between two runs."""


class Scrubber:
    """Verifies checked slots, parity and packages of this node every ``secs``; 0: never.

    Corruption is reported once, as an event ``corrupt``, and again if it recurs after a good run. Slots are never
    written: a trainer may take one over at any moment, without a lock; a restart repairs them. A target with a
    corrupt slot is refused. Its corrupt parity and packages are deleted, and it is encoded again. A protected
    snapshot keeps corrupt parity, whose other blocks are useful, until the next one is protected.
    """

    def __init__(self, encoder: Encoder, events: Events, secs: float) -> None:
        self.lost: set[SnapshotId] = set()
        """Snapshots that lost a part, which must be encoded again; the reader clears it."""
        self._encoder = encoder
        self._sources = encoder.sources
        self._events = events
        self._secs = secs
        self._next = time.monotonic() + secs
        self._found: set[tuple[object, ...]] = set()
        self._reported: set[tuple[object, ...]] = set()
        self._refused: dict[SnapshotId, str] = {}

    @property
    def due(self) -> bool:
        """Whether the next run is due."""
        return self._secs > 0 and time.monotonic() >= self._next

    def refused(self, snapshot: SnapshotId) -> str:
        """An arena whose slot of ``snapshot`` was corrupt in the last run; "" if none was."""
        return self._refused.get(snapshot, "")

    def forget(self) -> None:
        """Forget corrupt slots: a restart may have repaired them."""
        self._refused.clear()

    def run(self) -> Work[None]:
        """Scrub everything once; raises FtckptError or OSError if something cannot be read at all."""
        refused: dict[SnapshotId, str] = {}
        begun, nbytes = time.monotonic(), 0
        self._found = set()
        try:
            for arena in self._sources.arenas.all:
                nbytes += yield from self._slots(arena, refused)
                nbytes += yield from self._parity(arena)
            yield from self._packages()
            self._revoke_incomplete()
        finally:
            # Also after an error, which would recur at once.
            self._next = time.monotonic() + self._secs
        self._refused = refused
        self._reported = self._found
        self._events.emit("scrubbed", secs=round(time.monotonic() - begun, 4), bytes=nbytes)

    def _slots(self, arena: MonitoredArena, refused: dict[SnapshotId, str]) -> Work[int]:
        """Hash every chunk of every checked slot; returns the number of bytes."""
        total = 0
        for snapshot in arena.mapped.snapshots():
            bad: list[int] = []
            if (slot := arena.find(snapshot)) is None:
                continue
            for chunk, span in enumerate(arena.mapped.image.chunks):
                yield from self._sources.pace.memory(span.nbytes)
                total += span.nbytes
                if arena.mapped.hash_chunk(slot.slot, chunk) != int(slot.hashes[chunk]):
                    bad.append(chunk)
                yield 0.0
            # A slot that was reused meanwhile is not corrupt.
            if not bad or not slot.still_holds():
                continue
            # At once: the target must not be encoded again because of ``lost``.
            refused[snapshot] = self._refused[snapshot] = arena.name
            if snapshot in self._targets():
                self._revoke(snapshot)
            names = {chunk: (arena.name, slot.slot, slot.record.sequence, chunk) for chunk in bad}
            if new := [chunk for chunk, key in names.items() if self._is_new(key)]:
                what = Corruption(tuple(new[:_MAX_NAMED])).names
                where = {"arena": arena.name, "slot": slot.slot, "iteration": snapshot.iteration}
                self._events.emit("corrupt", **where, what=what)
        return total

    def _parity(self, arena: MonitoredArena) -> Work[int]:
        """Hash every block of every sealed parity file; returns the number of bytes."""
        total, files = 0, self._sources.arenas.parity
        for path in (parity_path(arena.path, mode, index) for mode in MODES for index in range(PARITY_FILES)):
            file = files.get(path)
            if file is not None and (damage := file.damage()):
                self._report(("parity", str(path), damage), arena=arena.name, file=path.name, what=damage.names)
                # The mapped file was parsed when it was opened: the next ``get`` sees its current state.
                files.drop(path)
                continue
            snapshot = None if file is None else file.snapshot()
            if file is None or snapshot is None or file.group.members[file.holder].shard != arena.shard:
                continue
            bad = False
            for block in range(file.num_blocks):
                yield from self._sources.pace.memory(len(file.block(block)))
                total += len(file.block(block))
                if not file.verify(block) and file.snapshot() == snapshot:
                    bad = True
                    self._report(
                        ("parity", str(path), block), arena=arena.name, file=path.name, what=[f"block {block}"]
                    )
                yield 0.0
            if bad and snapshot in self._targets():
                files.drop(path)
                path.unlink(missing_ok=True)  # ``_revoke_incomplete`` follows
        return total

    def _packages(self) -> Work[None]:
        """Verify all packages, and delete corrupt ones: the other nodes that keep one have the only usable copies."""
        for name in package.list_packages(self._sources.arenas.node_dir):
            try:
                yield from in_thread(partial(package.load, name.path))
            except (CorruptError, MismatchError) as error:
                if name.path.exists():
                    self._report(("package", str(name.path)), file=name.path.name, what=[str(error)])
                    name.path.unlink(missing_ok=True)
            yield 0.0

    def _revoke_incomplete(self) -> None:
        """Revoke encoded snapshots with a deleted or unreadable file."""
        arenas = self._sources.arenas.all
        marks = {arena.mapped.control.protected() for arena in arenas} | self._targets()
        for snapshot in self._encoder.encoded():
            if not self._encoder.is_complete(snapshot):
                # Checked after the files: a removed arena vanishes before its files, and revokes nothing.
                if any(arena.vanished for arena in arenas):
                    return
                self._revoke(snapshot)
                # Files of other snapshots were reused for newer ones: no loss.
                if snapshot in marks:
                    reason = "a package or a parity file is gone"
                    self._events.emit("not_covered", iteration=snapshot.iteration, reason=reason)

    def _targets(self) -> set[SnapshotId]:
        marks = (arena.mapped.control.target() for arena in self._sources.arenas.all)
        return {mark for mark in marks if mark is not None}

    def _revoke(self, snapshot: SnapshotId) -> None:
        self._encoder.revoke(snapshot)
        self.lost.add(snapshot)

    def _report(self, key: tuple[object, ...], **fields: object) -> None:
        if self._is_new(key):
            self._events.emit("corrupt", **fields)

    def _is_new(self, key: tuple[object, ...]) -> bool:
        """Record a corruption; returns whether the last run did not have it."""
        self._found.add(key)
        return key not in self._reported
