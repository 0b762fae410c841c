"""Planning of reconstruction: the chunks that a snapshot lacks, the repairs that give them, and their solution."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ftckpt.array_types import Bytes
from ftckpt.config import PAGE_BYTES
from ftckpt.memory.corruption import OBJECTS, Corruption
from ftckpt.memory.inventory import VerifiedPackage
from ftckpt.memory.locations import BlockAt, ChunkAt, OpenArenas, SlotAt
from ftckpt.parity.codecs import MISSING, MissingArray, decode, encode
from ftckpt.parity.groups import ParityGroup
from ftckpt.parity.stripes import num_blocks
from ftckpt.parity.survive import BlockId, ChunkId, Repair, block_chunk, solve
from ftckpt.restore.candidates import Candidate, SnapshotProtection

NEW_SLOT = -1
"""Placeholder for a slot's number: the slot is chosen when the shard is reconstructed."""


@dataclass(frozen=True)
class ShardRepair:
    """One shard without a good slot: it is reconstructed at ``at``, in a new slot or in place.

    ``chunks`` come from parity; all else (objects and mutable chunks, manifest and checksums of a new slot) comes
    from the ``package``, which a slot with only bad chunks does not need. ``parts``: see ``Corruption``.
    """

    shard: str
    at: SlotAt
    chunks: tuple[int, ...]
    package: VerifiedPackage | None = None
    parts: tuple[str, ...] = ()

    @property
    def in_place(self) -> bool:
        """Whether an existing slot is repaired."""
        return self.at.slot != NEW_SLOT


@dataclass(frozen=True)
class Rebuild:
    """The plan for the shards of ``fixes``: ``repairs``, ordered so that each has its inputs."""

    fixes: Mapping[str, ShardRepair]
    repairs: tuple[Repair, ...]


def assess(
    candidate: Candidate,
    bad: Mapping[SlotAt, Corruption],
    protection: SnapshotProtection,
    bad_blocks: Collection[BlockId],
) -> Rebuild | tuple[str, ...]:
    """The plan that completes ``candidate`` from its ``protection``, or a reason per shard why there is none.

    ``bad`` slots and ``bad_blocks`` of parity failed verification.
    """
    fixes: dict[str, ShardRepair] = {}
    arenas: dict[str, str] = {}
    hopeless: list[str] = []
    for shard in candidate.homes:
        source = candidate.nearest(shard, bad)
        if source is None:
            fix = _fix(candidate, shard, bad, protection)
            if fix is None:
                hopeless.append(f"{shard}: {_state(candidate, shard, bad)} and no package of it is left")
                continue
            fixes[shard] = fix
            source = fix.at
        arenas[shard] = source.arena
    if hopeless:
        return tuple(hopeless)
    groups = [group for group in protection.groups.values() if _fits(group, arenas)]
    lost = {(shard, chunk) for shard, fix in fixes.items() for chunk in fix.chunks}
    repairs, unsolved = solve(groups, lost, _lost_blocks(groups, protection) | set(bad_blocks))
    if unsolved:
        shards = sorted({shard for shard, _ in unsolved})
        return tuple(
            f"{shard}: {_state(candidate, shard, bad)} and {_reason(shard, groups, fixes, protection)}"
            for shard in shards
        )
    return Rebuild(fixes, tuple(repairs))


def _fix(
    candidate: Candidate, shard: str, bad: Mapping[SlotAt, Corruption], protection: SnapshotProtection
) -> ShardRepair | None:
    home = candidate.homes[shard]
    packages = sorted(protection.packages.get(shard, ()), key=lambda one: (one.at.node != home, one.at))
    package = packages[0] if packages else None
    damaged = [s for s in candidate.slots.get(shard, ()) if not bad[s].useless]
    # The slot with the fewest bad chunks first; among equals the one on the home node.
    for source in sorted(damaged, key=lambda s: (len(bad[s].chunks), s.node != home, s)):
        damage = bad[source]
        # The name has the manifest's digest: package and slot have the same chunks.
        if package is not None and package.holding.arena == source.arena:
            # Parity covers the chunks before the first mutable one; that and later ones are in the package.
            chunks = tuple(c for c in damage.chunks if c < package.holding.volatile[0])
            return ShardRepair(shard, source, chunks, package, damage.parts)
        # Only a package has the objects; header and padding follow from the manifest.
        if OBJECTS not in damage.parts:
            return ShardRepair(shard, source, damage.chunks, None, damage.parts)
    if package is None:
        return None
    chunks = tuple(range(package.holding.volatile[0]))
    return ShardRepair(shard, SlotAt(home, package.holding.arena, NEW_SLOT), chunks, package)


