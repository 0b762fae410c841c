"""What snapshots cost training, all in all: how much longer iterations near one take than those far from any.

That holds what training waits for at the boundary and in the fence, what copies beside compute steps slow down, and
what checksums and parity behind them do; and in the same way what a flush to storage slows down. Only iterations are
measured that training goes through anyway, so that intervals which are too short to have any far from a snapshot are
made longer now and then (``ftckpt.schedule.auto_interval``). Each is compared with its neighbours, and the median of
many comparisons counts: what else goes on at the machine is in both of what is compared, or in few comparisons.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

NEAR = 3
"""Iterations behind a boundary with a snapshot that it is held to slow down: that beside its copies, and two while
its checksums and parity are made."""

CYCLE = 2 * NEAR
"""Iterations from one snapshot to the next that show what it costs: as many again to compare with."""

_SKIPPED = 5
"""Iterations after a start that say nothing: they compile, allocate and connect."""

_JUDGED = 64
"""Snapshots over which the cost is a median; fewer do, from ``_FEWEST`` on, with the doubt that this leaves."""

_FEWEST = 8

_LEAST = 5
"""Iterations that a median of their length needs."""

_KEPT = 64
"""Iterations that a median of their length is taken of."""


class Cost(NamedTuple):
    """Of a snapshot, over the length of an iteration; ``error`` is the standard error."""

    share: float
    error: float


class IntervalRequest(NamedTuple):
    """What a rank wants of the intervals, and from what.

    ``stretch``: by how much snapshots are to be rarer. ``cost``: of one, over the length of an iteration; negative:
    it is being measured.
    ``iteration_secs``: of an iteration far from any; 0: not known. ``flush_share``: by how much of its length one
    takes longer beside a flush to storage.
    """

    stretch: int = 1
    cost: float = 0.0
    iteration_secs: float = 0.0
    flush_share: float = 0.0


def shortest_interval(cost_share: float, budget: float, most: int) -> int:
    """The least number of iterations between snapshots at which they keep ``budget``, a share of training.

    ``cost_share``: what one takes, over the length of an iteration. As in CheckFreq (FAST'21), with the whole cost in
    place of the wait for a copy.
    """
    return max(1, math.ceil(min(cost_share / budget, most)))


class CostMeter:
    """Takes the length of each iteration, and how far the last snapshot lies behind it."""

    def __init__(self) -> None:
        self._seen = 0
        self._cycle: dict[int, float] = {}
        self._before: list[float] = []  # iterations far from any snapshot, right before this one
        self._shares: deque[float] = deque(maxlen=_JUDGED)
        self._lengths: dict[tuple[bool, bool], deque[float]] = {
            (near, flushing): deque(maxlen=_KEPT) for near in (False, True) for flushing in (False, True)
        }

    def add(self, place: int, secs: float, flushing: bool) -> bool:
        """An iteration of ``secs``, ``place`` boundaries behind the last one with a snapshot; ``flushing``: beside a
        flush. Whether the cost of a snapshot is known better than before."""
        self._seen += 1
        if self._seen <= _SKIPPED:
            return False
        self._lengths[place == 0, flushing].append(secs)
        more = False
        if place == 0:
            more = self._judge()
            self._before = self._far[-CYCLE:]
            self._cycle.clear()
        self._cycle[place] = secs
        return more

    @property
    def cost(self) -> Cost | None:
        """Of a snapshot; None before it is known."""
        if len(self._shares) < _FEWEST:
            return None
        share = statistics.median(self._shares)
        spread = statistics.median(abs(other - share) for other in self._shares)
        # Of a median of n normal values: 1.25 standard deviations over the root of n; one is 1.48 spreads.
        return Cost(share, 1.25 * 1.48 * spread / len(self._shares) ** 0.5)

    @property
    def num_snapshots(self) -> int:
        """Those over which ``cost`` is the median."""
        return len(self._shares)

    @property
    def is_full(self) -> bool:
        """Whether more snapshots make ``cost`` no more precise."""
        return len(self._shares) == _JUDGED

    def forget_cost(self) -> None:
        """Of a snapshot, as far as it is known: it is measured anew."""
        self._shares.clear()

    @property
    def iteration_secs(self) -> float:
        """The median length of an iteration, far from snapshots where there are such; 0: not known."""
        return _median(self._lengths[False, False]) or _median(self._lengths[True, False])

    @property
    def flush_share(self) -> float:
        """By how much of its length an iteration takes longer beside a flush; 0 where nothing is known."""
        for near in (False, True):
            alone, beside = (_median(self._lengths[near, flushing]) for flushing in (False, True))
            if alone and beside:
                return max(0.0, beside / alone - 1)
        return 0.0

    @property
    def _far(self) -> list[float]:
        return [secs for place, secs in self._cycle.items() if place >= NEAR]

    def _judge(self) -> bool:
        """The iterations since the last snapshot are complete; whether they are enough to compare."""
        near, far = [self._cycle[place] for place in range(NEAR) if place in self._cycle], self._far
        if len(near) < NEAR or len(far) < CYCLE - NEAR:
            return False
        # The mean of these: of lengths that spread to one side the median is less, and all would seem to cost.
        alone = statistics.fmean([*self._before, *far[:CYCLE]])
        self._shares.append(sum(near) / max(alone, 1e-9) - NEAR)  # 1e-9: a clock may stand still
        return True


def _median(lengths: Sequence[float]) -> float:
    return statistics.median(lengths) if len(lengths) >= _LEAST else 0.0
