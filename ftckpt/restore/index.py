"""All that can be read, by key and type, so that what touches one need is found without looking at the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ftckpt.state.fragment import Box, Fragment, Shape

Array = npt.NDArray[np.int64]


class Have(NamedTuple):
    """A fragment that can be read from ``source`` (an index that the caller understands)."""

    source: int
    fragment: Fragment
    offset: int
    """Where the fragment's first byte lies in the source."""


class Kind(NamedTuple):
    """What fragments must have in common to be parts of the same tensor."""

    key: str
    dtype: str
    shape: Shape


FIXED_COLUMNS = 3
"""Columns before those that follow the dimensions."""


def row_of(fragment: Fragment, offset: int) -> tuple[int, ...]:
    """A have as numbers, without its source and kind: byte offset, start, stop, box offset, box shape."""
    return offset, fragment.start, fragment.stop, *fragment.box.offset, *fragment.box.shape


FEW = 32
"""Haves of a kind that are looked at one by one: arrays take longer to make."""


@dataclass
class Alike:
    """Haves of one kind, in the order in which they were added. All are added before any is looked for."""

    kind: Kind
    _few: list[Have] = field(default_factory=list)
    _sources: list[Array] = field(default_factory=list)
    _rows: list[Array] = field(default_factory=list)

    def add(self, sources: Array, rows: Array) -> None:
        """``rows``, shape (haves, columns), as ``row_of`` gives them, and the source of each."""
        self._sources.append(sources)
        self._rows.append(rows)

    def add_one(self, have: Have) -> None:
        """One of few."""
        self._few.append(have)
        if len(self._few) > FEW:
            self._flush()

    def touching(self, need: Fragment) -> list[Have]:
        """Those that may hold an element of ``need``; no other have does."""
        if not self._sources:
            return [have for have in self._few if _meet(have.fragment, need)]
        low, high = bounds(np.array([row_of(need, 0)], np.int64))
        found = ((self._bounds[0] < high) & (self._bounds[1] > low)).all(axis=1)
        return [self._have(index) for index in np.flatnonzero(found).tolist()]

    @cached_property
    def _table(self) -> tuple[Array, Array]:
        self._flush()
        return np.concatenate(self._sources), np.concatenate(self._rows)

    @cached_property
    def _bounds(self) -> tuple[Array, Array]:
        return bounds(self._table[1])

    def _flush(self) -> None:
        if self._few:
            rows = np.array([row_of(have.fragment, have.offset) for have in self._few], np.int64)
            self.add(np.array([have.source for have in self._few], np.int64), rows)
            self._few.clear()

    def _have(self, index: int) -> Have:
        key, dtype, shape = self.kind
        offset, start, stop, *box = self._table[1][index].tolist()
        place = Box(tuple(box[: len(shape)]), tuple(box[len(shape) :]))
        return Have(int(self._table[0][index]), Fragment(key, dtype, shape, place, start, stop), offset)


class Index:
    """Haves by key and type; made once, used by any number of plans."""

    def __init__(self, haves: Iterable[Have] = ()) -> None:
        self._by_key: dict[tuple[str, str], dict[Shape, Alike]] = {}
        for have in haves:
            key, dtype, shape = have.fragment.key, have.fragment.dtype, have.fragment.global_shape
            found = self._by_key.get((key, dtype), {}).get(shape) or self.alike(Kind(key, dtype, shape))
            found.add_one(have)

    def alike(self, kind: Kind) -> Alike:
        """The haves of one kind, to which more can be added as long as nothing was looked for."""
        shapes = self._by_key.setdefault((kind.key, kind.dtype), {})
        if kind.shape not in shapes:
            shapes[kind.shape] = Alike(kind)
        return shapes[kind.shape]

    def shapes(self, key: str, dtype: str) -> frozenset[Shape]:
        """Global shapes in which ``key`` is there with that type; empty where it is not."""
        return frozenset(self._by_key.get((key, dtype), ()))

    def usable(self, need: Fragment, padded: bool) -> list[Alike]:
        """Haves of the need's own global shape and, where it is ``padded``, of those that differ in dimension 0."""
        shape = need.global_shape
        return [
            alike
            for found, alike in self._by_key.get((need.key, need.dtype), {}).items()
            if found == shape or (padded and len(found) == len(shape) > 0 and found[1:] == shape[1:])
        ]


def _meet(one: Fragment, other: Fragment) -> bool:
    """Whether the boxes share an element, and, where they are the same, the ranges."""
    if one.box == other.box:
        return one.start < other.stop and other.start < one.stop
    return all(
        at < to + size and to < at + length
        for at, length, to, size in zip(one.box.offset, one.box.shape, other.box.offset, other.box.shape, strict=True)
    )


def bounds(rows: Array) -> tuple[Array, Array]:
    """First and one past the last index of each row's elements along each dimension; shape (rows, dims) each.

    The least box around them; one without elements where there are none.
    """
    dims = (rows.shape[1] - FIXED_COLUMNS) // 2
    offset, shape = rows[:, FIXED_COLUMNS : FIXED_COLUMNS + dims], rows[:, FIXED_COLUMNS + dims :]
    low, high = offset.copy(), offset + shape
    first, last = rows[:, 1], rows[:, 2] - 1
    alone = first <= last  # all elements share the index along each dimension so far
    high[~alone] = low[~alone]
    for axis in range(dims):
        inner = np.maximum(np.prod(shape[:, axis + 1 :], axis=1), 1)
        begin, end = first // inner, last // inner
        low[alone, axis] = (offset[:, axis] + begin)[alone]
        high[alone, axis] = (offset[:, axis] + end + 1)[alone]
        first, last = first - begin * inner, last - begin * inner
        alone = alone & (begin == end)
    return low, high
