"""Decisions of a rank's session, as values that ``SnapshotDriver`` executes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ftckpt.model.snapshot import SnapshotId


@dataclass(frozen=True)
class CommitMark:
    """All ranks have sealed ``snapshot``: mark it in the arena."""

    snapshot: SnapshotId


@dataclass(frozen=True)
class UpdateTargets:
    """Publish the targets: the protected snapshot, the one to protect next, and the one to flush."""

    protected: SnapshotId | None
    target: SnapshotId | None
    flush: SnapshotId | None = None


@dataclass(frozen=True)
class OldArenaRemoval:
    """Remove older arenas: a snapshot in the current ones is as safe as theirs."""


@dataclass(frozen=True)
class Divergence:
    """Replicas were identical at iteration ``after`` and differ at ``until``: snapshots in between may mix states."""

    after: int
    until: int


@dataclass(frozen=True)
class IntervalConclusion:
    """Store an ``interval`` that keeps the budget (``interval`` auto): the next attempt starts with it."""

    interval: int


@dataclass(frozen=True)
class Disable:
    """Take no more snapshots in this process."""

    reason: str


@dataclass(frozen=True)
class Announcement:
    """An event, with its ``text`` for the job's log, if any. ``error``: the message to raise under
    ``on_error: raise``, about the snapshot of the field ``iteration``."""

    event: str
    fields: Mapping[str, Any]
    text: str = ""
    error: str = ""


@dataclass(frozen=True)
class TakeSnapshot:
    """Take the snapshot, into a slot that has none of ``keep``."""

    snapshot: SnapshotId
    keep: frozenset[SnapshotId]


@dataclass(frozen=True)
class SkipSnapshot:
    """Take no snapshot at this boundary."""

    reason: str


Action = CommitMark | UpdateTargets | OldArenaRemoval | Divergence | IntervalConclusion | Disable | Announcement
