"""All that can be read, by key and type, so that what touches one need is found without looking at the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ftckpt.state.fragment import Fragment, Shape

Array = npt.NDArray[np.int64]


class Have(NamedTuple):
    """A fragment that can be read from ``source`` (an index that the caller understands)."""

    source: int
    fragment: Fragment
    offset: int
    """Where the fragment's first byte lies in the source."""


@dataclass
class Alike:
    """Haves of one key, type and global shape, in the order in which they were given. All are added before any is
    looked for."""

    haves: list[Have] = field(default_factory=list)

    def touching(self, low: Shape, high: Shape) -> list[Have]:
        """Those that may hold an element of the box ``low`` to ``high``; no other have does."""
        found = ((self._bounds[:, 0] < high) & (self._bounds[:, 1] > low)).all(axis=1)
        return [self.haves[index] for index in np.flatnonzero(found).tolist()]

    @cached_property
    def _bounds(self) -> Array:
        """Shape (haves, 2, dims): the least box around each have."""
        bounds = [bounds_of(have.fragment) for have in self.haves]
        return np.array(bounds, dtype=np.int64).reshape(len(bounds), 2, -1)


class Index:
    """Haves by key and type; made once, used by any number of plans."""

    def __init__(self, haves: Iterable[Have] = ()) -> None:
        self._by_key: dict[tuple[str, str], dict[Shape, Alike]] = {}
        for have in haves:
            fragment = have.fragment
            shapes = self._by_key.setdefault((fragment.key, fragment.dtype), {})
            alike = shapes.get(fragment.global_shape)
            if alike is None:
                alike = shapes[fragment.global_shape] = Alike()
            alike.haves.append(have)

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


def bounds_of(fragment: Fragment) -> tuple[Shape, Shape]:
    """The first and one past the last index of the fragment's elements along each dimension; all equal if empty."""
    low, high = list(fragment.box.offset), list(fragment.box.offset)
    start, stop = fragment.start, fragment.stop
    if start == stop:
        return tuple(low), tuple(high)
    shape = fragment.box.shape
    for axis in range(len(shape)):
        inner = math.prod(shape[axis + 1 :])
        first, last = start // inner, (stop - 1) // inner
        high[axis] = low[axis] + last + 1
        low[axis] += first
        if first < last:
            for rest in range(axis + 1, len(shape)):
                high[rest] = low[rest] + shape[rest]
            break
        start, stop = start - first * inner, stop - first * inner
    return tuple(low), tuple(high)
