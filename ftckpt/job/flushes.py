"""Which snapshot goes to storage next, and when it is there: the same on all ranks, by the verdicts they read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ftckpt.job.actions import Announcement
from ftckpt.job.agreement import Coverage, Verdict
from ftckpt.model.snapshot import SnapshotId
from ftckpt.store.pulse import FlushState

_REST_SECS = 30.0
"""At least, after a snapshot that did not come to storage; as long as that one took, if it took longer."""


class FlushGuard(NamedTuple):
    """What a rank sees of its node's SMP, and of what it has done for storage.

    ``ready``: it lives, and knows what to do. ``sealed``: this rank's arena has the snapshot. ``state``: how far the
    SMP is with it.
    """

    ready: bool = False
    sealed: bool = False
    state: FlushState = FlushState.NONE


NO_FLUSH = FlushGuard()
"""Of a rank whose node brings nothing to storage."""


@dataclass
class Flushes:
    """What every rank concludes from the same verdicts about storage.

    The first snapshot that ``learn`` is given at or behind each multiple of ``interval`` iterations is ``current``
    until it is on storage, or some node cannot bring it there, or ``timeout_secs`` are over; then a newer one is.
    ``interval`` 0: none goes there.
    """

    interval: int
    timeout_secs: float = 0.0
    current: SnapshotId | None = None
    persisted: SnapshotId | None = None
    """The newest that is on storage, of those of this attempt."""
    due: int = field(init=False)
    chosen_secs: float = 0.0
    rests_until_secs: float = 0.0

    def __post_init__(self) -> None:
        self.due = self.interval

    def begin(self, on_storage: int) -> None:
        """Storage has a snapshot of that iteration already, -1 for none."""
        if self.interval:
            self.due = self._behind(max(0, on_storage))

    def learn(self, verdict: Verdict, newest: SnapshotId | None, now_secs: float) -> Iterator[Announcement]:
        """What a verdict changes; ``newest`` is the snapshot to take if one is due."""
        yield from self._settle(verdict, now_secs)
        if self.current is not None or newest is None or not self.interval or newest.iteration < self.due:
            return
        if verdict.flushed != Coverage.CANNOT:
            self.current, self.due, self.chosen_secs = newest, self._behind(newest.iteration), now_secs

    def report(self, guard: FlushGuard, now_secs: float) -> tuple[int, Coverage]:
        """The iteration that goes to storage and how far this node is with it, for a round."""
        if not self.interval:
            return -1, Coverage.DONE
        if self.current is None:
            return -1, Coverage.DONE if guard.ready and now_secs >= self.rests_until_secs else Coverage.CANNOT
        took_secs = now_secs - self.chosen_secs
        if guard.state == FlushState.DONE:
            done = Coverage.DONE
        elif guard.state == FlushState.CANNOT or not guard.sealed or took_secs > self.timeout_secs:
            done = Coverage.CANNOT
            self.rests_until_secs = now_secs + max(_REST_SECS, took_secs)
        else:
            done = Coverage.WORKING  # without an SMP, too: one is started in its place, and begins anew
        return self.current.iteration, done

    def forget(self) -> None:
        """What was on its way is not any more: training went back, or the arenas were laid out anew."""
        if self.current is not None:
            self.due, self.current = self.current.iteration, None

    def _behind(self, iteration: int) -> int:
        return (iteration // self.interval + 1) * self.interval

    def _settle(self, verdict: Verdict, now_secs: float) -> Iterator[Announcement]:
        current = self.current
        # A verdict may be older than the choice: a rank that was late posted before it read of it.
        if current is None or verdict.flush != current.iteration or verdict.flushed == Coverage.WORKING:
            return
        secs, self.current = now_secs - self.chosen_secs, None
        fields = {"iteration": current.iteration, "secs": secs}
        if verdict.flushed == Coverage.DONE:
            self.persisted = current
            yield Announcement(
                "persisted", fields, f"iteration {current.iteration} is on storage, after {secs:.1f} s"
            )
        else:
            self.due = current.iteration  # the next one will do
            error = f"iteration {current.iteration} did not come to storage within {secs:.0f} s"
            yield Announcement("not_persisted", fields, error=error)
