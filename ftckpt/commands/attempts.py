"""One attempt of a run: what its ranks left of it, and how old its snapshots were."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Age:
    """At the boundary of ``iteration``: how many iterations older the newest whole and protected snapshots were."""

    iteration: int
    whole: int | None
    protected: int | None


@dataclass
class SnapshotTimes:
    """What became of one snapshot; ``copied`` and ``checked`` have a bit for each rank or shard."""

    boundary_at: float = 0.0
    copied: int = 0
    copied_at: float = 0.0
    checked: int = 0
    checked_at: float = 0.0
    protected_at: float = math.inf

    def whole_at(self, num_ranks: int) -> float:
        """When all ranks had copied it, or the SMPs had checked all of it."""
        times = [(self.copied.bit_count(), self.copied_at), (self.checked.bit_count(), self.checked_at)]
        return min((time for num, time in times if num >= num_ranks), default=math.inf)


@dataclass
class Attempt:
    """One start of all ranks that came to train; a lineage is its name."""

    start: int | None = None
    source: str | None = None
    layout: str = ""
    joined_at: float = 0.0
    restored_at: float = 0.0
    rebuild_secs: float = 0.0
    boundary_at: float = 0.0
    last_iteration: int = 0
    sources: set[str] = field(default_factory=set)
    rebuilt_shards: set[str] = field(default_factory=set)
    rebuilt_bytes: int = 0
    nodes: set[str] = field(default_factory=set)
    pids: set[int] = field(default_factory=set)
    last_signs: dict[int, float] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    abandoned: Counter[int] = field(default_factory=Counter)
    marks: dict[int, SnapshotTimes] = field(default_factory=lambda: defaultdict(SnapshotTimes))

    @property
    def restore_secs(self) -> float:
        """While every rank was in restore(): one that waits there for a late rank is not restoring yet."""
        return max(0.0, self.restored_at - self.joined_at)

    @property
    def first_step_secs(self) -> float:
        """From the last rank's restore to the last rank's first boundary."""
        return max(0.0, self.boundary_at - self.restored_at) if self.boundary_at else 0.0

    @property
    def ended_well(self) -> bool:
        """Whether every rank closed ftckpt."""
        return self.closed >= self.last_signs.keys()

    def ages(self) -> Iterator[Age]:
        """How old snapshots were at each boundary, iterations in order."""
        num = len(self.last_signs)
        whole = _Newest((mark.whole_at(num), iteration) for iteration, mark in self.marks.items())
        protected = _Newest((mark.protected_at, iteration) for iteration, mark in self.marks.items())
        # What was restored is whole; whether it is protected is only known once this attempt has protected it.
        for iteration, mark in sorted(self.marks.items()):
            if mark.boundary_at:
                newest_whole = whole.at(mark.boundary_at)
                newest_protected = protected.at(mark.boundary_at)
                if newest_whole is None:
                    newest_whole = self.start
                yield Age(
                    iteration,
                    None if newest_whole is None else max(0, iteration - newest_whole),
                    None if newest_protected is None else max(0, iteration - newest_protected),
                )

    def lags(self) -> Iterator[tuple[int, float]]:
        """Seconds from the boundary of each snapshot until it was protected."""
        for iteration, mark in sorted(self.marks.items()):
            if mark.boundary_at and mark.protected_at < math.inf:
                yield iteration, max(0.0, mark.protected_at - mark.boundary_at)


class _Newest:
    """The newest iteration that something had come to by a time; asked for times in any order."""

    def __init__(self, times: Iterator[tuple[float, int]]) -> None:
        self._times: list[float] = []
        self._newest: list[int] = []
        for time, iteration in sorted(times):
            if time < math.inf:
                self._times.append(time)
                self._newest.append(max(iteration, self._newest[-1] if self._newest else iteration))

    def at(self, time: float) -> int | None:
        place = bisect_right(self._times, time)
        return self._newest[place - 1] if place else None
