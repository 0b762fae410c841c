"""Replicated scheduler of flushes to storage: every rank derives the same state from the same vote results."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ftckpt.config import Config
from ftckpt.memory.heartbeat import FlushState
from ftckpt.model.flush_interval import best_interval_secs, mtbf_secs
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist import commit
from ftckpt.schedule.cost import IntervalRequest
from ftckpt.session.actions import Announcement
from ftckpt.session.vote import TaskState, VoteResult

_REST_SECS = 30.0
"""Minimum pause after a failed flush; as long as that flush took, if it took longer."""

_LEAST_SHARE = 0.01
"""Minimum cost of a flush, as a share of its duration: storage and network have other users, too."""

_WORTHWHILE = 1 / 4
"""Minimum relative change of an interval: a smaller one gains less than the error of the measurement."""

_UNMEASURED = 500
"""Iterations between flushes until one has been measured."""

_FIRST = 50
"""Iterations of an attempt before its first flush: the slowdown is measured against iterations that no longer compile
and allocate."""

_MOST = 1 << 30
"""Maximum of iterations between flushes, however rare failures are."""

_JUDGED = 5
"""Flushes whose median is the duration of one."""


class FlushStatus(NamedTuple):
    """The state of a node's SMP and of its flush of a snapshot, as one rank reads it.

    ``ready``: the SMP is alive and configured. ``sealed``: this rank's arena has the snapshot. ``state``: progress of
    the flush.
    """

    ready: bool = False
    sealed: bool = False
    state: FlushState = FlushState.NONE

    @property
    def is_running(self) -> bool:
        """Whether the flush is neither done nor failed, and may still proceed."""
        return self.ready and self.sealed and self.state not in (FlushState.DONE, FlushState.CANNOT)


NO_FLUSH = FlushStatus()
"""The status without flushes."""


@dataclass
class FlushScheduler:
    """The state of flushes, derived from vote results alone.

    The first snapshot that ``learn`` is given at or after each multiple of ``interval`` iterations is ``current``
    until it is persisted, or some node cannot flush it, or ``timeout_secs`` have passed; then a newer one is.
    ``interval`` 0: no flushes.

    With ``tunes`` an early flush measures duration and cost. Later ones follow ``interval`` iterations after the last
    one, where ``interval`` is the ranks' maximum request: the one that minimizes expected lost work if failures that
    lose memory are ``mtbf_secs`` apart.
    """

    interval: int
    timeout_secs: float = 0.0
    tunes: bool = False
    mtbf_secs: float = math.inf
    current: SnapshotId | None = field(default=None, init=False)
    persisted: SnapshotId | None = field(default=None, init=False)
    """The newest snapshot that this attempt persisted."""
    waits: bool = field(default=False, init=False)
    """Whether a snapshot is due but some node is not ready; from results alone, so the same on all ranks."""
    due: int = field(init=False)
    chosen_secs: float = field(default=0.0, init=False)
    rests_until_secs: float = field(default=0.0, init=False)
    requested: int = field(default=0, init=False)
    """Iterations between flushes that this rank requests, by its measurements; 0: none yet."""
    _last: int | None = field(default=None, init=False)  # the iteration of the last flush, unless it failed
    # Recompute the request, once per flush: its inputs change slightly with every iteration.
    _judges: bool = field(default=False, init=False)
    # Training time that a flush costs, as measured by this rank.
    _cost_secs: float | None = field(default=None, init=False)
    _took_secs: deque[float] = field(default_factory=lambda: deque(maxlen=_JUDGED), init=False)

    def __post_init__(self) -> None:
        self.due = _FIRST if self.tunes else self.interval

    @classmethod
    def of(cls, config: Config, nodes: int = 1) -> FlushScheduler:
        """A scheduler as configured, for a job of that many nodes."""
        if not config.persist:
            return cls(0)
        tunes = config.persist_interval == "auto"
        interval = _UNMEASURED if config.persist_interval == "auto" else config.persist_interval
        return cls(interval, commit.FLUSH_SECS, tunes, mtbf_secs(config.mtbf, nodes))

    def begin(self, on_storage: int) -> None:
        """Note the newest iteration on storage at start, -1: none."""
        if self.interval and not self.tunes:
            self.due = self._behind(max(0, on_storage))

    def resume(self, iteration: int) -> None:
        """Note that training resumes after ``iteration``, -1: from the beginning."""
        if self.tunes:
            self.due = iteration + _FIRST

    def learn(self, result: VoteResult, newest: SnapshotId | None, now_secs: float) -> Iterator[Announcement]:
        """Apply a vote result; ``newest`` is the snapshot to flush if one is due."""
        yield from self._settle(result, now_secs)
        yield from self._tune(result.flush_interval)
        self.waits = False
        if self.current is not None or newest is None or not self.interval or newest.iteration < self.due:
            return
        self.waits = result.flushed == TaskState.CANNOT
        if not self.waits:
            self.current, self.due, self.chosen_secs = newest, self._behind(newest.iteration), now_secs
            self._last = newest.iteration

    @property
    def pending(self) -> bool:
        """Whether another vote would settle something; from earlier results alone."""
        return self.current is not None or self.waits

    def request(self, measured: IntervalRequest) -> int:
        """The iterations between flushes that this rank requests, for a vote; 0: no request.

        By ``model.flush_interval``; the cost of a flush is the additional time of the iterations during it.
        """
        if not self._judges or not measured.iteration_secs:
            return self.requested
        self._judges = False
        secs = statistics.median(self._took_secs)
        self._cost_secs = max(measured.flush_share, _LEAST_SHARE) * secs
        interval_secs = best_interval_secs(self._cost_secs, secs, self.mtbf_secs)
        interval = max(1, round(min(interval_secs / measured.iteration_secs, _MOST)))
        if abs(interval - self.requested) > _WORTHWHILE * self.requested:
            self.requested = interval
        return self.requested

    def report(self, guard: FlushStatus, now_secs: float) -> tuple[int, TaskState]:
        """The iteration that is being flushed and this node's progress, for a vote."""
        if not self.interval:
            return -1, TaskState.DONE
        if self.current is None:
            return -1, TaskState.DONE if guard.ready and now_secs >= self.rests_until_secs else TaskState.CANNOT
        took_secs = now_secs - self.chosen_secs
        if guard.state == FlushState.DONE:
            done = TaskState.DONE
        elif guard.state == FlushState.CANNOT or not guard.sealed or took_secs > self.timeout_secs:
            done = TaskState.CANNOT
            self.rests_until_secs = now_secs + max(_REST_SECS, took_secs)
        else:
            done = TaskState.WORKING  # without an SMP, too: another one is started, which restarts the flush
        return self.current.iteration, done

    def forget(self) -> None:
        """Abort the current flush: the arenas were rebuilt."""
        self.waits = False
        if self.current is not None:
            self._again(self.current.iteration)
            self.current = None

    def _again(self, iteration: int) -> None:
        """Make the next flush due at once: that of ``iteration`` has failed."""
        self._last, self.due = None, iteration

    def _behind(self, iteration: int) -> int:
        if self.tunes:
            return iteration + self.interval
        return (iteration // self.interval + 1) * self.interval

    def _tune(self, interval: int) -> Iterator[Announcement]:
        if not self.tunes or interval in (0, self.interval):
            return
        self.interval = interval
        if self._last is not None:
            self.due = self._behind(self._last)
        fields: dict[str, Any] = {"of": "storage", "interval": interval, "mtbf_secs": self.mtbf_secs}
        text = f"flush interval changed to {interval} iteration(s): "
        if self._cost_secs is not None:  # another rank's request may come before this one has measured
            secs = statistics.median(self._took_secs)
            fields |= {"flush_secs": secs, "cost_secs": self._cost_secs}
            text += f"a flush takes {secs:.3g} s and costs {self._cost_secs:.3g} s of training, and "
        text += f"a failure that loses memory is expected every {self.mtbf_secs / 3600:.3g} h (--ftckpt-mtbf)"
        yield Announcement("interval_changed", fields, text)

    def _settle(self, result: VoteResult, now_secs: float) -> Iterator[Announcement]:
        current = self.current
        # A result may be older than ``current``: a late rank posted its vote before it knew of it.
        if current is None or result.flush != current.iteration or result.flushed == TaskState.WORKING:
            return
        secs, self.current = now_secs - self.chosen_secs, None
        fields = {"iteration": current.iteration, "secs": secs}
        if result.flushed == TaskState.DONE:
            self.persisted = current
            self._took_secs.append(secs)
            self._judges = self.tunes
            yield Announcement(
                "persisted", fields, f"iteration {current.iteration} is on storage, after {secs:.1f} s"
            )
        else:
            self._again(current.iteration)
            error = f"flush of iteration {current.iteration} failed after {secs:.0f} s"
            yield Announcement("flush_failed", fields, error=error)
