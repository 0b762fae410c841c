"""One rank's requests for the interval between snapshots, from what they cost."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

from ftckpt.config import Config
from ftckpt.schedule.auto_interval import AutoInterval
from ftckpt.schedule.cost import CostMeter, IntervalRequest, shortest_interval

_MOST_STRETCH = 10_000
"""Maximum factor on the interval, however small the budget."""

_FENCES = 5
"""Snapshots over which the median of fence costs is taken."""


class IntervalControl:
    """Keeps snapshots within ``overhead_budget``.

    With ``interval`` auto the budget covers their total cost, otherwise the wait in the fence.

    Args:
        speaks: whether this rank's cost of snapshots decides for all ranks with ``interval`` auto.
        tell: logs a line.
    """

    def __init__(self, config: Config, speaks: bool, tell: Callable[[str], None]) -> None:
        self._budget, self._is_auto = config.overhead_budget, config.interval == "auto"
        self._meter = CostMeter()
        self._auto: AutoInterval | None = None
        if self._is_auto and self._budget and speaks:
            self._auto = AutoInterval(self._budget, _MOST_STRETCH, self._meter, tell)
        self._fences: deque[float] = deque(maxlen=_FENCES)
        self._has_replanned = False
        self.stretch = 1
        """The factor on the interval that this rank requests to stay within the budget."""
        self._cost = -1.0 if self._is_auto else 0.0
        self._request: IntervalRequest | None = None

    def resume(self, interval: int) -> None:
        """With ``interval`` auto: start with the interval that an earlier attempt measured."""
        if self._auto is not None:
            self._auto.resume(interval)
            self._follow(self._auto)
            self._request = None

    @property
    def request(self) -> IntervalRequest:
        """This rank's requests for the intervals, computed when a vote needs them."""
        if self._request is None:
            self._request = IntervalRequest(
                self.stretch, self._cost, self._meter.iteration_secs, self._meter.flush_share
            )
        return self._request

    def add(self, place: int, secs: float, flushing: bool, target: int) -> None:
        """Add an iteration, see ``CostMeter.add``."""
        self._request = None
        more = self._meter.add(place, secs, flushing, target)
        if self._auto is not None:
            if place == 0:
                self._auto.took()
            if more:
                self._auto.judge()
            self._follow(self._auto)

    def add_fence(self, share: float, can_replan: bool) -> float | None:
        """Add the wait in a snapshot's fence, a ``share`` of its iteration.

        Returns the median share if the windows are to be measured again, and None otherwise. If that has not helped,
        a longer interval is requested. With ``interval`` auto the interval depends on the total cost alone.
        """
        self._fences.append(share)
        if not self._budget or len(self._fences) < _FENCES:
            return None
        median = statistics.median(self._fences)
        # An n times longer interval has one n-th of the cost.
        needed = shortest_interval(median, self._budget, _MOST_STRETCH)
        if needed > self.stretch and can_replan and not self._has_replanned:
            self._has_replanned = True
            self._fences.clear()
            return median
        # Hysteresis: shorter only if half would do. An interval that followed every median would oscillate.
        if not self._is_auto and (needed > self.stretch or 2 * needed <= self.stretch):
            self._set(needed, median)
        return None

    def _follow(self, auto: AutoInterval) -> None:
        stretch, cost = auto.request
        if stretch != self.stretch:
            self._set(stretch, cost)
        self._cost = cost

    def _set(self, stretch: int, cost: float) -> None:
        self.stretch, self._cost, self._has_replanned = stretch, cost, False
        self._fences.clear()
