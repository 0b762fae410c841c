"""Which snapshot goes to storage next, and when it is there: the same on all ranks, by the verdicts they read."""

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
"""At least, after a snapshot that did not come to storage; as long as that one took, if it took longer."""

_LEAST_SHARE = 0.01
"""Of the time that a flush takes, what it is held to cost at the least: storage and network have other users, too."""

_WORTHWHILE = 1 / 4
"""Of an interval: a change by less gains less than the error of what it is computed from."""

_UNMEASURED = 500
"""Iterations between two while nothing is known of the first."""

_FIRST = 50
"""Iterations of an attempt before the first: what a flush slows down is to be compared with others than those that
compile and allocate."""

_MOST = 1 << 30
"""Iterations: however seldom the job fails."""

_JUDGED = 5
"""Flushes that the time of one is a median of."""


class FlushStatus(NamedTuple):
    """What a rank sees of its node's SMP, and of what it has done for storage.

    ``ready``: it lives, and knows what to do. ``sealed``: this rank's arena has the snapshot. ``state``: how far the
    SMP is with it.
    """

    ready: bool = False
    sealed: bool = False
    state: FlushState = FlushState.NONE

    @property
    def goes_on(self) -> bool:
        """Whether the SMP may still come to an end with it, good or bad."""
        return self.ready and self.sealed and self.state not in (FlushState.DONE, FlushState.CANNOT)


NO_FLUSH = FlushStatus()
"""Of a rank whose node brings nothing to storage."""


