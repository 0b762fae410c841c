"""What a rank's session decides, as values: the checkpointer carries it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ftckpt.model.snapshot import SnapshotId


@dataclass(frozen=True)
class MarkCommitted:
    """All ranks have sealed ``snapshot``: mark it in the arena."""

    snapshot: SnapshotId


@dataclass(frozen=True)
class UpdateTargets:
    """Tell the SMP what to protect next and what to write to storage, and readers of the arena what is protected."""

    protected: SnapshotId | None
    target: SnapshotId | None
    flush: SnapshotId | None = None


@dataclass(frozen=True)
class OldArenaRemoval:
    """What the arenas hold as they are laid out now is as safe as what older ones hold: these can go."""


@dataclass(frozen=True)
class Divergence:
    """Replicas were the same at iteration ``after`` and differ at ``until``: snapshots in between may mix states."""

    after: int
    until: int


@dataclass(frozen=True)
class IntervalConclusion:
    """With ``interval`` auto snapshots that far apart keep the budget: the next attempt begins with that."""

    interval: int


@dataclass(frozen=True)
class Disable:
    """No more snapshots in this process."""

    reason: str


@dataclass(frozen=True)
class Announcement:
    """An event, and how it reads in the log of the job, if it does; ``error``: what training is told where errors are
    to end it (``on_error: raise``), of the snapshot of the field ``iteration``."""

    event: str
    fields: Mapping[str, Any]
    text: str = ""
    error: str = ""


@dataclass(frozen=True)
class TakeSnapshot:
    """Take the snapshot, into a slot that holds none of ``keep``."""

    snapshot: SnapshotId
    keep: frozenset[SnapshotId]


@dataclass(frozen=True)
class SkipSnapshot:
    """Take no snapshot at this boundary."""

    reason: str


Action = MarkCommitted | UpdateTargets | OldArenaRemoval | Divergence | IntervalConclusion | Disable | Announcement
