"""Votes: one asynchronous all-reduce per round of what each rank reports; and the steps of training that have one.

Where replicas are compared, an all-gather accompanies the vote of a snapshot, see ``ftckpt.capture.sample``. A rank
waits for a vote result only when it needs a slot.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

from ftckpt.group import Group
from ftckpt.model.sampled import Comparison, SampleOutcome

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MAX_PAUSE = 7
"""Maximum of steps without a vote between two of one snapshot: an all-reduce costs a millisecond of CPU time."""


class Readiness(IntEnum):
    """A rank's vote on the next snapshot; the minimum over all ranks decides."""

    OFF, SKIP, GO = -1, 0, 1
    """All ranks turn ftckpt off, skip the snapshot, take it."""


class TaskState(IntEnum):
    """A node's progress with the protection of the target; the minimum over all ranks counts.

    ``READY``: done, or no target, and able to start the next one. ``DONE``: done, and throttled before the next one.
    """

    CANNOT, WORKING, DONE, READY = -1, 0, 1, 2


class Reducer(Enum):
    """The reduction of a field over all ranks. ``SAME``: the value that all ranks have, -1 if they differ."""

    MIN, MAX, SAME = range(3)


@dataclass(frozen=True, slots=True)
class Vote:
    """One rank's report; all fields but ``due`` are sent.

    ``number``: snapshots that were due by the step of this vote; only a rank that turns all off without reading
    results can differ. ``newest``: the newest iteration that this rank has sealed in the job's lineage, -1: none. A
    minimum could name a snapshot that a rank with a newer one has overwritten. ``stretch``: the requested factor
    between the configured interval and the one in force; ``cost``: the cost of a snapshot in millionths of an
    iteration. ``target``: the iteration of the protection target, -1: none; ``cover``: its state. ``flush``,
    ``flushed``: the same of the flush; ``flush_interval``: the requested iterations between two flushes, 0: no
    request. ``step``: step boundaries that this rank has passed. ``due``: whether it is the first vote of that
    snapshot.
    """

    number: Annotated[int, Reducer.MAX]
    newest: Annotated[int, Reducer.SAME]
    will: Annotated[Readiness, Reducer.MIN] = Readiness.GO
    stretch: Annotated[int, Reducer.MAX] = 1
    cost: Annotated[int, Reducer.MAX] = 0
    target: Annotated[int, Reducer.SAME] = -1
    cover: Annotated[TaskState, Reducer.MIN] = TaskState.READY
    flush: Annotated[int, Reducer.SAME] = -1
    flushed: Annotated[TaskState, Reducer.MIN] = TaskState.DONE
    flush_interval: Annotated[int, Reducer.MAX] = 0
    step: Annotated[int, Reducer.MAX] = 0
    due: bool = True

    def words(self) -> tuple[int, ...]:
        """The input of an element-wise minimum over all ranks; for a maximum a value is negated, for ``SAME`` it is
        sent both ways."""
        return tuple(sign * getattr(self, name) for name, reducer in _REDUCERS.items() for sign in _SIGNS[reducer])


_REDUCERS: dict[str, Reducer] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Vote, include_extras=True).items() if name != "due"
}
_SIGNS = {Reducer.MIN: (1,), Reducer.MAX: (-1,), Reducer.SAME: (1, -1)}


@dataclass(frozen=True, slots=True)
class VoteResult(Vote):
    """The reduction of the n-th votes over all ranks, the same on each of them: ``newest`` is committed.

    ``replicas``: the outcome of that snapshot's sample.
    """

    replicas: SampleOutcome = SampleOutcome.UNKNOWN

    @classmethod
    def of(cls, minima: Sequence[int]) -> VoteResult:
        """Read the minimum of ``Vote.words`` over all ranks."""
        words, values = iter(minima), {}
        for name, reducer in _REDUCERS.items():
            found = {sign * next(words) for sign in _SIGNS[reducer]}
            values[name] = found.pop() if len(found) == 1 else -1
        will, cover, flushed = Readiness(values["will"]), TaskState(values["cover"]), TaskState(values["flushed"])
        return replace(cls(**values), will=will, cover=cover, flushed=flushed)  # type: ignore[arg-type]


class AgreementError(RuntimeError):
    """The other ranks are unreachable."""


class _PostedVote(NamedTuple):
    """A vote in flight; with ``rows`` and their ``comparison`` if samples accompany it."""

    work: Any
    minima: Any
    sample: Any = None
    rows: Any = None
    comparison: Comparison | None = None

    @property
    def works(self) -> tuple[Any, ...]:
        return (self.work,) if self.sample is None else (self.work, self.sample)


