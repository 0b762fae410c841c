"""The digest of a job's state is that of its logical tensors, whoever holds which part of them."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.training_state import Description, Piece
from tests.support.arenas import ThreadGroup
from tests.support.elements import Digest, Digester

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8, "I64": torch.int64}
Tensors = dict[str, tuple[str, np.ndarray]]


def digests(ranks: Sequence[Description], rows: int | None = None) -> Digest:
    shared = [b""] * len(ranks), threading.Barrier(len(ranks))

    def digest(rank: int) -> Digest:
        try:
            return Digester(ranks[rank], ThreadGroup(rank, shared).gather, rank, rows)()
        except BaseException:
            shared[1].abort()
            raise

    with ThreadPoolExecutor(len(ranks)) as pool:
        found = list(pool.map(digest, range(len(ranks))))
    assert all(other == found[0] for other in found)
    return found[0]


def piece(key: str, dtype: str, whole: np.ndarray, box: Box, span: tuple[int, int]) -> Piece:
    start, stop = span
    part = whole[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))].reshape(-1)[start:stop]
    tensor = torch.from_numpy(np.ascontiguousarray(part)).view(DTYPES[dtype])
    return Piece(Fragment(key, dtype, whole.shape, box, start, stop), tensor)


@st.composite
def tensors(draw: st.DrawFn) -> Tensors:
    made: Tensors = {}
    for index in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
        bits = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, (math.prod(shape), 8), np.uint8)
        width = torch.empty(0, dtype=DTYPES[dtype]).element_size()
        flat = np.ascontiguousarray(bits[:, :width]).view(f"i{width}" if width > 1 else "u1").reshape(shape)
        made[f"master/{index}"] = (dtype, flat)
    return made


def split(draw: Any, whole: Tensors) -> list[Description]:
    """Ranks that hold boxes and ranges of them, some of them several times and with overlaps."""
    ranks: list[list[Piece]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for key, (dtype, values) in whole.items():
        cut = draw(st.integers(0, values.shape[0]))
        for first, last in ((0, cut), (cut, values.shape[0])):
            box = Box((first, *(0,) * (values.ndim - 1)), (last - first, *values.shape[1:]))
            middle = draw(st.integers(0, box.numel))
            ranges = [(0, middle), (draw(st.integers(0, middle)), box.numel)]
            if draw(st.booleans()):
                ranges.append((0, box.numel))
            for start, stop in ranges:
                if start < stop:
                    holder = draw(st.sampled_from(ranks))
                    holder.append(piece(key, dtype, values, box, (start, stop)))
    return [Description(tuple(pieces), ()) for pieces in ranks]


@settings(max_examples=60)
@given(st.data())
def test_every_split_has_the_same_digest(data: st.DataObject) -> None:
    whole = data.draw(tensors())
    found = digests(split(data.draw, whole))
    assert found == digests(split(data.draw, whole))
    assert {key: count for key, (count, _) in found.items()} == {key: v.size for key, (_, v) in whole.items()}


@settings(max_examples=60)
@given(st.data())
def test_one_bit_or_two_elements_in_each_others_place_are_seen(data: st.DataObject) -> None:
    whole = data.draw(tensors())
    before = digests(split(data.draw, whole))
    key = data.draw(st.sampled_from(sorted(whole)))
    dtype, values = whole[key]
    changed = values.reshape(-1).copy()
    index, other = (data.draw(st.integers(0, changed.size - 1)) for _ in range(2))
    if changed[index] != changed[other]:
        changed[[index, other]] = changed[[other, index]]
    else:
        changed[index] ^= 1
    after = digests(split(data.draw, {**whole, key: (dtype, changed.reshape(values.shape))}))
    assert {name for name in before if before[name] != after[name]} == {key}


def whole_piece(key: str, values: np.ndarray) -> Piece:
    return piece(key, "F32", values.astype(np.int32), Box((0,) * values.ndim, values.shape), (0, values.size))


def test_padding_and_what_belongs_to_a_rank_do_not_count() -> None:
    values = np.arange(30).reshape(10, 3)
    key = "weight/embedding"
    padded = [whole_piece(key, np.concatenate([values, np.full((more, 3), more)])) for more in (2, 6)]
    found = [digests([Description((p,), (whole_piece("local/x", values),), frozenset({key}))], 10) for p in padded]
    assert found[0] == found[1] and found[0][key][0] == 30 and list(found[0]) == [key]
    assert digests([Description((padded[0],), ())])[key][0] == 36
