"""Who has which elements × who needs which elements → what to read: geometry alone.

Every needed element is read exactly once, from the cheapest source that has it. Restoring the same layout
is the case in which boxes coincide and each read is one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ftckpt.errors import LostError
from ftckpt.state.fragment import Fragment

Runs = npt.NDArray[np.int64]
"""Shape (n, 3): source start, destination start, number of elements; starts count from each fragment's own
first element; ordered by destination."""

_NO_RUNS: Runs = np.empty((0, 3), dtype=np.int64)


@dataclass(frozen=True)
class Have:
    """A fragment that can be read from ``source`` (an index that the caller understands)."""

    source: int
    fragment: Fragment
    offset: int
    """Where the fragment's first byte lies in the source."""


@dataclass(frozen=True)
class Read:
    """Elements to copy from one have into one need."""

    have: Have
    need: int
    runs: Runs

    @property
    def nbytes(self) -> int:
        """Bytes that this read moves."""
        return int(self.runs[:, 2].sum()) * self.have.fragment.item_bytes


def plan(haves: Iterable[Have], needs: Sequence[Fragment], cost: Callable[[int], int]) -> list[Read]:
    """Reads that fill every element of every need exactly once.

    ``cost(source)`` orders the sources; cheaper ones are taken first, ties in the order given.

    Raises:
        LostError: some element is in no source; the text names the tensors.
    """
    by_key: dict[tuple[str, str], list[Have]] = {}
    for have in sorted(haves, key=lambda h: cost(h.source)):
        by_key.setdefault((have.fragment.key, have.fragment.dtype), []).append(have)
    reads: list[Read] = []
    missing: list[str] = []
    for index, need in enumerate(needs):
        candidates = by_key.get((need.key, need.dtype), [])
        found, complete = _fill(need, index, candidates)
        reads += found
        if not complete:
            missing.append(need.name)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise LostError(f"no source holds all of {', '.join(missing[:3])}{more}")
    return reads


def _fill(need: Fragment, index: int, candidates: Sequence[Have]) -> tuple[list[Read], bool]:
    reads: list[Read] = []
    left = need.numel
    filled: Runs = _NO_RUNS
    for have in candidates:
        if left == 0:
            break
        if have.fragment.global_shape != need.global_shape:
            continue
        runs = overlap(have.fragment, need)
        if len(filled):
            runs = _without(runs, filled)
        if len(runs):
            reads.append(Read(have, index, runs))
            filled = np.concatenate([filled, runs])
            left -= int(runs[:, 2].sum())
    return reads, left == 0


def overlap(have: Fragment, need: Fragment) -> Runs:
    """Contiguous runs of elements that both fragments hold; see ``Runs``."""
    if have.box == need.box:
        start, stop = max(have.start, need.start), min(have.stop, need.stop)
        if start >= stop:
            return _NO_RUNS
        return np.array([[start - have.start, start - need.start, stop - start]], dtype=np.int64)
    rows = _rows(have, need)
    if not len(rows):
        return rows
    skipped = np.maximum(np.maximum(have.start - rows[:, 0], need.start - rows[:, 1]), 0)
    over = np.maximum(rows[:, 0] + rows[:, 2] - have.stop, rows[:, 1] + rows[:, 2] - need.stop)
    runs = np.stack(
        [
            rows[:, 0] + skipped - have.start,
            rows[:, 1] + skipped - need.start,
            rows[:, 2] - skipped - np.maximum(over, 0),
        ],
        axis=1,
    )
    return _merge(runs[runs[:, 2] > 0])


def _rows(have: Fragment, need: Fragment) -> Runs:
    """Runs of the boxes' intersection, in flat positions of the two whole boxes."""
    dims = range(len(need.global_shape))
    low = [max(have.box.offset[d], need.box.offset[d]) for d in dims]
    high = [min(have.box.offset[d] + have.box.shape[d], need.box.offset[d] + need.box.shape[d]) for d in dims]
    shape = [h - lo for lo, h in zip(low, high, strict=True)]
    if any(size <= 0 for size in shape):
        return _NO_RUNS
    inner = len(shape)
    length = 1
    while inner > 0:
        inner -= 1
        length *= shape[inner]
        if not shape[inner] == have.box.shape[inner] == need.box.shape[inner]:
            break
    starts = [_flat(low, shape[:inner], fragment) for fragment in (have, need)]
    return np.stack([starts[0], starts[1], np.full(len(starts[0]), length, dtype=np.int64)], axis=1)


def _flat(low: list[int], outer: list[int], fragment: Fragment) -> npt.NDArray[np.int64]:
    """Flat position in the fragment's box of the first element of each row."""
    strides = [1] * len(low)
    for d in range(len(low) - 2, -1, -1):
        strides[d] = strides[d + 1] * fragment.box.shape[d + 1]
    base = sum((lo - off) * s for lo, off, s in zip(low, fragment.box.offset, strides, strict=True))
    positions = np.full(1, base, dtype=np.int64)
    for size, stride in zip(outer, strides, strict=False):
        positions = (positions[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return positions


def _merge(runs: Runs) -> Runs:
    """Join runs that follow each other in both source and destination."""
    if len(runs) < 2:
        return runs
    ends = runs[:, :2] + runs[:, 2:]
    first = np.concatenate([[True], (runs[1:, :2] != ends[:-1]).any(axis=1)])
    lengths = np.add.reduceat(runs[:, 2], np.flatnonzero(first))
    return np.concatenate([runs[first][:, :2], lengths[:, None]], axis=1)


def _without(runs: Runs, filled: Runs) -> Runs:
    """The parts of ``runs`` whose destinations ``filled`` does not cover yet."""
    taken = sorted((int(d), int(d + n)) for _, d, n in filled)
    rest: list[tuple[int, int, int]] = []
    for source, dest, numel in runs.tolist():
        position, end = dest, dest + numel
        for begin, stop in taken:
            if stop <= position or begin >= end:
                continue
            if begin > position:
                rest.append((source + position - dest, position, begin - position))
            position = max(position, stop)
        if position < end:
            rest.append((source + position - dest, position, end - position))
    return np.array(rest, dtype=np.int64).reshape(-1, 3)
