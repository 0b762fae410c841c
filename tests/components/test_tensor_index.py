"""Reads from a snapshot of another layout: keys with the same meaning, padding, copies that must agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ftckpt.errors import MismatchError
from ftckpt.memory.image import SlotImage
from ftckpt.memory.locations import SlotAt
from ftckpt.model.fragment import DTYPE_BYTES, Box, Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.model.replicas import private_key
from ftckpt.model.training_state import Piece
from ftckpt.restore.plan import plan
from ftckpt.restore.shard_contents import (
    SlotContents,
    check_copies,
    index_for,
    needs_of,
    whole_in,
)
from ftckpt.restore.tensor_index import Index
from tests.support.errors import raises

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
