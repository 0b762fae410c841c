"""Restore plans: who reads which bytes, and what passes between ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from ftckpt.errors import CorruptError, LostError
from ftckpt.model.fragment import Box, Fragment
from ftckpt.restore import redistribute
from ftckpt.restore import tensor_index as indexing
from ftckpt.restore.plan import ReadItem, StridedCopy, cut, in_bytes, overlap, plan, regions, run, simplified, stream
from ftckpt.restore.redistribute import NAME_BYTES, name_of, part_of, sharers
from ftckpt.restore.tensor_index import Index, ShardEntry, bounds, encode_table, row_of

# --- every needed element is read exactly once, whatever the boxes and ranges ---


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


@st.composite
def parts(draw: st.DrawFn, shape: tuple[int, ...]) -> Fragment:
    """Any flat range of any box, possibly empty."""
    edges = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    box = Box(tuple(lo for lo, _ in edges), tuple(hi - lo for lo, hi in edges))
    start, stop = sorted(draw(st.tuples(st.integers(0, box.numel), st.integers(0, box.numel))))
    return Fragment("w", "F32", shape, box, start, stop)


def values(fragment: Fragment) -> np.ndarray:
    """The elements of the fragment when each element of the tensor is its own flat index."""
    shape = fragment.global_shape
    whole = np.arange(math.prod(shape)).reshape(shape)
    slices = tuple(slice(o, o + s) for o, s in zip(fragment.box.offset, fragment.box.shape, strict=True))
    return whole[slices].flatten()[fragment.start : fragment.stop]


def copy(block: StridedCopy, source: np.ndarray, dest: np.ndarray) -> None:
    """Add what ``block`` reads to what is there, one strided operation; nothing outside the arrays is touched."""
    for array, at, strides in ((source, block.source, block.source_strides), (dest, block.dest, block.dest_strides)):
        last = at + sum((size - 1) * stride for size, stride in zip(block.shape, strides, strict=True))
        assert 0 <= at <= last < len(array)
    views = [
        as_strided(array[at:], block.shape, [stride * array.itemsize for stride in strides])
        for array, at, strides in (
            (source, block.source, block.source_strides),
            (dest, block.dest, block.dest_strides),
        )
    ]
    views[1][...] += views[0]


def apply(reads: Sequence[ReadItem], needs: Sequence[Fragment]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The values that the needs get, and how often each element was written."""
    got = [np.zeros(need.numel, dtype=np.int64) for need in needs]
    written = [np.zeros(need.numel, dtype=np.int64) for need in needs]
    for read in reads:
        source = values(read.offer.fragment)
        for block in read.copies:
            copy(block, source, got[read.need])
            copy(block, np.ones_like(source), written[read.need])
        assert read.nbytes == 4 * sum(block.numel for block in read.copies) > 0
    return got, written


