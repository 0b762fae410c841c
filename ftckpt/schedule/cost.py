"""The total cost of snapshots: how much longer iterations near one take than those far from any.

It includes the waits at the boundary and in the fence, and the slowdown by concurrent copies, checksums and parity;
flushes are measured in the same way. All iterations are training's own. An iteration is near a snapshot until the
snapshot is protected, if that takes longer than usual: on a host without idle cores it may take dozens. If the
interval is too short for any to be far from a snapshot, ``ftckpt.schedule.interval_control`` extends it now and then.
Iterations are compared with their neighbours, and the cost is the median of many comparisons: other load on the
machine affects both sides of one, or few of them.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

NEAR = 3
"""Minimum of iterations that a snapshot slows down: the one of its copies, and two of its checksums and parity."""

CYCLE = 2 * NEAR
"""Iterations between snapshots while their cost is measured: ``NEAR`` slow ones, and as many to compare with."""

_SKIPPED = 5
"""Iterations after a start that are ignored: they compile, allocate and connect."""

_JUDGED = 64
"""Maximum of snapshots whose median is the cost; ``_FEWEST`` is the minimum, with a larger error."""

_FEWEST = 8

_PROTECTIONS = 3
"""Protected snapshots over which the median of their iterations is taken."""

_LEAST = 5
"""Minimum of iterations for a median of their length."""

_KEPT = 64
"""Maximum of iterations for a median of their length."""


class Cost(NamedTuple):
    """The cost of a snapshot as a share of an iteration's length; ``error`` is the standard error."""

    share: float
    error: float


class IntervalRequest(NamedTuple):
    """A rank's requests for the intervals, and the measurements behind them.

    ``stretch``: requested factor on the interval of snapshots. ``cost``: of a snapshot, as a share of an iteration's
    length; negative: being measured. ``iteration_secs``: length of an iteration without a snapshot; 0: unknown.
    ``flush_share``: share by which an iteration is longer during a flush.
    """

    stretch: int = 1
    cost: float = 0.0
    iteration_secs: float = 0.0
    flush_share: float = 0.0


def shortest_interval(cost_share: float, budget: float, most: int) -> int:
    """The minimum of iterations between snapshots that stays within ``budget``, a share of training time.

    ``cost_share``: the cost of one snapshot as a share of an iteration's length. As in CheckFreq (FAST'21), but with
    the total cost instead of the wait for a copy.
    """
    return max(1, math.ceil(min(cost_share / budget, most)))


class CostMeter:
    """Estimates the cost of snapshots and flushes from the length of each iteration."""

    def __init__(self) -> None:
        self._seen = 0
        self._cycle: dict[int, tuple[float, bool]] = {}  # length by place, and whether the iteration is near
        self._target = -1
        self._target_iterations = 0
        self._protections: deque[int] = deque(maxlen=_PROTECTIONS)
        self._before: list[float] = []  # iterations far from any snapshot, just before the current cycle
        self._shares: deque[float] = deque(maxlen=_JUDGED)
        self._lengths: dict[tuple[bool, bool], deque[float]] = {
            (near, flushing): deque(maxlen=_KEPT) for near in (False, True) for flushing in (False, True)
        }

    def add(self, place: int, secs: float, flushing: bool, target: int = -1) -> bool:
        """Add an iteration of ``secs``, ``place`` boundaries after the last snapshot, ``flushing`` if during a flush,
        ``target`` the snapshot that was being protected (-1: none); returns whether that refined the cost of a
        snapshot."""
        self._seen += 1
        self._count_protection(target)
        if self._seen <= _SKIPPED:
            return False
        self._lengths[place == 0, flushing].append(secs)
        more = False
        if place == 0:
            more = self._judge()
            self._before = self._far[-CYCLE:]
            self._cycle.clear()
        self._cycle[place] = secs, place < NEAR or target >= 0
        return more

    @property
    def near_iterations(self) -> int:
        """The number of iterations that a snapshot slows down at present."""
        taken = self._protections or (self._target_iterations,)
        return max(NEAR, 1 + int(statistics.median(taken)))  # 1: the iteration of its copies

    @property
    def cost(self) -> Cost | None:
        """The cost of a snapshot; None until known."""
        if len(self._shares) < _FEWEST:
            return None
        share = statistics.median(self._shares)
        spread = statistics.median(abs(other - share) for other in self._shares)
        # Standard error of the median of n normal values: 1.25 sigma / sqrt(n), where sigma = 1.48 MAD.
        return Cost(share, 1.25 * 1.48 * spread / len(self._shares) ** 0.5)

    @property
    def num_snapshots(self) -> int:
        """The number of snapshots whose median is ``cost``."""
        return len(self._shares)

    @property
    def is_full(self) -> bool:
        """Whether more snapshots make ``cost`` no more precise."""
        return len(self._shares) == _JUDGED

    def forget_cost(self) -> None:
        """Discard the measured cost of a snapshot."""
        self._shares.clear()

    @property
    def iteration_secs(self) -> float:
        """The median length of an iteration without a snapshot, or of one with if all have one; 0: unknown."""
        return _median(self._lengths[False, False]) or _median(self._lengths[True, False])

    @property
    def flush_share(self) -> float:
        """The share by which an iteration is longer during a flush; 0 if unknown."""
        for near in (False, True):
            alone, beside = (_median(self._lengths[near, flushing]) for flushing in (False, True))
            if alone and beside:
                return max(0.0, beside / alone - 1)
        return 0.0

    @property
    def _far(self) -> list[float]:
        return [secs for secs, is_near in self._cycle.values() if not is_near]

    def _count_protection(self, target: int) -> None:
        if target != self._target:
            if self._target >= 0:
                self._protections.append(self._target_iterations)
            self._target, self._target_iterations = target, 0
        self._target_iterations += target >= 0

    def _judge(self) -> bool:
        """Compare the iterations of the cycle that has ended; returns whether there were enough of them."""
        near, far = [secs for secs, is_near in self._cycle.values() if is_near], self._far
        if any(place not in self._cycle for place in range(NEAR)) or len(far) < CYCLE - NEAR:
            return False
        # The mean: lengths are skewed, their median is below the mean, and every snapshot would seem to cost.
        alone = statistics.fmean([*self._before, *far[:CYCLE]])
        self._shares.append(sum(near) / max(alone, 1e-9) - len(near))  # 1e-9: a clock may stand still
        return True


def _median(lengths: Sequence[float]) -> float:
    return statistics.median(lengths) if len(lengths) >= _LEAST else 0.0
