"""Which snapshots all ranks keep: the newest whole one, the protected one, and the one being protected."""

from __future__ import annotations

from collections.abc import Iterable

from ftckpt.comm import Agreement, Told

SnapshotId = tuple[bytes, int]
"""Lineage and iteration: with the job's name they name a snapshot."""


class Targets:
    """What every rank concludes from the same sequence of answers, so that no message more is needed.

    A snapshot that is whole on all ranks becomes the ``target``; when all nodes have done their part for it, it is
    ``protected`` until the next one is. One that some node cannot protect is given up, the protected one stays, and
    no other is chosen before all nodes could protect it. ``interval`` is the number of snapshots between two that are
    to be protected; 0: none is.
    """

    def __init__(self, lineage: bytes, interval: int) -> None:
        self._lineage = lineage
        self._interval = interval
        self._since = interval
        self.protected: SnapshotId | None = None
        self.target: SnapshotId | None = None
        self.given_up: list[SnapshotId] = []
        """Targets that were given up and not yet told of; the caller empties it."""

    def begin(self, restored: SnapshotId | None) -> None:
        """Training goes on from ``restored``, which is the first to be protected."""
        self.target = restored if self._interval else None

    def hear(self, told: Iterable[Told]) -> bool:
        """Take answers in; whether target or protected have changed."""
        before = self.protected, self.target
        for answer in told:
            self._settle(answer)
            self._since += 1
            newest = (self._lineage, answer.newest)
            due = self._interval and self._since >= self._interval and answer.newest >= 0
            if due and answer.cover != Agreement.CANNOT and self.target is None and newest != self.protected:
                self.target, self._since = newest, 0
        return before != (self.protected, self.target)

    def forget(self) -> None:
        """The arenas were laid out anew: what was protected is not protected any more."""
        self.protected = self.target = None

    def stop(self) -> None:
        """Nothing is protected from now on."""
        self.forget()
        self._interval = 0

    def keep(self, whole: SnapshotId | None) -> set[SnapshotId]:
        """Snapshots whose slots must not be written; ``whole`` is the newest that all have sealed."""
        return {snapshot for snapshot in (whole, self.protected, self.target) if snapshot is not None}

    def _settle(self, answer: Told) -> None:
        # An answer may be older than the target.
        if self.target is None or answer.target != self.target[1] or answer.cover == Agreement.WORKING:
            return
        if answer.cover == Agreement.DONE:
            self.protected = self.target
        else:
            self.given_up.append(self.target)
        self.target = None
