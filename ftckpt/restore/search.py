"""The collective search for the snapshot to restore: inventory, decide, verify, repair, until one is complete.

All ranks run the same loop over the same data: findings are gathered before the next decision, so that all ranks
decide alike and none waits for a message that nobody sends.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import NamedTuple

from ftckpt.errors import FtckptError, LostError, StorageError
from ftckpt.events import Events, Progress
from ftckpt.group import Group, gather_all, gather_bytes, together
from ftckpt.memory.arena import Arena
from ftckpt.memory.control_block import SlotState
from ftckpt.memory.corruption import Corruption
from ftckpt.memory.package import load, package_path
from ftckpt.model import codec
from ftckpt.model.lineage import ANY, Selection
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import Topology, layouts_differ
from ftckpt.persist.shards import StoredSnapshot
from ftckpt.restore.chunk_reader import ChunkReader, ShardFiles
from ftckpt.restore.decide import Decision, Findings, Query, decide, readers_of
from ftckpt.restore.direct_read import DirectReader, SlotAge
from ftckpt.restore.inventory import (
    Inventory,
    NodeProtection,
    Problem,
    SnapshotProtection,
    known_shards,
    read_protection,
    take_inventory,
)
from ftckpt.restore.locations import OpenArenas, SlotAt
from ftckpt.restore.reconstruction_plan import NEW_SLOT
from ftckpt.restore.repair import RepairContext, Repairer, Usage
from ftckpt.restore.slot_file import SlotShard
from ftckpt.restore.storage_catalog import NO_SHELF, StorageCatalog
from ftckpt.restore.storage_source import ShardFetch, reads
from ftckpt.restore.threads import in_order, threads_of

_FETCHES = 3
"""Attempts per snapshot: after a fetch another slot may fail its first verification, and is fetched as well."""


def pass_over(events: Events, snapshot: SnapshotId, error: StorageError) -> None:
    """Skip a ``snapshot`` that is corrupt on storage; an older one is used.

    Raises:
        StorageError: on all ranks; storage is unavailable, and has the snapshot once it is back.
    """
    if not error.lasting:
        away = StorageError(
            f"iteration {snapshot.iteration} cannot be read: {error}; start again when storage is back, or name "
            "--ftckpt-rollback-before, which abandons it, to resume from an older one"
        )
        away.of_all_ranks = True
        raise away
    events.emit("storage_damaged", iteration=snapshot.iteration, error=str(error))


def tell_verified(
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


def part_of_inventory(topology: Topology, arenas: OpenArenas) -> Inventory:
    """This rank's part of its node's inventory; raises as ``take_inventory``."""
    local = topology.ranks_on(topology.me.node)
    return take_inventory(arenas, topology.me.node, local.index(topology.rank), len(local))


@dataclass(frozen=True)
class BadSlot:
    """A slot that failed verification, and its shard."""

    at: SlotAt
    shard: str
    damage: Corruption


@dataclass(frozen=True)
class SlotFindings:
    """Results of one rank's verification: bad slots, and the states of all that it verified."""

    bad: tuple[BadSlot, ...] = ()
    states: tuple[SlotAge, ...] = ()


class PendingLoad(NamedTuple):
    """A direct read into the live state (``straight``) that is still to come; it verifies what it reads.

    ``slots``: if not None, the source is storage, and this fetches to slots if a direct read does not fit; if None,
    the source are slots. ``states``: the states of the slots of the shards that this rank opens; raises ArenaError.
    """

    straight: DirectReader
    slots: ShardFetch | None
    states: Callable[[], Mapping[str, SlotAge]] = dict