@dataclass
class FlushScheduler:
    """What every rank concludes from the same verdicts about storage.

    The first snapshot that ``learn`` is given at or behind each multiple of ``interval`` iterations is ``current``
    until it is on storage, or some node cannot bring it there, or ``timeout_secs`` are over; then a newer one is.
    ``interval`` 0: none goes there.

    With ``tunes`` one goes there early in an attempt, which shows how long that takes and what it costs, and then the
    first at or behind an ``interval`` after the last one: as ranks wish by then, to lose least to failures that lose
    memory, ``mtbf_secs`` from one to the next.
    """

    interval: int
    timeout_secs: float = 0.0
    tunes: bool = False
    mtbf_secs: float = math.inf
    current: SnapshotId | None = None
    persisted: SnapshotId | None = None
    """The newest that is on storage, of those of this attempt."""
    waits: bool = False
    """Whether one could go there, and some node is not ready for it: from verdicts alone, so alike on all ranks."""
    due: int = field(init=False)
    chosen_secs: float = 0.0
    rests_until_secs: float = 0.0
    wished: int = 0
    """Iterations between two, by what this rank has measured; 0: nothing yet."""
    _last: int | None = None  # the iteration of the one that was chosen last, unless that did not come there
    _judges: bool = False  # once behind each flush: what it follows from differs a little in each iteration
    _cost_secs: float | None = None  # of training, that one takes, as this rank has measured it
    _took_secs: deque[float] = field(default_factory=lambda: deque(maxlen=_JUDGED))

    def __post_init__(self) -> None:
        self.due = _FIRST if self.tunes else self.interval

    @classmethod
    def of(cls, config: Config, nodes: int = 1) -> FlushScheduler:
        """As configured, for a job of so many nodes."""
        if not config.persist:
            return cls(0)
        tunes = config.persist_interval == "auto"
        interval = _UNMEASURED if config.persist_interval == "auto" else config.persist_interval
        return cls(interval, commit.FLUSH_SECS, tunes, mtbf_secs(config.mtbf, nodes))

    def begin(self, on_storage: int) -> None:
        """Storage has a snapshot of that iteration already, -1 for none."""
        if self.interval and not self.tunes:
            self.due = self._behind(max(0, on_storage))

    def resume(self, iteration: int) -> None:
        """Training goes on behind ``iteration``, -1 for the beginning."""
        if self.tunes:
            self.due = iteration + _FIRST

    def learn(self, verdict: VoteResult, newest: SnapshotId | None, now_secs: float) -> Iterator[Announcement]:
        """What a verdict changes; ``newest`` is the snapshot to take if one is due."""
        yield from self._settle(verdict, now_secs)
        yield from self._tune(verdict.flush_interval)
        self.waits = False
        if self.current is not None or newest is None or not self.interval or newest.iteration < self.due:
            return
        self.waits = verdict.flushed == TaskState.CANNOT
        if not self.waits:
            self.current, self.due, self.chosen_secs = newest, self._behind(newest.iteration), now_secs
            self._last = newest.iteration

    @property
    def pending(self) -> bool:
        """Whether another verdict would settle something, by those before alone."""
        return self.current is not None or self.waits

    def wish(self, measured: IntervalRequest) -> int:
        """The iterations between two that this rank wishes for, for a round; 0 without a wish.

        By ``model.flush_interval``, where a flush costs the time that iterations take longer beside it.
        """
        if not self._judges or not measured.iteration_secs:
            return self.wished
        self._judges = False
        secs = statistics.median(self._took_secs)
        self._cost_secs = max(measured.flush_share, _LEAST_SHARE) * secs
        interval_secs = best_interval_secs(self._cost_secs, secs, self.mtbf_secs)
        wish = max(1, round(min(interval_secs / measured.iteration_secs, _MOST)))
        if abs(wish - self.wished) > _WORTHWHILE * self.wished:
            self.wished = wish
        return self.wished

    def report(self, guard: FlushStatus, now_secs: float) -> tuple[int, TaskState]:
        """The iteration that goes to storage and how far this node is with it, for a round."""
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
            done = TaskState.WORKING  # without an SMP, too: one is started in its place, and begins anew
        return self.current.iteration, done

    def forget(self) -> None:
        """What was on its way is not any more: training went back, or the arenas were laid out anew."""
        self.waits = False
        if self.current is not None:
            self._again(self.current.iteration)
            self.current = None

    def _again(self, iteration: int) -> None:
        """That one has not come: the next one will do."""
        self._last, self.due = None, iteration

    def _behind(self, iteration: int) -> int:
        if self.tunes:
            return iteration + self.interval
        return (iteration // self.interval + 1) * self.interval

    def _tune(self, wish: int) -> Iterator[Announcement]:
        if not self.tunes or wish in (0, self.interval):
            return
        self.interval = wish
        if self._last is not None:
            self.due = self._behind(self._last)
        fields: dict[str, Any] = {"of": "storage", "interval": wish, "mtbf_secs": self.mtbf_secs}
        text = f"from now on a snapshot goes to storage every {wish} iteration(s): "
        if self._cost_secs is not None:  # another rank may have a wish when this one has none yet
            secs = statistics.median(self._took_secs)
            fields |= {"flush_secs": secs, "cost_secs": self._cost_secs}
            text += f"one takes {secs:.3g} s and {self._cost_secs:.3g} s of training, and "
        text += f"a failure that loses memory is expected every {self.mtbf_secs / 3600:.3g} h (--ftckpt-mtbf)"
        yield Announcement("interval_changed", fields, text)

    def _settle(self, verdict: VoteResult, now_secs: float) -> Iterator[Announcement]:
        current = self.current
        # A verdict may be older than the choice: a rank that was late posted before it read of it.
        if current is None or verdict.flush != current.iteration or verdict.flushed == TaskState.WORKING:
            return
        secs, self.current = now_secs - self.chosen_secs, None
        fields = {"iteration": current.iteration, "secs": secs}
        if verdict.flushed == TaskState.DONE:
            self.persisted = current
            self._took_secs.append(secs)
            self._judges = self.tunes
            yield Announcement(
                "persisted", fields, f"iteration {current.iteration} is on storage, after {secs:.1f} s"
            )
        else:
            self._again(current.iteration)
            error = f"iteration {current.iteration} did not come to storage within {secs:.0f} s"
            yield Announcement("flush_failed", fields, error=error)
