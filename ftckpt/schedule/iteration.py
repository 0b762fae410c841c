"""What one iteration of training did when, which of it copies ran beside, and what the next one is expected to do.

An iteration goes from one boundary to the next. It is cut into spans without gaps, each named after what
the trainer does; idle ones are the windows:

| kind | from | to |
|---|---|---|
| boundary | the end of an iteration | the snapshot has begun: the time for which training waits there |
| start | that | the beginning of the pipeline's schedule |
| forward, backward | the begin of one compute step | its end |
| window | a compute step, or the schedule's begin | the next compute step: receives, sends, waiting |
| tail | the last backward | the fence: reduction of gradients, gradient norm, waiting for other stages |
| fence | the point before the first write to stepped state | the copies are safe |
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
SCHEDULED = frozenset({"window", "forward", "backward", "tail"})
"""What the model of a schedule speaks of; the rest of an iteration depends on nothing that it knows."""


@dataclass(frozen=True)
class Iteration:
    """``kinds[i]`` lasted from ``edges[i]`` to ``edges[i + 1]``; ``copies`` are (begin, end, bytes).

    Seconds since the boundary, on the clock of the device.
    """

    kinds: tuple[str, ...]
    edges: tuple[float, ...]
    copies: tuple[tuple[float, float, int], ...] = ()

    @property
    def secs(self) -> float:
        """From boundary to boundary, in seconds."""
        return self.edges[-1] - self.edges[0]

    @property
    def lengths(self) -> tuple[float, ...]:
        return tuple(end - begin for begin, end in zip(self.edges, self.edges[1:], strict=False))

    def secs_of(self, kinds: frozenset[str]) -> float:
        """Seconds spent in spans of these kinds."""
        return sum(secs for kind, secs in zip(self.kinds, self.lengths, strict=True) if kind in kinds)

    @property
    def stall_secs(self) -> float:
        """How long the fence waited for copies: what it takes besides would be there without any."""
        done = max((end for _, end, _ in self.copies), default=0.0)
        spans = zip(self.kinds, self.edges, self.edges[1:], strict=False)
        return sum(max(0.0, min(end, done) - begin) for kind, begin, end in spans if kind == "fence")

    @property
    def moved_bytes(self) -> dict[str, int]:
        """Bytes copied by kind of span; a copy that runs across several is divided by time."""
        return divide(self.copies, self.kinds, self.edges)


def divide(
    copies: Sequence[tuple[float, float, int]], kinds: Sequence[str], edges: Sequence[float]
) -> dict[str, int]:
    """Bytes of ``copies`` by the kind of span they ran in; what ran before or after all spans is the nearest's.

    ``copies`` follow each other: none begins before the one before it has ended.
    """
    if not copies or not kinds:
        return {}
    begins, ends, sizes = np.array(copies, dtype=np.float64).T
    after = np.cumsum(sizes)
    # Bytes copied by the time t rise linearly inside each copy; each span gets the rise between its edges.
    times, done = np.column_stack([begins, ends]).ravel(), np.column_stack([after - sizes, after]).ravel()
    # Ascending even where rounding makes copies that touch each other overlap: interpolation wants it so.
    inner = np.interp(np.array(edges[1:-1], dtype=np.float64), np.maximum.accumulate(times), done)
    # Rounded before the difference, so that the parts add up to the bytes that were copied.
    steps = np.diff(np.rint(np.concatenate([[0.0], inner, after[-1:]])).astype(np.int64))
    moved: dict[str, int] = {}
    for kind, nbytes in zip(kinds, steps.tolist(), strict=True):
        if nbytes:
            moved[kind] = moved.get(kind, 0) + nbytes
    return moved


def in_windows(moved_bytes: Mapping[str, int]) -> float:
    """Share of the bytes that were copied inside windows."""
    total = sum(moved_bytes.values())
    return sum(nbytes for kind, nbytes in moved_bytes.items() if kind in IDLE) / total if total else 0.0


_MEDIAN_OF = 9
"""Iterations a median is taken of: one that stalled does not move it."""

_SETTLED = 3
"""Iterations after which a median means something."""

_REFRESHED = 4
"""Iterations after which medians are taken anew: fewer would change few of them."""


@dataclass(frozen=True)
class IterationForecast:
    """The expected iteration: ``kinds[i]`` takes ``secs[i]``."""

    kinds: tuple[str, ...]
    secs: tuple[float, ...]

    def distance(self, other: IterationForecast) -> float:
        """How much of the iteration lies elsewhere than in ``other``, as a share; 1 where places differ."""
        if self is other:
            return 0.0
        if self.kinds != other.kinds:
            return 1.0
        mine, theirs = np.array(self.secs), np.array(other.secs)
        # 1e-9: no division by 0 where an iteration has no length.
        return float(np.abs(mine - theirs).sum() / max(mine.sum(), 1e-9))


class Profile:
    """The last iterations of this rank.

    The first one after a start, and after each change of the schedule, is not counted: it compiles,
    allocates and connects.
    """

    def __init__(self) -> None:
        self._kinds: tuple[str, ...] = ()
        self._lengths: deque[np.ndarray[Any, np.dtype[np.float64]]] = deque(maxlen=_MEDIAN_OF)
        self._fresh = True
        self._first: Iteration | None = None
        self._model: tuple[tuple[str, ...], tuple[float, ...]] | None = None
        self._medians: IterationForecast | None = None
        self._behind = 0  # iterations that the medians do not know of

    def expect(self, kinds: Sequence[str], lengths: Sequence[float]) -> None:
        """What a model of the schedule says of its places, in relative lengths; used until it was measured."""
        self._model = (tuple(kinds), tuple(lengths))

    def add(self, iteration: Iteration) -> None:
        if iteration.kinds != self._kinds:
            self._kinds, self._fresh = iteration.kinds, True
            self._clear()
        if self._fresh:
            self._fresh, self._first = False, iteration
            return
        self._lengths.append(np.array(iteration.lengths))
        self._behind += 1

    def forget(self) -> None:
        """Nothing that was measured counts any more."""
        self._kinds, self._first = (), None
        self._clear()

    @property
    def measured(self) -> bool:
        """Whether enough iterations were measured."""
        return len(self._lengths) >= _SETTLED

    @property
    def timeline(self) -> IterationForecast | None:
        """Medians of what was measured, before that the model scaled to the first iteration, or None."""
        if self.measured:
            if self._medians is None or self._behind >= _REFRESHED:
                # Not NumPy's own: it goes through so much code that training waits twice as long.
                rows, middle = np.sort(np.array(self._lengths), axis=0), len(self._lengths) // 2
                medians = (rows[middle] + rows[~middle]) / 2
                self._medians, self._behind = IterationForecast(self._kinds, tuple(medians.tolist())), 0
            return self._medians
        if self._first is not None and self._model is not None:
            return _scaled(self._first, *self._model)
        return None

    def _clear(self) -> None:
        self._lengths.clear()
        self._medians, self._behind = None, 0


def _scaled(first: Iteration, kinds: Sequence[str], lengths: Sequence[float]) -> IterationForecast | None:
    """The model's places at the speed of ``first``; None where the model is of another schedule."""
    places = [index for index, kind in enumerate(first.kinds) if kind in SCHEDULED]
    if tuple(first.kinds[index] for index in places) != tuple(kinds):
        return None
    unit = first.secs_of(SCHEDULED) / max(sum(lengths), 1e-9)
    secs = list(first.lengths)
    for index, length in zip(places, lengths, strict=True):
        secs[index] = length * unit
    return IterationForecast(first.kinds, tuple(secs))
