"""Chunks of a shard on storage go where the live state wants them, whatever they are cut from."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import cast

import torch

from ftckpt.persist.shard_file import ShardFile
from ftckpt.restore.straight import _begin, _bring, _chunks, _Part
from ftckpt.store.image import Span


class Image:
    """A file of so many bytes, in chunks; which of them were read."""

    def __init__(self, nbytes: int, chunk_bytes: int, first: int) -> None:
        self.data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        spans = [Span(at, min(nbytes, at + chunk_bytes)) for at in range(first, nbytes, chunk_bytes)]
        self.image = SimpleNamespace(chunks=spans)
        self.read: list[int] = []

    def fill(self, number: int, memory: memoryview) -> None:
        span = self.image.chunks[number]
        memory[:] = self.data[span.begin : span.end].numpy().data
        self.read.append(number)

    def bring(self, wanted: list[tuple[int, int]]) -> list[torch.Tensor]:
        """What comes of these bytes, from … to."""
        live = [torch.zeros(end - begin, dtype=torch.uint8) for begin, end in wanted]
        parts = [_Part(begin, end, to) for (begin, end), to in zip(wanted, live, strict=True)]
        for chunk in _chunks(cast(ShardFile, self), sorted(parts, key=_begin)):
            _bring(chunk)
        return live


def test_a_shard_of_many_chunks_comes_straight() -> None:
    rng = random.Random(7)
    for _ in range(200):
        file = Image(1000, rng.choice([7, 64, 100, 1000]), 40)
        edges = sorted(rng.sample(range(40, 1001), 12))
        wanted = list(zip(edges[::2], edges[1::2], strict=True))
        wanted += [wanted[0], (edges[0], edges[-1])]  # one is wanted twice, one lies around all others
        for (begin, end), live in zip(wanted, file.bring(wanted), strict=True):
            assert torch.equal(live, file.data[begin:end])


def test_only_chunks_that_are_wanted_are_read_and_each_once() -> None:
    file = Image(1000, 100, 0)
    file.bring([(150, 160), (170, 210), (900, 901), (199, 200)])
    assert file.read == [1, 2, 9]