class Search:
    """One search: ``run``, then ``settle`` if a pending load from slots must be replaced; both collective.

    ``usage``: reconstructed and fetched chunks, by source, after ``run``.

    Args:
        slots: the number of slots of arenas that must be created.
        selection: the snapshots in memory that may be restored.
        overlaps: decide on a snapshot that only storage has before it is read, see ``coming``.
        unproven: decide on a snapshot in slots before it is verified, see ``coming``.
        reports: the inventory of all ranks, if it was already taken.
    """

    def __init__(
        self, group: Group, topology: Topology, events: Events, arenas: OpenArenas, *,
        shelf: StorageCatalog = NO_SHELF, slots: int = 2, selection: Selection = ANY, overlaps: bool = False,
        unproven: bool = False, reports: Sequence[Inventory] | None = None,
    ) -> None:  # fmt: skip
        self.usage: Usage = {}
        self.coming: PendingLoad | None = None
        """The pending load of the decision, None if its bytes are verified: it may turn out bad."""
        self._overlaps, self._unproven, self._reports = overlaps, unproven, reports
        self._shelf, self._slots, self._selection = shelf, slots, selection
        self._group = group
        self._topology = topology
        self._threads = threads_of(topology)
        self._events = events
        self._arenas = arenas
        self._inventory = Inventory()
        self._findings = Findings()
        self._texts: dict[SlotAt, str] = {}
        self._good: set[SlotAt] = set()
        self._is_proven = False  # whether the last decision from memory was verified
        self._rebuilt = False
        self._states: dict[SlotAt, SlotAge] = {}
        self._brought: Usage = {}
        self._told: tuple[str, int, list[str]] | None = None

    def run(self) -> Decision | None:
        """The newest snapshot that is complete or was reconstructed, in memory or on storage; None if there never was
        one. All its bytes are verified, unless it is ``coming``.

        A snapshot on storage that is newer than all in memory is fetched to slots, or is ``coming``.

        Raises:
            LostError, MismatchError, MemoryBudgetError, ArenaError: on all ranks together.
            StorageError: likewise; storage became unavailable during a read.
        """
        self._inventory = self._gather_inventory() if self._reports is None else self._join(self._reports)
        if not is_of_one_layout(self._inventory, self._shelf.snapshots):
            self._overlaps = self._unproven = False
        decision = self._newest()
        if decision is not None and self.coming is None and not self._is_proven:
            self.coming = self._in_slots(decision)
        return decision

    def settle(self) -> Decision | None:
        """Search again with slots verified first: the pending load from slots does not fit, or was bad."""
        self._unproven, self.coming = False, None
        return self._newest()

    def _newest(self) -> Decision | None:
        decision, lost = self._or_lost()
        for stored in self._shelf.snapshots:
            for _ in range(_FETCHES):
                if _is_at(decision, stored):
                    return decision
                fetch = self._fetch_of(stored)
                if self._overlaps and fetch.is_all:
                    if (to_come := self._to_come(fetch)) is not None:
                        return to_come
                    break
                if not self._fetch(fetch, stored):
                    break
                decision, lost = self._or_lost()
            if _is_at(decision, stored):
                return decision
        if lost is None and decision is None:
            lost = self._shelf.lost
        if lost is not None:
            raise lost
        return decision

    def _or_lost(self) -> tuple[Decision | None, LostError | None]:
        try:
            return self._in_memory(), None
        except LostError as error:
            return None, error

    def _fetch_of(self, stored: StoredSnapshot) -> ShardFetch:
        assert self._shelf.storage is not None
        return ShardFetch(
            self._group, self._topology, self._events, self._arenas, files=ShardFiles(self._shelf.storage, stored),
            inventory=self._inventory, bad=self._findings.damage, slots=self._slots,
        )  # fmt: skip

    def _fetch(self, fetch: ShardFetch, stored: StoredSnapshot) -> bool:
        """Fetch the shards of a snapshot that memory lacks from storage; False if they are corrupt there."""
        findings, snapshot = self._findings, stored.snapshot
        try:
            brought = list(fetch.run().values())
        except StorageError as error:
            pass_over(self._events, snapshot, error)
            return False
        for at in brought:
            findings.damage.pop(at, None)
        self._good.update(brought)  # every chunk was verified before it was written
        self._states.update(dict.fromkeys(brought, SlotAge(SlotState.SEALED.name.lower())))
        findings.given_up.pop(snapshot, None)
        self._inventory = self._gather_inventory()
        self._brought = {"storage": fetch.usage} if brought else {}
        return True

    def _to_come(self, fetch: ShardFetch) -> Decision | None:
        """The decision for a snapshot of which memory has nothing; None if it is corrupt on storage."""
        stored, topology = fetch.files.stored, self._topology
        same = not layouts_differ(topology.layout, stored.layout)
        places = _places(topology, stored.shards, same)
        ranks = topology.rank_of if same else {}
        decision = Decision(stored.snapshot, places, layout=stored.layout, ranks=ranks)
        reader = ChunkReader(self._group, reads(stored.snapshot))
        straight = DirectReader(
            self._group, topology, fetch.files.get, reader, places=places, mine=[*self._mine(decision)]
        )
        try:
            straight.begin()
        except BaseException as error:  # close what it has opened, whatever failed
            straight.close()
            if not isinstance(error, StorageError):
                raise
            pass_over(self._events, stored.snapshot, error)
            return None
        self.coming = PendingLoad(straight, fetch)
        self.usage = {"storage": reader.usage}
        return decision

    def _in_slots(self, decision: Decision) -> PendingLoad:
        """The pending load of a snapshot that is complete in slots."""
        mine = self._mine(decision)

        @cache
        def open_shard(shard: str) -> SlotShard:
            at = decision.sources[shard]
            arena, file = self._arenas.get(at.arena), self._arenas.file(at)
            return SlotShard(arena, at.slot, decision.snapshot, file, self._expected(arena, at.slot))

        reader = ChunkReader(self._group, f"loads iteration {decision.snapshot.iteration}", self._threads)
        straight = DirectReader(
            self._group, self._topology, open_shard, reader, places=decision.sources, mine=[*mine], in_slots=True
        )
        # Called later, in a collective step: a rank that cannot open an arena must not leave the others waiting.
        return PendingLoad(straight, None, lambda: {shard: self._state_of(at) for shard, at in mine.items()})

    def _mine(self, decision: Decision) -> dict[str, SlotAt]:
        """The shards that this rank reads and reports, with their slots."""
        readers = readers_of(self._topology, decision)
        return {shard: at for shard, at in decision.sources.items() if readers[shard] == self._group.rank}

    def _state_of(self, at: SlotAt) -> SlotAge:
        arena = self._arenas.get(at.arena)
        return SlotAge(SlotState(arena.state(at.slot)).name.lower(), arena.gap_secs(at.slot))

    def _in_memory(self) -> Decision | None:
        """The newest snapshot that memory has, or that parity reconstructs."""
        while True:
            decision = decide(self._inventory, self._topology, self._findings)
            if decision is None:
                return None
            if isinstance(decision, Query):
                self._findings.shields[decision.snapshot] = self._gather_shield(decision)
                continue
            proves = not self._unproven or decision.rebuild is not None
            if proves and self._verify(decision):
                # Query protection again: it has packages only of shards that were missing, and more may be missing.
                self._findings.shields.clear()
            else:
                whole = self._repair(decision)
                if whole is not None:
                    self._is_proven = proves
                    self.usage = {**self.usage, **self._brought}
                    self._report_fallback(whole)
                    return whole

    def _gather_inventory(self) -> Inventory:
        return self._join(gather_all(self._group, lambda: part_of_inventory(self._topology, self._arenas), Inventory))

    def _join(self, reports: Sequence[Inventory]) -> Inventory:
        every = Inventory.join([report.selected(self._selection) for report in reports])
        for report in every.arenas:
            if report.problems:
                self._events.emit("arena_problem", shard=report.shard, problems=report.problems)
        inventory, problems = every.of_shards(known_shards(every.arenas, self._topology))
        self._report_problems(problems)
        return inventory

    def _gather_shield(self, query: Query) -> SnapshotProtection:
        """The protection of a snapshot, gathered from the leaders of all nodes."""
        lacking, topology = query.lacking(self._inventory, self._findings.damage), self._topology

        def read() -> NodeProtection:
            if not topology.is_node_leader:
                return NodeProtection()
            return read_protection(self._arenas, topology.me.node, query.snapshot, lacking, query.layout)

        # Every rank receives the reports of all nodes, mostly repeated names. Level 1: the restart waits for it.
        gathered = gather_bytes(self._group, lambda: zlib.compress(codec.encode(read()), 1))

        def join() -> SnapshotProtection:
            nodes = [codec.decode(zlib.decompress(data), NodeProtection) for data in gathered]
            return SnapshotProtection.of(nodes, query.shards)

        shield = together(self._group, join)
        self._report_problems(shield.problems)
        return shield

    def _verify(self, decision: Decision) -> bool:
        """Verify the decision's slots on all ranks; returns whether one was newly found bad."""
        begin = time.perf_counter()
        mine = self._mine(decision)
        reports = codec.gather(self._group, self._verify_mine(decision.snapshot, mine), SlotFindings)
        bad = [slot for report in reports for slot in report.bad]
        # Slots of all ranks: the reader of a slot may change with the next decision.
        self._good |= set(decision.sources.values()) - {slot.at for slot in bad}
        for slot in bad:
            # From gathered data, the same on all ranks: ``decide`` must give the same answer on each.
            self._findings.damage[slot.at] = slot.damage
            self._texts[slot.at] = f"{slot.shard}: {', '.join(slot.damage.names[:3])}"
        if not bad:
            every, secs = chain.from_iterable(one.states for one in reports), time.perf_counter() - begin
            known = {shard: self._states.get(at, SlotAge("")) for shard, at in mine.items()}
            tell_verified(self._events, decision.snapshot.iteration, secs, every, known)
        return bool(bad)

    def _verify_mine(self, snapshot: SnapshotId, slots: Mapping[str, SlotAt]) -> SlotFindings:
        bad = []
        for shard, slot in slots.items():
            damage = self._verify_once(snapshot, shard, slot)
            if damage:
                bad.append(BadSlot(slot, shard, damage))
                self._events.emit("arena_problem", shard=shard, problems=damage.names)
        states = tuple(self._states[slot] for slot in slots.values() if slot in self._states)
        return SlotFindings(tuple(bad), states)

    def _verify_once(self, snapshot: SnapshotId, shard: str, slot: SlotAt) -> Corruption:
        """The corruption of a slot; none if it was verified before."""
        if slot in self._good:
            return Corruption()
        progress = Progress(f"rank {self._group.rank} verifies {shard}")
        try:
            self._states[slot] = self._state_of(slot)
            damage = self._verify_slot(snapshot, slot, progress)
        except FtckptError as error:
            return Corruption(reason=str(error))
        return damage

    def _verify_slot(self, snapshot: SnapshotId, slot: SlotAt, progress: Progress) -> Corruption:
        """The corruption of a slot. A slot without checksums is hashed, and compared with this node's package of it
        if there is one."""
        arena = self._arenas.get(slot.arena)
        if arena.control.record(slot.slot).snapshot != snapshot:
            # A failed reconstruction may have taken the slot since.
            return Corruption(reason="record")

        def hashes(chunks: Iterable[int]) -> Iterable[int]:
            return in_order(self._arenas.file(slot).take, chunks, self._threads)

        damage = arena.verify(slot.slot, progress, hashes)
        # The trainers died before the SMP hashed this slot: the gap that ``checked`` events measure.
        if not damage and arena.unchecked(slot.slot):
            expected, bad = self._expected(arena, slot.slot), []
            for chunk, value in enumerate(hashes(range(len(arena.image.chunks)))):
                if chunk in expected and value != expected[chunk]:
                    bad.append(chunk)
                progress(arena.image.chunks[chunk].end, arena.image.file_bytes)
            damage = Corruption(tuple(bad))
        return damage

    def _expected(self, arena: Arena, slot: int) -> Mapping[int, int]:
        """The known checksums of a slot's chunks: its own, or else those of this node's package."""
        if (hashes := arena.hashes(slot)) is not None:
            return dict(enumerate(hashes.tolist()))
        snapshot = arena.control.record(slot).snapshot
        if snapshot is None:
            return {}
        try:
            package = load(package_path(self._arenas.node_dir, arena.manifest.shard, snapshot))
        except FtckptError:
            return {}
        # With another digest chunks have other bounds, and their hashes cannot be compared.
        same = package.manifest.digest == arena.manifest.digest
        return dict(enumerate(package.chunk_hashes.tolist())) if same else {}

    def _repair(self, decision: Decision) -> Decision | None:
        """The decision with every shard in a slot; None if a slot, package or block to use turned out bad."""
        if decision.rebuild is None:
            return decision
        snapshot, findings = decision.snapshot, self._findings
        site = RepairContext(
            self._group, self._topology, self._events, self._arenas, readers_of(self._topology, decision)
        )
        repairer = Repairer(site, decision, decision.rebuild, findings.shields[snapshot], self._inventory)
        outcome = repairer.run()
        if outcome.sources:
            self.usage, self._rebuilt = outcome.usage, True
            return replace(decision, sources={**decision.sources, **outcome.sources}, rebuild=None)
        findings.damage.update(outcome.damage)
        findings.bad_blocks.setdefault(snapshot, set()).update(outcome.bad_blocks)
        if outcome.given_up:
            findings.given_up[snapshot] = outcome.given_up
        self._report_problems(
            Problem(f"group {name}", f"block {block} of member {holder} is corrupt")
            for name, holder, block in sorted(outcome.bad_blocks)[:3]
        )
        if outcome.damage:
            findings.shields.clear()
        return None

    def _report_problems(self, problems: Iterable[Problem]) -> None:
        for problem in problems:
            self._events.emit("arena_problem", file=problem.file, problems=[problem.text])

    def _report_fallback(self, decision: Decision) -> None:
        damaged = bool(self._findings.damage)
        if decision.passed_over or (damaged and not self._rebuilt):
            reasons = [*decision.passed_over, *self._texts.values()]
            loud, iteration = "fallback" if damaged else "passed_over", decision.snapshot.iteration
            told = (loud, iteration, reasons)
            if told != self._told:  # ``settle`` may repeat ``run``
                self._events.emit(loud, iteration=iteration, reasons=reasons)
            self._told = told


def _places(topology: Topology, shards: Collection[str], same: bool) -> dict[str, SlotAt]:
    """Placeholder slots for the shards on storage, each on the node of the rank that opens it."""
    if same:
        return {member.shard: SlotAt(member.node, member.shard, NEW_SLOT) for member in topology.members}
    nodes = [member.node for member in topology.members]
    return {shard: SlotAt(nodes[number % len(nodes)], shard, NEW_SLOT) for number, shard in enumerate(sorted(shards))}


def is_of_one_layout(inventory: Inventory, stored: Iterable[StoredSnapshot]) -> bool:
    """Whether all snapshots that may be restored have the same layout.

    If a snapshot turns out bad after some of it was written to the live state, one in another layout cannot replace
    it: it has no bytes for padding and for state private to a rank, where bad ones would stay.
    """
    layouts = [report.layout for report in inventory.arenas if report.slots], [one.layout for one in stored]
    every = [*chain.from_iterable(layouts)]
    return not any(layouts_differ(every[0], layout) for layout in every[1:])


def _is_at(decision: Decision | None, stored: StoredSnapshot) -> bool:
    """Whether the decision is at least as new as a stored snapshot."""
    return decision is not None and decision.snapshot.iteration >= stored.snapshot.iteration
