"""Replicated scheduler of protection: every rank derives the same target from the same vote results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ftckpt.config import Config
from ftckpt.model.snapshot import SnapshotId
from ftckpt.session.actions import Announcement
from ftckpt.session.vote import TaskState, VoteResult

_RESTS = 2
"""Pause after a target that timed out, as a multiple of its timeout."""
_MAX_DELAY_SECS = 30.0
"""Lag from which protection is reported as delayed; the report is cleared at half of it."""
_WHY_DELAYED = {
    TaskState.DONE: "the SMP of some node is throttled: it has used its share of the idle cores",
    TaskState.WORKING: "the SMP of some node still protects snapshot {}: it has too few cores, or too little network",
}


class ProtectionStatus(NamedTuple):
    """The state of a node's SMP and of the target's protection, as one rank reads it.

    ``alive``: its heartbeat is recent. ``configured``: it is configured for this attempt. ``sealed``: this rank's
    arena has the target. ``covered``: the target's parity and packages are complete on this node. ``gave_up``: they
    cannot be completed. ``rests``: the SMP is throttled, until its CPU use is back within its share. ``wait_secs``:
    the SMP's forecast of the time for a target.
    """

    alive: bool = False
    configured: bool = False
    sealed: bool = False
    covered: bool = False
    gave_up: bool = False
    rests: bool = False
    wait_secs: float = 0.0


@dataclass
class ProtectionScheduler:
    """The state of protection, derived from vote results alone: no further messages are needed.

    A committed snapshot becomes the ``target``. Once all nodes have completed their part, it is ``protected`` until
    the next one is. A target that some node cannot protect is given up: the protected one stays, and the next target
    is chosen when all nodes are able again. ``interval``: protect every n-th snapshot; 0: none. ``timeout_secs``:
    this rank's minimum wait for its node's part. Once a snapshot is protected, no target is chosen while some node's
    SMP is throttled; the SMP limits how long that lasts.
    """

    interval: int
    timeout_secs: float = 0.0
    protected: SnapshotId | None = None
    target: SnapshotId | None = None
    chosen_secs: float = 0.0
    """When the target was chosen."""
    degraded: bool = field(default=False, init=False)
    """Whether a target was given up, or none could be chosen for long, and none has been protected since."""
    given_up: SnapshotId | None = field(default=None, init=False)
    """The last target if it was given up; from results alone, so the same on all ranks."""
    waits: bool = field(default=False, init=False)
    """Whether a snapshot could become the target but some node is not ready; the same on all ranks."""
    due: int = field(default=0, init=False)
    """The number of the first snapshot whose vote may choose the next target."""
    rests_until_secs: float = field(default=0.0, init=False)
    wait_secs: float = field(default=0.0, init=False)
    """This rank's current timeout for its node's part."""
    unable_since_secs: float | None = field(default=None, init=False)
    """Since when some node has been unable to protect a new target."""
    behind_since_secs: float | None = field(default=None, init=False)
    """Since when a newer snapshot than the protected one has been the target or a candidate."""
    delayed: bool = field(default=False, init=False)
    """Whether protection is reported as delayed."""

    @classmethod
    def of(cls, config: Config) -> ProtectionScheduler:
        """A scheduler as configured, for a job with protection."""
        return cls(1 if config.protect_interval == "auto" else config.protect_interval, config.protect_timeout_secs)

    def learn(self, result: VoteResult, lineage: bytes, now_secs: float) -> Iterator[Announcement]:
        """Apply a vote result; announces targets that were protected or given up, and long delays."""
        yield from self._settle(result, now_secs)
        yield from self._note_delay(result, now_secs)
        self.waits = False
        if not self.interval or result.number < self.due or result.newest < 0:
            return
        newest = SnapshotId(lineage, result.newest)
        if self.target is not None or newest in (self.protected, self.given_up):
            return
        if self.behind_since_secs is None:
            self.behind_since_secs = now_secs
        if result.cover == TaskState.DONE:  # some node's SMP is throttled
            self.unable_since_secs, self.waits = None, True
        elif result.cover != TaskState.CANNOT:
            self.target, self.due, self.chosen_secs = newest, result.number + self.interval, now_secs
            self.unable_since_secs = None
        else:
            self.waits = True
            if self.unable_since_secs is None:
                self.unable_since_secs = now_secs
            elif now_secs - self.unable_since_secs > self.timeout_secs and not self.degraded:
                self.degraded = True
                yield self._not_protected(newest, error="the SMP of some node is dead or not configured")

    @property
    def pending(self) -> bool:
        """Whether another vote would settle something; from earlier results alone."""
        return self.target is not None or self.waits

    def report(self, guard: ProtectionStatus, now_secs: float) -> tuple[int, TaskState]:
        """The target's iteration and this node's progress with it, for a vote."""
        if not self.interval:
            return -1, TaskState.READY
        self.wait_secs = max(self.timeout_secs, guard.wait_secs)
        ready = guard.alive and guard.configured and now_secs >= self.rests_until_secs
        # The first protection is not throttled.
        done = TaskState.DONE if guard.rests and self.protected is not None else TaskState.READY
        if self.target is None:  # CANNOT keeps all ranks from choosing one
            return -1, done if ready else TaskState.CANNOT
        # Complete parity outlives its SMP, but not a change of the groups (``configured``).
        if guard.configured and guard.sealed and guard.covered:
            cover = done
        elif not ready or not guard.sealed or guard.gave_up:
            cover = TaskState.CANNOT
        elif now_secs - self.chosen_secs > self.wait_secs:
            self.rests_until_secs = now_secs + _RESTS * self.wait_secs
            cover = TaskState.CANNOT
        else:
            cover = TaskState.WORKING
        return self.target.iteration, cover

    def forget(self) -> None:
        """Forget the protected snapshot and the target: the arenas were rebuilt."""
        self.protected = self.target = self.behind_since_secs = None
        self.waits = False

    def stop(self) -> None:
        """Stop protection for good."""
        self.forget()
        self.interval = 0

    def _settle(self, result: VoteResult, now_secs: float) -> Iterator[Announcement]:
        target = self.target
        # A result may be older than the target: a late rank posted its vote before it knew of the target.
        if target is None or result.target != target.iteration or result.cover == TaskState.WORKING:
            return
        if result.cover >= TaskState.DONE:
            secs, again = now_secs - self.chosen_secs, self.degraded
            yield Announcement("protected", {"iteration": target.iteration, "secs": secs, "again": again})
            self.protected, self.degraded, self.rests_until_secs = target, False, 0.0
            self.given_up = None
            since = self.chosen_secs if self.behind_since_secs is None else self.behind_since_secs
            self.delayed = self.delayed and now_secs - since > _MAX_DELAY_SECS / 2
            self.behind_since_secs = None
        else:
            if not self.degraded:
                yield self._not_protected(target)
            self.degraded, self.given_up = True, target
        self.target = None

    def _note_delay(self, result: VoteResult, now_secs: float) -> Iterator[Announcement]:
        since = self.behind_since_secs
        if since is None or now_secs - since <= _MAX_DELAY_SECS or self.delayed or self.degraded:
            return
        why = _WHY_DELAYED.get(result.cover)
        if why is not None:
            self.delayed = True
            reason = why.format(result.target)
            yield Announcement("protection_slow", {"secs": round(now_secs - since, 1), "reason": reason})

    def _not_protected(self, snapshot: SnapshotId, **why: str) -> Announcement:
        protected = self.protected.iteration if self.protected is not None else None
        return Announcement("not_protected", {"iteration": snapshot.iteration, "protected": protected, **why})