class Agreement:
    """Votes that this rank has posted, and results that it has not read yet.

    ``group`` must carry nothing else: votes pair up by order, and any other collective would shift them.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._posted: deque[_PostedVote] = deque()
        self._unread: list[VoteResult] = []
        self._ended = False  # by an OFF result, after which no rank posts

    @property
    def broken(self) -> bool:
        """Whether the other ranks are unreachable."""
        return self._group.broken

    def post(
        self, vote: Vote, words: npt.NDArray[np.int64] | None = None, comparison: Comparison | None = None
    ) -> None:
        """Post this rank's vote; never waits. ``words``: its sample of that snapshot, given by all ranks or by none,
        for ``comparison``.

        Raises:
            AgreementError: nothing was posted.
        """
        try:
            work, minima = self._group.start_minimum(vote.words())
            sample, rows = self._group.start_gather(words) if words is not None else (None, None)
            self._posted.append(_PostedVote(work, minima, sample, rows, comparison))
        except RuntimeError as error:
            raise AgreementError(str(error)) from error

    def read(self, timeout_secs: float) -> tuple[VoteResult, ...] | None:
        """Read the results of all votes posted since the last read; None if one is missing after the timeout.

        All or none: ranks that have read the missing one may have reused slots since, so no slot may be chosen by
        the others alone. The next read returns them all, since an earlier result may name a snapshot that the last
        one does not. The sequence ends with the first OFF result, after which no rank posts.

        Raises:
            AgreementError: the result will never arrive.
        """
        deadline = time.monotonic() + timeout_secs
        while self._posted and not self._ended:
            if not self._finish_first(deadline):
                return None
        return self._take_unread()

    def read_complete(self) -> tuple[VoteResult, ...]:
        """Read the results that have arrived, in order, up to the first that has not; never waits.

        Raises:
            AgreementError: the other ranks are unreachable.
        """
        while self._posted and not self._ended and self._group.is_complete(self._posted[0].works):
            self._finish_first(deadline=math.inf)
        return self._take_unread()

    def _take_unread(self) -> tuple[VoteResult, ...]:
        results, self._unread = tuple(self._unread), []
        return results

    def _finish_first(self, deadline: float) -> bool:
        """Move the first vote's result to the unread ones; returns whether it arrived before the deadline."""
        posted = self._posted[0]
        try:
            if not self._group.finish(posted.work, deadline - time.monotonic()):
                return False
            result = VoteResult.of(posted.minima.values.tolist())
            # A rank that turns all off may not know whether a sample accompanies its last vote.
            wait_secs = deadline - time.monotonic() if result.will != Readiness.OFF else 0.0
            has_sample = posted.sample is None or self._group.finish(posted.sample, wait_secs)
            if not has_sample and result.will != Readiness.OFF:
                return False
        except RuntimeError as error:
            raise AgreementError(str(error)) from error
        # Not earlier: a read that timed out must find the same vote again.
        self._posted.popleft()
        self._group.give_back(posted.minima)
        if has_sample and posted.comparison is not None:
            result = replace(result, replicas=posted.comparison.outcome(posted.rows.values))
            self._group.give_back(posted.rows)
        self._unread.append(result)
        self._ended = result.will == Readiness.OFF
        return True


class VoteStep(NamedTuple):
    """The ``ordinal``-th step of training. It starts with snapshot ``number`` if it is ``due``, and comes after it
    otherwise."""

    ordinal: int
    number: int
    due: bool


class VoteSchedule:
    """One rank's undecided steps (no vote posted, and not known to have none) and its unread vote results.

    Votes pair up by order alone. A step runs from one boundary to the next. A step that starts with a snapshot has a
    vote, posted when that snapshot is sealed. Any other step has one if the results of all earlier votes leave
    something pending: a rank that has not read them all does not know yet, and posts later. So a late rank delays
    only what its vote decides, and no rank waits for it at a boundary without a snapshot. The next vote is that of a
    step which no rank had reached when it posted the last one: steps that a late rank missed have none. The longer
    something stays pending, the more steps pass between two votes, up to ``_MAX_PAUSE``.
    """

    def __init__(self) -> None:
        self._steps: deque[VoteStep] = deque()
        self.step = 0
        """Step boundaries that this rank has passed."""
        self._num_unread = 0  # results of posted votes
        self._furthest = 0  # ``step`` of the last result
        self._number = self._num_again = 0  # the snapshot of the last result, and results of it before
        self._pause = 0  # steps without a vote before the next one

    @property
    def settled(self) -> bool:
        """Whether no step is undecided."""
        return not self._steps

    @property
    def unread(self) -> bool:
        """Whether results of posted votes are unread."""
        return self._num_unread > 0

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
        self._num_unread += 1

    def read(self, result: VoteResult) -> None:
        """Note the result of the first unread vote."""
        self._num_unread -= 1
        self._furthest = result.step
        self._num_again = self._num_again + 1 if result.number == self._number else 0
        self._number = result.number
        # The pause grows with the wait, so that it delays a result by a fraction of the time already waited.
        self._pause = min(_MAX_PAUSE, self._num_again // 2)
