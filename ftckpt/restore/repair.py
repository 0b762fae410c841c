"""Collective reconstruction of a snapshot's lost shards in the trainers, from packages, data and parity."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ftckpt.array_types import Bytes
from ftckpt.errors import CorruptError, FtckptError, MemoryBudgetError
from ftckpt.events import Events, Progress
from ftckpt.group import Group, gather_all, together
from ftckpt.host_memory import host_memory
from ftckpt.memory.corruption import Corruption
from ftckpt.memory.directory import list_arenas
from ftckpt.memory.ledger import Ledger, for_rebuild, give_up, in_use, refusal, require
from ftckpt.memory.package import Package, unpack
from ftckpt.model import codec
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import human
from ftckpt.model.topology import Topology
from ftckpt.parity.survive import BlockId, ChunkId, Repair
from ftckpt.restore.decide import Decision, worth_keeping
from ftckpt.restore.inventory import Inventory, SnapshotProtection
from ftckpt.restore.load import Transfer, execute, fetch, reader_for
from ftckpt.restore.locations import BlockAt, ChunkAt, OpenArenas, SlotAt
from ftckpt.restore.reconstruction_plan import Input, Rebuild, RepairTask, TaskSlice, batches, levels, solve_slice
from ftckpt.restore.shard_reconstruction import ShardReconstruction

BATCH_BYTES = 64 << 20
"""Maximum memory of a rank in addition to the slots: bytes read and bytes solved."""

_PATIENCE_SECS = 5.0
"""Wait for the SMP to unmap freed files before snapshots are evicted."""

_STILL_BAD = Corruption(reason="fails verification after its repair")

Usage = dict[str, dict[str, int]]
"""Source of reconstructed or fetched chunks → chunks and bytes."""


@dataclass
class Outcome:
    """The outcome of a repair, the same on all ranks.

    On success ``sources`` has the slots of the reconstructed shards. Otherwise ``damage``, ``bad_blocks`` or
    ``given_up`` name the slots, the blocks or the snapshot (by the reason) that must not be used again.
    """

    sources: dict[str, SlotAt] = field(default_factory=dict)
    damage: dict[SlotAt, Corruption] = field(default_factory=dict)
    bad_blocks: set[BlockId] = field(default_factory=set)
    given_up: str = ""
    usage: Usage = field(default_factory=dict)


@dataclass(frozen=True)
class RepairContext:
    """The job and node of a repair; ``readers``: the rank that reads or reconstructs each shard."""

    group: Group
    topology: Topology
    events: Events
    arenas: OpenArenas
    readers: Mapping[str, int]


@dataclass(frozen=True)
class BadSolve:
    """A stripe that was solved to wrong bytes: the parity blocks used, and the chunks."""

    use: tuple[BlockId, ...]
    chunks: tuple[ChunkId, ...]


class Repairer:
    """One attempt to reconstruct the shards that ``decision`` lacks. ``run`` is collective."""

    def __init__(
        self,
        site: RepairContext,
        decision: Decision,
        rebuild: Rebuild,
        shield: SnapshotProtection,
        inventory: Inventory,
    ) -> None:
        self._site = site
        self._group = site.group
        self._snapshot = decision.snapshot
        self._rebuild = rebuild
        self._shield = shield
        self._inventory = inventory
        self._sources = dict(decision.sources)
        self._builds: dict[str, ShardReconstruction] = {}
        self._builders = {shard: site.readers[shard] for shard in rebuild.fixes}
        self._usage: Usage = {}
        self._done_bytes = 0

    def run(self) -> Outcome:
        """Reconstruct all shards; the outcome has them, or the causes of failure.

        After a failure the slots used for it are lost. They were useless, unless an arena had no such slot: then it
        has lost a newer snapshot, or the oldest fallback.

        Raises:
            MemoryBudgetError, ArenaError: on all ranks together.
            RuntimeError: from torch.distributed; a rank has exited.
        """
        begin = time.monotonic()
        # Before any slot is written: bytes solved from a bad block would fail their checksum, but only at the end.
        bad_blocks = self._verify_blocks()
        if bad_blocks:
            return Outcome(bad_blocks=bad_blocks)
        try:
            self._open()
            # Nothing is sealed before every chunk of every rank has the right checksum.
            outcome = self._solve() or self._finish()
        finally:
            for build in self._builds.values():
                build.close()
            # Mappings may show replaced files; the next reader opens the current ones.
            self._site.arenas.close()
        if outcome.sources:
            outcome.usage = self._gather_usage()
            self._report(outcome, time.monotonic() - begin)
        return outcome

    def _verify_blocks(self) -> set[BlockId]:
        """Required blocks of parity files that fail their checksum."""
        needed = sorted({block for repair in self._rebuild.repairs for block in repair.use})
        bad = []
        for block in needed:
            at = self._block_at(block)
            # By the block's number: the ranks of a node share the work.
            if at is None or self._reader_on(at.node, at.block) != self._group.rank:
                continue
            try:
                good = self._site.arenas.parity(at.arena, at.file).verify(at.block)
            except FtckptError:
                good = False
            if not good:
                bad.append(block)
        return {block for blocks in codec.gather(self._group, bad, list[BlockId]) for block in blocks}

    def _open(self) -> None:
        """Create or open every slot to reconstruct, and gather their places on all ranks."""
        packages = self._fetch_packages()
        # As in the job's other arenas; 2, the minimum, if none could be read.
        num_slots = max((report.num_slots for report in self._inventory.arenas), default=0) or 2
        keep, arenas = worth_keeping(self._inventory, self._site.topology, self._snapshot), self._site.arenas
        for shard, fix in self._rebuild.fixes.items():
            if self._builders[shard] == self._group.rank:
                package = packages.get(shard)
                self._builds[shard] = ShardReconstruction(arenas.node_dir, fix, package, num_slots, keep)
        self._site.arenas.close()  # files may be freed or replaced from here on, by any rank of the node
        site = self._site
        make_room(
            self._group, site.topology, site.arenas.node_dir, site.events, chosen=self._snapshot,
            need=lambda: Need.of(self._builds.values()), keep=keep,
        )  # fmt: skip
        for opened in gather_all(self._group, self._open_builds, dict[str, SlotAt]):
            self._sources.update(opened)

    def _open_builds(self) -> dict[str, SlotAt]:
        for build in self._builds.values():
            build.open()
        return {shard: build.at for shard, build in self._builds.items()}

    def _fetch_packages(self) -> dict[str, Package]:
        transfers: list[Transfer] = []
        buffers: dict[str, torch.Tensor] = {}
        for shard, fix in self._rebuild.fixes.items():
            if fix.package is None or self._builders[shard] != self._group.rank:
                continue
            at = fix.package.at
            buffers[shard] = host_memory(fix.package.nbytes)
            transfers.append(fetch(at, self._reader_on(at.node, 0), (0, buffers[shard])))
        execute(self._group, lambda: transfers, self._site.arenas)
        return together(self._group, lambda: {shard: self._unpack(shard, data) for shard, data in buffers.items()})

    def _unpack(self, shard: str, data: torch.Tensor) -> Package:
        package = unpack(data.numpy().data)
        if package.shard != shard or package.snapshot != self._snapshot:
            raise CorruptError(f"package of {shard}: it was replaced while it was fetched; start again")
        return package

    def _solve(self) -> Outcome | None:
        """Solve level by level; None when every chunk has the right checksum."""
        by_level = levels(self._rebuild.repairs)
        mine = together(self._group, lambda: [[self._task(r) for r in level if self._own(r)] for level in by_level])
        total = sum(task.out_bytes for tasks in mine for task in tasks)
        progress = Progress(f"rank {self._group.rank} reconstructs {', '.join(list(self._builds)[:3])}")
        for tasks in mine:
            wrong: list[RepairTask] = []
            batched = batches(tasks, BATCH_BYTES)
            # Every rank takes part in each exchange, without requests once its own batches are done.
            num_batches = max(codec.gather(self._group, len(batched), int))
            for number in range(num_batches):
                slices = batched[number] if number < len(batched) else []
                inputs = self._read(slices)
                wrong += together(self._group, lambda s=slices, i=inputs: self._put(s, i))  # type: ignore[misc]
                progress(self._done_bytes, total)
            # The next level reads what this one wrote: all ranks wait until it is verified.
            failed = self._gather_mistakes(wrong)
            if failed is not None:
                return failed
        return None

    def _own(self, repair: Repair) -> bool:
        return any(shard in self._builds for shard, _ in repair.lost)

    def _task(self, repair: Repair) -> RepairTask:
        return RepairTask.of(repair, set(self._builds), self._chunk_input, self._block_input)

    def _chunk_input(self, shard: str, chunk: int, nbytes: int) -> Input:
        slot = self._sources[shard]
        at = ChunkAt(slot.node, slot.arena, slot.slot, chunk)
        return Input(at, reader_for(self._site.topology, at), nbytes)

    def _block_input(self, block: BlockId, nbytes: int) -> Input:
        at = self._block_at(block)
        if at is None:
            raise CorruptError(f"group {block[0]}: block {block[2]} of member {block[1]} has no parity file")
        return Input(at, reader_for(self._site.topology, at), nbytes)

    def _block_at(self, block: BlockId) -> BlockAt | None:
        """The location of a block of a parity file; None for one in a slot."""
        name, holder, index = block
        file = self._shield.parity.get((name, holder))
        return BlockAt(file.node, file.arena, file.file, index) if file is not None else None

    def _reader_on(self, node: str, turn: int) -> int:
        local = self._site.topology.ranks_on(node)
        return local[turn % len(local)]

    def _read(self, slices: Sequence[TaskSlice]) -> dict[tuple[int, Input], Bytes]:
        """Bytes from other nodes, by slice and input; local bytes are read in place."""
        transfers: list[Transfer] = []
        buffers: dict[tuple[int, Input], torch.Tensor] = {}
        for index, task_slice in enumerate(slices):
            for wanted in task_slice.task.inputs:
                nbytes = min(task_slice.end, wanted.nbytes) - task_slice.begin
                if wanted.reader != self._group.rank and nbytes > 0:
                    buffer = buffers[index, wanted] = host_memory(nbytes)
                    transfers.append(fetch(wanted.at, wanted.reader, (task_slice.begin, buffer)))
        execute(self._group, lambda: transfers, self._site.arenas)
        return {key: buffer.numpy() for key, buffer in buffers.items()}

    def _put(self, slices: Sequence[TaskSlice], inputs: Mapping[tuple[int, Input], Bytes]) -> list[RepairTask]:
        """Solve slices and write them; returns the tasks whose chunks have wrong checksums."""
        wrong = []
        for index, task_slice in enumerate(slices):
            task = task_slice.task
            for (shard, chunk), data in solve_slice(task_slice, index, inputs, self._site.arenas).items():
                self._builds[shard].put(chunk, task_slice.begin, data)
            self._done_bytes += (task_slice.end - task_slice.begin) * len(task.own)
            # Only complete chunks have checksums: all slices but the last are written unchecked.
            if task_slice.end == task.length:
                for shard, chunk in task.own:
                    self._builds[shard].clear_behind(chunk, task_slice.end)
                if not all(self._builds[shard].check(chunk) for shard, chunk in task.own):
                    wrong.append(task)
                self._count(task)
        return wrong

    def _count(self, task: RepairTask) -> None:
        used = self._usage.setdefault(task.repair.group.traits.source, {"chunks": 0, "bytes": 0})
        used["chunks"] += len(task.own)
        used["bytes"] += sum(self._builds[shard].length(chunk) for shard, chunk in task.own)

    def _gather_mistakes(self, wrong: Sequence[RepairTask]) -> Outcome | None:
        mine = [BadSolve(task.repair.use, task.own) for task in wrong]
        mistakes = [mistake for all_of in codec.gather(self._group, mine, list[BadSolve]) for mistake in all_of]
        if not mistakes:
            return None
        outcome = Outcome()
        for mistake in mistakes:
            outcome.bad_blocks |= set(mistake.use)
            # No block to blame: data and the chunk's checksum contradict each other, and a retry gives the same.
            if not mistake.use:
                shard, chunk = mistake.chunks[0]
                outcome.given_up = f"{shard}: the parity in chunk {chunk} does not match the data"
        return outcome

    def _finish(self) -> Outcome:
        def finish() -> list[str]:
            return [shard for shard, build in self._builds.items() if build.finish()]

        # Sealed rank by rank: after a kill in between the next start has fewer shards to reconstruct.
        failed = [shard for shards in gather_all(self._group, finish, list[str]) for shard in shards]
        if failed:
            return Outcome(damage=dict.fromkeys((self._sources[shard] for shard in failed), _STILL_BAD))
        return Outcome(sources={shard: self._sources[shard] for shard in self._rebuild.fixes})

    def _gather_usage(self) -> Usage:
        total: Usage = {}
        for usage in codec.gather(self._group, self._usage, dict[str, dict[str, int]]):
            for name, counts in usage.items():
                used = total.setdefault(name, {"chunks": 0, "bytes": 0})
                for key, number in counts.items():
                    used[key] += number
        return total

    def _report(self, outcome: Outcome, secs: float) -> None:
        nbytes = sum(used["bytes"] for used in outcome.usage.values())
        if self._builds:
            own = sum(used["bytes"] for used in self._usage.values())
            self._site.events.emit(
                "rebuilt", iteration=self._snapshot.iteration, shards=sorted(self._builds), bytes=own, secs=secs,
                sources=self._usage,
            )  # fmt: skip
        self._site.events.announce(
            f"reconstructed {len(outcome.sources)} shards from parity: {nbytes / 1e9:.2f} GB in {secs:.1f} s"
        )


class Need(NamedTuple):
    """The memory that one rank needs for reconstruction: new bytes, and the slots."""

    nbytes: int
    sites: tuple[SlotAt, ...]

    @classmethod
    def of(cls, builds: Collection[ShardReconstruction]) -> Need:
        """The sum over ``builds``."""
        return cls(sum(build.new_bytes() for build in builds), tuple(build.fix.at for build in builds))


def make_room(
    group: Group,
    topology: Topology,
    node_dir: Path,
    events: Events,
    *,
    chosen: SnapshotId,
    need: Callable[[], Need],
    keep: Sequence[Collection[SnapshotId]],
) -> None:
    """Make room on every node for the reconstructed slots. Collective; no rank may have an arena mapped.

    If memory is short, unusable snapshots are evicted: first those that are useless even if nodes come back, then
    newer ones, which this restart invalidates anyway. None is evicted unless that suffices on every node.

    Args:
        chosen: the snapshot to reconstruct; ``need``: the memory of this rank for it. Arenas with a slot to
            reconstruct are not touched.
        keep: the result of ``decide.worth_keeping``; the first set that leaves enough memory is retained.

    Raises:
        MemoryBudgetError: a node has no room; on all ranks together.
    """
    needs = gather_all(group, need, Need)
    total = for_rebuild(_of_node(topology, [one.nbytes for one in needs]))
    refusals = gather_all(group, lambda: refusal(node_dir, total.now_bytes, _PATIENCE_SECS), str)
    # All ranks return here, or none does: the rest is collective.
    if not any(refusals):
        return
    why = refusals[group.rank]
    rebuilt = {site.arena for one in needs for site in one.sites if site.node == topology.me.node}
    arenas = [path for path in list_arenas(node_dir) if path.name not in rebuilt]
    needed = together(group, lambda: _enough(node_dir, total, keep, arenas, why) if why else None)

    # Here every node can make room: otherwise all ranks have raised above, and none evicts anything.
    # Only the first set of ``keep`` has the newer snapshots: with another one they are evicted.
    free = partial(_free, events=events, iteration=chosen.iteration, newer=needed != keep[0])
    together(group, lambda: free(node_dir, arenas, total, needed) if needed is not None else None)


def _free(
    node_dir: Path,
    arenas: Sequence[Path],
    total: Ledger,
    snapshots: Collection[SnapshotId],
    *,
    events: Events,
    iteration: int,
    newer: bool,
) -> None:
    freed_bytes = give_up(arenas, snapshots)
    events.emit("spare_given_up", iteration=iteration, bytes=freed_bytes, newer=newer)
    events.announce(f"evicted {human(freed_bytes)} of unneeded snapshots to reconstruct iteration {iteration}")
    # Deleted files count as free only once nothing maps them: an error is better now than during reconstruction.
    require(node_dir, total.now_bytes)


def _of_node(topology: Topology, needs: Sequence[int]) -> int:
    """The memory that all ranks of this node need, on its leader; 0 on others, so that it is requested once."""
    return sum(needs[rank] for rank in topology.ranks_on(topology.me.node)) if topology.is_node_leader else 0


def _enough(
    node_dir: Path, total: Ledger, keep: Sequence[Collection[SnapshotId]], arenas: Sequence[Path], why: str
) -> Collection[SnapshotId]:
    """The first set of ``keep`` that leaves room for ``total`` if all other snapshots are evicted.

    Raises:
        MemoryBudgetError: none does.
    """
    there, spare = in_use(arenas), Ledger()
    for needed in keep:
        spare = there.spare(needed)
        if not refusal(node_dir, (spare + total).later_bytes):
            return needed
    raise MemoryBudgetError(
        f"no room to reconstruct this node's shards, even if {human(spare.free_bytes)} of snapshots are evicted: "
        f"{why}"
    )
