"""What one iteration of training did when, and which of it the copies of a snapshot ran beside: pure data.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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
        """Boundary to boundary."""
        return self.edges[-1] - self.edges[0]

    @property
    def lengths(self) -> tuple[float, ...]:
        """Seconds of each span."""
        return tuple(end - begin for begin, end in zip(self.edges, self.edges[1:], strict=False))

    def secs_of(self, kinds: frozenset[str]) -> float:
        """Seconds spent in spans of these kinds."""
        return sum(secs for kind, secs in zip(self.kinds, self.lengths, strict=True) if kind in kinds)

    @property
    def window_share(self) -> float:
        """Idle part of the time between the schedule's begin and the fence."""
        scheduled = self.secs_of(SCHEDULED)
        return self.secs_of(frozenset({"window", "tail"})) / scheduled if scheduled else 0.0

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
    inner = np.interp(np.array(edges[1:-1], dtype=np.float64), np.maximum.accumulate(times), done)
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
