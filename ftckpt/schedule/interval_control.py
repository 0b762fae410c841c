"""One rank's requests for the interval between snapshots, from what they cost."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

from ftckpt.config import Config
from ftckpt.schedule.cost import CYCLE, Cost, CostMeter, IntervalRequest, shortest_interval

_MOST_STRETCH = 10_000
"""Maximum factor on the interval, however small the budget."""

_FENCES = 5
"""Snapshots over which the median of fence costs is taken."""

_EARLY_SNAPSHOTS, _SNAPSHOTS_APART = 16, 1024
"""Snapshots before the first measurement, one in each iteration, and between two measurements."""

_MIN_SNAPSHOTS = 24
"""Minimum of snapshots for a conclusion, however little their costs differ."""

_SURE, _SURE_AT_FIRST = 3.0, 2.0
"""Standard errors between the cost and the one that an interval allows before the interval changes; the second
applies to the first conclusion."""

_PRECISE = 1 / 12
"""Relative standard error of the cost at which a measurement ends."""


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
        self.stretch = 1
        """The factor on the interval that this rank requests to stay within the budget."""
        self._cost = -1.0 if self._is_auto else 0.0

    def resume(self, interval: int) -> None:
        """With ``interval`` auto: start with the interval that an earlier attempt measured."""
        if self._auto is not None:
            self._auto.resume(interval)
            self._follow(self._auto)

    @property
    def request(self) -> IntervalRequest:
        """This rank's requests for the intervals."""
        return IntervalRequest(self.stretch, self._cost, self._meter.iteration_secs, self._meter.flush_share)

    def add(self, place: int, secs: float, flushing: bool, target: int) -> None:
        """Add an iteration, see ``CostMeter.add``."""
        more = self._meter.add(place, secs, flushing, target)
        if self._auto is not None:
            if place == 0:
                self._auto.took()
            if more:
                self._auto.judge()
            self._follow(self._auto)

    def add_fence(self, share: float) -> None:
        """Add the wait in a snapshot's fence, a ``share`` of its iteration.

        With ``interval`` auto the interval depends on the total cost alone.
        """
        self._fences.append(share)
        if self._is_auto or not self._budget or len(self._fences) < _FENCES:
            return
        median = statistics.median(self._fences)
        # An n times longer interval has one n-th of the cost.
        needed = shortest_interval(median, self._budget, _MOST_STRETCH)
        # Hysteresis: shorter only if half would do. An interval that followed every median would oscillate.
        if needed > self.stretch or 2 * needed <= self.stretch:
            self.stretch, self._cost = needed, median
            self._fences.clear()

    def _follow(self, auto: AutoInterval) -> None:
        self.stretch, self._cost = auto.request


class AutoInterval:
    """Chooses the interval on one rank for all: ranks train in step, and the maximum of all would be the noisiest's.

    Snapshots in each iteration are too close to show their cost. During a measurement they are ``CYCLE`` iterations
    apart, or more if the cost requires it or protection takes long. An interval stays while it is within the error
    of the cost.

    Args:
        most: maximum of iterations between snapshots.
        tell: logs a line.
    """

    def __init__(self, budget: float, most: int, meter: CostMeter, tell: Callable[[str], None]) -> None:
        self._budget, self._most = budget, most
        self._meter, self._tell = meter, tell
        self.interval = 1
        """The last conclusion."""
        self.cost: Cost | None = None
        """The cost of a snapshot at that time; None: no conclusion in this attempt."""
        self._knows, self._has_told = False, False
        self._spacing = 0
        """Iterations between snapshots during a measurement; 0: none is under way."""
        self._left = _EARLY_SNAPSHOTS
        """Snapshots to the next measurement."""

    def resume(self, interval: int) -> None:
        """Start with the conclusion of an earlier attempt."""
        self.interval, self._left, self._knows, self._spacing = interval, _SNAPSHOTS_APART, True, 0

    @property
    def request(self) -> tuple[int, float]:
        """Requested iterations between snapshots, and the cost of one as a share of an iteration's length, negative
        while there is no conclusion."""
        if self._spacing:
            return max(self.interval, self._spacing), -1.0
        return self.interval, -1.0 if self.cost is None else max(0.0, self.cost.share)

    def took(self) -> None:
        """Count a snapshot."""
        self._left -= 1
        if self._spacing:
            if 4 * (self._apart - self._spacing) > self._spacing:  # less is noise, and affects all ranks
                self._spacing = self._apart
        elif self._left <= 0 and self.interval < self._apart:
            self._spacing = self._apart

    @property
    def _apart(self) -> int:
        """Minimum of iterations between snapshots that shows their cost: half of them are far from any."""
        return max(CYCLE, 2 * self._meter.near_iterations)

    def judge(self) -> None:
        """Conclude from the meter's refined cost, once it is precise enough."""
        cost = self._meter.cost
        if cost is None:
            return
        sure = _SURE if self._knows else _SURE_AT_FIRST
        doubt = sure * max(cost.error, _PRECISE / 2 * cost.share)
        shortest, needed, longest = (
            shortest_interval(max(0.0, share), self._budget, self._most)
            for share in (cost.share - doubt, cost.share, cost.share + doubt)
        )
        is_precise = cost.error <= _PRECISE * cost.share or longest == 1
        if self._meter.num_snapshots < _MIN_SNAPSHOTS or not (is_precise or self._meter.is_full):
            if 4 * abs(needed - self._spacing) > self._spacing > 0:
                self._spacing = max(self._apart, needed)
            return
        if not shortest <= self.interval <= longest:
            self.interval, self.cost = needed, cost
        elif self._spacing or self.cost is None:
            self.cost = cost
        if self.interval == 1 < longest and not self._has_told:
            self._has_told = True
            self._tell(
                f"a snapshot each iteration: its cost, {cost.share:.2%} ± {cost.error:.2%} of an iteration, does not "
                f"measurably exceed the budget of {self._budget:.2%}"
            )
        self._knows, self._spacing, self._left = True, 0, _SNAPSHOTS_APART
        # The next conclusion uses new samples only: repeated tests of the same ones would find a false difference.
        self._meter.forget_cost()
