"""The order in which stripes are solved, cut into parts that fit in memory, and the arithmetic of one part."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ftckpt.protect.codecs import MISSING, Missing, decode, encode
from ftckpt.protect.survive import BlockId, ChunkId, Repair, block_chunk
from ftckpt.restore.load import OpenArenas
from ftckpt.restore.source import BlockAt, ChunkAt

Bytes = npt.NDArray[np.uint8]

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Input:
    """A chunk or a block of ``nbytes``, and the rank that reads it."""

    at: ChunkAt | BlockAt
    reader: int
    nbytes: int


@dataclass(frozen=True)
class Job:
    """A repair as one rank does it: ``own`` are the lost chunks that it writes.

    ``data`` are the stripe's arrays in order (an input, MISSING, or None: zeros), ``blocks`` those used, by row.
    """

    repair: Repair
    own: tuple[ChunkId, ...]
    data: tuple[Input | Missing | None, ...]
    blocks: Mapping[int, Input]

    @classmethod
    def of(
        cls,
        repair: Repair,
        mine: Collection[str],
        chunk_input: Callable[[str, int, int], Input],
        block_input: Callable[[BlockId, int], Input],
    ) -> Job:
        """The part of ``repair`` that a rank has which rebuilds the shards ``mine``."""
        group, stripe = repair.group, repair.stripe
        data: list[Input | Missing | None] = []
        for index, offset in stripe.data:
            member = group.members[index]
            chunk = (member.shard, member.first + offset)
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
        """All that is read."""
        return [i for i in self.data if isinstance(i, Input)] + list(self.blocks.values())

    @property
    def width(self) -> int:
        """How many arrays are in memory at a time: those read, those solved and one scratch for each."""
        return len(self.inputs) + 2 * max(1, len(self.repair.lost))

    @property
    def out_bytes(self) -> int:
        """Bytes that are written, ends of short chunks counted as whole."""
        return self.length * len(self.own)


@dataclass(frozen=True)
class Part:
    """Bytes ``begin`` to ``end`` of every array of a job."""

    job: Job
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return (self.end - self.begin) * self.job.width


def levels(repairs: Sequence[Repair]) -> list[list[Repair]]:
    """Repairs that can be done at the same time, in the order of the levels: each needs only earlier ones."""
    level_of: dict[ChunkId, int] = {}
    found: list[list[Repair]] = []
    for repair in repairs:
        level = max((level_of[chunk] + 1 for chunk in _needed(repair) if chunk in level_of), default=0)
        if level == len(found):
            found.append([])
        found[level].append(repair)
        level_of.update(dict.fromkeys(repair.lost, level))
    return found


def _needed(repair: Repair) -> Iterator[ChunkId]:
    """Chunks that a repair reads."""
    group = repair.group
    for index, offset in repair.stripe.data:
        member = group.members[index]
        if offset >= 0 and (member.shard, member.first + offset) not in repair.lost:
            yield member.shard, member.first + offset
    for _, holder, block in repair.use:
        chunk = block_chunk(group, holder, block)
        if chunk is not None:
            yield chunk


def batches(jobs: Sequence[Job], most_bytes: int) -> list[list[Part]]:
    """Jobs cut into parts, which stand together while they take ``most_bytes`` of memory or less."""
    found: list[list[Part]] = []
    room = 0
    for job in jobs:
        step = max(PAGE_BYTES, most_bytes // job.width // PAGE_BYTES * PAGE_BYTES)
        for begin in range(0, max(1, job.length), step):  # a block of a stripe without chunks has no bytes
            part = Part(job, begin, min(begin + step, job.length))
            if part.nbytes > room or not found:
                found.append([])
                room = most_bytes
            found[-1].append(part)
            room -= part.nbytes
    return found


def solve_part(
    part: Part, index: int, received: Mapping[tuple[int, Input], torch.Tensor], arenas: OpenArenas
) -> dict[ChunkId, Bytes]:
    """The bytes of this part of each chunk that the rank rebuilds.

    ``received`` has what came from other nodes, by ``index`` of the part and input; the rest is read in place.
    """
    job, group = part.job, part.job.repair.group
    nbytes = part.end - part.begin

    def bytes_of(wanted: Input) -> Bytes:
        if wanted.nbytes <= part.begin:
            return np.empty(0, np.uint8)
        if (index, wanted) in received:
            return received[index, wanted].numpy()
        return np.frombuffer(arenas.view(wanted.at), np.uint8)[part.begin : part.end]

    data = [bytes_of(item) if isinstance(item, Input) else item for item in job.data]
    if not job.repair.use:
        known = [None if isinstance(array, Missing) else array for array in data]
        rows = {block_chunk(group, *at): row for row, at in enumerate(job.repair.stripe.blocks)}
        return {chunk: encode(group.code, known, nbytes, rows[chunk], group.losses) for chunk in job.own}
    blocks = {row: bytes_of(block) for row, block in job.blocks.items()}
    solved = decode(group.code, data, blocks, nbytes, group.losses)
    found: dict[ChunkId, Bytes] = {}
    for place, array in solved.items():
        member, offset = job.repair.stripe.data[place]
        chunk = (group.members[member].shard, group.members[member].first + offset)
        if chunk in job.own:
            found[chunk] = array
    return found
