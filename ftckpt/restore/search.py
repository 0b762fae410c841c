"""Finds the snapshot to restore, together with all ranks: inventory, decide, verify, repair, until one is whole."""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ftckpt.arena.control import SlotState
from ftckpt.arena.package import PackageName, list_packages, load
from ftckpt.arena.segment import Arena
from ftckpt.comm import Group, together
from ftckpt.errors import FtckptError
from ftckpt.events import Events, Progress
from ftckpt.layout.topology import Topology, layouts_differ
from ftckpt.protect.survive import BlockId
from ftckpt.restore.decide import Ask, Decision, Known, decide
from ftckpt.restore.found import known_shards
from ftckpt.restore.inventory import ArenaReport, take_inventory
from ftckpt.restore.load import OpenArenas
from ftckpt.restore.protection import ProtectionReport, Shield, Snapshot, join, read_shield, take_protection
from ftckpt.restore.repair import Place, Repairing, Used
from ftckpt.restore.source import Damage, Source


def readers_of(topology: Topology, decision: Decision) -> dict[str, int]:
    """The rank that reads each shard of a snapshot, or rebuilds it; on the node where that lies.

    The shard's own rank where it is there, otherwise the ranks of the node in turn: of another layout's shards each
    has as many as the others, give or take one.
    """
    places = dict(decision.sources)
    if decision.rebuild is not None:
        places.update({shard: fix.at for shard, fix in decision.rebuild.fixes.items()})
    local: dict[str, list[int]] = {}
    for rank, member in enumerate(topology.members):
        local.setdefault(member.node, []).append(rank)
    own = {} if reshaped(topology, decision) else topology.rank_of
    turns: Counter[str] = Counter()
    readers: dict[str, int] = {}
    for shard in sorted(places):
        node = places[shard].node
        if own.get(shard) in local[node]:
            readers[shard] = own[shard]
        else:
            readers[shard] = local[node][turns[node] % len(local[node])]
            turns[node] += 1
    return readers


def reshaped(topology: Topology, decision: Decision) -> bool:
    """Whether the snapshot was taken in another layout than the job has now."""
    return bool(layouts_differ(topology.layout, decision.layout))


