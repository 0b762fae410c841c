"""Collective reconstruction of a snapshot's lost shards in the trainers, from packages, data and parity."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from ftckpt.array_types import Buffer, Bytes
from ftckpt.errors import CorruptError, FtckptError
from ftckpt.group import gather_all, together
from ftckpt.host_memory import host_memory
from ftckpt.memory.corruption import Corruption
from ftckpt.memory.inventory import Inventory
from ftckpt.memory.locations import BlockAt, ChunkAt, SlotAt
from ftckpt.memory.package import Package, unpack
from ftckpt.model import codec
from ftckpt.parity.survive import BlockId, ChunkId, Repair
from ftckpt.restore.candidates import SnapshotProtection
from ftckpt.restore.context import RestoreContext, Usage, total_of
from ftckpt.restore.decide import Decision, readers_of, worth_keeping
from ftckpt.restore.load import Reads, Transfer, execute, fetch, reader_for
from ftckpt.restore.progress import Progress
from ftckpt.restore.reconstruction_plan import Input, Rebuild, RepairTask, TaskSlice, batches, levels, solve_slice
from ftckpt.restore.room import Keep, open_slots
from ftckpt.restore.shard_reconstruction import ShardReconstruction

BATCH_BYTES = 64 << 20
"""Maximum memory of a rank in addition to the slots: bytes read and bytes solved."""

_STILL_BAD = Corruption(reason="fails verification after its repair")


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


BadSolve = tuple[tuple[BlockId, ...], tuple[ChunkId, ...]]
"""A stripe that was solved to wrong bytes: the parity blocks used, and the chunks."""


class Repairer:
    """One attempt to reconstruct the shards that ``decision`` lacks. ``run`` is collective."""

    def __init__(
        self, context: RestoreContext, decision: Decision, rebuild: Rebuild, protection: SnapshotProtection,
        inventory: Inventory,
    ) -> None:  # fmt: skip
        self._context = context
        self._group = context.group
        self._snapshot = decision.snapshot
        self._rebuild = rebuild
        self._protection = protection
        self._inventory = inventory
        self._sources = dict(decision.sources)
        self._builds: dict[str, ShardReconstruction] = {}
        readers = readers_of(context.topology, decision)
        self._mine = {shard: fix for shard, fix in rebuild.fixes.items() if readers[shard] == context.group.rank}
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
        packages = self._fetch_packages()
        keep = worth_keeping(self._inventory, self._context.topology, self._snapshot)
        with ExitStack() as undo:
            opened = open_slots(self._context, self._snapshot, keep, lambda: self._make_builds(packages, keep), undo)
            self._sources.update(opened)
            # Nothing is sealed before every chunk of every rank has the right checksum.
            outcome = self._solve() or self._finish()
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
                good = self._context.arenas.parity(at.arena, at.file).verify(at.block)
            except FtckptError:
                good = False
            if not good:
                bad.append(block)
        return {block for blocks in codec.gather(self._group, bad, list[BlockId]) for block in blocks}

    def _make_builds(self, packages: Mapping[str, Package], keep: Keep) -> Mapping[str, ShardReconstruction]:
        # As in the job's other arenas; 2, the minimum, if none could be read.
        num_slots = max((report.num_slots for report in self._inventory.arenas), default=0) or 2
        node_dir = self._context.arenas.node_dir
        self._builds = {
            shard: ShardReconstruction(node_dir, fix, packages.get(shard), num_slots, keep)
            for shard, fix in self._mine.items()
        }
        return self._builds

    def _fetch_packages(self) -> dict[str, Package]:
        """The packages of the shards that this rank reconstructs; those of this node are read in place."""
        arenas, transfers, buffers = self._context.arenas, list[Transfer](), dict[str, torch.Tensor]()
        for shard, fix in self._mine.items():
            if fix.package is not None and fix.package.at.node != self._context.topology.me.node:
                at, buffers[shard] = fix.package.at, host_memory(fix.package.nbytes)
                transfers.append(fetch(at, self._reader_on(at.node, 0), (0, buffers[shard])))
        execute(self._group, lambda: Reads((), transfers, 0), arenas)

        def unpack_all() -> dict[str, Package]:
            packages = {shard: self._unpack(shard, data.numpy().data) for shard, data in buffers.items()}
            for shard, fix in self._mine.items():
                if fix.package is not None and shard not in packages:
                    packages[shard] = self._unpack(shard, arenas.view(fix.package.at))
            return packages

        return together(self._group, unpack_all)

    def _unpack(self, shard: str, data: Buffer) -> Package:
        package = unpack(data)
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
        return Input(at, reader_for(self._context.topology, at), nbytes)

    def _block_input(self, block: BlockId, nbytes: int) -> Input:
        at = self._block_at(block)
        if at is None:
            raise CorruptError(f"group {block[0]}: block {block[2]} of member {block[1]} has no parity file")
        return Input(at, reader_for(self._context.topology, at), nbytes)

    def _block_at(self, block: BlockId) -> BlockAt | None:
        """The location of a block of a parity file; None for one in a slot."""
        name, holder, index = block
        file = self._protection.parity.get((name, holder))
        return BlockAt(file.node, file.arena, file.file, index) if file is not None else None

    def _reader_on(self, node: str, turn: int) -> int:
        local = self._context.topology.ranks_on(node)
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
        execute(self._group, lambda: Reads((), transfers, 0), self._context.arenas)
        return {key: buffer.numpy() for key, buffer in buffers.items()}

    def _put(self, slices: Sequence[TaskSlice], inputs: Mapping[tuple[int, Input], Bytes]) -> list[RepairTask]:
        """Solve slices and write them; returns the tasks whose chunks have wrong checksums."""
        wrong = []
        for index, task_slice in enumerate(slices):
            task = task_slice.task
            for (shard, chunk), data in solve_slice(task_slice, index, inputs, self._context.arenas).items():
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
        nbytes = sum(self._builds[shard].length(chunk) for shard, chunk in task.own)
        source, more = task.repair.group.traits.source, {"chunks": len(task.own), "bytes": nbytes}
        self._usage[source] = total_of([self._usage.get(source, {}), more])

    def _gather_mistakes(self, wrong: Sequence[RepairTask]) -> Outcome | None:
        mine: list[BadSolve] = [(task.repair.use, task.own) for task in wrong]
        mistakes = [mistake for all_of in codec.gather(self._group, mine, list[BadSolve]) for mistake in all_of]
        outcome = Outcome()
        for use, chunks in mistakes:
            outcome.bad_blocks |= set(use)
            # No block to blame: data and the chunk's checksum contradict each other, and a retry gives the same.
            if not use:
                outcome.given_up = f"{chunks[0][0]}: the parity in chunk {chunks[0][1]} does not match the data"
        return outcome if mistakes else None

    def _finish(self) -> Outcome:
        def finish() -> list[str]:
            return [shard for shard, build in self._builds.items() if build.finish()]

        # Sealed rank by rank: after a kill in between the next start has fewer shards to reconstruct.
        failed = [shard for shards in gather_all(self._group, finish, list[str]) for shard in shards]
        # A new slot would be taken again, in the same memory, and go bad again.
        if new := [shard for shard in failed if not self._rebuild.fixes[shard].in_place]:
            return Outcome(given_up=f"{new[0]}: its new slot is corrupt after the copy: check that node's memory")
        if failed:
            return Outcome(damage=dict.fromkeys((self._sources[shard] for shard in failed), _STILL_BAD))
        return Outcome(sources={shard: self._sources[shard] for shard in self._rebuild.fixes})

    def _gather_usage(self) -> Usage:
        gathered = codec.gather(self._group, self._usage, dict[str, dict[str, int]])
        names = sorted({name for usage in gathered for name in usage})
        return {name: total_of(usage.get(name, {}) for usage in gathered) for name in names}

    def _report(self, outcome: Outcome, secs: float) -> None:
        nbytes = sum(used["bytes"] for used in outcome.usage.values())
        if self._builds:
            own = sum(used["bytes"] for used in self._usage.values())
            self._context.events.emit(
                "rebuilt", iteration=self._snapshot.iteration, shards=sorted(self._builds), bytes=own, secs=secs,
                sources=self._usage,
            )  # fmt: skip
        self._context.events.announce(
            f"reconstructed {len(outcome.sources)} shards from parity: {nbytes / 1e9:.2f} GB in {secs:.1f} s"
        )
