"""What a rank tells the others with each snapshot, and what it concludes from what all of them told."""

from __future__ import annotations

from ftckpt.capture.capture import Capture, SnapshotId
from ftckpt.capture.interval import Interval
from ftckpt.comm import Agreement, Group
from ftckpt.config import Config
from ftckpt.events import Events
from ftckpt.protection import Protection


class Dialogue:
    """One post per snapshot, and one answer. Construction is collective.

    ``whole`` is the newest snapshot that all ranks were known to have sealed. ``posted`` tells that this rank has
    said what it has with the latest snapshot.
    """

    def __init__(self, config: Config, interval: Interval, protection: Protection, events: Events) -> None:
        self._config = config
        self._agreement = Agreement(Group(config.start_timeout_secs))
        self._interval = interval
        self._protection = protection
        self._events = events
        self._lineage = b""
        self._posts_for = self._newest = -1
        self.posted = True
        self.whole: SnapshotId | None = None

    def begin(self, lineage: bytes, whole: SnapshotId | None) -> None:
        """Snapshots have ``lineage`` from now on; training goes on from ``whole``."""
        self._lineage, self.whole = lineage, whole
        self._protection.begin(lineage, whole)

    def post(self, capture: Capture | None, spent: bool, stretch: int) -> bool:
        """Say what this rank has sealed, and how willing it is: not at all without a ``capture``, or when ``spent``.

        ``stretch`` is the wish for rarer snapshots. Returns whether a snapshot was sealed since the last post.

        Raises:
            RuntimeError: the other ranks cannot be reached.
        """
        sealed = capture.newest if capture is not None else None
        newest = sealed[1] if sealed is not None and sealed[0] == self._lineage else -1
        fresh = newest > self._newest
        self._newest = max(self._newest, newest)
        willing = Agreement.SKIP if capture is not None and capture.busy else Agreement.GO
        if capture is None or (spent and not fresh):
            willing = Agreement.OFF
        target, cover = self._protection.say()
        self._agreement.post(newest, willing, self._posts_for, stretch, target=target, cover=cover)
        self.posted = True
        return fresh

    def read(self) -> tuple[int, SnapshotId | None] | None:
        """How willing all ranks are, and the newest whole snapshot if it is a new one; None: answers are missing.

        Raises:
            RuntimeError: the answer will never come.
        """
        answer = self._agreement.read(self._config.agree_timeout_secs)
        self.posted, self._posts_for = False, self._interval.number
        if answer is None:
            return None
        self._protection.hear(answer.told)
        for told in answer.told:
            if self._interval.heard(told.number, told.stretch):
                interval = told.stretch * self._config.interval
                self._events.emit("interval_changed", interval=interval, fence_budget=self._config.fence_budget)
                self._events.tell(f"soon a snapshot every {interval} iterations, so that fences keep their budget")
        if answer.newest < 0 or (self.whole is not None and answer.newest <= self.whole[1]):
            return answer.willing, None
        self.whole = (self._lineage, answer.newest)
        return answer.willing, self.whole
