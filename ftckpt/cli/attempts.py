"""One attempt of a run, from the events of its ranks, and the staleness of its snapshots."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ftckpt.cli.event_log import LinePlace

_STATES = ("committed", "protected", "persisted")
_PASSED = "~"
"""A boundary: at the same instant, snapshots reach their states before it."""


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


class TimelinePlace(NamedTuple):
    """The place of a rank's timeline, which begins at ``begin``; ``is_warm``: it is not of the process's first
    snapshot."""

    begin: float
    is_warm: bool
    node: str
    place: LinePlace


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
    timelines: dict[int, dict[int, TimelinePlace]] = field(default_factory=lambda: defaultdict(dict))
    """By iteration and rank."""

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
        num, events = len(self.last_signs), list[tuple[float, str, int]]()
        for iteration, one in self.snapshots.items():
            marks = (one.committed_at(num), one.protected_at, one.persisted_at)
            events += [(at, state, iteration) for state, at in zip(_STATES, marks, strict=True) if at < math.inf]
            events += [(one.boundary_at, _PASSED, iteration)] if one.boundary_at else []
        # The restored snapshot is committed; it counts as protected once this attempt has protected it.
        newest: dict[str, int | None] = {"committed": self.start, "protected": None, "persisted": stored}
        for _, state, iteration in sorted(events):
            if state == _PASSED:
                ages = (None if of is None else max(0, iteration - of) for of in map(newest.get, _STATES))
                yield Age(iteration, *ages)
            else:
                newest[state] = max(iteration, newest[state] or 0)

    @property
    def persisted(self) -> list[int]:
        """The iterations that the attempt persisted."""
        return [iteration for iteration, one in self.snapshots.items() if one.persisted_at < math.inf]

    def lags(self) -> Iterator[tuple[int, float]]:
        """Seconds from the boundary of each snapshot until it was protected."""
        for iteration, one in sorted(self.snapshots.items()):
            if one.boundary_at and one.protected_at < math.inf:
                yield iteration, max(0.0, one.protected_at - one.boundary_at)
