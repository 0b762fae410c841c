"""Scrubbing: detection of corrupt bytes in memory, repair of parity and packages, reports of corrupt slots."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ftckpt.errors import CorruptError, FtckptError, MismatchError
from ftckpt.events import Events
from ftckpt.memory import package
from ftckpt.memory.checks import CheckState
from ftckpt.memory.corruption import Corruption
from ftckpt.memory.parity_file import ParityFile, parity_path
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.groups import ParityGroup
from ftckpt.parity.modes import PARITY_FILES
from ftckpt.parity.stripes import num_blocks, stripe, stripe_of_block
from ftckpt.parity.survive import BlockId, ChunkId, solve
from ftckpt.setting_checks import MODES
from ftckpt.smp.arenas import CheckedSlot, MonitoredArena
from ftckpt.smp.chunk_source import Feed
from ftckpt.smp.encode import Encoder, has_package, make_block, pull_packages, store_package
from ftckpt.smp.work import Work, in_thread, within

_REMOTE_SECS = 30.0
"""Timeout for other nodes' data in the repair of a parity block or package."""
_MAX_NAMED = 20


@dataclass
class _State:
    """Results of a run for one snapshot: parity files, corrupt blocks, and corrupt chunks of slots."""

    files: dict[tuple[str, int], ParityFile] = field(default_factory=dict)
    bad_blocks: set[BlockId] = field(default_factory=set)
    slots: list[tuple[CheckedSlot, list[int]]] = field(default_factory=list)


SCRUB_SECS = 300.0
"""Interval between runs, short enough that two chunks of a stripe rarely become corrupt between two runs."""


