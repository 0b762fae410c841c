"""Chunks of a shard on storage go where the live state wants them, whatever they are cut from."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import cast

import torch

from ftckpt.memory.destinations import TargetParts
from ftckpt.memory.image import Span
from ftckpt.persist.shard_file import ShardFile
from ftckpt.restore.chunk_reads import Part, chunks_of, land
from ftckpt.restore.plan import StridedCopy, run
from ftckpt.restore.selected_shards import reads_little_twice
from ftckpt.restore.staging import StagingBuffers


class Image:
    """A file of so many bytes, in chunks; which of them were read."""

    def __init__(self, nbytes: int, chunk_bytes: int, first: int) -> None:
        self.data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        spans = [Span(at, min(nbytes, at + chunk_bytes)) for at in range(first, nbytes, chunk_bytes)]
        self.image = SimpleNamespace(chunks=spans, objects=Span(nbytes, nbytes))
        self.read: list[int] = []

    def scatter(self, number: int, parts: TargetParts) -> None:
        place = self.image.chunks[number].begin
        for span, targets in parts():
            for begin, memory in targets:
                assert max(place, span.begin) <= begin <= begin + len(memory) <= span.end
                place = begin + len(memory)
                memory[:] = self.data[begin:place].numpy().data
        self.read.append(number)

    def bring(self, wanted: list[StridedCopy]) -> list[torch.Tensor]:
        """The results of these copies, each to memory of its own."""
        live = [torch.zeros(one.numel, dtype=torch.uint8) for one in wanted]
        parts = [Part(*one) for one in zip(wanted, live, strict=True)]
        for chunk in chunks_of(cast(ShardFile, self), parts):
            land(chunk, StagingBuffers())
        return live


def runs(*wanted: tuple[int, int]) -> list[StridedCopy]:
    """Bytes from … to."""
    return [run(begin, 0, end - begin) for begin, end in wanted]


def test_a_shard_of_many_chunks_comes_straight() -> None:
    rng = random.Random(7)
    for _ in range(200):
        file = Image(1000, rng.choice([7, 64, 100, 1000]), 40)
        edges = sorted(rng.sample(range(40, 1001), 12))
        wanted = list(zip(edges[::2], edges[1::2], strict=True))
        wanted += [wanted[0], (edges[0], edges[-1])]  # one is wanted twice, one lies around all others
        for (begin, end), live in zip(wanted, file.bring(runs(*wanted)), strict=True):
            assert torch.equal(live, file.data[begin:end])


def test_columns_of_a_matrix_come_straight_however_chunks_cut_it() -> None:
    rng = random.Random(11)
    for _ in range(300):
        file = Image(1000, rng.choice([5, 33, 64, 100, 1000]), 0)
        planes, rows, row = rng.randint(1, 3), rng.randint(1, 6), rng.randint(4, 20)
        width, begin = rng.randint(1, row), rng.randint(0, 60)
        plane = rows * row + rng.randint(0, 150)
        copy = StridedCopy(begin, 0, (planes, rows, width), (plane, row, 1), (rows * width, width, 1))
        (live,) = file.bring([copy])
        there = file.data[begin:].as_strided(copy.shape, copy.source_strides)
        assert torch.equal(live.view(copy.shape), there)
        lines = [begin + i * plane + j * row for i in range(planes) for j in range(rows)]
        spans = enumerate(file.image.chunks)
        touched = [n for n, span in spans if any(at < span.end and at + width > span.begin for at in lines)]
        assert file.read == touched, "what lies between rows is not read"


def test_only_chunks_that_are_wanted_are_read_and_each_once() -> None:
    file = Image(1000, 100, 0)
    file.bring(runs((150, 160), (170, 210), (900, 901), (199, 200)))
    assert file.read == [1, 2, 9]


def test_of_a_slot_every_chunk_is_read_and_each_once() -> None:
    file = Image(1000, 100, 0)
    live = torch.zeros(60, dtype=torch.uint8)
    for chunk in chunks_of(cast(ShardFile, file), [Part(run(170, 0, 60), live)], every=True):
        land(chunk, StagingBuffers())
    assert file.read == list(range(10)) and torch.equal(live, file.data[170:230])


def test_what_several_ranks_need_is_not_read_by_each() -> None:
    gb = 1 << 30
    assert reads_little_twice([gb] * 8, 8 * gb), "each its own"
    assert reads_little_twice([9 * gb // 8] * 8, 8 * gb), "and chunks that two share"
    assert not reads_little_twice([2 * gb] * 8, 8 * gb), "each half of all tensors, cut along their rows"
    assert not reads_little_twice([8 * gb] * 8, 8 * gb), "replicas"
    assert reads_little_twice([50 << 20] * 2, 50 << 20), "a small model, of which a chunk is the most"
