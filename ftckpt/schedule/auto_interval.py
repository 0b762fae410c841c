"""How many iterations apart snapshots keep the overhead budget with ``interval`` auto, by what was measured."""

from __future__ import annotations

from collections.abc import Callable

from ftckpt.schedule.cost import CYCLE, Cost, CostMeter, shortest_interval

_EARLY_SNAPSHOTS, _SNAPSHOTS_APART = 16, 1024
"""Snapshots before the first measurement, one in each iteration, and between two measurements."""

_MIN_SNAPSHOTS = 24
"""Snapshots that a conclusion needs, however little their costs differ."""

_SURE, _SURE_AT_FIRST = 3.0, 2.0
"""Standard errors by which the cost must differ from what an interval allows before that changes; the second, where
none was concluded before."""

_PRECISE = 1 / 12
"""Of the cost, as its standard error: nothing more is gained by measuring on."""


class AutoInterval:
    """Of one rank, which speaks for all: they train in step, and the wish of the noisiest of many would count.

    Snapshots in each iteration are too close to show what one costs. While it is measured they are ``CYCLE`` apart,
    or further where the cost known by then asks for it. An interval stays while the cost, with its error, allows it.

    Args:
        most: iterations between snapshots.
        tell: logs a line.
    """

    def __init__(self, budget: float, most: int, meter: CostMeter, tell: Callable[[str], None]) -> None:
        self._budget, self._most = budget, most
        self._meter, self._tell = meter, tell
        self.interval = 1
        """As it was concluded last."""
        self.cost: Cost | None = None
        """Of a snapshot, when it was; None: this attempt has concluded nothing."""
        self._knows, self._has_told = False, False
        self._spacing = 0
        """While the cost is measured; 0: it is not."""
        self._left = _EARLY_SNAPSHOTS
        """Snapshots to the next measurement."""

    def resume(self, interval: int) -> None:
        """Begin with what an earlier attempt has concluded."""
        self.interval, self._left, self._knows, self._spacing = interval, _SNAPSHOTS_APART, True, 0

    @property
    def wish(self) -> tuple[int, float]:
        """Iterations between snapshots for now, and what one costs over the length of an iteration; the latter is
        negative while the former is no conclusion."""
        if self._spacing:
            return max(self.interval, self._spacing), -1.0
        return self.interval, -1.0 if self.cost is None else max(0.0, self.cost.share)

    def took(self) -> None:
        """A snapshot was taken."""
        self._left -= 1
        if self._left <= 0 and not self._spacing and self.interval < CYCLE:
            self._spacing = CYCLE

    def judge(self) -> None:
        """The meter knows the cost better than before."""
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
            if 4 * abs(needed - self._spacing) > self._spacing > 0:  # less is noise, and all ranks follow each change
                self._spacing = max(CYCLE, needed)
            return
        if not shortest <= self.interval <= longest:
            self.interval, self.cost = needed, cost
        elif self._spacing or self.cost is None:
            self.cost = cost
        if self.interval == 1 < longest and not self._has_told:
            self._has_told = True
            self._tell(
                f"a snapshot each iteration: its cost, {cost.share:.2%} of one give or take {cost.error:.2%}, is too "
                f"little to be told from the budget of {self._budget:.2%}"
            )
        self._knows, self._spacing, self._left = True, 0, _SNAPSHOTS_APART
        # Judged again by others alone: of many looks at much the same one would find a difference.
        self._meter.forget_cost()
