"""The measured spans of one training iteration, the copies in them, and the forecast of the next one.

An iteration runs from one step boundary to the next. It consists of contiguous spans, each named after the trainer's
activity; the idle ones are the windows:

| kind | from | to |
|---|---|---|
| boundary | the end of an iteration | the snapshot has started: training's wait at the boundary |
| start | the end of boundary | the start of the pipeline schedule |
| forward, backward | the start of one compute step | its end |
| window | a compute step, or the schedule's start | the next compute step: receives, sends, waiting |
| tail | the last backward | the fence: reduction of gradients, gradient norm, waiting for other stages |
| fence | the point before the first write to optimizer-updated state | the copies have finished |
| optimizer | the fence | the next boundary |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

COMPUTE = frozenset({"forward", "backward"})
IDLE = frozenset({"start", "window", "tail"})


@dataclass(frozen=True)
class Iteration:
    """``kinds[i]`` lasted from ``edges[i]`` to ``edges[i + 1]``; ``copies`` are (begin, end, bytes).

    All in seconds since the boundary, on the device's clock.
    """

    kinds: tuple[str, ...]
    edges: tuple[float, ...]
    copies: tuple[tuple[float, float, int], ...] = ()

    @property
    def secs(self) -> float:
        """The time from boundary to boundary."""
        return self.edges[-1] - self.edges[0]

    @property
    def lengths(self) -> tuple[float, ...]:
        return tuple(end - begin for begin, end in zip(self.edges, self.edges[1:], strict=False))

    def secs_of(self, kinds: frozenset[str]) -> float:
        """Seconds spent in spans of these kinds."""
        return sum(secs for kind, secs in zip(self.kinds, self.lengths, strict=True) if kind in kinds)

    @property
    def stall_secs(self) -> float:
        """The time that the fence waited for copies; the rest of the fence occurs without copies, too."""
        done = max((end for _, end, _ in self.copies), default=0.0)
        spans = zip(self.kinds, self.edges, self.edges[1:], strict=False)
        return sum(max(0.0, min(end, done) - begin) for kind, begin, end in spans if kind == "fence")

    @property
    def moved_bytes(self) -> dict[str, int]:
        """Bytes copied by kind of span; a copy across several spans is split in proportion to time."""
        return divide(self.copies, self.kinds, self.edges)


def divide(
    copies: Sequence[tuple[float, float, int]], kinds: Sequence[str], edges: Sequence[float]
) -> dict[str, int]:
    """Bytes of ``copies`` by the kind of span they ran in; bytes outside all spans count for the nearest one.

    ``copies`` must be sequential: none starts before the previous one has ended.
    """
    if not copies or not kinds:
        return {}
    begins, ends, sizes = np.array(copies, dtype=np.float64).T
    after = np.cumsum(sizes)
    # Bytes copied by time t rise linearly within each copy; each span gets the rise between its edges.
    times, done = np.column_stack([begins, ends]).ravel(), np.column_stack([after - sizes, after]).ravel()
    # np.interp needs ascending times, and rounding can make adjacent copies overlap.
    inner = np.interp(np.array(edges[1:-1], dtype=np.float64), np.maximum.accumulate(times), done)
    # Rounded before the difference, so that the parts add up to the bytes that were copied.
    steps = np.diff(np.rint(np.concatenate([[0.0], inner, after[-1:]])).astype(np.int64))
    moved: dict[str, int] = {}
    for kind, nbytes in zip(kinds, steps.tolist(), strict=True):
        if nbytes:
            moved[kind] = moved.get(kind, 0) + nbytes
    return moved


def in_windows(moved_bytes: Mapping[str, int]) -> float:
    """The share of the bytes that were copied in windows."""
    total = sum(moved_bytes.values())
    return sum(nbytes for kind, nbytes in moved_bytes.items() if kind in IDLE) / total if total else 0.0


_MEDIAN_OF = 9
"""Iterations per median: a single stall does not move it."""

_SETTLED = 3
"""Minimum of iterations for a median."""

_REFRESHED = 4
"""Iterations after which medians are recomputed: fewer hardly change them."""


@dataclass(frozen=True)
class IterationForecast:
    """The expected iteration: ``kinds[i]`` takes ``secs[i]``."""

    kinds: tuple[str, ...]
    secs: tuple[float, ...]

    def distance(self, other: IterationForecast) -> float:
        """The share of the iteration by which spans differ in length from ``other``; 1 if their kinds differ."""
        if self is other:
            return 0.0
        if self.kinds != other.kinds:
            return 1.0
        mine, theirs = np.array(self.secs), np.array(other.secs)
        # 1e-9 avoids division by 0 for an iteration of no length.
        return float(np.abs(mine - theirs).sum() / max(mine.sum(), 1e-9))


class Profile:
    """The last iterations of this rank.

    The first one after a start, or after a change of the schedule, is excluded: it compiles, allocates and connects.
    """

    def __init__(self) -> None:
        self._kinds: tuple[str, ...] = ()
        self._lengths: deque[np.ndarray[Any, np.dtype[np.float64]]] = deque(maxlen=_MEDIAN_OF)
        self._fresh = True
        self._medians: IterationForecast | None = None
        self._behind = 0  # iterations since the medians were computed

    def add(self, iteration: Iteration) -> None:
        if iteration.kinds != self._kinds:
            self._kinds, self._fresh = iteration.kinds, True
            self._lengths.clear()
            self._medians, self._behind = None, 0
        if self._fresh:
            self._fresh = False
            return
        self._lengths.append(np.array(iteration.lengths))
        self._behind += 1

    @property
    def measured(self) -> bool:
        """Whether enough iterations were measured."""
        return len(self._lengths) >= _SETTLED

    @property
    def timeline(self) -> IterationForecast | None:
        """The forecast: medians of the last iterations; None until measured."""
        if not self.measured:
            return None
        if self._medians is None or self._behind >= _REFRESHED:
            # Not np.median: its overhead would double training's wait.
            rows, middle = np.sort(np.array(self._lengths), axis=0), len(self._lengths) // 2
            medians = (rows[middle] + rows[~middle]) / 2
            self._medians, self._behind = IterationForecast(self._kinds, tuple(medians.tolist())), 0
        return self._medians
