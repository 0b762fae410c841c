"""Counters of a rank's snapshots and of their cost, for monitoring."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ftckpt.memory.heartbeat import HeartbeatGauge
from ftckpt.model.snapshot import SnapshotId


@dataclass
class _Reader:
    """The counters at a caller's last report, and the longest wait for a snapshot since."""

    counts: list[int] = field(default_factory=lambda: [0] * len(HeartbeatGauge))
    at: float = field(default_factory=time.monotonic)
    most_secs: float = 0.0


class RankNumbers:
    """Counters since the start of the rank."""

    def __init__(self) -> None:
        self.counts = [0] * len(HeartbeatGauge)
        """Values by ``HeartbeatGauge``."""
        self._readers: dict[str, _Reader] = {"": _Reader()}
        self._boundary_secs = 0.0
        self._failed_round = -1
        self._first: int | None = None

    def took(self, nbytes: int) -> None:
        """Count a started snapshot of ``nbytes``."""
        self.counts[HeartbeatGauge.SNAPSHOTS] += 1
        self.counts[HeartbeatGauge.COPIED_BYTES] += nbytes

    def failed(self, number: int) -> None:
        """Count a failure of snapshot ``number``; repeated failures of one snapshot in a row count once."""
        self.counts[HeartbeatGauge.FAILED] += number != self._failed_round
        self._failed_round = number

    def passed(
        self, iteration: int, spacing: int, committed: SnapshotId | None, protected: SnapshotId | None
    ) -> None:
        """Update the staleness of snapshots at ``iteration``; they are ``spacing`` iterations apart."""
        # The minimum, in case the script's iteration decreases.
        self._first = iteration if self._first is None else min(self._first, iteration)
        for count, newest in ((HeartbeatGauge.WHOLE_BEHIND, committed), (HeartbeatGauge.PROTECTED_BEHIND, protected)):
            since = newest.iteration if newest is not None else self._first
            self.counts[count] = max(0, iteration - since) // spacing

    def bounded(self, secs: float) -> None:
        """Add training's wait at a boundary."""
        self._boundary_secs = secs
        self._wait(secs, secs)

    def fenced(self, secs: float) -> None:
        """Add training's wait in the fence."""
        self._wait(secs, self._boundary_secs + secs)
        self._boundary_secs = 0.0

    def _wait(self, secs: float, of_snapshot_secs: float) -> None:
        self.counts[HeartbeatGauge.BLOCKED_US] += round(secs * 1e6)
        for reader in self._readers.values():
            reader.most_secs = max(reader.most_secs, of_snapshot_secs)

    def report(
        self, who: str, iteration: int, committed: SnapshotId | None, protected: SnapshotId | None
    ) -> dict[str, float]:
        """See ``Checkpointer.numbers``."""
        before = self._readers.get(who, self._readers[""])
        now = self._readers[who] = _Reader(list(self.counts))
        since = [new - old for new, old in zip(now.counts, before.counts, strict=True)]
        numbers = {
            "blocked_ms": since[HeartbeatGauge.BLOCKED_US] / 1e3 / max(1, since[HeartbeatGauge.SNAPSHOTS]),
            "blocked_ms_most": before.most_secs * 1e3,
            "snapshots": float(since[HeartbeatGauge.SNAPSHOTS]),
            "skipped": float(since[HeartbeatGauge.SKIPPED]),
            "failed": float(since[HeartbeatGauge.FAILED]),
            "copied_bytes_per_sec": since[HeartbeatGauge.COPIED_BYTES] / max(now.at - before.at, 1e-9),
        }
        for name, snapshot in (("whole_age", committed), ("protected_age", protected)):
            if snapshot is not None:
                numbers[name] = float(max(0, iteration - snapshot.iteration))
        return numbers