@given(st.data())
def test_any_partition_fills_any_other(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    sources, needs = data.draw(grids(shape)), data.draw(grids(shape))
    offers = [ShardEntry(i, f, 0) for i, f in enumerate(sources)]
    offers += [ShardEntry(i, f, 0) for i, f in enumerate(sources) if data.draw(st.booleans())]  # replicas
    offers += [ShardEntry(99, f, 0) for f in data.draw(st.lists(parts(shape), max_size=3))]  # of other shapes
    needs += data.draw(st.lists(parts(shape), max_size=2))
    offers = data.draw(st.permutations(offers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexing, "FEW", data.draw(st.sampled_from([0, 2, 32])))
        index = Index(offers)
    if data.draw(st.booleans()):
        of = [[have for have in offers if have.source == source] for source in range(100)]
        index = Index(once=data.draw(st.booleans()))
        index.add_tables(
            (
                (n, encode_table([o.fragment for o in all_of], [o.offset for o in all_of]))
                for n, all_of in enumerate(of)
            ),
            lambda key: key,
        )
    turn = data.draw(st.integers(0, 5))
    got, written = apply(plan(index, needs, cost=lambda source: source % 2, turn=turn), needs)
    for need, filled, count in zip(needs, got, written, strict=True):
        assert (count == 1).all()
        assert (filled == values(need)).all()


@given(st.data())
def test_a_missing_part_is_named(data: st.DataObject) -> None:
    shape = data.draw(SHAPES.filter(lambda s: math.prod(s) > 1))
    sources, needs = data.draw(grids(shape)), data.draw(grids(shape))
    dropped = data.draw(st.integers(0, len(sources) - 1))
    offers = [ShardEntry(0, f, 0) for i, f in enumerate(sources) if i != dropped]
    with pytest.raises(LostError, match="w\\["):
        plan(offers, needs, cost=lambda source: 0)


@given(st.data())
def test_padding_is_neither_read_nor_touched(data: st.DataObject) -> None:
    """Rows that both shapes have are read; rows beyond the source's stay as they are."""
    inner = data.draw(st.lists(st.integers(1, 4), max_size=2).map(tuple))
    old, new = ((data.draw(st.integers(1, 7)), *inner) for _ in range(2))
    sources, needs = data.draw(grids(old)), data.draw(grids(new))
    reads = plan([ShardEntry(i, f, 0) for i, f in enumerate(sources)], needs, lambda source: 0, frozenset({"w"}))
    got, written = apply(reads, needs)
    rows = math.prod(inner) * min(old[0], new[0])
    for need, filled, count in zip(needs, got, written, strict=True):
        wanted = values(need)
        assert (count == (wanted < rows)).all()
        assert (filled == np.where(wanted < rows, wanted, 0)).all()


def test_padding_is_for_named_keys_and_the_first_dimension() -> None:
    def whole(*shape: int, key: str = "w") -> Fragment:
        return Fragment.whole(key, "F32", shape, Box((0,) * len(shape), shape))

    padded = frozenset({"w"})
    for have, need in [(whole(8, 4), whole(8, 6)), (whole(8), whole(8, 1)), (whole(8, key="v"), whole(6, key="v"))]:
        with pytest.raises(LostError):
            plan([ShardEntry(0, have, 0)], [need], lambda source: 0, padded)
    lacking = whole(8, 4).part(0, 16)
    with pytest.raises(LostError):  # rows that the source's shape has are needed
        plan([ShardEntry(0, lacking, 0)], [whole(6, 4)], lambda source: 0, padded)


@given(st.data())
def test_a_range_of_a_box_is_few_boxes_in_order(data: st.DataObject) -> None:
    part = data.draw(parts(data.draw(SHAPES)))
    shape = part.box.shape
    positions = np.arange(math.prod(shape)).reshape(shape)
    found = regions(shape, part.start, part.stop)
    held = [positions[tuple(map(slice, low, high))].reshape(-1).tolist() for low, high in found]
    assert list(chain.from_iterable(held)) == list(range(part.start, part.stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    low, high = (edge[0].tolist() for edge in bounds(np.array([row_of(part, 0)])))
    if found:
        begins, ends = (np.add(list(edges), part.box.offset) for edges in zip(*found, strict=True))
        assert low == begins.min(axis=0).tolist() and high == ends.max(axis=0).tolist()
    else:
        assert low == high


@given(st.data())
def test_blocks_can_be_cut_anywhere_and_counted_in_bytes(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    have, need = data.draw(parts(shape)), data.draw(parts(shape))
    blocks, item = overlap(have, need), data.draw(st.sampled_from([1, 2, 4]))
    total = sum(block.numel for block in blocks)
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, total * item), max_size=3))), total * item]
    counted = [in_bytes(block, item, 3, 5) for block in blocks]
    pieces = [list(stream(counted, begin, end)) for begin, end in pairwise(edges)]
    sizes = [sum(piece.numel for piece in part) for part in pieces]
    assert sizes == [end - begin for begin, end in pairwise(edges)]
    source = np.random.default_rng(0).integers(1, 255, 3 + have.numel * item, dtype=np.uint8)
    whole, cut_up = (np.zeros(5 + need.numel * item, dtype=np.uint8) for _ in range(2))
    for block in counted:
        copy(block, source, whole)
    order: list[int] = []
    for part in pieces:
        for piece in part:
            copy(piece, source, cut_up)
            order += positions(piece)
    assert (whole == cut_up).all()
    assert order == [at for block in counted for at in positions(block)]
    kept = source[3:].reshape(-1, item), whole[5:].reshape(-1, item)
    for block in blocks:
        for at, to in zip(positions(block), positions(swapped(block)), strict=True):
            assert (kept[0][at] == kept[1][to]).all()


