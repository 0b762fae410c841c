"""One attempt of a run, from the events of its ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ftckpt.cli.event_log import LinePlace


@dataclass
class SnapshotTimes:
    """The times at which a snapshot's last rank passed its boundary, and at which it was protected."""

    boundary_at: float = 0.0
    protected_at: float = math.inf


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

    def lags(self) -> Iterator[float]:
        """Seconds from the boundary of each snapshot until it was protected."""
        for one in self.snapshots.values():
            if one.boundary_at and one.protected_at < math.inf:
                yield max(0.0, one.protected_at - one.boundary_at)
