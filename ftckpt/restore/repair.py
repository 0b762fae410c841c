"""Rebuilds what a snapshot lacks, in the trainers' processes: packages, data and parity go where they are needed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ftckpt.arena.package import Package, unpack
from ftckpt.comm import Group, together
from ftckpt.errors import CorruptError, FtckptError
from ftckpt.events import Events, Progress
from ftckpt.layout.topology import Topology
from ftckpt.protect.survive import BlockId, Repair
from ftckpt.restore.build import Build
from ftckpt.restore.decide import Decision
from ftckpt.restore.load import OpenArenas, Transfer, execute, fetch
from ftckpt.restore.protection import Shield
from ftckpt.restore.rebuild import Rebuild
from ftckpt.restore.room import make_room
from ftckpt.restore.solve import Input, Job, Part, batches, levels, solve_part
from ftckpt.restore.source import BlockAt, ChunkAt, Damage, PackageAt, Source

BATCH_BYTES = 64 << 20
"""Bound on what a rank holds at a time beside the slots: bytes read and bytes solved."""

MODE_NAMES = {"node": "node_parity", "replica": "replica_parity", "peer": "peer_parity", "copy": "copy"}

Used = dict[str, dict[str, int]]
"""By what was rebuilt → chunks and bytes."""


@dataclass
class Outcome:
    """What came of a repair, alike on all ranks.

    ``sources`` are the shards that are whole now. Otherwise ``bad`` slots, ``bad_blocks`` or ``given_up`` say what
    must not be used again.
    """

    sources: dict[str, Source] = field(default_factory=dict)
    bad: dict[Source, Damage] = field(default_factory=dict)
    bad_blocks: set[BlockId] = field(default_factory=set)
    given_up: str = ""
    used: Used = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """This rank among all, and what it may read."""

    group: Group
    topology: Topology
    node_dir: Path
    events: Events
    arenas: OpenArenas
    readers: Mapping[str, int]
    """The rank that reads each shard, or rebuilds it."""


class Repairing:
    """One attempt to rebuild what ``decision`` lacks. ``run`` is collective."""

    def __init__(self, place: Place, decision: Decision, rebuild: Rebuild, shield: Shield, num_slots: int) -> None:
        self._place = place
        self._group = place.group
        self._snapshot = (bytes.fromhex(decision.lineage), decision.iteration)
        self._rebuild = rebuild
        self._shield = shield
        self._num_slots = num_slots
        self._sources = dict(decision.sources)
        self._builds: dict[str, Build] = {}
        self._builders = {shard: place.readers[shard] for shard in rebuild.fixes}
        self._used: Used = {}
        self._done_bytes = 0

    def run(self) -> Outcome:
        """Rebuild all shards, or say what is in the way; after a failure slots are as good as before.

        Raises:
            MemoryBudgetError, ArenaError: on all ranks together.
            RuntimeError: from torch.distributed, when a peer is gone.
        """
        begin = time.monotonic()
        bad_blocks = self._verify_blocks()
        if bad_blocks:
            return Outcome(bad_blocks=bad_blocks)
        try:
            self._open()
            outcome = self._solve() or self._finish()
        finally:
            for build in self._builds.values():
                build.close()
            self._place.arenas.close()
        if outcome.sources:
            outcome.used = self._gather_used()
            self._tell(outcome, time.monotonic() - begin)
        return outcome

    def _verify_blocks(self) -> set[BlockId]:
        """Blocks of parity files that are needed and do not have the checksum they were written with."""
        needed = sorted({block for repair in self._rebuild.repairs for block in repair.use})
        bad = []
        for block in needed:
            at = self._block_at(block)
            if at is None or self._reader_of_block(at) != self._group.rank:
                continue
            try:
                good = self._place.arenas.parity(at.arena, at.file).verify(at.block)
            except FtckptError:
                good = False
            if not good:
                bad.append(block)
        found = [json.loads(data) for data in self._group.gather(json.dumps(bad).encode())]
        return {(name, holder, block) for told in found for name, holder, block in told}

    def _open(self) -> None:
        """Create or open every slot that is rebuilt; from then on all ranks know where they lie."""
        packages = self._fetch_packages()
        for shard, fix in self._rebuild.fixes.items():
            if self._builders[shard] == self._group.rank:
                package = packages.get(shard)
                self._builds[shard] = Build(self._place.node_dir, fix, package, self._num_slots)
        self._place.arenas.close()  # files may be freed or replaced now
        self._have_room()
        together(self._group, self._open_builds)
        mine = [[shard, build.source.to_json()[1:]] for shard, build in self._builds.items()]
        for data in self._group.gather(json.dumps(mine).encode()):
            self._sources.update({shard: Source(*source) for shard, source in json.loads(data)})

    def _open_builds(self) -> None:
        for build in self._builds.values():
            build.open()

    def _fetch_packages(self) -> dict[str, Package]:
        transfers: list[Transfer] = []
        buffers: dict[str, torch.Tensor] = {}
        for shard, fix in self._rebuild.fixes.items():
            if fix.kept is None or self._builders[shard] != self._group.rank:
                continue
            kept = fix.kept
            buffers[shard] = torch.empty(kept.nbytes, dtype=torch.uint8)
            reader = self._near(kept.node, 0)
            at = PackageAt(kept.node, kept.file)
            transfers.append(fetch(at, reader, 0, buffers[shard]))
        execute(self._group, transfers, self._place.arenas)
        return together(self._group, lambda: {shard: self._unpack(shard, data) for shard, data in buffers.items()})

    def _unpack(self, shard: str, data: torch.Tensor) -> Package:
        package = unpack(data.numpy().data)
        if package.shard != shard or (package.lineage, package.iteration) != self._snapshot:
            raise CorruptError(f"package of {shard}: it was replaced while it was fetched; start again")
        return package

    def _have_room(self) -> None:
        need = together(self._group, lambda: sum(build.new_bytes() for build in self._builds.values()))
        place, (lineage, iteration) = self._place, self._snapshot
        chosen, sites = (iteration, lineage.hex()), [fix.at for fix in self._rebuild.fixes.values()]
        make_room(self._group, place.topology, place.node_dir, place.events, chosen=chosen, sites=sites, need=need)

    def _solve(self) -> Outcome | None:
        """Solve level by level; None when every chunk has the right checksum."""
        all_levels = levels(self._rebuild.repairs)
        mine = together(self._group, lambda: [[self._job(r) for r in lvl if self._own(r)] for lvl in all_levels])
        total = sum(job.out_bytes for jobs in mine for job in jobs)
        told = Progress(f"rank {self._group.rank} rebuilds {', '.join(list(self._builds)[:3])}")
        for jobs in mine:
            wrong: list[Job] = []
            packed = batches(jobs, BATCH_BYTES)
            counts = self._group.gather(str(len(packed)).encode())
            for index in range(max(map(int, counts))):
                parts = packed[index] if index < len(packed) else []
                inputs = self._read(parts)
                wrong += together(self._group, lambda p=parts, i=inputs: self._put(p, i))  # type: ignore[misc]
                told(self._done_bytes, total)
            failed = self._gather_wrong(wrong)
            if failed is not None:
                return failed
        return None

    def _own(self, repair: Repair) -> bool:
        return any(shard in self._builds for shard, _ in repair.lost)

    def _job(self, repair: Repair) -> Job:
        return Job.of(repair, set(self._builds), self._chunk_input, self._block_input)

    def _chunk_input(self, shard: str, chunk: int, nbytes: int) -> Input:
        source = self._sources[shard]
        at = ChunkAt(source.node, source.arena, source.slot, chunk)
        if source.node == self._place.topology.me.node:
            return Input(at, self._group.rank, nbytes)
        return Input(at, self._place.readers[shard], nbytes)

    def _block_input(self, block: BlockId, nbytes: int) -> Input:
        at = self._block_at(block)
        if at is None:
            raise CorruptError(f"group {block[0]}: block {block[2]} of member {block[1]} is nowhere")
        near = at.node == self._place.topology.me.node
        return Input(at, self._group.rank if near else self._reader_of_block(at), nbytes)

    def _block_at(self, block: BlockId) -> BlockAt | None:
        """Where a block of a parity file lies; None for one in a slot."""
        name, holder, index = block
        found = self._shield.parity.get((name, holder))
        return BlockAt(found.node, found.arena, found.file, index) if found is not None else None

    def _reader_of_block(self, at: BlockAt) -> int:
        return self._near(at.node, at.block)

    def _near(self, node: str, spread: int) -> int:
        local = self._place.topology.ranks_on(node)
        return local[spread % len(local)]

    def _read(self, parts: Sequence[Part]) -> dict[tuple[int, Input], torch.Tensor]:
        """Bytes from other nodes, by part and input; what lies on this node is read in place."""
        transfers: list[Transfer] = []
        buffers: dict[tuple[int, Input], torch.Tensor] = {}
        for index, part in enumerate(parts):
            for wanted in part.job.inputs:
                nbytes = min(part.end, wanted.nbytes) - part.begin
                if wanted.reader != self._group.rank and nbytes > 0:
                    buffer = buffers[index, wanted] = torch.empty(nbytes, dtype=torch.uint8)
                    transfers.append(fetch(wanted.at, wanted.reader, part.begin, buffer))
        execute(self._group, transfers, self._place.arenas)
        return buffers

    def _put(self, parts: Sequence[Part], inputs: Mapping[tuple[int, Input], torch.Tensor]) -> list[Job]:
        """Solve parts and write them; the jobs that ended with a wrong checksum."""
        wrong = []
        for index, part in enumerate(parts):
            for (shard, chunk), data in solve_part(part, index, inputs, self._place.arenas).items():
                self._builds[shard].put(chunk, part.begin, data)
            self._done_bytes += (part.end - part.begin) * len(part.job.own)
            if part.end == part.job.length:
                for shard, chunk in part.job.own:
                    self._builds[shard].clear_behind(chunk, part.end)
                if not all(self._builds[shard].check(chunk) for shard, chunk in part.job.own):
                    wrong.append(part.job)
                self._count(part.job)
        return wrong

    def _count(self, job: Job) -> None:
        used = self._used.setdefault(MODE_NAMES[job.repair.group.mode], {"chunks": 0, "bytes": 0})
        used["chunks"] += len(job.own)
        used["bytes"] += sum(self._builds[shard].length(chunk) for shard, chunk in job.own)

    def _gather_wrong(self, wrong: Sequence[Job]) -> Outcome | None:
        mine = [[list(job.repair.use), [list(chunk) for chunk in job.own]] for job in wrong]
        found = [w for data in self._group.gather(json.dumps(mine).encode()) for w in json.loads(data)]
        if not found:
            return None
        outcome = Outcome()
        for use, chunks in found:
            outcome.bad_blocks |= {(name, holder, block) for name, holder, block in use}
            if not use:
                shard, chunk = chunks[0]
                outcome.given_up = f"{shard}: the parity in chunk {chunk} is of other bytes than those there are"
        return outcome

    def _finish(self) -> Outcome:
        problems = together(self._group, lambda: {shard: build.finish() for shard, build in self._builds.items()})
        mine = [shard for shard, found in problems.items() if found]
        bad = [shard for data in self._group.gather(json.dumps(mine).encode()) for shard in json.loads(data)]
        if bad:
            return Outcome(bad={self._sources[shard]: Damage() for shard in bad})
        return Outcome(sources={shard: self._sources[shard] for shard in self._rebuild.fixes})

    def _gather_used(self) -> Used:
        total: Used = {}
        for data in self._group.gather(json.dumps(self._used).encode()):
            for name, counts in json.loads(data).items():
                used = total.setdefault(name, {"chunks": 0, "bytes": 0})
                for key, number in counts.items():
                    used[key] += number
        return total

    def _tell(self, outcome: Outcome, secs: float) -> None:
        nbytes = sum(used["bytes"] for used in outcome.used.values())
        if self._builds:
            own = sum(used["bytes"] for used in self._used.values())
            self._place.events.emit(
                "rebuilt", iteration=self._snapshot[1], shards=sorted(self._builds), bytes=own, secs=secs,
                sources=self._used,
            )  # fmt: skip
        self._place.events.tell(
            f"rebuilt {len(outcome.sources)} shards from parity: {nbytes / 1e9:.2f} GB in {secs:.1f} s"
        )