def _fits(group: ParityGroup, arenas: Mapping[str, str]) -> bool:
    """Whether the group was made for the arenas that have the snapshot."""
    # An arena's name has the manifest's digest: with another one chunk numbers differ from the group's.
    return all(arenas.get(member.shard) == member.arena for member in group.members)


def _lost_blocks(groups: Sequence[ParityGroup], protection: SnapshotProtection) -> set[BlockId]:
    """Blocks of missing parity files; blocks in slots are lost with their chunks."""
    return {
        (group.name, holder, block)
        for group in groups
        if not group.in_slots
        for holder in range(len(group.members))
        if (group.name, holder) not in protection.parity
        for block in range(num_blocks(group, holder))
    }


def _state(candidate: Candidate, shard: str, bad: Mapping[SlotAt, Corruption]) -> str:
    damaged = [bad[source] for source in candidate.slots.get(shard, ())]
    if damaged:
        some = min(damaged, key=lambda d: (d.useless, len(d.chunks)))
        parts = [f"{len(some.chunks)} of its chunks"] if some.chunks else []
        parts += some.parts
        return f"{', '.join(parts)} are corrupt" if parts else "its slot is corrupt"
    if candidate.homes[shard] not in candidate.nodes:
        return "its node's arenas are lost"
    if not candidate.ranks and shard not in candidate.arenas:
        return "its arena is lost"
    return "its arena does not have it"


def _reason(
    shard: str, groups: Sequence[ParityGroup], fixes: Mapping[str, ShardRepair], protection: SnapshotProtection
) -> str:
    texts = []
    for group in groups:
        names = [member.shard for member in group.members]
        if shard not in names:
            continue
        lost = [
            name
            for holder, name in enumerate(names)
            if (name in fixes and fixes[name].chunks)
            or (not group.in_slots and (group.name, holder) not in protection.parity)
        ]
        texts.append(f"group {group.mode}-{group.name[:4]} has lost {len(lost)} of {len(names)} members")
    return ", ".join(texts) or "no parity covers it"


@dataclass(frozen=True)
class Input:
    """A chunk or block of ``nbytes``, and the rank that reads it."""

    at: ChunkAt | BlockAt
    reader: int
    nbytes: int


@dataclass(frozen=True)
class RepairTask:
    """One rank's part of a repair: ``own`` are the lost chunks that it writes.

    ``data``: the stripe's arrays in order (an input, MISSING, or None: zeros). ``blocks``: the blocks used, by row.
    """

    repair: Repair
    own: tuple[ChunkId, ...]
    data: tuple[Input | MissingArray | None, ...]
    blocks: Mapping[int, Input]

    @classmethod
    def of(
        cls,
        repair: Repair,
        mine: Collection[str],
        chunk_input: Callable[[str, int, int], Input],
        block_input: Callable[[BlockId, int], Input],
    ) -> RepairTask:
        """The task of the rank that reconstructs the shards ``mine``."""
        group, stripe = repair.group, repair.stripe
        data: list[Input | MissingArray | None] = []
        for index, offset in stripe.data:
            member = group.members[index]
            chunk = (member.shard, member.first + offset)
            # A member with fewer chunks than the others is zeros in the last stripes.
            if offset < 0:
                data.append(None)
            elif chunk in repair.lost:
                data.append(MISSING)
            else:
                data.append(chunk_input(*chunk, member.lengths[offset]))
        blocks: dict[int, Input] = {}
        for row, (holder, block) in enumerate(stripe.blocks):
            if (group.name, holder, block) in repair.use:
                in_slot = block_chunk(group, holder, block)
                ident = (group.name, holder, block)
                blocks[row] = chunk_input(*in_slot, stripe.length) if in_slot else block_input(ident, stripe.length)
        own = tuple(chunk for chunk in repair.lost if chunk[0] in mine)
        return cls(repair, own, tuple(data), blocks)

    @property
    def length(self) -> int:
        """Bytes of the stripe's longest chunk."""
        return self.repair.stripe.length

    @property
    def inputs(self) -> list[Input]:
        return [i for i in self.data if isinstance(i, Input)] + list(self.blocks.values())

    @property
    def width(self) -> int:
        """The number of arrays in memory at a time: those read, those solved and a scratch array for each."""
        return len(self.inputs) + 2 * max(1, len(self.repair.lost))

    @property
    def out_bytes(self) -> int:
        """Bytes written, with short chunks counted at full length."""
        return self.length * len(self.own)


