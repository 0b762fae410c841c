"""Which steps of training have a round, alike on all ranks.

Rounds of all ranks pair up by their order alone. A step, from one boundary to the next, that begins with a snapshot
has a round, which is posted when that is sealed. Any other step has one where the verdicts of all rounds before it
leave something to be settled: a rank that has not read them all does not know yet, and posts later. So a late rank
delays what follows from its round, and nobody waits for it at a boundary without a snapshot. The next round is of a
step to which no rank had come when it posted the last one: steps that a late rank has missed have none. And the
longer it takes until all is settled, the more steps lie between two rounds, up to ``_MAX_PAUSE``.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ftckpt.session.vote import VoteResult

_MAX_PAUSE = 7
"""Steps without a round between two of one snapshot: an all-reduce takes the processor for a millisecond."""


class VoteStep(NamedTuple):
    """The ``ordinal``-th from one boundary to the next. It begins with the snapshot of that ``number`` if it is
    ``due``, and follows it otherwise."""

    ordinal: int
    number: int
    due: bool


class VoteSchedule:
    """Of one rank: steps whose round is neither posted nor known not to be, and rounds whose verdict is not read."""

    def __init__(self) -> None:
        self._steps: deque[VoteStep] = deque()
        self.step = 0
        """Boundaries that this rank has passed."""
        self._num_posted = self._num_read = 0
        self._furthest = 0  # the step of the rank that was furthest when it posted, by the last verdict
        self._number = self._num_again = 0  # the snapshot of that verdict, and how many came of it before
        self._pause = 0  # steps that have no round next

    @property
    def settled(self) -> bool:
        """Whether every step so far has had its round, or has none."""
        return not self._steps

    @property
    def unread(self) -> bool:
        """Whether rounds were posted whose verdict was not read."""
        return self._num_read < self._num_posted

    def boundary(self, number: int, due: bool, pending: bool) -> None:
        """A step begins; ``pending``: what was read leaves something to be settled."""
        self.step += 1
        if due or pending or self.unread or self._steps:
            self._steps.append(VoteStep(self.step, number, due))

    def next(self, pending: bool, *, but: int = 0, unasked: bool = False) -> VoteStep | None:
        """The step whose round is to be posted now; None: there is none, or it is not known yet.

        The last ``but`` steps are left out. ``unasked``: a round is posted, whichever it is for the others.
        """
        steps = self._steps
        while len(steps) > but:
            step = steps[0]
            if step.due or unasked:
                return step
            if self.unread:
                return None
            if pending and step.ordinal > self._furthest + self._pause:
                return step
            steps.popleft()
        return None

    @property
    def waits(self) -> bool:
        """Whether a verdict that is not read decides which round comes next."""
        return bool(self._steps) and not self._steps[0].due and self.unread

    def posted(self) -> None:
        """The round of ``next`` is on its way."""
        self._steps.popleft()
        self._num_posted += 1

    def read(self, verdict: VoteResult) -> None:
        """The verdict of the first round that was not read yet."""
        self._num_read += 1
        self._furthest = verdict.step
        self._num_again = self._num_again + 1 if verdict.number == self._number else 0
        self._number = verdict.number
        # What is done in between is known late by a small part of what it took.
        self._pause = min(_MAX_PAUSE, self._num_again // 4)
