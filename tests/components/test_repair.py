"""Stripes are solved in an order that works, in bounded memory, into slots that are not sealed until complete."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.array_types import Bytes
from ftckpt.memory.arena import Arena
from ftckpt.memory.corruption import OBJECTS, Corruption
from ftckpt.memory.locations import BlockAt, ChunkAt, OpenArenas, SlotAt
from ftckpt.memory.package import Package, load, package_path
from ftckpt.memory.slots import slot_name
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.codecs import encode
from ftckpt.parity.groups import Member, ParityGroup, slot_group, slot_group_name
from ftckpt.parity.modes import Modes
from ftckpt.parity.stripes import stripes
from ftckpt.parity.survive import BlockId, ChunkId, Repair, block_chunk, solve
from ftckpt.restore.reconstruction_plan import NEW_SLOT, Input, RepairTask, ShardRepair, batches, levels, solve_slice
from ftckpt.restore.shard_reconstruction import ShardReconstruction
from tests.support.flips import flip
from tests.support.protected import Job, build, contents, file_groups, record_begin
from tests.support.snapshots import LINEAGE, slot_of

CHUNK = 64
ME, OTHER = 0, 1


class World:
    """Chunks and blocks of one group, all at hand."""

    def __init__(self, group: ParityGroup, seed: int) -> None:
        self.group = group
        bits = np.random.default_rng(seed)
        self.chunks: dict[ChunkId, np.ndarray] = {}
        self.blocks: dict[BlockId, np.ndarray] = {}
        for member in group.members:
            for index, nbytes in enumerate(member.lengths):
                self.chunks[member.shard, member.first + index] = np.frombuffer(bits.bytes(nbytes), np.uint8)
        for stripe in stripes(group):
            data = [None if c < 0 else self.chunks[self.chunk(m, c)] for m, c in stripe.data]
            for row, (holder, block) in enumerate(stripe.blocks):
                found = encode(data, stripe.length, row, group.losses)
                self.blocks[group.name, holder, block] = found
                at = block_chunk(group, holder, block)
                if at is not None:
                    self.chunks[at] = found

    def chunk(self, member: int, index: int) -> ChunkId:
        return self.group.members[member].shard, self.group.members[member].first + index

    def view(self, place: Any) -> memoryview:
        if isinstance(place, ChunkAt):
            return self.chunks[place.arena, place.chunk].data
        return self.blocks[place.arena, int(place.file), place.block].data

    def task(self, repair: Repair, mine: set[str], far: set[str] = frozenset()) -> RepairTask:  # type: ignore[assignment]
        def chunk_input(shard: str, chunk: int, nbytes: int) -> Input:
            return Input(ChunkAt("n", shard, 0, chunk), OTHER if shard in far else ME, nbytes)

        def block_input(block: BlockId, nbytes: int) -> Input:
            return Input(BlockAt("n", block[0], str(block[1]), block[2]), ME, nbytes)

        return RepairTask.of(repair, mine, chunk_input, block_input)

    def received(self, part: Any, index: int) -> Mapping[tuple[int, Input], Bytes]:
        found = {}
        for wanted in part.task.inputs:
            if wanted.reader == OTHER and part.begin < wanted.nbytes:
                data = np.frombuffer(self.view(wanted.at), np.uint8)[part.begin : min(part.end, wanted.nbytes)]
                found[index, wanted] = data.copy()
        return found


@st.composite
def groups(draw: st.DrawFn) -> ParityGroup:
    members = draw(st.integers(2, 5))
    code = draw(st.sampled_from(["xor", "rs", "mirror"]))
    losses = draw(st.integers(1, members - 1)) if code == "rs" else 1
    lengths = st.integers(0, 5).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, CHUNK)))
    found = []
    for index in range(members):
        chunks, last = draw(lengths)
        cut = (CHUNK,) * (chunks - 1) + (last,) if chunks else ()
        found.append(Member(f"s{index}", f"n{index}", f"s{index}", draw(st.integers(0, 2)), cut))
    mode = draw(st.sampled_from(["peer", "slots"]))
    if mode == "peer" or code == "rs":
        return ParityGroup.of("peer", losses, CHUNK, found)
    mode = "replica" if code == "xor" else "copy"
    name = slot_group_name(mode, [m.shard for m in found], [m.shard for m in found])
    behind = [m.first + len(m.lengths) for m in found]
    slots = [Member(m.shard, m.node, m.arena, m.first, m.lengths, b) for m, b in zip(found, behind, strict=True)]
    return slot_group(name, mode, CHUNK, slots)


@given(groups(), st.data(), st.sampled_from([1, 3000, 1 << 20]))
def test_every_lost_chunk_comes_back_byte_for_byte(group: ParityGroup, data: st.DataObject, bound: int) -> None:
    """In any batches, from near and far, with short chunks and chunks that some members do not have."""
    world = World(group, 1)
    shards = [member.shard for member in group.members]
    lost_shards = set(data.draw(st.lists(st.sampled_from(shards), min_size=1, max_size=group.losses)))
    far = set(data.draw(st.lists(st.sampled_from(shards))))
    lost = {chunk for chunk in world.chunks if chunk[0] in lost_shards}
    gone = {block for block in world.blocks if shards[block[1]] in lost_shards and not group.in_slots}
    repairs, unsolved = solve([group], lost, gone)
    assert not unsolved
    known = {chunk: array for chunk, array in world.chunks.items() if chunk not in lost}
    whole, world.chunks = world.chunks, known
    world.blocks = {block: array for block, array in world.blocks.items() if block not in gone}
    page, solver = 16, pytest.MonkeyPatch()
    solver.setattr("ftckpt.restore.reconstruction_plan.PAGE_BYTES", page)
    try:
        for level in levels(repairs):
            for parts in batches([world.task(repair, lost_shards, far) for repair in level], bound):
                assert sum(part.nbytes for part in parts) <= max(bound, page * parts[0].task.width)
                for index, part in enumerate(parts):
                    arenas = cast(OpenArenas, world)
                    found = solve_slice(part, index, world.received(part, index), arenas)
                    assert set(found) == set(part.task.own)
                    for chunk, array in found.items():
                        have = known.setdefault(chunk, np.zeros(len(whole[chunk]), np.uint8))
                        have[part.begin : part.end] = array[: max(0, len(have) - part.begin)]
    finally:
        solver.undo()
    assert set(known) == set(whole)
    for chunk, array in whole.items():
        assert np.array_equal(known[chunk], array), chunk


def test_a_repair_that_needs_another_stands_behind_it(arena_root: Path) -> None:
    """A node's chunk comes from its peers, the next one from the node's parity over it."""
    job = Job(arena_root, ("a", "a", "a", "b", "b", "b"), Modes(node=True, peer=True))
    lost = {("dp0", chunk) for chunk in range(6)} | {("dp1", chunk) for chunk in range(6)}
    repairs, unsolved = solve(file_groups(job), lost, set())
    assert not unsolved
    found = levels(repairs)
    assert len(found) > 1
    there: set[ChunkId] = set()
    for level in found:
        for repair in level:
            for index, offset in repair.stripe.data:
                member = repair.group.members[index]
                chunk = (member.shard, member.first + offset)
                assert offset < 0 or chunk in repair.lost or chunk not in lost or chunk in there
        there |= {chunk for repair in level for chunk in repair.lost}
    assert there == lost


# --- one shard's slot ---


def made(root: Path) -> tuple[Job, Package, bytes]:
    job = Job(root, ("a", "a", "a"), Modes(node=True))
    build(job, (3, 4, 5), (5,))
    package = load(package_path(job.node_dir("a"), "dp1", SnapshotId(LINEAGE, 5)))
    return job, package, contents(job, 1, 5)


def at(*iterations: int) -> frozenset[SnapshotId]:
    return frozenset(SnapshotId(LINEAGE, iteration) for iteration in iterations)


def new_slot(
    job: Job, package: Package, keep: Sequence[frozenset[SnapshotId]] = (at(4, 5), at(4, 5))
) -> ShardReconstruction:
    fix = ShardRepair("dp1", SlotAt("a", job.path(1).name, NEW_SLOT), tuple(range(6)))
    return ShardReconstruction(job.node_dir("a"), fix, package, 3, keep)


def chunks_of(job: Job, iteration: int = 5) -> list[np.ndarray]:
    with closing(Arena.open(job.path(1))) as arena:
        slot = slot_of(arena, iteration)
        spans = arena.image.chunks[: arena.image.num_stepped_chunks]
        with arena.slot(slot) as view:
            return [np.frombuffer(view[s.begin : s.end].tobytes(), np.uint8) for s in spans]


def sealed(job: Job) -> set[int]:
    with closing(Arena.open(job.path(1))) as arena:
        records = [arena.control.record(slot) for slot in range(arena.control.slots)]
        return {record.snapshot.iteration for record in records if record.snapshot is not None}


def put_all(building: ShardReconstruction, chunks: list[np.ndarray]) -> None:
    for chunk, data in enumerate(chunks):
        building.put(chunk, 0, data)
        assert building.check(chunk)


@pytest.mark.parametrize("before", ["free slot", "all sealed", "torn", "gone", "truncated", "spoilt control"])
def test_a_shard_comes_into_a_slot_that_claims_nothing_before_its_end(before: str, arena_root: Path) -> None:
    job, package, wanted = made(arena_root)
    chunks = chunks_of(job)
    with closing(Arena.open(job.path(1), writable=True)) as arena:
        slot = slot_of(arena, 5)
        if before == "free slot":
            arena.control.void(slot)
        elif before == "all sealed":
            arena.control.begin(slot)
            arena.control.seal(slot, SnapshotId(LINEAGE, 7))
        elif before == "torn":
            flip(job.path(1) / "control", record_begin(job, 1, 5) + 26)
    if before == "gone":
        shutil.rmtree(job.path(1))
    elif before == "truncated":
        (job.path(1) / slot_name(slot)).write_bytes(b"x" * 5000)
    elif before == "spoilt control":
        flip(job.path(1) / "control", 20)
    building = new_slot(job, package)
    files = 2 * 4096 if before in ("gone", "spoilt control") else 0  # control block and header
    wanted_bytes = building.file_bytes if before in ("gone", "truncated", "spoilt control") else 0
    assert building.new_bytes() == wanted_bytes + files
    building.open()
    assert 5 not in sealed(job)
    put_all(building, chunks)
    assert 5 not in sealed(job)
    assert not building.finish()
    building.close()
    assert contents(job, 1, 5) == wanted
    kept = set() if before in ("gone", "spoilt control") else {4, 7} if before == "all sealed" else {3, 4}
    assert sealed(job) == kept | {5}, "what else was there is kept"


def test_wrong_bytes_are_found_by_the_packages_checksums(arena_root: Path) -> None:
    job, package, _ = made(arena_root)
    chunks = chunks_of(job)
    building = new_slot(job, package)
    building.open()
    wrong = chunks[2].copy()
    wrong[9] ^= 4
    building.put(2, 0, wrong)
    assert not building.check(2)
    building.put(2, 0, chunks[2])
    assert building.check(2)
    building.close()
    assert sealed(job) == {3, 4}


@pytest.mark.parametrize("part", ["mutable state", "objects"])
def test_a_slot_whose_bytes_of_the_package_went_bad_is_not_sealed(arena_root: Path, part: str) -> None:
    job, package, _ = made(arena_root)
    chunks, building = chunks_of(job), new_slot(job, package)
    building.open()
    put_all(building, chunks)
    image = building.arena.image
    region, bad = image.volatile, Corruption((image.num_stepped_chunks,))
    if part == "objects":
        region, bad = image.objects, Corruption(parts=(OBJECTS,))
    flip(job.path(1) / slot_name(building.at.slot), region.begin)
    assert building.finish() == bad
    building.close()
    assert sealed(job) == {3, 4}
