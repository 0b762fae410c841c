"""Looking for bytes that went bad while they lay there, and putting them right while it can still be done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import xxhash

from ftckpt.arena import package
from ftckpt.arena.control import Snapshot
from ftckpt.arena.segment import Arena
from ftckpt.errors import CorruptError, FtckptError, MismatchError
from ftckpt.events import Events
from ftckpt.protect.codecs import MISSING, Missing, decode
from ftckpt.protect.groups import MODES
from ftckpt.protect.parity_file import ParityFile, parity_path
from ftckpt.protect.stripes import stripe, stripe_of_block
from ftckpt.protect.survive import BlockId, ChunkId, Repair, solve
from ftckpt.smp.encode import make_block
from ftckpt.smp.held import Found, Held
from ftckpt.smp.parity_files import FILES
from ftckpt.smp.sources import Bytes, Feed, Sources
from ftckpt.smp.work import Work, in_thread, within

_REMOTE_SECS = 30.0
"""How long other nodes may take to give what a bad parity block is computed anew from."""


@dataclass
class _State:
    """What was found of one snapshot: parity files, chunks and blocks that are bad."""

    files: dict[tuple[str, int], ParityFile] = field(default_factory=dict)
    bad_chunks: set[ChunkId] = field(default_factory=set)
    bad_blocks: set[BlockId] = field(default_factory=set)


class _LostBlocks:
    """Blocks of parity files that are bad or not on this node."""

    def __init__(self, state: _State) -> None:
        self._state = state

    def __contains__(self, block: object) -> bool:
        assert isinstance(block, tuple)
        return block[:2] not in self._state.files or block in self._state.bad_blocks


class Scrubber:
    """Goes through checked slots, parity and packages of this node, every ``secs``; 0: never.

    What is bad is told once, as an event ``corrupt``, and what is put right as ``repaired``.
    """

    def __init__(self, sources: Sources, events: Events, secs: float) -> None:
        self.repaired = 0
        self.lost: set[Snapshot] = set()
        """Snapshots of which the last run deleted something that has to be made anew."""
        self._sources = sources
        self._events = events
        self._secs = secs
        self._next = time.monotonic() + secs
        self._told: set[tuple[object, ...]] = set()

    @property
    def due(self) -> bool:
        """Whether it is time for the next run."""
        return self._secs > 0 and time.monotonic() >= self._next

    def run(self) -> Work[None]:
        """One run over all that is held; raises FtckptError or OSError where something cannot be read at all."""
        states: dict[Snapshot, _State] = {}
        begun, nbytes = time.monotonic(), 0
        self.lost = set()
        try:
            for held in self._sources.held.all:
                nbytes += yield from self._slots(held, states)
                nbytes += yield from self._parity(held, states)
            for snapshot, state in states.items():
                if state.bad_chunks:
                    yield from self._repair_chunks(snapshot, state)
                for name, holder, block in sorted(state.bad_blocks):
                    yield from self._repair_block(snapshot, state.files[name, holder], block)
            yield from self._packages()
        finally:
            self._next = time.monotonic() + self._secs
        self._events.emit("scrubbed", secs=round(time.monotonic() - begun, 4), bytes=nbytes)

    def _slots(self, held: Held, states: dict[Snapshot, _State]) -> Work[int]:
        """Hash every chunk of every checked slot; returns the bytes."""
        total = 0
        for snapshot in list(_checked(held)):
            bad = []
            found = held.found(snapshot)
            for chunk, span in enumerate(held.arena.image.chunks if found is not None else ()):
                yield from self._sources.pace.memory(span.nbytes)
                total += span.nbytes
                if found is not None and held.arena.hash_chunk(found.slot, chunk) != int(found.hashes[chunk]):
                    bad.append((held.shard, chunk))
                yield 0.0
            # Only what was not given up meanwhile says anything.
            if bad and found is not None and held.same(found.slot, found.record):
                states.setdefault(snapshot, _State()).bad_chunks.update(bad)
                self._tell_corrupt(held, found, [chunk for _, chunk in bad])
        return total

    def _parity(self, held: Held, states: dict[Snapshot, _State]) -> Work[int]:
        """Hash every block of every sealed parity file; returns the bytes."""
        total = 0
        for path in (parity_path(held.path, mode, index) for mode in MODES for index in range(FILES)):
            file = self._sources.held.parity.get(path)
            snapshot = None if file is None else file.snapshot()
            if file is None or snapshot is None or file.group.members[file.holder].shard != held.shard:
                continue
            state = states.setdefault(snapshot, _State())
            state.files[file.group.name, file.holder] = file
            for block in range(file.num_blocks):
                yield from self._sources.pace.memory(len(file.block(block)))
                total += len(file.block(block))
                if not file.verify(block) and file.snapshot() == snapshot:
                    state.bad_blocks.add((file.group.name, file.holder, block))
                    self._tell(("parity", str(path), block), arena=held.name, file=path.name, what=[f"block {block}"])
                yield 0.0
        return total

    def _repair_chunks(self, snapshot: Snapshot, state: _State) -> Work[None]:
        """In place, from the parity of this node. Only what no trainer may overwrite: protected or target."""
        groups = [file.group for file in state.files.values() if file.group.mode == "node"]
        unique = list({group.name: group for group in groups}.values())
        repairs, _ = solve(unique, state.bad_chunks, _LostBlocks(state))
        for repair in repairs:
            try:
                arrays = yield from self._solve(snapshot, repair, state)
            except FtckptError:
                continue  # what it needs has gone bad, or was given up, meanwhile: the next run sees it
            for (shard, chunk), data in arrays.items():
                held, found = self._sources.find(shard, snapshot)
                if xxhash.xxh3_64_intdigest(data.data) != int(found.hashes[chunk]):
                    continue  # the parity was made of bytes that were bad already, or of another snapshot
                if (yield from self._put_right(held, found, chunk, data)):
                    self.repaired += 1
                    self._events.emit(
                        "repaired", arena=held.name, slot=found.slot, iteration=snapshot[1], what=f"chunk {chunk}"
                    )

    def _solve(self, snapshot: Snapshot, repair: Repair, state: _State) -> Work[dict[ChunkId, Bytes]]:
        group, lost = repair.group, set(repair.lost)
        arrays: list[Bytes | Missing | None] = []
        ids: dict[int, tuple[ChunkId, int]] = {}
        for place, (index, chunk) in enumerate(repair.stripe.data):
            member = group.members[index]
            if chunk < 0:
                arrays.append(None)
            elif (member.shard, member.first + chunk) in lost:
                ids[place] = ((member.shard, member.first + chunk), member.lengths[chunk])
                arrays.append(MISSING)
            else:
                arrays.append((yield from self._sources.local(member.shard, member.first + chunk, snapshot)))
        rows = {holder: row for row, holder in enumerate(repair.stripe.blocks)}
        blocks = {rows[holder, block]: state.files[name, holder].block(block) for name, holder, block in repair.use}
        yield from self._sources.pace.memory(repair.stripe.length * (len(blocks) + 1))
        solved = decode(group.code, arrays, blocks, repair.stripe.length, group.losses)
        return {chunk_id: solved[place][:nbytes] for place, (chunk_id, nbytes) in ids.items()}

    def _put_right(self, held: Held, found: Found, chunk: int, data: Bytes) -> Work[bool]:
        """Whether the chunk is good afterwards; nothing is written to a slot that a trainer may take."""
        arena = yield from in_thread(lambda: Arena.open(held.path, writable=True))
        try:
            # The lease comes first: a trainer that takes the slot over after the marks were read sees it.
            with held.lease(found.slot):
                kept = (held.arena.control.protected(), held.arena.control.target())
                snapshot = (found.record.lineage, found.record.iteration)
                if snapshot not in kept or not held.same(found.slot, found.record):
                    return False
                arena.repair_chunk(found.slot, chunk, data)
                return held.arena.hash_chunk(found.slot, chunk) == int(found.hashes[chunk])
        finally:
            arena.close()

    def _repair_block(self, snapshot: Snapshot, file: ParityFile, block: int) -> Work[None]:
        """Compute a bad block anew; where that fails the file goes, if it can still be made anew as a whole."""
        group, holder = file.group, file.holder
        one = stripe(group, stripe_of_block(group, holder, block))
        row = one.blocks.index((holder, block))
        what = f"block {block} of {file.path.name}"
        try:
            feed = Feed(self._sources, group, [one], snapshot)
            data = yield from within(make_block(self._sources, feed, group, one, row=row), _REMOTE_SECS)
            if file.snapshot() == snapshot:
                np.copyto(file.block(block), data)
            good = file.verify(block)
        except FtckptError:
            good = False
        if good:
            self.repaired += 1
            self._events.emit("repaired", arena=file.path.parent.name, iteration=snapshot[1], what=what)
        elif snapshot in [held.arena.control.target() for held in self._sources.held.all]:
            self._sources.held.parity.drop(file.path)
            file.path.unlink(missing_ok=True)
            self.lost.add(snapshot)

    def _packages(self) -> Work[None]:
        node_dir = self._sources.held.node_dir
        for name in package.list_packages(node_dir):
            try:
                yield from in_thread(partial(package.load, name.path))
            except (CorruptError, MismatchError) as error:
                if name.path.exists():
                    self._tell(("package", str(name.path)), file=name.path.name, what=[str(error)])
                    name.path.unlink(missing_ok=True)
                    yield from self._pack_again(name)
            yield 0.0

    def _pack_again(self, name: package.PackageName) -> Work[None]:
        """Of a shard of this node at once; of another node's when the target is covered anew."""
        held = self._sources.held.by_shard.get(name.shard)
        for snapshot in list(_checked(held)) if held is not None else []:
            found = held.found(snapshot) if held is not None else None
            if held is not None and found and (snapshot[0].hex()[:8], snapshot[1]) == (name.lineage8, name.iteration):
                with held.lease(found.slot):
                    package.store(self._sources.held.node_dir, package.pack(held.arena, found.slot))
                self.repaired += 1
                self._events.emit("repaired", iteration=name.iteration, what=f"package {name.path.name}")
                return
        for mark in (held.arena.control.target() for held in self._sources.held.all):
            if mark is not None and (mark[0].hex()[:8], mark[1]) == (name.lineage8, name.iteration):
                self.lost.add(mark)
        yield 0.0

    def _tell_corrupt(self, held: Held, found: Found, chunks: list[int]) -> None:
        keys = {chunk: (held.name, found.slot, found.record.sequence, chunk) for chunk in chunks}
        new = [chunk for chunk, key in keys.items() if key not in self._told]
        self._told.update(keys.values())
        if new:
            what = [f"chunk {chunk}" for chunk in new[:20]]
            iteration = found.record.iteration
            self._events.emit("corrupt", arena=held.name, slot=found.slot, iteration=iteration, what=what)

    def _tell(self, key: tuple[object, ...], **fields: object) -> None:
        if key not in self._told:
            self._told.add(key)
            self._events.emit("corrupt", **fields)


def _checked(held: Held) -> Iterator[Snapshot]:
    """Snapshots of an arena that are checked."""
    for slot in range(held.arena.control.slots):
        record = held.arena.control.record(slot)
        snapshot = (record.lineage, record.iteration)
        found = held.found(snapshot) if record.sealed else None
        if found is not None and found.slot == slot:
            yield snapshot
