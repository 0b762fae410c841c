"""Decisions of a rank's session, as values that ``SnapshotDriver`` executes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ftckpt.model.snapshot import SnapshotId


class CommitMark(NamedTuple):
    """All ranks have sealed ``snapshot``: mark it in the arena."""

    snapshot: SnapshotId


class UpdateTargets(NamedTuple):
    """Publish the targets: the protected snapshot, the one to protect next, and the one to flush."""

    protected: SnapshotId | None
    target: SnapshotId | None
    flush: SnapshotId | None = None


class OldArenaRemoval(NamedTuple):
    """Remove older arenas: a snapshot in the current ones is as safe as theirs."""


class Divergence(NamedTuple):
    """Replicas were identical at iteration ``after`` and differ at ``until``: snapshots in between may mix states."""

    after: int
    until: int


class IntervalConclusion(NamedTuple):
    """Store an ``interval`` that keeps the budget (``interval`` auto): the next attempt starts with it."""

    interval: int


class Disable(NamedTuple):
    """Take no more snapshots in this process."""

    reason: str


class Announcement(NamedTuple):
    """An event, with its ``text`` for the job's log, if any. ``error``: the message to raise under
    ``on_error: raise``, about the snapshot of the field ``iteration``."""

    event: str
    fields: Mapping[str, Any]
    text: str = ""
    error: str = ""


class TakeSnapshot(NamedTuple):
    """Take the snapshot, into a slot that has none of ``keep``."""

    snapshot: SnapshotId
    keep: frozenset[SnapshotId]


class SkipSnapshot(NamedTuple):
    """Take no snapshot at this boundary."""

    reason: str


Action = CommitMark | UpdateTargets | OldArenaRemoval | Divergence | IntervalConclusion | Disable | Announcement
