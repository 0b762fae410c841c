"""What a node owes to the protection of one snapshot: packages, parity, packages of other nodes' shards."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from ftckpt.arena import package
from ftckpt.arena.checks import CheckState
from ftckpt.arena.control import Snapshot
from ftckpt.errors import CorruptError, MismatchError
from ftckpt.events import Events
from ftckpt.protect.groups import ParityGroup
from ftckpt.protect.stripes import num_blocks
from ftckpt.smp.encode import sealed_parity, write_parity
from ftckpt.smp.held import Found, Held
from ftckpt.smp.sources import Sources
from ftckpt.smp.wire import Kind, Request
from ftckpt.smp.work import Work, in_thread

_POLL_SECS = 0.02
_PULLED_AT_ONCE = 4


@dataclass(frozen=True)
class Duty:
    """What this node was told to do: groups with a member here, and of which nodes' shards it keeps packages."""

    groups: tuple[ParityGroup, ...] = ()
    mirror_from: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_json(cls, description: Mapping[str, Any]) -> Duty:
        """What a description for the SMP says; raises ValueError, TypeError or AttributeError if it is unusable."""
        groups = tuple(ParityGroup.from_json(group) for group in description.get("groups", ()))
        mirrors = description.get("mirror_from", {})
        return cls(groups, tuple((str(node), str(shard)) for node, shards in mirrors.items() for shard in shards))

    def holders(self, sources: Sources) -> Iterator[tuple[Held, ParityGroup, int]]:
        """Arenas of this node, and what they are in each group; groups that need no other node first."""
        for group in sorted(self.groups, key=lambda group: group.mode != "node"):
            for index, member in enumerate(group.members):
                held = sources.held.by_shard.get(member.shard)
                if member.node == sources.node and held is not None:
                    yield held, group, index

    def done(self, sources: Sources, snapshot: Snapshot) -> bool:
        """Whether everything that this node owes to ``snapshot`` is there."""
        node_dir = sources.held.node_dir
        shards = [held.shard for held in sources.held.all] + [shard for _, shard in self.mirror_from]
        return all(package.package_path(node_dir, shard, *snapshot).is_file() for shard in shards) and all(
            num_blocks(group, index) == 0 or sealed_parity(sources, held, group, index, snapshot=snapshot) is not None
            for held, group, index in self.holders(sources)
        )


class Cover:
    """The work on one target snapshot. Whatever is there already, and sound, is not done again."""

    def __init__(self, sources: Sources, duty: Duty, events: Events, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._keep: Snapshot | None = None
        self._sources = sources
        self._duty = duty
        self._events = events

    def run(self) -> Work[None]:
        """Do it all and store COVERED; ends at once where that is stored already.

        Raises:
            FtckptError, OSError: it cannot be done; the text says why.
        """
        found = yield from self._checked()
        if all(one.check.state == CheckState.COVERED for _, one in found):
            return
        begun, received = time.monotonic(), self._sources.received_bytes
        with ExitStack() as leases:
            for held, one in found:
                leases.enter_context(held.lease(one.slot))
            self._prune(found)
            yield from self._duties(found)
            if not self._store_covered(found):
                return
        self._events.emit(
            "covered",
            iteration=self.snapshot[1],
            secs=round(time.monotonic() - begun, 4),
            bytes=sum(held.arena.image.file_bytes for held, _ in found),
            received_bytes=self._sources.received_bytes - received,
        )

    def _checked(self) -> Work[list[tuple[Held, Found]]]:
        """Waits until every arena of the node holds the snapshot and is CHECKED."""
        while True:
            found = [(arena, arena.found(self.snapshot)) for arena in self._sources.held.all]
            ready = [(arena, one) for arena, one in found if one is not None]
            if self._sources.held.complete and len(ready) == len(found):
                return ready
            yield _POLL_SECS

    def _duties(self, found: Sequence[tuple[Held, Found]]) -> Work[None]:
        yield from self._own_packages(found)
        for held, group, index in self._duty.holders(self._sources):
            keep = held.arena.control.protected() or self._keep
            yield from write_parity(self._sources, held, group, index, snapshot=self.snapshot, keep=keep)
        yield from self._other_packages()

    def _prune(self, found: Sequence[tuple[Held, Found]]) -> None:
        """Packages of what is neither protected nor to be protected; nothing where it is not known what is."""
        marks = [mark for held, _ in found if (mark := held.arena.control.protected()) is not None]
        if marks:
            self._keep = max(marks, key=lambda mark: mark[1])
            keep = {(lineage.hex()[:8], iteration) for lineage, iteration in [*marks, self.snapshot]}
            package.prune(self._sources.held.node_dir, keep)

    def _own_packages(self, found: Sequence[tuple[Held, Found]]) -> Work[None]:
        node_dir = self._sources.held.node_dir
        for held, one in found:
            if not self._kept(held.shard):
                yield from self._sources.pace.memory(held.arena.image.volatile.nbytes)
                data = package.pack(held.arena, one.slot)
                yield from in_thread(partial(package.store, node_dir, data))
            yield 0.0

    def _other_packages(self) -> Work[None]:
        node_dir = self._sources.held.node_dir
        missing = [(node, shard) for node, shard in self._duty.mirror_from if not self._kept(shard)]
        for begin in range(0, len(missing), _PULLED_AT_ONCE):
            asked = []
            for node, shard in missing[begin : begin + _PULLED_AT_ONCE]:
                request = Request(Kind.PACKAGE, shard, *self.snapshot)
                asked.append((node, shard, (yield from self._sources.ask(node, request, package.MAX_PACKAGE_BYTES))))
            for node, shard, fetch in asked:
                wrong = partial(self._wrong_package, shard=shard)
                data = bytes((yield from self._sources.take(node, fetch, wrong)))
                yield from in_thread(partial(package.store, node_dir, data))

    def _wrong_package(self, data: bytearray, shard: str) -> str:
        try:
            found = package.unpack(data)
        except (CorruptError, MismatchError) as error:
            return str(error)
        same = (found.shard, found.lineage, found.iteration) == (shard, *self.snapshot)
        return "" if same else f"a package of {found.shard} at {found.iteration}"

    def _kept(self, shard: str) -> bool:
        return package.package_path(self._sources.held.node_dir, shard, *self.snapshot).is_file()

    def _store_covered(self, found: Sequence[tuple[Held, Found]]) -> bool:
        """Whether all slots still hold the snapshot; only then is anything claimed."""
        if not all(held.same(one.slot, one.record) for held, one in found):
            return False
        for held, one in found:
            held.checks.store_covered(one.slot, one.record.lineage, one.record.iteration, one.record.sequence)
        return True


def uncover(sources: Sources, duty: Duty) -> bool:
    """Take back COVERED where it is not true any more: other duties, or something that is gone. Whether any was."""
    held = sources.held
    covered: dict[Snapshot, list[tuple[Held, Found]]] = {}
    for arena in held.all:
        for slot in range(arena.arena.control.slots):
            check = arena.checks.read(slot)
            if check is not None and check.state == CheckState.COVERED:
                snapshot = (check.lineage, check.iteration)
                found = arena.found(snapshot)
                if found is not None and found.slot == slot:
                    covered.setdefault(snapshot, []).append((arena, found))
    taken_back = False
    for snapshot, slots in covered.items():
        if not duty.done(sources, snapshot):
            taken_back = True
            for arena, found in slots:
                arena.checks.store_checked(found.slot, *found.check.key, found.hashes, found.check.gap_secs)
    return taken_back