class Scrubber:
    """Verifies checked slots, parity and packages of this node every ``secs``; 0: never.

    Corruption is reported once, as an event ``corrupt``, and again if it recurs after a good run. Slots are never
    written: a trainer may take one over at any moment, without a lock; a restart repairs them. Corrupt parity and
    packages, which the SMP owns, are recreated, with an event ``repaired`` each. If that fails, or a chunk cannot be
    reconstructed, the snapshot counts as encoded no more.
    """

    def __init__(self, encoder: Encoder, events: Events, secs: float) -> None:
        self.repaired = 0
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
        """An arena whose slot of ``snapshot`` was irreparable in the last run; "" if none was."""
        return self._refused.get(snapshot, "")

    def forget(self) -> None:
        """Forget irreparable slots: a restart may have repaired them."""
        self._refused.clear()

    def run(self) -> Work[None]:
        """Scrub everything once; raises FtckptError or OSError if something cannot be read at all."""
        states: dict[SnapshotId, _State] = {}
        refused: dict[SnapshotId, str] = {}
        begun, nbytes = time.monotonic(), 0
        self._found = set()
        try:
            for arena in self._sources.arenas.all:
                nbytes += yield from self._slots(arena, states)
                nbytes += yield from self._parity(arena, states)
            for snapshot, state in states.items():
                for slot, bad in state.slots:
                    if not self._judge(state, slot, bad):
                        # At once: the target must not be encoded again because of ``lost``.
                        refused[snapshot] = self._refused[snapshot] = slot.arena.name
                        self._revoke(snapshot)
                for key in sorted({(name, holder) for name, holder, _ in state.bad_blocks}):
                    yield from self._repair_file(snapshot, state, key)
            yield from self._packages()
            self._revoke_incomplete()
        finally:
            # Also after an error, which would recur at once.
            self._next = time.monotonic() + self._secs
        self._refused = refused
        self._reported = self._found
        self._events.emit("scrubbed", secs=round(time.monotonic() - begun, 4), bytes=nbytes)

    def _slots(self, arena: MonitoredArena, states: dict[SnapshotId, _State]) -> Work[int]:
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
            if bad and slot.still_holds():
                states.setdefault(snapshot, _State()).slots.append((slot, bad))
        return total

    def _parity(self, arena: MonitoredArena, states: dict[SnapshotId, _State]) -> Work[int]:
        """Hash every block of every sealed parity file; returns the number of bytes."""
        total = 0
        for path in (parity_path(arena.path, mode, index) for mode in MODES for index in range(PARITY_FILES)):
            file = self._sources.arenas.parity.get(path)
            if file is not None and (damage := file.damage()):
                self._report(("parity", str(path), damage), arena=arena.name, file=path.name, what=damage.names)
                # The mapped file was parsed when it was opened: the next ``get`` sees its current state.
                self._sources.arenas.parity.drop(path)
                continue
            snapshot = None if file is None else file.snapshot()
            if file is None or snapshot is None or file.group.members[file.holder].shard != arena.shard:
                continue
            state = states.setdefault(snapshot, _State())
            state.files[file.group.name, file.holder] = file
            for block in range(file.num_blocks):
                yield from self._sources.pace.memory(len(file.block(block)))
                total += len(file.block(block))
                if not file.verify(block) and file.snapshot() == snapshot:
                    state.bad_blocks.add((file.group.name, file.holder, block))
                    self._report(
                        ("parity", str(path), block), arena=arena.name, file=path.name, what=[f"block {block}"]
                    )
                yield 0.0
        return total

    def _judge(self, state: _State, slot: CheckedSlot, bad: list[int]) -> bool:
        """Report corrupt chunks of a slot; returns whether all can be reconstructed."""
        if not slot.still_holds():
            return True
        arena, is_encoded = slot.arena, slot.check.state == CheckState.ENCODED
        safe = self._repairable(slot.snapshot, state, is_encoded) if is_encoded or state.files else set()
        names = {chunk: (arena.name, slot.slot, slot.record.sequence, chunk) for chunk in bad}
        if new := [chunk for chunk, key in names.items() if self._is_new(key)]:
            repairable = Corruption(tuple(chunk for chunk in new if (arena.shard, chunk) in safe))
            self._events.emit(
                "corrupt",
                arena=arena.name,
                slot=slot.slot,
                iteration=slot.snapshot.iteration,
                what=Corruption(tuple(new[:_MAX_NAMED])).names,
                repairable=repairable.names[:_MAX_NAMED],
            )
        # A restart reconstructs them: only trainers write slots.
        return all((arena.shard, chunk) in safe for chunk in bad)

    def _repairable(self, snapshot: SnapshotId, state: _State, is_encoded: bool) -> set[ChunkId]:
        """The corrupt chunks of a snapshot that a restart can reconstruct, as far as this node knows."""
        groups = {file.group.name: file.group for file in state.files.values()}
        groups |= {group.name: group for group in self._encoder.part.groups}
        bad = {(slot.arena.shard, chunk) for slot, chunks in state.slots for chunk in chunks}
        _, left = solve(list(groups.values()), bad, self._lost_blocks(state, groups.values(), is_encoded))
        safe = bad - left
        for slot, chunks in state.slots if is_encoded else ():
            image, shard = slot.arena.mapped.image, slot.arena.shard
            spans = [range(s.first_chunk, s.first_chunk + s.num_chunks) for s in image.sections if s.group]
            if has_package(self._sources.arenas.node_dir, shard, snapshot):  # it has a copy of the mutable state
                spans.append(range(image.num_stepped_chunks, len(image.chunks)))
            # Replica parity of these chunks is in the slots of other nodes.
            safe |= {(shard, chunk) for chunk in chunks if any(chunk in span for span in spans)}
        return safe

    def _lost_blocks(self, state: _State, groups: Iterable[ParityGroup], is_encoded: bool) -> set[BlockId]:
        """The corrupt or missing blocks. Those of other nodes are missing unless the snapshot is encoded."""
        holders = [(group, holder, one.node) for group in groups for holder, one in enumerate(group.members)]
        missing = [
            (group, holder)
            for group, holder, node in holders
            if (group.name, holder) not in state.files and (node == self._sources.node or not is_encoded)
        ]
        blocks = {(group.name, holder, n) for group, holder in missing for n in range(num_blocks(group, holder))}
        return blocks | state.bad_blocks

    def _repair_file(self, snapshot: SnapshotId, state: _State, key: tuple[str, int]) -> Work[None]:
        """Recompute corrupt blocks. If that fails the snapshot is revoked, and a target's file is recreated."""
        file = state.files[key]
        good = True
        for block in sorted(block for *which, block in state.bad_blocks if tuple(which) == key):
            try:
                good = yield from within(self._repair_block(snapshot, file, block), _REMOTE_SECS)
            except ValueError:
                return  # the file was closed meanwhile: it is not needed
            except FtckptError:
                good = False
            if not good:
                break
            self.repaired += 1
            what = f"block {block} of {file.path.name}"
            self._events.emit("repaired", arena=file.path.parent.name, iteration=snapshot.iteration, what=what)
        if not good:
            self._revoke(snapshot)
            # A target's file is recreated completely. A protected snapshot's stays: its other blocks are useful.
            if snapshot in self._targets():
                self._sources.arenas.parity.drop(file.path)
                file.path.unlink(missing_ok=True)

    def _repair_block(self, snapshot: SnapshotId, file: ParityFile, block: int) -> Work[bool]:
        group, holder = file.group, file.holder
        one = stripe(group, stripe_of_block(group, holder, block))
        # Not in place: the corrupt block may be the only copy until its data is verified.
        data, row = np.empty(one.length, np.uint8), one.blocks.index((holder, block))
        with closing(Feed(self._sources, group, [one], snapshot)) as feed:
            yield from make_block(self._sources, feed, group, one, row=row, out=data)
        # Encoding of the next target may have started to overwrite the file during the wait.
        if file.snapshot() == snapshot:
            np.copyto(file.block(block), data)
        return file.verify(block)

    def _packages(self) -> Work[None]:
        for name in package.list_packages(self._sources.arenas.node_dir):
            try:
                yield from in_thread(partial(package.load, name.path))
            except (CorruptError, MismatchError) as error:
                if name.path.exists():
                    self._report(("package", str(name.path)), file=name.path.name, what=[str(error)])
                    yield from self._remake_package(name)
            yield 0.0

    def _remake_package(self, name: package.PackageName) -> Work[None]:
        """Pack or pull a corrupt package again. If that fails it is deleted and its snapshot is revoked."""
        arenas = self._sources.arenas.all
        known = {slot.snapshot for arena in arenas for slot in arena.checked()} | self._targets()
        snapshot = name.snapshot if name.snapshot in known else None
        try:
            if snapshot is not None and (yield from within(self._make_package(name.shard, snapshot), _REMOTE_SECS)):
                self.repaired += 1
                self._events.emit("repaired", iteration=snapshot.iteration, what=f"package {name.path.name}")
                return
        except FtckptError:
            pass
        if snapshot is not None:
            self._revoke(snapshot)
        name.path.unlink(missing_ok=True)

    def _make_package(self, shard: str, snapshot: SnapshotId) -> Work[bool]:
        """Store the package if it is one that this node stores; returns whether it is."""
        if (slot := self._sources.arenas.find(shard, snapshot)) is not None:
            yield from store_package(self._sources, slot)
            return True
        wanted = [each for each in self._encoder.part.mirror_from if each.shard == shard]
        yield from pull_packages(self._sources, snapshot, wanted)
        return bool(wanted)

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