def positions(block: StridedCopy) -> list[int]:
    """The offsets that a block reads, in its own order."""
    at = np.full(1, block.source)
    for size, stride in zip(block.shape, block.source_strides, strict=True):
        at = (at[:, None] + np.arange(size) * stride).reshape(-1)
    return at.tolist()


def swapped(block: StridedCopy) -> StridedCopy:
    """The copy in the other direction."""
    return StridedCopy(block.dest, block.source, block.shape, block.dest_strides, block.source_strides)


def test_loops_that_go_on_in_both_memories_are_one() -> None:
    assert simplified(StridedCopy(7, 9, (2, 1, 3, 4), (12, 5, 4, 1), (12, 5, 4, 1))) == run(7, 9, 24)
    assert simplified(StridedCopy(7, 9, (2, 3, 4), (12, 4, 1), (24, 4, 1))) == StridedCopy(
        7, 9, (2, 12), (12, 1), (24, 1)
    )
    assert simplified(StridedCopy(7, 9, (1, 1), (3, 3), (4, 4))) == run(7, 9, 1)
    assert list(cut(run(7, 9, 24), 3, 5)) == [run(10, 12, 2)]
    assert in_bytes(StridedCopy(0, 0, (3,), (1,), (5,)), 4) == StridedCopy(0, 0, (3, 4), (4, 1), (20, 1))
    assert in_bytes(StridedCopy(1, 2, (3,), (8,), (4,)), 4) == StridedCopy(4, 8, (3, 4), (32, 1), (16, 1))


def test_columns_of_any_number_of_rows_are_one_block() -> None:
    need = Fragment.whole("w", "F32", (1 << 20, 8), Box((0, 2), (1 << 20, 4)))
    have = Fragment.whole("w", "F32", (1 << 20, 8), Box((0, 4), (1 << 20, 4)))
    assert overlap(have, need) == (StridedCopy(0, 2, (1 << 20, 2), (4, 1), (4, 1)),)


def whole(key: str = "w") -> Fragment:
    return Fragment.whole(key, "F32", (8,), Box((0,), (8,)))


def test_the_cheapest_source_wins() -> None:
    reads = plan([ShardEntry(0, whole(), 0), ShardEntry(1, whole(), 0)], [whole()], cost=lambda source: 1 - source)
    assert [read.offer.source for read in reads] == [1]


def test_sources_that_cost_the_same_are_read_alike_and_in_turn() -> None:
    keys = [f"w{number}" for number in range(8)]
    index = Index(ShardEntry(source, whole(key), 0) for source in range(4) for key in keys)
    for turn in range(4):
        reads = plan(index, [whole(key) for key in keys], cost=lambda source: 0, turn=turn)
        sources = [read.offer.source for read in reads]
        assert sources[0] == turn
        assert all(sources.count(source) == 2 for source in range(4))


