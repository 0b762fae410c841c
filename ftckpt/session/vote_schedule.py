"""The steps of training that have a vote: the same on all ranks.

Votes pair up by order alone. A step runs from one boundary to the next. A step that starts with a snapshot has a
vote, posted when that snapshot is sealed. Any other step has one if the results of all earlier votes leave something
pending: a rank that has not read them all does not know yet, and posts later. So a late rank delays only what its
vote decides, and no rank waits for it at a boundary without a snapshot. The next vote is that of a step which no rank
had reached when it posted the last one: steps that a late rank missed have none. After the first vote of a snapshot
as many steps have none as its protection is expected to take, by the last one. From then on, the longer something
stays pending, the more steps pass between two votes, up to ``_MAX_PAUSE``.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ftckpt.session.vote import TaskState, VoteResult

_MAX_PAUSE = 7
"""Maximum of steps without a vote between two of one snapshot: an all-reduce costs a millisecond of CPU time."""


class VoteStep(NamedTuple):
    """The ``ordinal``-th step of training. It starts with snapshot ``number`` if it is ``due``, and comes after it
    otherwise."""

    ordinal: int
    number: int
    due: bool


class VoteSchedule:
    """One rank's undecided steps (no vote posted, and not known to have none) and its unread vote results."""

    def __init__(self) -> None:
        self._steps: deque[VoteStep] = deque()
        self.step = 0
        """Step boundaries that this rank has passed."""
        self._num_posted = self._num_read = 0
        self._furthest = 0  # ``step`` of the last result
        self._number = self._num_again = 0  # the snapshot of the last result, and results of it before
        self._began = 0  # ``step`` of that snapshot's first result
        self._busy_steps = 0  # steps after a snapshot's first result until SMPs are expected to be done
        self._has_waited = False  # whether they took at least as long for that snapshot
        self._pause = 0  # steps without a vote before the next one

    @property
    def settled(self) -> bool:
        """Whether no step is undecided."""
        return not self._steps

    @property
    def unread(self) -> bool:
        """Whether results of posted votes are unread."""
        return self._num_read < self._num_posted

    def boundary(self, number: int, due: bool, pending: bool) -> None:
        """A step starts; ``pending``: the results read so far leave something pending."""
        self.step += 1
        if due or pending or self.unread or self._steps:
            self._steps.append(VoteStep(self.step, number, due))

    def next(self, pending: bool, *, but: int = 0, unasked: bool = False) -> VoteStep | None:
        """The step whose vote is to be posted now; None: there is none, or it is not known yet.

        The last ``but`` steps are excluded. ``unasked``: return the first step without waiting for results.
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
        """Whether an unread result decides the next vote."""
        return bool(self._steps) and not self._steps[0].due and self.unread

    def posted(self) -> None:
        """The vote of the step that ``next`` returned is in flight."""
        self._steps.popleft()
        self._num_posted += 1

    def read(self, verdict: VoteResult) -> None:
        """Note the result of the first unread vote."""
        self._num_read += 1
        self._furthest = verdict.step
        if verdict.number == self._number:
            self._num_again += 1
            # The pause grows with the wait, so that it delays a result by a fraction of the time already waited.
            self._pause = min(_MAX_PAUSE, self._num_again // 4)
            # Without a target the next one is chosen once no node's SMP is throttled.
            if verdict.cover < (TaskState.DONE if verdict.target >= 0 else TaskState.READY):
                self._busy_steps = min(_MAX_PAUSE, verdict.step - self._began)
                self._has_waited = True
            return
        if not self._has_waited:  # a step earlier, in case protection got faster
            self._busy_steps = max(0, self._busy_steps - 1)
        self._pause, self._has_waited = self._busy_steps, False
        self._number, self._num_again, self._began = verdict.number, 0, verdict.step
