"""Votes: one asynchronous all-reduce per round of what each rank reports; and the two groups that connect the ranks,
which break together.

Where replicas are compared, an all-gather accompanies the vote of a snapshot, see ``ftckpt.capture.sample``.

The n-th votes of all ranks pair up. ``ftckpt.session.vote_schedule`` decides which steps of training have one, and
decides the same on all ranks. A rank waits for a vote result only when it needs a slot.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, get_type_hints

from ftckpt.group import Group
from ftckpt.model.sampled import Comparison, SampleOutcome

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")


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
            posted = _PostedVote(*self._group.start_minimum(vote.words()))
            if words is not None:
                sample, rows = self._group.start_gather(words)
                posted = posted._replace(sample=sample, rows=rows, comparison=comparison)
            self._posted.append(posted)
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
        verdicts, self._unread = tuple(self._unread), []
        return verdicts

    def _finish_first(self, deadline: float) -> bool:
        """Move the first vote's result to the unread ones; returns whether it arrived before the deadline."""
        posted = self._posted[0]
        try:
            if not self._group.finish(posted.work, deadline - time.monotonic()):
                return False
            verdict = VoteResult.of(posted.minima.values.tolist())
            # A rank that turns all off may not know whether a sample accompanies its last vote.
            wait_secs = deadline - time.monotonic() if verdict.will != Readiness.OFF else 0.0
            has_sample = posted.sample is None or self._group.finish(posted.sample, wait_secs)
            if not has_sample and verdict.will != Readiness.OFF:
                return False
        except RuntimeError as error:
            raise AgreementError(str(error)) from error
        # Not earlier: a read that timed out must find the same vote again.
        self._posted.popleft()
        self._group.give_back(posted.minima)
        if has_sample and posted.comparison is not None:
            verdict = replace(verdict, replicas=posted.comparison.outcome(posted.rows.values))
            self._group.give_back(posted.rows)
        self._unread.append(verdict)
        self._ended = verdict.will == Readiness.OFF
        return True


class GroupPair:
    """The groups that connect all ranks: ``group`` for blocking collectives, ``agreement`` for votes.

    A rank that cannot reach the others through one of them breaks both, so that all ranks notice.

    Args:
        start_timeout_secs: longest wait for other ranks at start and end.
        connect_timeout_secs: longest wait to reconnect a broken group at the end.
        group: all ranks; a new group if None.
    """

    def __init__(self, start_timeout_secs: float, connect_timeout_secs: float, group: Group | None = None) -> None:
        self.group = group or Group(start_timeout_secs)
        # A separate group: votes pair up by order, and any other collective would shift them.
        self._votes = Group(start_timeout_secs, partners=0)
        self.agreement = Agreement(self._votes)
        self._start_timeout_secs, self._connect_timeout_secs = start_timeout_secs, connect_timeout_secs

    @property
    def broken(self) -> bool:
        """Whether some rank is unreachable."""
        return self.group.broken or self.agreement.broken

    def give_up(self, reason: str) -> None:
        """Break both groups, which ends the wait of other ranks in them."""
        self.group.give_up(reason)
        self._votes.give_up(reason)

    def part(self, leave: Callable[[], None]) -> None:
        """Run ``leave`` as the last collective, then close the vote group; raises as ``meet``."""
        self.meet("end", leave)
        self._votes.close()

    def meet(self, place: str, action: Callable[[], T]) -> T:
        """Run ``action``, which must be collective and repeatable, at the end of the job. A broken group is
        reconnected for it, once. ``place`` must be unique to this call.

        Raises:
            RuntimeError: raised by ``action``.
            LaunchError: the group could not be reconnected.
        """
        self.group.timeout_secs = self._start_timeout_secs
        begin = time.monotonic()
        try:
            return action()
        except RuntimeError:
            left_secs = self._start_timeout_secs - (time.monotonic() - begin)
            if not self.group.broken or left_secs <= 0:
                raise
            self.group.renew(f"{self.group.name}/{place}", min(left_secs, self._connect_timeout_secs))
            return action()
