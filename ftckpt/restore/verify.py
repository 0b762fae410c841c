"""Verification of the slots of a decision, before or while they are loaded."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import chain
from typing import NamedTuple

from ftckpt.errors import FtckptError
from ftckpt.events import Events
from ftckpt.memory.arena import Arena
from ftckpt.memory.control_block import SlotState
from ftckpt.memory.corruption import Corruption
from ftckpt.memory.destinations import TargetPart
from ftckpt.memory.locations import OpenArenas, SlotAt
from ftckpt.memory.package import load, package_path
from ftckpt.memory.slot_file import SlotShard
from ftckpt.model import codec
from ftckpt.model.snapshot import SnapshotId
from ftckpt.restore.chunk_reads import OpenShard
from ftckpt.restore.context import RestoreContext
from ftckpt.restore.decide import Decision, readers_of
from ftckpt.restore.progress import Progress
from ftckpt.restore.threads import in_order, threads_of


class SlotAge(NamedTuple):
    """The ``SlotState`` of a snapshot in lower case, and its time without checksums, see ``Arena.gap_secs``."""

    state: str
    gap_secs: float = 0.0

    @classmethod
    def of(cls, arenas: OpenArenas, at: SlotAt) -> SlotAge:
        """The age of a slot of this node; raises ArenaError."""
        arena = arenas.get(at.arena)
        return cls(arena.state(at.slot).name.lower(), arena.gap_secs(at.slot))


FETCHED = SlotAge(SlotState.SEALED.name.lower())
"""The age of a slot that was fetched from storage."""


class SlotFindings(NamedTuple):
    """Results of one rank's verification: the shards whose slots are bad, and the ages of all that it verified."""

    bad: dict[str, Corruption]
    ages: list[SlotAge]


class SlotVerifier:
    """The verification of slots by all ranks of a job; each slot is read once.

    ``bad_texts``: a text for each slot that was found bad.
    """

    def __init__(self, context: RestoreContext) -> None:
        self._context = context
        self._threads = threads_of(context.topology)
        self._good: set[SlotAt] = set()
        self._ages: dict[SlotAt, SlotAge] = {}
        self.bad_texts: dict[SlotAt, str] = {}

    def accept(self, fetched: Iterable[SlotAt]) -> None:
        """Take slots as verified: they were verified when they were fetched from storage."""
        slots = set(fetched)
        self._good |= slots
        self._ages.update(dict.fromkeys(slots, FETCHED))

    def verify(self, decision: Decision) -> dict[SlotAt, Corruption]:
        """Verify the decision's slots on all ranks; returns those newly found bad. Collective."""
        begin, group = time.perf_counter(), self._context.group
        mine = slots_read_by(self._context, decision)
        reports = codec.gather(group, self._verify_mine(decision.snapshot, mine), SlotFindings)
        # From gathered data, the same on all ranks: ``decide`` must give the same answer on each.
        bad = {shard: damage for report in reports for shard, damage in report.bad.items()}
        # Slots of all ranks: the reader of a slot may change with the next decision.
        self._good |= {at for shard, at in decision.sources.items() if shard not in bad}
        for shard, damage in bad.items():
            self.bad_texts[decision.sources[shard]] = f"{shard}: {', '.join(damage.names[:3])}"
        if not bad:
            every, secs = chain.from_iterable(one.ages for one in reports), time.perf_counter() - begin
            known = {shard: self._ages.get(at, SlotAge("")) for shard, at in mine.items()}
            report_verified(self._context.events, decision.snapshot.iteration, secs, every, known)
        return {decision.sources[shard]: damage for shard, damage in bad.items()}

    def _verify_mine(self, snapshot: SnapshotId, slots: Mapping[str, SlotAt]) -> SlotFindings:
        bad: dict[str, Corruption] = {}
        for shard, at in slots.items():
            if at in self._good:
                continue
            try:
                self._ages[at] = SlotAge.of(self._context.arenas, at)
                damage = self._verify_slot(snapshot, shard, at)
            except FtckptError as error:
                damage = Corruption(reason=str(error))
            if damage:
                bad[shard] = damage
                self._context.events.emit("arena_problem", shard=shard, problems=damage.names)
        return SlotFindings(bad, [self._ages[at] for at in slots.values() if at in self._ages])

    def _verify_slot(self, snapshot: SnapshotId, shard: str, at: SlotAt) -> Corruption:
        """The corruption of a slot; chunks without checksums are hashed, too: the gap that ``checked`` events
        measure."""
        arena = self._context.arenas.get(at.arena)
        record = arena.control.record(at.slot)
        if record.snapshot != snapshot:
            # A failed reconstruction may have taken the slot since.
            return Corruption(reason="record")
        progress, bad = Progress(f"rank {self._context.group.rank} verifies {shard}"), []
        expected, file = expected_hashes(arena, at.slot), self._context.arenas.file(at)
        chunks = ([TargetPart(span, ())] for span in arena.image.chunks)
        for chunk, value in enumerate(in_order(file.take, chunks, self._threads)):
            if value != expected.get(chunk, value):
                bad.append(chunk)
            progress(arena.image.chunks[chunk].end, arena.image.file_bytes)
        return arena.damage(at.slot, record, bad)


def verified_on_the_way(arenas: OpenArenas, snapshot: SnapshotId) -> OpenShard:
    """Opens the shards of ``snapshot`` in slots of this node; their chunks are verified when they are read."""

    @cache
    def open_shard(at: SlotAt) -> SlotShard:
        arena = arenas.get(at.arena)
        return SlotShard(arena, at.slot, arenas.file(at), snapshot, expected_hashes(arena, at.slot))

    return open_shard


def expected_hashes(arena: Arena, slot: int) -> Mapping[int, int]:
    """The known checksums of a slot's chunks: its own, or else, if the trainers died before the SMP hashed the slot,
    those of this node's package."""
    if (hashes := arena.hashes(slot)) is not None:
        return dict(enumerate(hashes.tolist()))
    snapshot = arena.control.record(slot).snapshot
    if snapshot is None:
        return {}
    try:
        package = load(package_path(arena.path.parent, arena.manifest.shard, snapshot))
    except FtckptError:
        return {}
    # With another digest chunks have other bounds, and their hashes cannot be compared.
    same = package.manifest.digest == arena.manifest.digest
    return dict(enumerate(package.chunk_hashes.tolist())) if same else {}


def slots_read_by(context: RestoreContext, decision: Decision) -> dict[str, SlotAt]:
    """The shards that this rank reads and reports for all, with their slots."""
    readers = readers_of(context.topology, decision)
    return {shard: at for shard, at in decision.sources.items() if readers[shard] == context.group.rank}


def report_verified(
    events: Events, iteration: int, secs: float, every: Iterable[SlotAge], mine: Mapping[str, SlotAge]
) -> None:
    """Report that ``every`` slot to load was verified, and for how long slots had no checksums; ``mine``: those that
    this rank reads, by shard."""
    ages = [*every]
    below = {shard: age.state for shard, age in mine.items() if age.state != "protected"}
    gap_secs = max((age.gap_secs for age in ages), default=0.0)
    events.emit(
        "verified", iteration=iteration, secs=secs, states=Counter(age.state for age in ages), unprotected=below,
        gap_secs=round(gap_secs, 3),
    )  # fmt: skip
    if gap_secs:
        new = sum(age.state == "sealed" and age.gap_secs > 0 for age in ages)
        began = f"; {new} of {len(ages)} shards had none before this start" if new else ""
        events.announce(f"iteration {iteration}: in memory without checksums for {gap_secs:.1f} s{began}")
