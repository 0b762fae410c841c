"""A job's arenas with parity and packages, made without trainers and SMPs, and a restart from them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ftckpt.events import Events
from ftckpt.group import Group
from ftckpt.memory.arena import Arena
from ftckpt.memory.control_block import FORMAT
from ftckpt.memory.directory import arena_path, node_directory
from ftckpt.memory.image import SlotImage
from ftckpt.memory.package import pack, store
from ftckpt.memory.parity_file import ParityFile, parity_path
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest, Section, parity_fragment
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.parity.groups import Member, ParityGroup, mirrors, slot_group, slot_group_name, slot_groups
from ftckpt.parity.holding import ArenaLayout
from ftckpt.parity.modes import Modes
from ftckpt.parity.stripes import block_length, num_blocks
from ftckpt.restore.restart import Restart
from tests.support.flips import flip_slot
from tests.support.snapshots import LINEAGE, chunk_of, holding_groups, parity_blocks, seal, slot_of, write

JOB = "job"
CHUNK = 8192
SLOTS = 3


@dataclass(frozen=True)
class Job:
    """``nodes[rank]`` is where a rank runs. ``replica`` is "", "replica" or "copy": the shards that hold the same
    (``sets``, lists of ranks) protect each other's shares in their slots; ``uneven``: the first has the most."""

    root: Path
    nodes: tuple[str, ...]
    modes: Modes
    replica: str = ""
    sets: tuple[tuple[int, ...], ...] = ()
    stepped: int = 5 * CHUNK + 1000
    uneven: bool = False

    @property
    def topology(self) -> Topology:
        places = tuple(RankPlace({"dp": rank}, node) for rank, node in enumerate(self.nodes))
        return Topology(0, places, {"dp": len(self.nodes)})

    def node_dir(self, node: str) -> Path:
        return node_directory(self.root, JOB, node)

    def shard(self, rank: int) -> str:
        return self.topology.members[rank].shard

    def path(self, rank: int) -> Path:
        return arena_path(self.node_dir(self.nodes[rank]), self.manifest(rank))

    def manifest(self, rank: int) -> Manifest:
        """Ranks hold a little more or less than each other, so that stripes have holes and short chunks."""
        private = _fragment("own", rank, self.stepped + rank * 3000)
        volatile = (_fragment("counter", rank, 500), _fragment("buffers", rank, 9000))
        stepped, sections = [private], [Section("private", 1)]
        for ranks in self.sets:
            if rank in ranks:
                name, group = self._slot_group(ranks)
                stepped.append(self._share(ranks, rank))
                sections.append(Section("shared", 1, name))
                place = sorted(ranks, key=self.shard).index(rank)
                if self.replica == "copy":
                    of = sorted(ranks, key=self.shard)[place - 1]
                    stepped.append(self._share(ranks, of))
                    sections.append(Section("copy", 1, name, self.shard(of)))
                else:
                    last = num_blocks(group, place) - 1
                    stepped.append(parity_fragment(name, last * CHUNK + block_length(group, place, last)))
                    sections.append(Section("parity", 1, name))
        places = tuple(sections) if len(sections) > 1 else ()
        coords = {"dp": rank}
        return Manifest(coords, self.topology.layout, tuple(stepped), volatile, 2000, CHUNK, sections=places)

    def _share(self, ranks: tuple[int, ...], rank: int) -> Fragment:
        """The share of one of the ranks that hold the same tensor; shares differ in length."""
        width = 5 * CHUNK
        begin = rank * width
        name = "-".join(map(str, ranks))
        whole = width * (max(ranks) + 1)
        place = ranks.index(rank)
        stop = begin + (900 if self.uneven and place else 3 * CHUNK + 500 - 700 * place)
        return Fragment(f"shared{name}", "U8", (whole,), Box((0,), (whole,)), begin, stop)

    def _slot_group(self, ranks: tuple[int, ...]) -> tuple[str, ParityGroup]:
        shards = [self.shard(rank) for rank in ranks]
        name = slot_group_name(self.replica, shards, shards)
        members = []
        for rank in ranks:
            nbytes = self._share(ranks, rank).nbytes
            lengths = tuple(min(CHUNK, nbytes - at) for at in range(0, nbytes, CHUNK))
            members.append(Member(self.shard(rank), self.nodes[rank], "", 0, lengths, 0))
        return name, slot_group(name, self.replica, CHUNK, members)


