"""What a node owes to the protection of one snapshot: packages, parity, packages of other nodes' shards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftckpt.arena.checks import CheckState
from ftckpt.arena.control import Snapshot
from ftckpt.events import Events
from ftckpt.protect.groups import ParityGroup
from ftckpt.protect.stripes import num_blocks
from ftckpt.smp import packages
from ftckpt.smp.encode import sealed_parity, write_parity
from ftckpt.smp.held import Found, Held
from ftckpt.smp.sources import Sources
from ftckpt.smp.work import CannotError, Work, in_thread

_POLL_SECS = 0.02
_IsKept = Callable[[Path, str, Snapshot], bool]


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

    def shards(self, sources: Sources) -> list[str]:
        """Those of which this node keeps packages."""
        return [held.shard for held in sources.held.all] + [shard for _, shard in self.mirror_from]

    def done(self, sources: Sources, snapshot: Snapshot, is_kept: _IsKept = packages.kept) -> bool:
        """Whether everything that this node owes to ``snapshot`` is there; ``is_kept`` tells of packages."""
        node_dir = sources.held.node_dir
        return all(is_kept(node_dir, shard, snapshot) for shard in self.shards(sources)) and all(
            num_blocks(group, index) == 0 or sealed_parity(sources, held, group, index, snapshot=snapshot) is not None
            for held, group, index in self.holders(sources)
        )


class Cover:
    """The work on one target snapshot. Whatever is there already, and sound, is not done again."""

    def __init__(self, sources: Sources, duty: Duty, events: Events, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
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
        marks = [mark for held, _ in found if (mark := held.arena.control.protected()) is not None]
        node_dir = self._sources.held.node_dir
        with ExitStack() as leases:
            for held, one in found:
                leases.enter_context(held.lease(one.slot))
            packages.prune(node_dir, self._duty.shards(self._sources), set(marks), self.snapshot)
            yield from self._duties(found, max(marks, key=lambda mark: mark[1], default=None))
            if not self._store_covered(found):
                return
        marks = [mark for held, _ in found if (mark := held.arena.control.protected()) is not None]
        packages.prune_covered(node_dir, marks, self.snapshot)
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

    def _duties(self, found: Sequence[tuple[Held, Found]], keep: Snapshot | None) -> Work[None]:
        """``keep``: a protected snapshot, where an arena's own mark names none."""
        for held, one in found:
            if not (yield from self._kept(held.shard)):
                yield from packages.pack(self._sources, held, one)
            yield 0.0
        for held, group, index in self._duty.holders(self._sources):
            kept = held.arena.control.protected() or keep
            yield from write_parity(self._sources, held, group, index, snapshot=self.snapshot, keep=kept)
        missing = []
        for node, shard in self._duty.mirror_from:
            if not (yield from self._kept(shard)):
                missing.append((node, shard))
        yield from packages.pull(self._sources, self.snapshot, missing)

    def _kept(self, shard: str) -> Work[bool]:
        node_dir = self._sources.held.node_dir
        if not packages.exists(node_dir, shard, self.snapshot):
            return False
        return (yield from in_thread(lambda: packages.kept(node_dir, shard, self.snapshot)))

    def _store_covered(self, found: Sequence[tuple[Held, Found]]) -> bool:
        """Whether all slots still hold the snapshot; only then is anything claimed.

        Raises:
            CannotError: something that was made is not there any more.
        """
        if not all(held.same(one.slot, one.record) for held, one in found):
            return False
        if not self._duty.done(self._sources, self.snapshot, packages.exists):
            raise CannotError(f"iteration {self.snapshot[1]}: a package or a parity file was replaced or deleted")
        for held, one in found:
            held.checks.store_covered(one.slot, one.record.lineage, one.record.iteration, one.record.sequence)
        return True


def covered_slots(sources: Sources) -> dict[Snapshot, list[tuple[Held, Found]]]:
    """What is COVERED on this node, and where."""
    covered: dict[Snapshot, list[tuple[Held, Found]]] = {}
    for held in sources.held.all:
        for slot in range(held.arena.control.slots):
            check = held.checks.read(slot)
            if check is not None and check.state == CheckState.COVERED:
                snapshot = (check.lineage, check.iteration)
                found = held.found(snapshot)
                if found is not None and found.slot == slot:
                    covered.setdefault(snapshot, []).append((held, found))
    return covered


def take_back(slots: Iterable[tuple[Held, Found]]) -> None:
    """What is COVERED in ``slots`` is only CHECKED again."""
    for held, found in slots:
        held.checks.store_checked(found.slot, *found.check.key, found.hashes, found.check.gap_secs)


def uncover(sources: Sources, duty: Duty, is_kept: _IsKept = packages.kept) -> None:
    """Take back COVERED where it is not true any more: other duties, or something that is gone."""
    for snapshot, slots in covered_slots(sources).items():
        if not duty.done(sources, snapshot, is_kept):
            take_back(slots)
