"""Which snapshot is to be protected next, and which one is: the same on all ranks, by the verdicts that they read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ftckpt.config import Config
from ftckpt.model.snapshot import SnapshotId
from ftckpt.session.actions import Announcement
from ftckpt.session.vote import TaskState, VoteResult

_RESTS = 2
"""After a target that took too long, this many times that wait pass before another one is chosen."""
_MAX_DELAY_SECS = 30.0
"""Protection that is behind by more is delayed, and the log says so; it is not once it is behind by half at most."""
_WHY_DELAYED = {
    TaskState.DONE: "the SMP of some node has used its share of the idle cores",
    TaskState.WORKING: "the SMP of some node still works on snapshot {}: it has too few cores, or too little network",
}


class ProtectionStatus(NamedTuple):
    """What a rank sees of its node's SMP, and of what it has done for the target.

    ``alive``: it gave a sign of life lately. ``configured``: it knows what to guard. ``sealed``: this rank's arena
    has the target. ``covered``: parity and packages of it are complete on this node. ``gave_up``: they cannot be had.
    ``rests``: what the last one took of the node's cores is more than its share yet. ``wait_secs``: what a target
    may take by the SMP's forecast.
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
    """What every rank concludes from the same verdicts about protection, so that no message more is needed.

    A snapshot that is whole becomes the ``target``; when all nodes have done their part for it, it is
    ``protected`` until the next one is. One that some node cannot protect is given up, the protected one stays, and
    no other is chosen before all nodes could protect it. ``interval`` is the number of snapshots from one that is to
    be protected to the next; 0: none is. ``timeout_secs`` is how long this rank waits for its node's part, at least.
    Once anything is protected, no other target is chosen while some node rests: its SMP bounds that.
    """

    interval: int
    timeout_secs: float = 0.0
    protected: SnapshotId | None = None
    target: SnapshotId | None = None
    degraded: bool = False
    """Whether a target was given up, or none could be chosen for long, and none was protected since."""
    given_up: SnapshotId | None = None
    """The last target, where it was given up: from verdicts alone, and so alike on all ranks."""
    waits: bool = False
    """Whether a snapshot could be the target, and some node is not ready for it; likewise."""
    due: int = 0
    """The number of the snapshot whose round chooses the next target at the earliest."""
    chosen_secs: float = 0.0
    """When the target was chosen."""
    rests_until_secs: float = 0.0
    wait_secs: float = 0.0
    """What the node's SMP needs for a target, by its last forecast."""
    unable_since_secs: float | None = None
    """Since when some node could not protect what would be the target."""
    behind_since_secs: float | None = None
    """Since when a newer snapshot than the protected one is, or could be, the target."""
    delayed: bool = False
    """Whether protection was behind for long, and none was protected soon since."""

    @classmethod
    def of(cls, config: Config) -> ProtectionScheduler:
        """As configured, where anything is protected."""
        return cls(1 if config.protect_interval == "auto" else config.protect_interval, config.protect_timeout_secs)

    def learn(self, verdict: VoteResult, lineage: bytes, now_secs: float) -> Iterator[Announcement]:
        """What a verdict changes, with an event for each target that was protected or given up, and where for long
        none could be chosen."""
        yield from self._settle(verdict, now_secs)
        yield from self._note_delay(verdict, now_secs)
        self.waits = False
        if not self.interval or verdict.number < self.due or verdict.whole < 0:
            return
        newest = SnapshotId(lineage, verdict.whole)
        if self.target is not None or newest in (self.protected, self.given_up):
            return
        if self.behind_since_secs is None:
            self.behind_since_secs = now_secs
        if verdict.cover == TaskState.DONE:  # some node rests
            self.unable_since_secs, self.waits = None, True
        elif verdict.cover != TaskState.CANNOT:
            self.target, self.due, self.chosen_secs = newest, verdict.number + self.interval, now_secs
            self.unable_since_secs = None
        else:
            self.waits = True
            if self.unable_since_secs is None:
                self.unable_since_secs = now_secs
            elif now_secs - self.unable_since_secs > self.timeout_secs and not self.degraded:
                self.degraded = True
                yield self._not_protected(newest, error="the SMP of some node cannot be seen to guard")

    @property
    def pending(self) -> bool:
        """Whether another verdict would settle something, by those before alone."""
        return self.target is not None or self.waits

    def report(self, guard: ProtectionStatus, now_secs: float) -> tuple[int, TaskState]:
        """The target's iteration and how far this node is with it, for a round."""
        if not self.interval:
            return -1, TaskState.READY
        self.wait_secs = max(self.timeout_secs, guard.wait_secs)
        ready = guard.alive and guard.configured and now_secs >= self.rests_until_secs
        # Not before anything is protected.
        done = TaskState.DONE if guard.rests and self.protected is not None else TaskState.READY
        if self.target is None:  # none is chosen while a node could not protect it
            return -1, done if ready else TaskState.CANNOT
        # What is covered stays so without an SMP, but not where other groups have taken the place of these.
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
        """What was protected is not any more: training went back, or the arenas were laid out anew."""
        self.protected = self.target = self.behind_since_secs = None
        self.waits = False

    def stop(self) -> None:
        """Nothing is protected from now on."""
        self.forget()
        self.interval = 0

    def _settle(self, verdict: VoteResult, now_secs: float) -> Iterator[Announcement]:
        target = self.target
        # A verdict may be older than the target: a rank that was late posted before it read of it.
        if target is None or verdict.target != target.iteration or verdict.cover == TaskState.WORKING:
            return
        if verdict.cover >= TaskState.DONE:
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

    def _note_delay(self, verdict: VoteResult, now_secs: float) -> Iterator[Announcement]:
        since = self.behind_since_secs
        if since is None or now_secs - since <= _MAX_DELAY_SECS or self.delayed or self.degraded:
            return
        why = _WHY_DELAYED.get(verdict.cover)
        if why is not None:
            self.delayed = True
            reason = why.format(verdict.target)
            yield Announcement("protection_slow", {"secs": round(now_secs - since, 1), "reason": reason})

    def _not_protected(self, snapshot: SnapshotId, **why: str) -> Announcement:
        protected = self.protected.iteration if self.protected is not None else None
        return Announcement("not_protected", {"iteration": snapshot.iteration, "protected": protected, **why})
