"""Strided blocks: what two fragments have in common, as copies that each are one call however many rows they have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ftckpt.model.fragment import Fragment, Shape


class Block(NamedTuple):
    """A strided copy between two flat memories, in elements (or in bytes, see ``in_bytes``).

    ``source`` and ``dest`` are where its first element lies, counted from each memory's own begin; ``shape`` has one
    entry per loop and is never empty; ``source_strides`` and ``dest_strides`` follow it.
    """

    source: int
    dest: int
    shape: Shape
    source_strides: Shape
    dest_strides: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Region(NamedTuple):
    """A box in coordinates of the whole tensor: ``low`` (inclusive) to ``high`` (exclusive), neither empty."""

    low: Shape
    high: Shape

    @property
    def numel(self) -> int:
        return math.prod(h - lo for lo, h in zip(self.low, self.high, strict=True))


def run(source: int, dest: int, numel: int) -> Block:
    """The block of ``numel`` elements in a row."""
    return Block(source, dest, (numel,), (1,), (1,))


def regions(shape: Shape, start: int, stop: int) -> list[Region]:
    """The row-major range ``start`` to ``stop`` of an array of ``shape`` as disjoint boxes, in ascending order.

    At most 2·dims − 1 of them: a part of a row, whole rows, a part of a row, and so on inside those parts.
    """
    if start >= stop:
        return []
    if not shape:
        return [Region((), ())]
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        return _in_row(shape, first, head, tail)
    boxes = _in_row(shape, first, head, inner) if head else []
    begin = first + (head > 0)
    if begin < last:
        boxes.append(Region((begin, *(0,) * (len(shape) - 1)), (last, *shape[1:])))
    return boxes + (_in_row(shape, last, 0, tail) if tail else [])


def regions_of(fragment: Fragment) -> list[Region]:
    """The elements of ``fragment`` as disjoint boxes in coordinates of the whole tensor, in ascending order."""
    offset = fragment.box.offset
    return [
        Region(_plus(low, offset), _plus(high, offset))
        for low, high in regions(fragment.box.shape, fragment.start, fragment.stop)
    ]


def common(one: Region, other: Region) -> Region | None:
    """What both boxes hold, None where that is nothing."""
    low = tuple(map(max, one.low, other.low))
    high = tuple(map(min, one.high, other.high))
    return Region(low, high) if all(lo < h for lo, h in zip(low, high, strict=True)) else None


def without(region: Region, taken: Region) -> list[Region]:
    """What is left of ``region`` once ``taken``, which lies inside it, is gone: at most two boxes per dimension."""
    rest: list[Region] = []
    low, high = list(region.low), list(region.high)
    for axis, (begin, end) in enumerate(zip(taken.low, taken.high, strict=True)):
        if low[axis] < begin:
            rest.append(Region(tuple(low), (*high[:axis], begin, *high[axis + 1 :])))
        if end < high[axis]:
            rest.append(Region((*low[:axis], end, *low[axis + 1 :]), tuple(high)))
        low[axis], high[axis] = begin, end
    return rest


def block_of(region: Region, have: Fragment, need: Fragment) -> Block:
    """The copy of ``region``, which both fragments hold, from the memory of ``have`` into that of ``need``."""
    source, source_strides = _place(region.low, have)
    dest, dest_strides = _place(region.low, need)
    shape = tuple(h - lo for lo, h in zip(region.low, region.high, strict=True))
    return simplified(Block(source, dest, shape, source_strides, dest_strides))


def simplified(block: Block) -> Block:
    """The same elements in the same order by as few loops as possible."""
    loops: list[tuple[int, int, int]] = []
    for size, source, dest in zip(block.shape, block.source_strides, block.dest_strides, strict=True):
        if size == 1:
            continue
        if loops and loops[-1][1:] == (source * size, dest * size):
            loops[-1] = (loops[-1][0] * size, source, dest)
        else:
            loops.append((size, source, dest))
    if not loops:
        return run(block.source, block.dest, 1)
    shape, sources, dests = zip(*loops, strict=True)
    return Block(block.source, block.dest, shape, sources, dests)


def joined(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """The same elements in the same order: runs that follow each other in both memories become one."""
    longer: list[Block] = []
    for block in blocks:
        last = longer[-1] if longer else None
        if last is not None and _is_run(last) and _is_run(block):
            numel = last.shape[0]
            if (last.source + numel, last.dest + numel) == (block.source, block.dest):
                longer[-1] = run(last.source, last.dest, numel + block.shape[0])
                continue
        longer.append(block)
    return tuple(longer)


def in_bytes(block: Block, item_bytes: int, source: int = 0, dest: int = 0) -> Block:
    """A block of elements as one of bytes, with byte offsets added to both begins."""
    shape, sources, dests = block.shape, block.source_strides, block.dest_strides
    at = (source + block.source * item_bytes, dest + block.dest * item_bytes)
    if sources == dests == (1,):
        return run(*at, shape[0] * item_bytes)
    if sources[-1] == dests[-1] == 1:
        outer = len(shape) - 1
        shape = (*shape[:outer], shape[outer] * item_bytes)
        strides = [(*(s * item_bytes for s in by[:outer]), 1) for by in (sources, dests)]
    else:
        shape = (*shape, item_bytes)
        strides = [(*(s * item_bytes for s in by), 1) for by in (sources, dests)]
    return simplified(Block(*at, shape, strides[0], strides[1]))


def cut(block: Block, begin: int, end: int) -> Iterator[Block]:
    """Elements ``begin`` to ``end`` of ``block``, in its own order."""
    if (begin, end) == (0, block.numel):
        yield block
        return
    for low, high in regions(block.shape, begin, end):
        source = block.source + sum(map(int.__mul__, low, block.source_strides))
        dest = block.dest + sum(map(int.__mul__, low, block.dest_strides))
        shape = tuple(h - lo for lo, h in zip(low, high, strict=True))
        yield simplified(Block(source, dest, shape, block.source_strides, block.dest_strides))


def stream(blocks: Sequence[Block], begin: int, end: int) -> Iterator[Block]:
    """Elements ``begin`` to ``end`` of ``blocks`` laid end to end, each in its own order."""
    position = 0
    for block in blocks:
        numel = block.numel
        if position + numel > begin and position < end:
            yield from cut(block, max(0, begin - position), min(numel, end - position))
        position += numel


def _in_row(shape: Shape, row: int, start: int, stop: int) -> list[Region]:
    return [Region((row, *low), (row + 1, *high)) for low, high in regions(shape[1:], start, stop)]


def _place(low: Shape, fragment: Fragment) -> tuple[int, Shape]:
    """Where the element at ``low`` lies in the fragment's own memory, and the strides of its box."""
    strides = [1] * len(low)
    for axis in range(len(low) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * fragment.box.shape[axis + 1]
    at = sum((lo - off) * s for lo, off, s in zip(low, fragment.box.offset, strides, strict=True))
    return at - fragment.start, tuple(strides)


def _plus(one: Shape, other: Shape) -> Shape:
    return tuple(map(int.__add__, one, other))


def _is_run(block: Block) -> bool:
    return len(block.shape) == 1 and (block.shape[0] == 1 or block.source_strides == block.dest_strides == (1,))