class Search:
    """One search; ``run`` is collective. ``used`` says afterwards what was rebuilt from what.

    ``reshapes``: whether a snapshot of another layout will do.
    """

    def __init__(
        self,
        group: Group,
        topology: Topology,
        node_dir: Path,
        events: Events,
        arenas: OpenArenas,
        *,
        reshapes: bool = False,
    ) -> None:
        self.used: Used = {}
        self._reshapes = reshapes
        self._group = group
        self._topology = topology
        self._node_dir = node_dir
        self._events = events
        self._arenas = arenas
        self._homes = {member.shard: member.node for member in topology.members}
        self._bad: dict[Source, Damage] = {}
        self._texts: dict[Source, str] = {}
        self._good: set[Source] = set()
        self._states: dict[Source, str] = {}
        self._shields: dict[Snapshot, Shield] = {}
        self._bad_blocks: dict[Snapshot, set[BlockId]] = {}
        self._given_up: dict[Snapshot, str] = {}
        self._rebuilt = False

    def run(self) -> Decision | None:
        """The newest snapshot that is or was made whole, every byte of it verified; None if there never was one.

        Raises:
            LostError, MismatchError, MemoryBudgetError, ArenaError: on all ranks together.
        """
        reports, protection = self._inventory()
        num_slots = max((report.num_slots for report in reports), default=0) or 2
        while True:
            known = Known(protection, self._shields, self._bad_blocks, self._given_up)
            decision = decide(reports, self._homes, self._topology.layout, self._bad, known, reshapes=self._reshapes)
            if decision is None:
                return None
            if isinstance(decision, Ask):
                self._shields[decision.snapshot] = self._ask(decision, reports)
                continue
            if self._verify(decision):
                self._shields.clear()  # more packages may be needed now
                continue
            if decision.rebuild is None:
                self._tell_fallback(decision)
                return decision
            whole = self._repair(decision, num_slots)
            if whole is not None:
                self._tell_fallback(whole)
                return whole

    def _inventory(self) -> tuple[list[ArenaReport], ProtectionReport]:
        leader = self._topology.is_node_leader
        node = self._topology.me.node
        mine = together(self._group, lambda: take_inventory(self._node_dir, node) if leader else [])
        nothing = ProtectionReport()
        kept = together(self._group, lambda: take_protection(self._node_dir, node) if leader else nothing)
        told = {"arenas": [report.to_json() for report in mine], "protection": kept.to_json()}
        gathered = [json.loads(data) for data in self._group.gather(json.dumps(told).encode())]
        reports = [ArenaReport.from_json(value) for told in gathered for value in told["arenas"]]
        for report in reports:
            if report.problems:
                self._events.emit("arena_problem", shard=report.shard, problems=report.problems)
        parts = [ProtectionReport.from_json(told["protection"]) for told in gathered]
        protection = join(parts, known_shards(reports, self._homes, self._topology.layout))
        self._tell_problems(protection.problems)
        return reports, protection

    def _ask(self, ask: Ask, reports: list[ArenaReport]) -> Shield:
        """All about the protection of a snapshot, from the leaders of all nodes."""
        good = {
            report.shard
            for report in reports
            for slot in report.slots
            if (slot.iteration, slot.lineage) == ask.snapshot
            and Source(report.node, report.name, slot.index) not in self._bad
        }
        lacking = set(ask.shards) - good
        topology = self._topology
        place = (self._node_dir, topology.me.node, ask.snapshot, lacking, ask.layout)
        mine = together(self._group, lambda: read_shield(*place) if topology.is_node_leader else {})
        packed = zlib.compress(json.dumps(mine).encode(), 1)
        told = [json.loads(zlib.decompress(data)) for data in self._group.gather(packed)]
        shield = together(self._group, lambda: Shield.of([part for part in told if part], ask.shards))
        self._tell_problems(shield.problems)
        return shield

    def _verify(self, decision: Decision) -> bool:
        """Whether something new was found to be bad in the slots that would be taken."""
        begin = time.perf_counter()
        found: list[list[object]] = []
        readers = readers_of(self._topology, decision)
        mine = {shard: source for shard, source in decision.sources.items() if readers[shard] == self._group.rank}
        for shard, source in mine.items():
            problems = self._verify_once(shard, source)
            if problems:
                found.append([source.node, source.arena, source.slot, shard, problems])
                self._events.emit("arena_problem", shard=shard, problems=problems)
        counts = Counter(self._states[source] for source in mine.values() if source in self._states)
        states: Counter[str] = Counter()
        bad: dict[Source, list[str]] = {}
        for data in self._group.gather(json.dumps([found, counts]).encode()):
            wrong, told = json.loads(data)
            states.update(told)
            for node, arena, slot, shard, problems in wrong:
                bad[Source(node, arena, slot)] = problems
                self._texts[Source(node, arena, slot)] = f"{shard}: {', '.join(problems[:3])}"
        self._good |= set(decision.sources.values()) - set(bad)
        self._bad.update({source: Damage.of(problems) for source, problems in bad.items()})
        if not bad:
            below = {shard: state for shard, s in mine.items() if (state := self._states[s]) != "protected"}
            secs = time.perf_counter() - begin
            self._events.emit("verified", iteration=decision.iteration, secs=secs, states=states, unprotected=below)
        return bool(bad)

    def _verify_once(self, shard: str, source: Source) -> list[str]:
        """What is bad in a slot; nothing where that was found before."""
        if source in self._good:
            return []
        told = Progress(f"rank {self._group.rank} verifies {shard}")
        try:
            self._states[source], problems = self._verify_slot(source, told)
        except FtckptError as error:
            problems = [str(error)]
        return problems

    def _verify_slot(self, source: Source, told: Progress) -> tuple[str, list[str]]:
        """How far the snapshot in a slot had come, and what is bad in it.

        Of a slot that has no checksums yet they are taken now; where this node has a package of it they are
        compared with those in there.
        """
        arena = self._arenas.get(source.arena)
        state = arena.state(source.slot)
        problems = arena.verify(source.slot, told)
        if not problems and arena.unchecked(source.slot):
            expected = self._package_hashes(arena, source.slot)
            for chunk in range(len(arena.image.chunks)):
                value = arena.hash_chunk(source.slot, chunk)
                if chunk in expected and value != expected[chunk]:
                    problems.append(f"chunk {chunk}")
                told(arena.image.chunks[chunk].end, arena.image.file_bytes)
        return SlotState(state).name.lower(), problems

    def _package_hashes(self, arena: Arena, slot: int) -> Mapping[int, int]:
        record = arena.control.record(slot)
        wanted = (arena.manifest.shard, record.lineage.hex()[:8], record.iteration)

        def is_wanted(name: PackageName) -> bool:
            return (name.shard, name.lineage8, name.iteration) == wanted

        for name in filter(is_wanted, list_packages(self._node_dir)):
            try:
                package = load(name.path)
            except FtckptError:
                continue
            if (package.lineage, package.manifest.digest) == (record.lineage, arena.manifest.digest):
                return dict(enumerate(package.chunk_hashes.tolist()))
        return {}

    def _repair(self, decision: Decision, num_slots: int) -> Decision | None:
        """The decision with every shard in a slot; None where something that was to be used is bad."""
        snapshot = (decision.iteration, decision.lineage)
        if decision.rebuild is None:
            return decision
        readers = readers_of(self._topology, decision)
        place = Place(self._group, self._topology, self._node_dir, self._events, self._arenas, readers)
        repairing = Repairing(place, decision, decision.rebuild, self._shields[snapshot], num_slots)
        outcome = repairing.run()
        if outcome.sources:
            self.used, self._rebuilt = outcome.used, True
            return replace(decision, sources={**decision.sources, **outcome.sources}, rebuild=None)
        self._bad.update(outcome.bad)
        self._bad_blocks.setdefault(snapshot, set()).update(outcome.bad_blocks)
        if outcome.given_up:
            self._given_up[snapshot] = outcome.given_up
        for name, holder, block in sorted(outcome.bad_blocks)[:3]:
            self._tell_problems((((f"group {name}"), f"block {block} of member {holder} is corrupt"),))
        if outcome.bad:
            self._shields.clear()
        return None

    def _tell_problems(self, problems: tuple[tuple[str, str], ...]) -> None:
        for name, text in problems:
            self._events.emit("protection_problem", file=name, problem=text)

    def _tell_fallback(self, decision: Decision) -> None:
        if decision.passed_over or (self._bad and not self._rebuilt):
            reasons = [*decision.passed_over, *self._texts.values()]
            loud = "fallback" if self._bad else "passed_over"
            self._events.emit(loud, iteration=decision.iteration, reasons=reasons)
