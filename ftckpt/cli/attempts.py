"""One attempt of a run, from the events of its ranks, and the staleness of its snapshots."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Age(NamedTuple):
    """The ages, in iterations, of the newest committed, protected and persisted snapshots at the boundary of
    ``iteration``; None: there was none."""

    iteration: int
    committed: int | None
    protected: int | None
    persisted: int | None = None


@dataclass
class SnapshotTimes:
    """The times at which a snapshot reached each state; ``copied`` and ``checked`` have a bit per rank or shard."""

    boundary_at: float = 0.0
    copied: int = 0
    copied_at: float = 0.0
    checked: int = 0
    checked_at: float = 0.0
    protected_at: float = math.inf
    persisted_at: float = math.inf

    def committed_at(self, num_ranks: int) -> float:
        """The time at which all ranks had copied it, or the SMPs had checksums of all shards."""
        times = [(self.copied.bit_count(), self.copied_at), (self.checked.bit_count(), self.checked_at)]
        return min((time for num, time in times if num >= num_ranks), default=math.inf)


@dataclass
class Attempt:
    """One start of all ranks that completed restore(); the ``lineage`` of their events identifies it."""

    start: int | None = None
    source: str = ""
    ends: list[str] = field(default_factory=list)
    """The reasons why the previous attempt ended, the cause first."""
    launches: set[str] = field(default_factory=set)
    layout: str = ""
    joined_at: float = 0.0
    restored_at: float = 0.0
    rebuild_secs: float = 0.0
    boundary_at: float = 0.0
    last_iteration: int = 0
    rebuilt_shards: set[str] = field(default_factory=set)
    rebuilt_bytes: int = 0
    nodes: set[str] = field(default_factory=set)
    pids: set[int] = field(default_factory=set)
    last_signs: dict[int, float] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    snapshots: dict[int, SnapshotTimes] = field(default_factory=lambda: defaultdict(SnapshotTimes))

    @property
    def restore_secs(self) -> float:
        """The time from the last rank's entry into restore() to its end; waiting for late ranks does not count."""
        return max(0.0, self.restored_at - self.joined_at)

    @property
    def first_step_secs(self) -> float:
        """The time from the end of the last rank's restore to the last rank's first boundary."""
        return max(0.0, self.boundary_at - self.restored_at) if self.boundary_at else 0.0

    @property
    def ended_well(self) -> bool:
        """Whether every rank closed ftckpt."""
        return self.closed >= self.last_signs.keys()

    def ages(self, stored: int | None = None) -> Iterator[Age]:
        """The ages at each boundary, in order. ``stored``: the newest iteration on storage at the attempt's start."""
        num, times = len(self.last_signs), self.snapshots.items()
        # The restored snapshot is committed; it counts as protected once this attempt has protected it.
        committed = _Newest(self.start, ((one.committed_at(num), iteration) for iteration, one in times))
        protected = _Newest(None, ((one.protected_at, iteration) for iteration, one in times))
        persisted = _Newest(stored, ((one.persisted_at, iteration) for iteration, one in times))
        for iteration, one in sorted(times):
            if at := one.boundary_at:
                yield Age(iteration, *(newest.age(iteration, at) for newest in (committed, protected, persisted)))

    @property
    def persisted(self) -> list[int]:
        """The iterations that the attempt persisted."""
        return [iteration for iteration, one in self.snapshots.items() if one.persisted_at < math.inf]

    def lags(self) -> Iterator[tuple[int, float]]:
        """Seconds from the boundary of each snapshot until it was protected."""
        for iteration, one in sorted(self.snapshots.items()):
            if one.boundary_at and one.protected_at < math.inf:
                yield iteration, max(0.0, one.protected_at - one.boundary_at)


class _Newest:
    """The newest iteration that had reached a state at a given time; times may be queried in any order."""

    def __init__(self, first: int | None, times: Iterator[tuple[float, int]]) -> None:
        self._first = first
        self._times: list[float] = []
        self._newest: list[int] = []
        for time, iteration in sorted(times):
            if time < math.inf:
                self._times.append(time)
                self._newest.append(max(iteration, self._newest[-1] if self._newest else iteration))

    def age(self, iteration: int, at: float) -> int | None:
        place = bisect_right(self._times, at)
        newest = self._newest[place - 1] if place else self._first
        return None if newest is None else max(0, iteration - newest)
