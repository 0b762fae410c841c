"""Every needed element is read exactly once, whatever the boxes and ranges."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.errors import LostError
from ftckpt.restore.plan import Have, overlap, plan
from ftckpt.state.fragment import Box, Fragment

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def spans(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """``range(size)`` cut at up to two places."""
    cuts = draw(st.sets(st.integers(1, size - 1), max_size=2)) if size > 1 else set()
    edges = [0, *sorted(cuts), size]
    return list(pairwise(edges))


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Fragment]:
    """A random partition of a tensor: a grid of boxes, each cut into flat ranges."""
    cuts = []
    for size in shape:
        cuts.append(draw(spans(size)))
    boxes = [Box((), ())]
    for axis in cuts:
        boxes = [Box((*b.offset, lo), (*b.shape, hi - lo)) for b in boxes for lo, hi in axis]
    fragments = []
    for box in boxes:
        fragments += [Fragment("w", "F32", shape, box, lo, hi) for lo, hi in draw(spans(box.numel))]
    return fragments


def values(fragment: Fragment) -> np.ndarray:
    """What the fragment holds when each element of the tensor is its own flat index."""
    whole = np.arange(math.prod(fragment.global_shape)).reshape(fragment.global_shape)
    slices = tuple(slice(o, o + s) for o, s in zip(fragment.box.offset, fragment.box.shape, strict=True))
    return whole[slices].reshape(-1)[fragment.start : fragment.stop]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_partition_fills_any_other(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    sources, needs = data.draw(grids(shape)), data.draw(grids(shape))
    haves = [Have(i, f, 0) for i, f in enumerate(sources)]
    haves += [Have(i, f, 0) for i, f in enumerate(sources) if data.draw(st.booleans())]  # replicas
    written = [np.zeros(need.numel, dtype=int) for need in needs]
    got = [np.full(need.numel, -1) for need in needs]
    for read in plan(haves, needs, cost=lambda source: source % 2):
        source = values(read.have.fragment)
        for src, dst, numel in read.runs.tolist():
            got[read.need][dst : dst + numel] = source[src : src + numel]
            written[read.need][dst : dst + numel] += 1
    for need, filled, count in zip(needs, got, written, strict=True):
        assert (count == 1).all()
        assert (filled == values(need)).all()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_missing_part_is_named(data: st.DataObject) -> None:
    shape = data.draw(SHAPES.filter(lambda s: math.prod(s) > 1))
    sources, needs = data.draw(grids(shape)), data.draw(grids(shape))
    dropped = data.draw(st.integers(0, len(sources) - 1))
    haves = [Have(0, f, 0) for i, f in enumerate(sources) if i != dropped]
    with pytest.raises(LostError, match="w\\["):
        plan(haves, needs, cost=lambda source: 0)


def test_equal_boxes_give_one_run() -> None:
    box = Box((2, 0), (4, 8))
    have, need = Fragment("w", "F32", (8, 8), box, 3, 20), Fragment("w", "F32", (8, 8), box, 10, 32)
    assert overlap(have, need).tolist() == [[7, 0, 10]]


def test_the_cheapest_source_wins() -> None:
    whole = Fragment.whole("w", "F32", (8,), Box((0,), (8,)))
    reads = plan([Have(0, whole, 0), Have(1, whole, 0)], [whole], cost=lambda source: 1 - source)
    assert [read.have.source for read in reads] == [1]


def test_another_dtype_or_shape_is_no_source() -> None:
    need = Fragment.whole("w", "F32", (8,), Box((0,), (8,)))
    wrong = [
        Have(0, Fragment.whole("w", "BF16", (8,), Box((0,), (8,))), 0),
        Have(1, Fragment.whole("w", "F32", (16,), Box((0,), (16,))), 0),
    ]
    with pytest.raises(LostError):
        plan(wrong, [need], cost=lambda source: 0)
