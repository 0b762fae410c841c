"""Read planning: from the fragments that sources have and the fragments that a rank needs to strided copies. Pure.

Every needed element is read exactly once, from the cheapest source that has it. On the same layout boxes coincide,
and each read is one run. The overlap of two fragments is a few strided copies, each one call for any number of rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from ftckpt.errors import LostError
from ftckpt.model.fragment import Fragment, Shape
from ftckpt.model.text import listed
from ftckpt.restore.tensor_index import Index, ShardEntry


class StridedCopy(NamedTuple):
    """A strided copy between two flat memories, in elements (or in bytes, see ``in_bytes``).

    ``source`` and ``dest`` are the offsets of its first element from the start of each memory; ``shape`` has one
    entry per loop and is never empty; ``source_strides`` and ``dest_strides`` have one per loop, too.
    """

    source: int
    dest: int
    shape: Shape
    source_strides: Shape
    dest_strides: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def source_end(self) -> int:
        """One past the last element that is read."""
        steps = zip(self.shape, self.source_strides, strict=True)
        return self.source + 1 + sum((size - 1) * stride for size, stride in steps)


class Region(NamedTuple):
    """A box in coordinates of the global tensor, from ``low`` (inclusive) to ``high`` (exclusive); never empty."""

    low: Shape
    high: Shape

    @property
    def numel(self) -> int:
        return math.prod(h - lo for lo, h in zip(self.low, self.high, strict=True))


def run(source: int, dest: int, numel: int) -> StridedCopy:
    """The copy of ``numel`` contiguous elements."""
    return StridedCopy(source, dest, (numel,), (1,), (1,))


def regions(shape: Shape, start: int, stop: int) -> list[Region]:
    """The row-major range ``start`` to ``stop`` of an array of ``shape`` as disjoint boxes, in ascending order.

    At most 2·dims − 1 of them: a partial row, full rows, a partial row, and so on inside the partial ones.
    """
    if start >= stop:
        return []
    # A scalar: ``divmod`` below needs a first dimension.
    if not shape:
        return [Region((), ())]
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        return _in_row(shape, first, head, tail)
    # The tail of the first row if the range starts inside it, the full rows as one box, the head of the last row.
    boxes = _in_row(shape, first, head, inner) if head else []
    begin = first + (head > 0)
    if begin < last:
        boxes.append(Region((begin, *(0,) * (len(shape) - 1)), (last, *shape[1:])))
    return boxes + (_in_row(shape, last, 0, tail) if tail else [])


def regions_of(fragment: Fragment) -> list[Region]:
    """The elements of ``fragment`` as disjoint boxes in coordinates of the global tensor, in ascending order."""
    offset = fragment.box.offset
    return [
        Region(_plus(low, offset), _plus(high, offset))
        for low, high in regions(fragment.box.shape, fragment.start, fragment.stop)
    ]


def common(one: Region, other: Region) -> Region | None:
    """The intersection of two boxes, None if it is empty."""
    low = tuple(map(max, one.low, other.low))
    high = tuple(map(min, one.high, other.high))
    return Region(low, high) if all(lo < h for lo, h in zip(low, high, strict=True)) else None


def without(region: Region, taken: Region) -> list[Region]:
    """``region`` minus ``taken``, a box inside it: at most two boxes per dimension."""
    rest: list[Region] = []
    low, high = list(region.low), list(region.high)
    for axis, (begin, end) in enumerate(zip(taken.low, taken.high, strict=True)):
        if low[axis] < begin:
            rest.append(Region(tuple(low), (*high[:axis], begin, *high[axis + 1 :])))
        if end < high[axis]:
            rest.append(Region((*low[:axis], end, *low[axis + 1 :]), tuple(high)))
        # Later axes cut only the slab that ``taken`` spans along this axis, so the boxes are disjoint.
        low[axis], high[axis] = begin, end
    return rest


def copy_of(region: Region, have: Fragment, need: Fragment) -> StridedCopy:
    """The copy of ``region``, which both fragments hold, from the memory of ``have`` into that of ``need``."""
    source, source_strides = _place(region.low, have)
    dest, dest_strides = _place(region.low, need)
    shape = tuple(h - lo for lo, h in zip(region.low, region.high, strict=True))
    return simplified(StridedCopy(source, dest, shape, source_strides, dest_strides))


def simplified(copy: StridedCopy) -> StridedCopy:
    """The same elements in the same order, in as few loops as possible."""
    loops: list[tuple[int, int, int]] = []
    for size, source, dest in zip(copy.shape, copy.source_strides, copy.dest_strides, strict=True):
        # The stride of a loop of one step is irrelevant.
        if size == 1:
            continue
        # The outer loop continues exactly where this one ends, in both memories: merge the two.
        if loops and loops[-1][1:] == (source * size, dest * size):
            loops[-1] = (loops[-1][0] * size, source, dest)
        else:
            loops.append((size, source, dest))
    if not loops:
        return run(copy.source, copy.dest, 1)
    shape, sources, dests = zip(*loops, strict=True)
    return StridedCopy(copy.source, copy.dest, shape, sources, dests)


def joined(copies: Sequence[StridedCopy]) -> tuple[StridedCopy, ...]:
    """The same elements in the same order, with runs merged that are adjacent in both memories."""
    longer: list[StridedCopy] = []
    for copy in copies:
        last = longer[-1] if longer else None
        if last is not None and _is_run(last) and _is_run(copy):
            numel = last.shape[0]
            if (last.source + numel, last.dest + numel) == (copy.source, copy.dest):
                longer[-1] = run(last.source, last.dest, numel + copy.shape[0])
                continue
        longer.append(copy)
    return tuple(longer)


def in_bytes(copy: StridedCopy, item_bytes: int, source: int = 0, dest: int = 0) -> StridedCopy:
    """A copy of elements as a copy of bytes, with byte offsets added to both starts."""
    shape, sources, dests = copy.shape, copy.source_strides, copy.dest_strides
    at = (source + copy.source * item_bytes, dest + copy.dest * item_bytes)
    if sources == dests == (1,):
        return run(*at, shape[0] * item_bytes)
    if sources[-1] == dests[-1] == 1:
        outer = len(shape) - 1
        # Contiguous elements: their bytes are one run, and the innermost loop grows. Otherwise elements get a loop.
        shape = (*shape[:outer], shape[outer] * item_bytes)
        strides = [(*(s * item_bytes for s in by[:outer]), 1) for by in (sources, dests)]
    else:
        shape = (*shape, item_bytes)
        strides = [(*(s * item_bytes for s in by), 1) for by in (sources, dests)]
    return simplified(StridedCopy(*at, shape, strides[0], strides[1]))


def cut(copy: StridedCopy, begin: int, end: int) -> Iterator[StridedCopy]:
    """Elements ``begin`` to ``end`` of ``copy``, in its own order."""
    if (begin, end) == (0, copy.numel):
        yield copy
        return
    for low, high in regions(copy.shape, begin, end):
        source = copy.source + sum(map(int.__mul__, low, copy.source_strides))
        dest = copy.dest + sum(map(int.__mul__, low, copy.dest_strides))
        shape = tuple(h - lo for lo, h in zip(low, high, strict=True))
        yield simplified(StridedCopy(source, dest, shape, copy.source_strides, copy.dest_strides))


def reading(copy: StridedCopy, begin: int, end: int) -> Iterator[StridedCopy]:
    """The part of ``copy`` that reads elements ``begin`` to ``end`` of its source. The copy must read its source in
    ascending order: each stride exceeds the extent of the loops inside it."""
    if copy.numel == 0:
        return
    first, last = _read_before(copy, begin), _read_before(copy, end)
    if first < last:
        yield from cut(copy, first, last)


def _read_before(copy: StridedCopy, place: int) -> int:
    """The number of elements of ``copy`` before ``place`` in its source."""
    left, numel, count = place - copy.source, copy.numel, 0
    for size, stride in zip(copy.shape, copy.source_strides, strict=True):
        numel //= size
        # The steps of this loop that start before ``place``; the last of them may reach past it.
        begun = min(size, -(-left // stride))
        if begun <= 0:
            return count
        left -= (begun - 1) * stride
        count += (begun - 1) * numel
    return count + 1


def stream(copies: Sequence[StridedCopy], begin: int, end: int) -> Iterator[StridedCopy]:
    """Elements ``begin`` to ``end`` of the concatenation of ``copies``, each in its own order."""
    position = 0
    for copy in copies:
        numel = copy.numel
        if position + numel > begin and position < end:
            yield from cut(copy, max(0, begin - position), min(numel, end - position))
        position += numel


def _in_row(shape: Shape, row: int, start: int, stop: int) -> list[Region]:
    return [Region((row, *low), (row + 1, *high)) for low, high in regions(shape[1:], start, stop)]


def _place(low: Shape, fragment: Fragment) -> tuple[int, Shape]:
    """The offset of the element at ``low`` in the fragment's memory, and the strides of its box."""
    strides = [1] * len(low)
    for axis in range(len(low) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * fragment.box.shape[axis + 1]
    at = sum((lo - off) * s for lo, off, s in zip(low, fragment.box.offset, strides, strict=True))
    return at - fragment.start, tuple(strides)


def _plus(one: Shape, other: Shape) -> Shape:
    return tuple(map(int.__add__, one, other))


def _is_run(copy: StridedCopy) -> bool:
    return len(copy.shape) == 1 and (copy.shape[0] == 1 or copy.source_strides == copy.dest_strides == (1,))


Interval = tuple[int, int]


@dataclass(frozen=True)
class ReadItem:
    """Elements to copy from the entry ``offer`` into the need with the index ``need``; ``copies`` are disjoint."""

    offer: ShardEntry
    need: int
    copies: tuple[StridedCopy, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes that this read moves."""
        return sum(copy.numel for copy in self.copies) * self.offer.fragment.item_bytes


def plan(
    offers: Iterable[ShardEntry] | Index,
    needs: Sequence[Fragment],
    cost: Callable[[int], int],
    padded: frozenset[str] = frozenset(),
    turn: int = 0,
) -> list[ReadItem]:
    """Reads that fill every element of every need exactly once, in the order of the needs.

    Sources are used in the order of ``cost(source)``, cheapest first; of equal cost, the one from which this plan
    reads the fewest bytes so far; else in the given order, starting at index ``turn``: ranks that plan alike and pass
    their own number do not all use the same source.

    Entries must have the need's global shape. Of ``padded`` keys dimension 0 may differ: rows that both have are
    read, and rows that no source has stay unfilled.

    Raises:
        LostError: some element is in no source; the text names the tensors.
    """
    index = offers if isinstance(offers, Index) else Index(offers)
    cost = cache(cost)
    taken: Counter[int] = Counter()
    reads: list[ReadItem] = []
    missing: list[str] = []
    for number, need in enumerate(needs):
        last_row, useful = _useful(index, need, need.key in padded)
        # The turn comes last: as the first key, a rank would read remotely what its own node has.
        turned = [((place - turn) % len(useful), offer) for place, offer in enumerate(useful)]
        turned.sort(key=lambda pair: (cost(pair[1].source), taken[pair[1].source], pair[0]))
        filled, complete = _fill(need, [offer for _, offer in turned], last_row)
        for offer, copies in filled:
            read = ReadItem(offer, number, copies)
            reads.append(read)
            taken[offer.source] += read.nbytes
        if not complete:
            missing.append(need.name)
    if missing:
        raise LostError(f"no source holds all of {listed(missing)}")
    return reads


def overlap(have: Fragment, need: Fragment) -> tuple[StridedCopy, ...]:
    """The elements that both fragments have, as copies from the memory of ``have`` into that of ``need``.

    Global shapes must be equal, or differ in dimension 0 only.
    """
    filled, _ = _fill(need, [ShardEntry(0, have, 0)], None)
    return filled[0][1] if filled else ()


def _useful(index: Index, need: Fragment, padded: bool) -> tuple[int | None, list[ShardEntry]]:
    """The first row that is not needed (None: all are), and the entries that may overlap ``need``."""
    usable = index.usable(need, padded)
    useful = [offer for offers in usable for offer in offers.touching(need)]
    if not padded or not usable or not need.global_shape:
        return None, useful
    # Sources may be padded to different numbers of rows: the longest counts.
    return max(offers.tensor.shape[0] for offers in usable), useful


Filled = list[tuple[ShardEntry, tuple[StridedCopy, ...]]]


def _fill(need: Fragment, offers: Sequence[ShardEntry], last_row: int | None) -> tuple[Filled, bool]:
    """The copies from each entry, in the order of ``offers``, and whether they fill ``need``."""
    # The usual and fast case: intervals instead of boxes.
    if all(_flat_alike(offer.fragment, need) for offer in offers):
        return _fill_flat(need, offers, last_row)
    left = regions_of(need)
    if last_row is not None:
        # Rows from ``last_row`` on are padding that no source has.
        above = Region((0,) * len(need.global_shape), (last_row, *need.global_shape[1:]))
        left = [needed for region in left if (needed := common(region, above)) is not None]
    filled: Filled = []
    for offer in offers:
        if not left:
            break
        left, shared = _take(left, regions_of(offer.fragment))
        if shared:
            copies = [copy_of(region, offer.fragment, need) for region in shared]
            filled.append((offer, joined(copies)))
    return filled, not left


def _take(left: list[Region], offered: Sequence[Region]) -> tuple[list[Region], list[Region]]:
    """The disjoint boxes ``left`` minus the disjoint boxes ``offered``, and their intersection."""
    shared: list[Region] = []
    for taken in offered:
        rest: list[Region] = []
        for region in left:
            both = common(region, taken)
            if both is None:
                rest.append(region)
            else:
                shared.append(both)
                rest += without(region, both)
        left = rest
    return left, shared


def _flat_alike(have: Fragment, need: Fragment) -> bool:
    """Whether the two boxes differ in dimension 0 only: then their overlap is one run in each."""
    one, other = have.box, need.box
    return one.shape[1:] == other.shape[1:] and one.offset[1:] == other.offset[1:]


def _fill_flat(need: Fragment, offers: Sequence[ShardEntry], last_row: int | None) -> tuple[Filled, bool]:
    begin, end = _interval(need)
    left = [(begin, end)]
    if last_row is not None:
        left = [(begin, min(end, last_row * math.prod(need.box.shape[1:])))]
    left = [(lo, hi) for lo, hi in left if lo < hi]
    filled: Filled = []
    for offer in offers:
        if not left:
            break
        start, stop = _interval(offer.fragment)
        rest: list[Interval] = []
        copies: list[StridedCopy] = []
        for lo, hi in left:
            first, last = max(lo, start), min(hi, stop)
            if first >= last:
                rest.append((lo, hi))
                continue
            copies.append(run(first - start, first - begin, last - first))
            rest += [part for part in ((lo, first), (last, hi)) if part[0] < part[1]]
        left = rest
        if copies:
            filled.append((offer, tuple(copies)))
    return filled, not left


def _interval(fragment: Fragment) -> Interval:
    """The fragment's flat range, counted from row 0 of the tensor in rows of the fragment's box."""
    offset = fragment.box.offset
    above = offset[0] * math.prod(fragment.box.shape[1:]) if offset else 0
    return above + fragment.start, above + fragment.stop