@pytest.mark.parametrize("few", [0, 32])
def test_of_what_several_shards_hold_alike_all_ranks_take_that_of_the_first(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have drifted apart since the last proof: one version is as good as another, two are not."""
    monkeypatch.setattr(indexing, "FEW", few)
    halves = whole()._replace(stop=4), whole()._replace(start=4)
    held = [[halves[0]], [halves[1], whole("v")], [halves[0], whole("v")], [halves[1], whole("v")]]
    index = Index(once=True)
    index.add_tables(((n, encode_table(have, [0] * len(have))) for n, have in enumerate(held)), lambda key: key)
    for source in range(4):  # proven alike before anything is read: the nearest does
        index.add(ShardEntry(source, whole("u"), 0))
    for turn in range(4):
        reads = plan(index, [whole(), whole("v"), whole("u")], cost=lambda source: -source, turn=turn)
        assert {(read.need, read.offer.source) for read in reads} == {(0, 0), (0, 1), (1, 1), (2, 3)}


def test_another_dtype_or_shape_is_no_source() -> None:
    wrong = [
        ShardEntry(0, Fragment.whole("w", "BF16", (8,), Box((0,), (8,))), 0),
        ShardEntry(1, Fragment.whole("w", "F32", (16,), Box((0,), (16,))), 0),
    ]
    with pytest.raises(LostError):
        plan(wrong, [whole()], cost=lambda source: 0)
    index = Index(wrong)
    assert index.shapes("w", "F32") == {(16,)}
    assert index.shapes("w", "F16") == frozenset()


@pytest.mark.parametrize(
    "harm", [b"", b"\xff" * 40, encode_table([whole()], [0])[:-3], encode_table([whole()], [0])[:20]]
)
def test_what_is_no_table_is_an_error(harm: bytes) -> None:
    with pytest.raises(CorruptError, match="source 7"):
        Index().add_tables([(7, harm)], lambda key: key)


# --- ranks that lack the same bytes agree, each by itself, on who fetches what ---


NAMES = [name_of(b"place", [run(number, 0, 4)]) for number in range(6)]


@given(st.lists(st.sets(st.sampled_from(NAMES)), min_size=1, max_size=6))
def test_all_ranks_find_the_same_sharers(held: list[set[bytes]]) -> None:
    told = [b"".join(sorted(names)) for names in held]
    for rank, names in enumerate(held):
        found = sharers(told, rank)
        assert set(found) == {name for name in names if sum(name in other for other in held) > 1}
        for name, ranks in found.items():
            assert ranks == tuple(other for other, has in enumerate(held) if name in has)


@given(st.sampled_from(NAMES), st.integers(0, 1 << 20), st.integers(2, 9), st.integers(1, 5000))
def test_parts_fill_the_whole_and_are_of_a_size(name: bytes, nbytes: int, count: int, grain: int) -> None:
    ranks = tuple(range(3, 3 + 2 * count, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redistribute, "GRAIN_BYTES", grain)
        parts = sorted(part_of(name, nbytes, ranks, rank) for rank in ranks)
    position = 0
    for begin, end in parts:
        assert begin in (position, end)
        position = max(position, end)
    assert position == nbytes
    sizes = [end - begin for begin, end in parts]
    assert max(sizes) - min(sizes) <= 2 * grain


def test_a_name_is_of_what_is_read_and_its_order() -> None:
    rows, columns = StridedCopy(0, 0, (2, 3), (10, 1), (3, 1)), StridedCopy(0, 0, (3, 2), (1, 10), (1, 3))
    names = [
        name_of(b"one", [rows]),
        name_of(b"two", [rows]),
        name_of(b"one", [columns]),
        name_of(b"one", [rows, columns]),
        name_of(b"one", [columns, rows]),
        name_of(b"one", [rows._replace(source=1)]),
        name_of(b"one", [rows._replace(source_strides=(11, 1))]),
    ]
    assert len(set(names)) == len(names) and {len(name) for name in names} == {NAME_BYTES}
    assert name_of(b"one", [rows._replace(dest=7, dest_strides=(9, 1))]) == names[0]
