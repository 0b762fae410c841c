"""Looking for bytes that went bad while they lay there: what is the SMP's own is made anew, the rest is told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ftckpt.arena import package
from ftckpt.arena.checks import CheckState
from ftckpt.arena.control import Snapshot
from ftckpt.errors import CorruptError, FtckptError, MismatchError
from ftckpt.events import Events
from ftckpt.protect.groups import MODES, ParityGroup
from ftckpt.protect.parity_file import ParityFile, parity_path
from ftckpt.protect.stripes import stripe, stripe_of_block
from ftckpt.protect.survive import BlockId, ChunkId, solve
from ftckpt.smp import packages
from ftckpt.smp.cover import Duty, covered_slots, take_back
from ftckpt.smp.encode import make_block
from ftckpt.smp.held import Found, Held
from ftckpt.smp.parity_files import FILES
from ftckpt.smp.sources import Feed, Sources
from ftckpt.smp.work import Work, in_thread, within

_REMOTE_SECS = 30.0
"""How long other nodes may take to give what a bad parity block, or package, is made anew from."""
_MOST_NAMED = 20


@dataclass
class _State:
    """What was found of one snapshot: parity files, blocks that are bad, and bad chunks of slots."""

    files: dict[tuple[str, int], ParityFile] = field(default_factory=dict)
    bad_blocks: set[BlockId] = field(default_factory=set)
    slots: list[tuple[Held, Found, list[int]]] = field(default_factory=list)


class _LostBlocks:
    """Blocks that are bad or not there; what other nodes hold of a snapshot that is not covered is not there."""

    def __init__(self, state: _State, groups: dict[str, ParityGroup], node: str, covered: bool) -> None:
        self._state, self._groups, self._node, self._covered = state, groups, node, covered

    def __contains__(self, block: object) -> bool:
        assert isinstance(block, tuple)
        name, holder, _ = block
        if self._groups[name].members[holder].node != self._node:
            return not self._covered
        return (name, holder) not in self._state.files or block in self._state.bad_blocks


class Scrubber:
    """Goes through checked slots, parity and packages of this node, every ``secs``; 0: never.

    What is bad is told once, as an event ``corrupt``. Slots are never written: a trainer may take one over at any
    moment, and writes without a lock; a restart puts them right. Bad parity and packages are the SMP's own and are
    made anew, an event ``repaired`` each. Where that fails, or nothing can bring a chunk back, COVERED is taken back.
    """

    def __init__(self, sources: Sources, duty: Duty, events: Events, secs: float) -> None:
        self.repaired = 0
        self.lost: set[Snapshot] = set()
        """Snapshots of which something is gone that has to be made anew."""
        self._sources = sources
        self._duty = duty
        self._events = events
        self._secs = secs
        self._next = time.monotonic() + secs
        self._told: set[tuple[object, ...]] = set()
        self._refused: dict[Snapshot, str] = {}  # known before the target is begun anew, which ``lost`` brings about

    @property
    def due(self) -> bool:
        """Whether it is time for the next run."""
        return self._secs > 0 and time.monotonic() >= self._next

    def refused(self, snapshot: Snapshot) -> str:
        """An arena whose slot of ``snapshot`` is bad beyond repair, as of the last run; "" if none is."""
        return self._refused.get(snapshot, "")

    def forget(self) -> None:
        """What was bad may have been put right."""
        self._refused.clear()

    def run(self) -> Work[None]:
        """One run over all that is held; raises FtckptError or OSError where something cannot be read at all."""
        states: dict[Snapshot, _State] = {}
        refused: dict[Snapshot, str] = {}
        begun, nbytes = time.monotonic(), 0
        try:
            for held in self._sources.held.all:
                nbytes += yield from self._slots(held, states)
                nbytes += yield from self._parity(held, states)
            for snapshot, state in states.items():
                for held, found, bad in state.slots:
                    if self._judge(snapshot, state, held, found, bad):
                        refused[snapshot] = held.name
                for key in sorted({(name, holder) for name, holder, _ in state.bad_blocks}):
                    yield from self._repair_file(snapshot, state, key)
            yield from self._packages()
        finally:
            self._next = time.monotonic() + self._secs
        self._refused = refused
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
                    bad.append(chunk)
                yield 0.0
            # Only what was not given up meanwhile says anything.
            if bad and found is not None and held.same(found.slot, found.record):
                states.setdefault(snapshot, _State()).slots.append((held, found, bad))
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

    def _judge(self, snapshot: Snapshot, state: _State, held: Held, found: Found, bad: list[int]) -> bool:
        """Tell bad chunks of a slot; whether there are some that nothing can bring back, of what should be safe."""
        if not held.same(found.slot, found.record):
            return False
        covered = found.check.state == CheckState.COVERED
        safe = self._repairable(snapshot, state, covered) if covered or state.files else set()
        names = {chunk: (held.name, found.slot, found.record.sequence, chunk) for chunk in bad}
        new = [chunk for chunk, key in names.items() if key not in self._told]
        self._told.update(names.values())
        if new:
            self._events.emit(
                "corrupt",
                arena=held.name,
                slot=found.slot,
                iteration=snapshot[1],
                what=[f"chunk {chunk}" for chunk in new[:_MOST_NAMED]],
                repairable=[f"chunk {chunk}" for chunk in new if (held.shard, chunk) in safe][:_MOST_NAMED],
            )
        if all((held.shard, chunk) in safe for chunk in bad):
            return False
        self._refused[snapshot] = held.name
        self._take_back(snapshot)
        return True

    def _repairable(self, snapshot: Snapshot, state: _State, covered: bool) -> set[ChunkId]:
        """Those of the bad chunks of a snapshot that a restart can bring back, as far as this node can tell."""
        groups = {file.group.name: file.group for file in state.files.values()}
        groups |= {group.name: group for group in self._duty.groups}
        bad = {(held.shard, chunk) for held, _, chunks in state.slots for chunk in chunks}
        _, left = solve(list(groups.values()), bad, _LostBlocks(state, groups, self._sources.node, covered))
        safe = bad - left
        for held, _, chunks in state.slots if covered else ():
            image, node_dir = held.arena.image, self._sources.held.node_dir
            spans = [range(s.first_chunk, s.first_chunk + s.num_chunks) for s in image.sections if s.group]
            if packages.exists(node_dir, held.shard, snapshot):  # it has a copy of the volatile region
                spans.append(range(image.num_stepped_chunks, len(image.chunks)))
            # What replicas share is computed from them, and lies in the slots of other nodes.
            safe |= {(held.shard, chunk) for chunk in chunks if any(chunk in span for span in spans)}
        return safe

    def _repair_file(self, snapshot: Snapshot, state: _State, key: tuple[str, int]) -> Work[None]:
        """Compute bad blocks anew; where that fails COVERED is taken back, and the file is made anew for a target."""
        file = state.files[key]
        good = True
        for block in sorted(block for *which, block in state.bad_blocks if tuple(which) == key):
            try:
                good = yield from within(self._repair_block(snapshot, file, block), _REMOTE_SECS)
            except ValueError:
                return  # the file was closed meanwhile: it is needed no more
            except FtckptError:
                good = False
            if not good:
                break
            self.repaired += 1
            what = f"block {block} of {file.path.name}"
            self._events.emit("repaired", arena=file.path.parent.name, iteration=snapshot[1], what=what)
        if not good:
            self._take_back(snapshot)
            if snapshot in self._targets():
                self._sources.held.parity.drop(file.path)
                file.path.unlink(missing_ok=True)

    def _repair_block(self, snapshot: Snapshot, file: ParityFile, block: int) -> Work[bool]:
        group, holder = file.group, file.holder
        one = stripe(group, stripe_of_block(group, holder, block))
        with closing(Feed(self._sources, group, [one], snapshot)) as feed:
            data = yield from make_block(self._sources, feed, group, one, row=one.blocks.index((holder, block)))
        if file.snapshot() == snapshot:
            np.copyto(file.block(block), data)
        return file.verify(block)

    def _packages(self) -> Work[None]:
        for name in package.list_packages(self._sources.held.node_dir):
            try:
                yield from in_thread(partial(package.load, name.path))
            except (CorruptError, MismatchError) as error:
                if name.path.exists():
                    self._tell(("package", str(name.path)), file=name.path.name, what=[str(error)])
                    yield from self._package_anew(name)
            yield 0.0

    def _package_anew(self, name: package.PackageName) -> Work[None]:
        """Pack or pull a bad package again; where that fails it goes, and COVERED with it."""
        known = {snapshot for held in self._sources.held.all for snapshot in _checked(held)} | self._targets()
        snapshot = next((s for s in known if (s[0].hex()[:8], s[1]) == (name.lineage8, name.iteration)), None)
        try:
            if snapshot is not None and (yield from within(self._make_package(name.shard, snapshot), _REMOTE_SECS)):
                self.repaired += 1
                self._events.emit("repaired", iteration=name.iteration, what=f"package {name.path.name}")
                return
        except FtckptError:
            pass
        if snapshot is not None:
            self._take_back(snapshot)
        name.path.unlink(missing_ok=True)

    def _make_package(self, shard: str, snapshot: Snapshot) -> Work[bool]:
        """Whether this node has it to keep, and does again."""
        held = self._sources.held.by_shard.get(shard)
        found = held.found(snapshot) if held is not None else None
        if held is not None and found is not None:
            with held.lease(found.slot):
                yield from packages.pack(self._sources, held, found)
            return True
        wanted = [(node, other) for node, other in self._duty.mirror_from if other == shard]
        yield from packages.pull(self._sources, snapshot, wanted)
        return bool(wanted)

    def _targets(self) -> set[Snapshot]:
        marks = (held.arena.control.target() for held in self._sources.held.all)
        return {mark for mark in marks if mark is not None}

    def _take_back(self, snapshot: Snapshot) -> None:
        take_back(covered_slots(self._sources).get(snapshot, ()))
        self.lost.add(snapshot)

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
