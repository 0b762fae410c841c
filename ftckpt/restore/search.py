"""The collective search for the snapshot to restore: inventory, decide, verify, repair, until one is complete.

All ranks run the same loop over the same data: findings are gathered before the next decision, so that all ranks
decide alike and none waits for a message that nobody sends.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from ftckpt.errors import LostError, StorageError
from ftckpt.events import Events
from ftckpt.group import gather_all, gather_bytes, together
from ftckpt.memory.inventory import Inventory, NodeProtection, Problem, read_protection, take_inventory
from ftckpt.memory.locations import OpenArenas
from ftckpt.model import codec
from ftckpt.model.lineage import ANY, Selection
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import Topology, layouts_differ
from ftckpt.persist.shards import StoredSnapshot
from ftckpt.restore.candidates import SnapshotProtection, known_shards
from ftckpt.restore.chunk_reads import OpenShard
from ftckpt.restore.context import RestoreContext, Usage, total_of
from ftckpt.restore.decide import Decision, Findings, Query, decide
from ftckpt.restore.repair import Repairer
from ftckpt.restore.storage_catalog import EMPTY_CATALOG, StorageCatalog
from ftckpt.restore.storage_source import ShardFetch, ShardFiles
from ftckpt.restore.verify import SlotVerifier, slots_read_by, verified_on_the_way

_FETCHES = 3
"""Attempts per snapshot: after a fetch another slot may fail its first verification, and is fetched as well."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: a decision, and how its shards are opened.

    ``is_verified``: all its bytes are verified. Otherwise they are while they are loaded, and may turn out bad.
    ``fetch``: the source is storage, and this fetches to slots if a direct read does not fit; None: the source are
    slots. ``usage``: reconstructed and fetched chunks, by source.
    """

    decision: Decision
    open_shard: OpenShard
    is_verified: bool = True
    fetch: ShardFetch | None = None
    usage: Usage = field(default_factory=dict)

    def fetched(self, arenas: OpenArenas) -> SearchResult:
        """The result after a fetch to slots. Collective; raises as ``ShardFetch.run``."""
        assert self.fetch is not None
        sources, counts = self.fetch.run()
        return SearchResult(replace(self.decision, sources=sources), arenas.shard, usage={"storage": counts})


class Search:
    """One search: ``run``, then ``again`` if its result must be replaced; both collective.

    Args:
        slots: the number of slots of arenas that must be created.
        selection: the snapshots in memory that may be restored.
        overlaps: decide on a snapshot that only storage has before it is read.
        unproven: decide on a snapshot in slots before it is verified.
        reports: the inventory of all ranks, if it was already taken.
    """

    def __init__(
        self, context: RestoreContext, catalog: StorageCatalog = EMPTY_CATALOG, *, slots: int = 2,
        selection: Selection = ANY, overlaps: bool = False, unproven: bool = False,
        reports: Sequence[Inventory] | None = None,
    ) -> None:  # fmt: skip
        self._context = context
        self._catalog, self._slots, self._selection = catalog, slots, selection
        self._overlaps, self._unproven, self._reports = overlaps, unproven, reports
        self._inventory = Inventory()
        self._findings = Findings()
        self._verifier = SlotVerifier(context)
        self._usage: Usage = {}
        self._is_rebuilt = False
        self._reported: tuple[str, int, list[str]] | None = None

    def run(self) -> SearchResult | None:
        """The newest snapshot that is complete or was reconstructed, in memory or on storage; None if there never was
        one.

        A snapshot on storage that is newer than all in memory is fetched to slots, or read when it is loaded.

        Raises:
            LostError, MismatchError, MemoryBudgetError, ArenaError: on all ranks together.
            StorageError: likewise; storage became unavailable during a read.
        """
        self._inventory = self._gather_inventory() if self._reports is None else self._join(self._reports)
        if not is_of_one_layout(self._inventory, self._catalog.snapshots):
            self._overlaps = self._unproven = False
        return self._newest()

    def again(self, found: SearchResult) -> SearchResult | None:
        """The replacement of a result that turned out bad, or whose direct read does not fit."""
        if found.fetch is None:  # verify before the next load
            self._unproven = False
            return self._newest()
        self._catalog, self._reports = self._catalog.without(found.decision.snapshot), None
        return self.run()

    def _newest(self) -> SearchResult | None:
        found, lost = self._or_lost()
        for stored in self._catalog.snapshots:
            for _ in range(_FETCHES):
                if _is_at(found, stored):
                    return found
                fetch = self._fetch_of(stored)
                if self._overlaps and fetch.is_all:
                    if (direct := self._from_storage(fetch)) is not None:
                        return direct
                    break
                if not self._fetch(fetch, stored):
                    break
                found, lost = self._or_lost()
            if _is_at(found, stored):
                return found
        if lost is None and found is None:
            lost = self._catalog.lost
        if lost is not None:
            raise lost
        return found

    def _or_lost(self) -> tuple[SearchResult | None, LostError | None]:
        try:
            return self._in_memory(), None
        except LostError as error:
            return None, error

    def _fetch_of(self, stored: StoredSnapshot) -> ShardFetch:
        assert self._catalog.storage is not None
        files = ShardFiles(self._catalog.storage, stored)
        return ShardFetch(self._context, files, self._inventory, self._findings.damage, self._slots)

    def _fetch(self, fetch: ShardFetch, stored: StoredSnapshot) -> bool:
        """Fetch the shards of a snapshot that memory lacks from storage; False if they are corrupt there."""
        try:
            slots, counts = fetch.run()
        except StorageError as error:
            pass_over(self._context.events, stored.snapshot, error)
            return False
        for at in slots.values():
            self._findings.damage.pop(at, None)
        self._verifier.accept(slots.values())
        self._findings.given_up.pop(stored.snapshot, None)
        self._inventory = self._gather_inventory()
        if slots:
            self._usage["storage"] = counts
        return True

    def _from_storage(self, fetch: ShardFetch) -> SearchResult | None:
        """The result for a snapshot of which memory has nothing; None if it is corrupt on storage."""
        files = fetch.files
        decision = files.decision(self._context.topology)
        mine = slots_read_by(self._context, decision)
        try:
            gather_all(self._context.group, lambda: all([files.get(shard) for shard in mine]), bool)
        except StorageError as error:
            pass_over(self._context.events, files.stored.snapshot, error)
            return None
        return SearchResult(decision, files.shard, is_verified=False, fetch=fetch, usage={"storage": total_of([])})

    def _in_memory(self) -> SearchResult | None:
        """The newest snapshot that memory has, or that parity reconstructs."""
        arenas = self._context.arenas
        while True:
            decision = decide(self._inventory, self._context.topology, self._findings)
            if decision is None:
                return None
            if isinstance(decision, Query):
                self._findings.protections[decision.snapshot] = self._gather_protection(decision)
                continue
            if self._unproven and decision.rebuild is None:
                self._report_fallback(decision)
                open_shard = verified_on_the_way(arenas, decision.snapshot)
                return SearchResult(decision, open_shard, is_verified=False, usage=dict(self._usage))
            if bad := self._verifier.verify(decision):
                self._findings.damage.update(bad)
                # Query protection again: it has packages only of shards that were missing, and more may be missing.
                self._findings.protections.clear()
            elif (whole := self._repair(decision)) is not None:
                self._report_fallback(whole)
                return SearchResult(whole, arenas.shard, usage=dict(self._usage))

    def _gather_inventory(self) -> Inventory:
        topology, arenas = self._context.topology, self._context.arenas
        return self._join(gather_all(self._context.group, lambda: part_of_inventory(topology, arenas), Inventory))

    def _join(self, reports: Sequence[Inventory]) -> Inventory:
        every = Inventory.join([report.selected(self._selection) for report in reports])
        for report in every.arenas:
            if report.problems:
                self._context.events.emit("arena_problem", shard=report.shard, problems=report.problems)
        inventory, problems = every.of_shards(known_shards(every.arenas, self._context.topology))
        self._report_problems(problems)
        return inventory

    def _gather_protection(self, query: Query) -> SnapshotProtection:
        """The protection of a snapshot, gathered from the leaders of all nodes."""
        group, topology, _, arenas = self._context
        lacking = query.lacking(self._inventory, self._findings.damage)

        def read() -> NodeProtection:
            if not topology.is_node_leader:
                return NodeProtection()
            return read_protection(arenas, topology.me.node, query.snapshot, lacking, query.layout)

        # Every rank receives the reports of all nodes, mostly repeated names. Level 1: the restart waits for it.
        gathered = gather_bytes(group, lambda: zlib.compress(codec.encode(read()), 1))

        def join() -> SnapshotProtection:
            nodes = [codec.decode(zlib.decompress(data), NodeProtection) for data in gathered]
            return SnapshotProtection.of(nodes, query.shards)

        protection = together(group, join)
        self._report_problems(protection.problems)
        return protection

    def _repair(self, decision: Decision) -> Decision | None:
        """The decision with every shard in a slot; None if a slot, package or block to use turned out bad."""
        if decision.rebuild is None:
            return decision
        snapshot, findings = decision.snapshot, self._findings
        repairer = Repairer(
            self._context, decision, decision.rebuild, findings.protections[snapshot], self._inventory
        )
        outcome = repairer.run()
        if outcome.sources:
            self._usage = outcome.usage | {name: of for name, of in self._usage.items() if name == "storage"}
            self._is_rebuilt = True
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
            findings.protections.clear()
        return None

    def _report_problems(self, problems: Iterable[Problem]) -> None:
        for problem in problems:
            self._context.events.emit("arena_problem", file=problem.file, problems=[problem.text])

    def _report_fallback(self, decision: Decision) -> None:
        damaged = bool(self._findings.damage)
        if decision.passed_over or (damaged and not self._is_rebuilt):
            reasons = [*decision.passed_over, *self._verifier.bad_texts.values()]
            name, iteration = "fallback" if damaged else "passed_over", decision.snapshot.iteration
            report = (name, iteration, reasons)
            if report != self._reported:  # ``again`` may repeat it
                self._context.events.emit(name, iteration=iteration, reasons=reasons)
            self._reported = report


def part_of_inventory(topology: Topology, arenas: OpenArenas) -> Inventory:
    """This rank's part of its node's inventory; raises as ``take_inventory``."""
    local = topology.ranks_on(topology.me.node)
    return take_inventory(arenas, topology.me.node, local.index(topology.rank), len(local))


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


def is_of_one_layout(inventory: Inventory, stored: Iterable[StoredSnapshot]) -> bool:
    """Whether all snapshots that may be restored have the same layout.

    If a snapshot turns out bad after some of it was written to the live state, one in another layout cannot replace
    it: it has no bytes for padding and for state private to a rank, where bad ones would stay.
    """
    layouts = [report.layout for report in inventory.arenas if report.slots], [one.layout for one in stored]
    every = [*chain.from_iterable(layouts)]
    return not any(layouts_differ(every[0], layout) for layout in every[1:])


def _is_at(found: SearchResult | None, stored: StoredSnapshot) -> bool:
    """Whether the result is at least as new as a stored snapshot."""
    return found is not None and found.decision.snapshot.iteration >= stored.snapshot.iteration