def _fragment(key: str, rank: int, nbytes: int) -> Fragment:
    return Fragment.whole(f"{key}{rank}", "U8", (nbytes,), Box((0,), (nbytes,)))


def build(job: Job, iterations: Sequence[int], protected: Sequence[int], hashed: bool = True) -> None:
    """Snapshots of ``iterations`` in all arenas, those ``protected`` with parity and packages."""
    arenas = {}
    for rank in range(len(job.nodes)):
        arenas[job.shard(rank)] = Arena.create(job.node_dir(job.nodes[rank]), job.manifest(rank), SLOTS)
    for slot, iteration in enumerate(iterations):
        for arena in arenas.values():
            write(arena, slot, iteration)
        _fill_blocks(job, arenas, slot)
        for arena in arenas.values():
            seal(arena, slot, iteration, hashed or iteration in protected)
    for index, iteration in enumerate(protected):
        _protect(job, arenas, list(iterations).index(iteration), iteration, index)
    for arena in arenas.values():
        arena.control.mark_whole(SnapshotId(LINEAGE, iterations[-1]))
        arena.close()


def _fill_blocks(job: Job, arenas: dict[str, Arena], slot: int) -> None:
    slots = {shard: (arena, slot) for shard, arena in arenas.items()}
    for group in slot_groups(holdings(job)):
        for holder, block, data in list(parity_blocks(group, slots)):
            member = group.members[holder]
            place = chunk_of(arenas[member.shard], slot, member.blocks + block)
            place[: len(data)] = data
            place[len(data) :] = 0


def holdings(job: Job) -> list[ArenaLayout]:
    return [
        SlotImage.of(job.manifest(rank)).holding(node, "", job.path(rank).name) for rank, node in enumerate(job.nodes)
    ]


def file_groups(job: Job) -> list[ParityGroup]:
    """Parity groups of the job whose blocks are in files."""
    return holding_groups(holdings(job), job.modes)


def _protect(job: Job, arenas: dict[str, Arena], slot: int, iteration: int, index: int) -> None:
    """Parity files and packages of what is in ``slot``."""
    for group in file_groups(job):
        files = []
        for holder, member in enumerate(group.members):
            path = parity_path(arenas[member.shard].path, group.mode, index)
            files.append(ParityFile.create(path, group, holder))
            files[-1].begin(SnapshotId(LINEAGE, iteration))
        for holder, block, data in parity_blocks(group, {shard: (arena, slot) for shard, arena in arenas.items()}):
            files[holder].put(block, data)
        for file in files:
            file.seal()
            file.close()
    for shard, nodes in mirrors(holdings(job), job.modes).items():
        data = pack(arenas[shard], slot)
        for node in nodes:
            store(job.node_dir(node), data)


def contents(job: Job, rank: int, iteration: int) -> bytes:
    """The bytes of a slot up to the end of the objects in use."""
    with closing(Arena.open(job.path(rank))) as arena:
        slot = slot_of(arena, iteration)
        used = arena.control.record(slot).objects_used
        assert not arena.verify(slot)
        assert not arena.unchecked(slot)
        return bytes(arena.slot(slot)[: arena.image.objects.begin + used])


def record_begin(job: Job, rank: int, iteration: int) -> int:
    """The offset of a snapshot's record in the control block, see FORMAT.md."""
    with closing(Arena.open(job.path(rank))) as arena:
        slot, chunks = slot_of(arena, iteration), len(arena.image.chunks)
    return FORMAT.records_offset + slot * (-(-(64 + 8 * chunks) // 64) * 64)


def flip_chunk(job: Job, rank: int, iteration: int, chunk: int) -> None:
    """One bit of a chunk goes bad."""
    with closing(Arena.open(job.path(rank))) as arena:
        flip_slot(arena, slot_of(arena, iteration), arena.image.chunks[chunk].begin + 17)


def restart(rank: int, world_size: int, job: Job, events: Path, on_lost: str = "fail") -> dict[str, Any]:
    """One rank of a restart up to the point where training would load its state."""
    topology = replace(job.topology, rank=rank)
    group = Group(30.0)
    found = Restart(group, topology, job.node_dir(topology.me.node), Events(events, rank))
    try:
        decision = found.choose(on_lost)
        found.invalidate_newer(decision)
        told = {"source": found.source, "sources": found.usage}
        if decision is not None:
            mine = decision.sources[topology.me.shard]
            told |= {"iteration": decision.snapshot.iteration, "node": mine.node, "passed_over": decision.passed_over}
        return told
    finally:
        found.close()
