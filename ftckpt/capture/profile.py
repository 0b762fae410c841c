"""How long each place of an iteration takes: measured, and what is known before anything was."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ftckpt.capture.iteration import SCHEDULED, Iteration

_KEPT = 9
"""Iterations a median is taken of: one that stalled does not move it."""

_SETTLED = 3
"""Iterations after which a median means something."""


@dataclass(frozen=True)
class Timeline:
    """The expected iteration: ``kinds[i]`` takes ``secs[i]``."""

    kinds: tuple[str, ...]
    secs: tuple[float, ...]

    def distance(self, other: Timeline) -> float:
        """How much of the iteration lies elsewhere than in ``other``, as a share; 1 where places differ."""
        if self.kinds != other.kinds:
            return 1.0
        mine, theirs = np.array(self.secs), np.array(other.secs)
        return float(np.abs(mine - theirs).sum() / max(mine.sum(), 1e-9))


class Profile:
    """The last iterations of this rank.

    The first one after a start, and after each change of the schedule, is not counted: it compiles,
    allocates and connects.
    """

    def __init__(self) -> None:
        self._kinds: tuple[str, ...] = ()
        self._lengths: deque[np.ndarray[Any, np.dtype[np.float64]]] = deque(maxlen=_KEPT)
        self._fresh = True
        self._first: Iteration | None = None
        self._model: tuple[tuple[str, ...], tuple[float, ...]] | None = None

    def expect(self, kinds: Sequence[str], lengths: Sequence[float]) -> None:
        """What a model of the schedule says of its places, in relative lengths; used until it was measured."""
        self._model = (tuple(kinds), tuple(lengths))

    def add(self, iteration: Iteration) -> None:
        """One more measured iteration."""
        if iteration.kinds != self._kinds:
            self._kinds, self._fresh = iteration.kinds, True
            self._lengths.clear()
        if self._fresh:
            self._fresh, self._first = False, iteration
            return
        self._lengths.append(np.diff(iteration.edges))

    def forget(self) -> None:
        """Measure anew."""
        self._kinds, self._first = (), None
        self._lengths.clear()

    @property
    def measured(self) -> bool:
        """Whether enough iterations were measured."""
        return len(self._lengths) >= _SETTLED

    @property
    def timeline(self) -> Timeline | None:
        """Medians of what was measured, before that the model scaled to the first iteration, or None."""
        if self.measured:
            return Timeline(self._kinds, tuple(np.median(np.array(self._lengths), axis=0).tolist()))
        if self._first is not None and self._model is not None:
            return _scaled(self._first, *self._model)
        return None


def _scaled(first: Iteration, kinds: Sequence[str], lengths: Sequence[float]) -> Timeline | None:
    """The model's places at the speed of ``first``; None where the model is of another schedule."""
    places = [index for index, kind in enumerate(first.kinds) if kind in SCHEDULED]
    if tuple(first.kinds[index] for index in places) != tuple(kinds):
        return None
    unit = first.secs_of(SCHEDULED) / max(sum(lengths), 1e-9)
    secs = list(first.lengths)
    for index, length in zip(places, lengths, strict=True):
        secs[index] = length * unit
    return Timeline(first.kinds, tuple(secs))
