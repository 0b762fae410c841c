"""Tensors of saved shards: found in the index, read straight."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from ftckpt.errors import MismatchError
from ftckpt.memory.destinations import TargetParts
from ftckpt.memory.image import SlotImage, Span
from ftckpt.memory.locations import SlotAt
from ftckpt.model.fragment import DTYPE_BYTES, Box, Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.model.replicas import private_key
from ftckpt.model.training_state import Piece
from ftckpt.persist.shard_file import ShardFile
from ftckpt.restore.chunk_reads import Part, chunks_of, land
from ftckpt.restore.plan import StridedCopy, plan, run
from ftckpt.restore.selected_shards import reads_little_twice
from ftckpt.restore.shard_contents import SlotContents, check_copies, index_for, needs_of, whole_in
from ftckpt.restore.staging import StagingBuffers
from ftckpt.restore.tensor_index import Index
from tests.support.errors import raises

# --- reads from a snapshot of another layout ---


NONE: frozenset[str] = frozenset()


def fragment(key: str, *shape: int, dtype: str = "F32") -> Fragment:
    return Fragment.whole(key, dtype, shape, Box((0,) * len(shape), shape))


def piece(key: str, *shape: int, derived: bool = False, dtype: str = "F32") -> Piece:
    made = fragment(key, *shape, dtype=dtype)
    tensor = torch.zeros(made.nbytes // DTYPE_BYTES["F32"])
    return Piece(made, tensor, torch.zeros_like(tensor) if derived else None)


def image(dp: int, stepped: list[Fragment], volatile: list[Fragment]) -> SlotImage:
    own = [f.with_key(private_key(f.key, f"dp{dp}")) for f in volatile]
    return SlotImage.of(Manifest({"dp": dp}, {"dp": 2}, tuple(stepped), tuple(own), 100, 4096, padded=("p",)))


def contents(dp: int, stepped: list[Fragment], volatile: list[Fragment]) -> SlotContents:
    return SlotContents.of(SlotAt("n", f"dp{dp}.0", 0), dp, image(dp, stepped, volatile), 7)


def keys(
    pieces: list[Piece], index: Index, own: SlotContents | None = None, padded: frozenset[str] = NONE
) -> list[str]:
    return [need.key for _, need in needs_of(pieces, index, own, padded)]


def test_private_keys_are_the_models_where_nobody_continues_the_shard_and_local_ones_nobodys() -> None:
    volatile = [fragment("buffer/b", 3), fragment("local/s", 3)]
    slots = [contents(dp, [fragment(f"master/{dp}", 4)], volatile) for dp in (0, 1)]
    pieces = [piece("buffer/b", 3), piece("local/s", 3), piece("master/1", 4)]
    index = index_for(pieces, slots, None)
    assert index.shapes("buffer/b", "F32") == {(3,)} and not index.shapes("local/s", "F32")
    assert not index.shapes("buffer/b@dp1", "F32") and not index.shapes("master/0", "F32")
    assert keys(pieces, index) == ["buffer/b", "master/1"]
    same = index_for(pieces, slots, "dp1")
    assert not same.shapes("buffer/b@dp0", "F32") and not same.shapes("buffer/b", "F32")
    assert keys(pieces, same, slots[1]) == ["buffer/b@dp1", "local/s@dp1", "master/1"]


def test_ranks_of_another_layout_take_one_version_of_what_shards_hold_alike() -> None:
    """A shard continues with its own bytes; those of another shard must not come from elsewhere."""
    norm = fragment("weight/norm", 4)
    slots = [contents(dp, [norm], []) for dp in (0, 1)]
    for own, sources in ((None, [0, 0]), ("dp1", [0, 1])):
        index = index_for([piece("weight/norm", 4)], slots, own)
        reads = [plan(index, [norm], cost=lambda source, near=near: source != near)[0] for near in (0, 1)]
        assert [read.offer.source for read in reads] == sources


def test_only_padded_keys_may_have_other_rows() -> None:
    need = [piece("master/w", 12, 4)]
    index = index_for(need, [contents(0, [fragment("master/w", 16, 4)], [])], None)
    assert keys(need, index, padded=frozenset({"master/w"}))
    with raises(MismatchError, "master/w", "F32", "[12, 4]", "[16, 4]"):
        keys(need, index)
    for other in (piece("master/w", 12, 5), piece("master/w", 12), piece("master/w", 16, 4, dtype="BF16")):
        with pytest.raises(MismatchError):
            keys([other], index, padded=frozenset({"master/w"}))


def test_what_a_shard_has_as_it_is_needs_no_plan_and_all_else_does() -> None:
    stepped = [fragment("master/w", 4, 2), fragment("master/half", 4, 2).part(0, 4), fragment("master/t", 6)]
    volatile = [fragment("buffer/b", 3)]
    own, of = contents(1, stepped, volatile), image(1, stepped, volatile)
    taken = [piece("master/w", 4, 2), piece("buffer/b", 3)]
    others = [
        piece("master/half", 4, 2),  # a part of it is there
        piece("master/t", 6, dtype="F64"),  # the bytes of another number
        Piece(Fragment("master/t", "F32", (12,), Box((0,), (6,)), 0, 6), torch.zeros(6)),  # a row of another tensor
        piece("buffer/b@dp0", 3),
        piece("master/new", 4),
    ]
    whole, rest = whole_in([taken[0], *others, taken[1]], own, of)
    assert [piece for piece, _, _ in whole] == taken and rest == others
    index = index_for(taken, [own], "dp1")
    assert [(piece, need) for piece, need, _ in whole] == needs_of(taken, index, own, NONE)
    offsets = dict(zip(of.manifest.fragments, of.offsets, strict=True))
    assert [offset for _, need, offset in whole] == [offsets[need] for _, need, _ in whole]


def test_what_is_derived_is_read_only_where_it_is_there() -> None:
    pieces = [piece("weight/raw", 4, derived=True), piece("weight/cast", 4, derived=True)]
    index = index_for(pieces, [contents(0, [fragment("weight/raw", 4)], [])], None)
    assert keys(pieces, index) == ["weight/raw"]


def test_copies_must_agree_where_they_are_needed() -> None:
    sources = [
        contents(dp, [], [fragment("buffer/b", 3), fragment("buffer/c", 3), fragment("local/s", 3)]) for dp in (0, 1)
    ]
    assert [copy.key for copy, _ in sources[0].copies] == ["buffer/b", "buffer/c"]
    alike = {"dp0": np.array([7, 8], np.uint64), "dp1": np.array([7, 9], np.uint64)}
    check_copies(sources, alike, [fragment("buffer/b", 3)])
    with raises(MismatchError, "buffer/c", "dp0", "dp1"):
        check_copies(sources, alike, [fragment("buffer/c", 3)])


# --- chunks of a shard on storage go where the live state wants them, whatever they are cut from ---


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
