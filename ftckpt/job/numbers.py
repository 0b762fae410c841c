"""What snapshots come to and what they cost this rank, counted while it trains, for charts and alarms."""

from __future__ import annotations

import time

from ftckpt.model.snapshot import SnapshotId
from ftckpt.store.pulse import PulseCount


class RankNumbers:
    """Counted since the rank was started."""

    def __init__(self) -> None:
        self.counts = [0] * len(PulseCount)
        """By ``PulseCount``."""
        self._most_secs = 0.0
        self._boundary_secs = 0.0
        self._reported, self._reported_at = list(self.counts), time.monotonic()

    def took(self, blocked_secs: float, nbytes: int) -> None:
        """A snapshot of ``nbytes`` has begun, for which the boundary took so long."""
        self.counts[PulseCount.SNAPSHOTS] += 1
        self.counts[PulseCount.COPIED_BYTES] += nbytes
        self._boundary_secs = blocked_secs
        self._wait(blocked_secs, blocked_secs)

    def fenced(self, blocked_secs: float) -> None:
        """The fence of a snapshot took so long."""
        self._wait(blocked_secs, self._boundary_secs + blocked_secs)

    def _wait(self, secs: float, of_snapshot_secs: float) -> None:
        self.counts[PulseCount.BLOCKED_US] += round(secs * 1e6)
        self._most_secs = max(self._most_secs, of_snapshot_secs)

    def report(
        self, iteration: int, whole: SnapshotId | None, protected: SnapshotId | None, attempt: int
    ) -> dict[str, float]:
        """See ``Checkpointer.numbers``."""
        now, before, self._reported = time.monotonic(), self._reported, list(self.counts)
        secs, self._reported_at = now - self._reported_at, now
        since = [new - old for new, old in zip(self.counts, before, strict=True)]
        numbers = {
            "blocked_ms": since[PulseCount.BLOCKED_US] / 1e3 / max(1, since[PulseCount.SNAPSHOTS]),
            "blocked_ms_most": self._most_secs * 1e3,
            "snapshots": float(since[PulseCount.SNAPSHOTS]),
            "skipped": float(since[PulseCount.SKIPPED]),
            "failed": float(since[PulseCount.FAILED]),
            "copied_bytes_per_sec": since[PulseCount.COPIED_BYTES] / max(secs, 1e-9),
            "restarts": float(attempt - 1),
        }
        self._most_secs = 0.0
        for name, snapshot in (("whole_age", whole), ("protected_age", protected)):
            if snapshot is not None:
                numbers[name] = float(max(0, iteration - snapshot.iteration))
        return numbers