@dataclass(frozen=True)
class TaskSlice:
    """Bytes ``begin`` to ``end`` of every array of a task."""

    task: RepairTask
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Memory to solve it, including inputs and scratch."""
        return (self.end - self.begin) * self.task.width


def levels(repairs: Sequence[Repair]) -> list[list[Repair]]:
    """Levels of repairs: those of one level are independent, and need only earlier levels."""
    level_of: dict[ChunkId, int] = {}
    by_level: list[list[Repair]] = []
    for repair in repairs:
        level = max((level_of[chunk] + 1 for chunk in _needed(repair) if chunk in level_of), default=0)
        if level == len(by_level):
            by_level.append([])
        by_level[level].append(repair)
        level_of.update(dict.fromkeys(repair.lost, level))
    return by_level


def _needed(repair: Repair) -> Iterator[ChunkId]:
    """The chunks that a repair reads."""
    group = repair.group
    for index, offset in repair.stripe.data:
        member = group.members[index]
        if offset >= 0 and (member.shard, member.first + offset) not in repair.lost:
            yield member.shard, member.first + offset
    for _, holder, block in repair.use:
        chunk = block_chunk(group, holder, block)
        if chunk is not None:
            yield chunk


def batches(tasks: Sequence[RepairTask], most_bytes: int) -> list[list[TaskSlice]]:
    """Slices of tasks, in batches that take at most ``most_bytes`` of memory."""
    slices: list[TaskSlice] = []
    for task in tasks:
        # ``width`` arrays of this length are in memory at a time.
        step = max(PAGE_BYTES, most_bytes // task.width // PAGE_BYTES * PAGE_BYTES)
        for begin in range(0, max(1, task.length), step):  # a block of a stripe without chunks has no bytes
            slices.append(TaskSlice(task, begin, min(begin + step, task.length)))
    batched: list[list[TaskSlice]] = []
    room_bytes = 0
    for one in slices:
        if one.nbytes > room_bytes or not batched:
            batched.append([])
            room_bytes = most_bytes
        batched[-1].append(one)
        room_bytes -= one.nbytes
    return batched


def solve_slice(
    task_slice: TaskSlice, index: int, received: Mapping[tuple[int, Input], Bytes], arenas: OpenArenas
) -> dict[ChunkId, Bytes]:
    """The bytes of this slice of each chunk that the rank reconstructs.

    ``received``: bytes from other nodes, by ``index`` of the slice and input; local bytes are read in place.
    """
    task, group = task_slice.task, task_slice.task.repair.group
    nbytes = task_slice.end - task_slice.begin

    def bytes_of(wanted: Input) -> Bytes:
        # A short chunk that ends before this slice: the erasure code treats it as zeros.
        if wanted.nbytes <= task_slice.begin:
            return np.empty(0, np.uint8)
        if (index, wanted) in received:
            return received[index, wanted]
        return np.frombuffer(arenas.view(wanted.at), np.uint8)[task_slice.begin : task_slice.end]

    data = [bytes_of(item) if isinstance(item, Input) else item for item in task.data]
    # No blocks are used if all data exists: the lost chunks are blocks, which are encoded again.
    if not task.repair.use:
        known = [None if isinstance(array, MissingArray) else array for array in data]
        rows = {block_chunk(group, *at): row for row, at in enumerate(task.repair.stripe.blocks)}
        return {chunk: encode(known, nbytes, rows[chunk], group.losses) for chunk in task.own}
    blocks = {row: bytes_of(block) for row, block in task.blocks.items()}
    solved: dict[ChunkId, Bytes] = {}
    for place, array in decode(data, blocks, nbytes, group.losses).items():
        member, offset = task.repair.stripe.data[place]
        chunk = (group.members[member].shard, group.members[member].first + offset)
        if chunk in task.own:
            solved[chunk] = array
    return solved
