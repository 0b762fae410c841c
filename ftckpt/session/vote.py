"""What all ranks know together: one asynchronous all-reduce per round, posted by each rank, read as a verdict; and
the two groups through which a rank reaches all others, which break together.

An all-gather goes with the round of a snapshot where replicas are compared, see ``ftckpt.capture.sample``.

The n-th rounds of all ranks belong together. Which steps of training have one
``ftckpt.session.vote_schedule`` decides, alike on all ranks. Nobody waits for a verdict before a slot is needed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ftckpt.group import Group
from ftckpt.model.sampled import Comparison, SampleOutcome

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")


class Readiness(IntEnum):
    """What a rank wants of the next snapshot; the least of all ranks is what happens."""

    OFF, SKIP, GO = -1, 0, 1
    """All turn ftckpt off, all skip it, all take it."""


class TaskState(IntEnum):
    """How far a rank's node is with the protection of the target; the least of all ranks counts.

    ``READY``: done, or there is no target, and another one could be begun; after ``DONE`` the node rests first.
    """

    CANNOT, WORKING, DONE, READY = -1, 0, 1, 2


class Vote(NamedTuple):
    """What one rank posts.

    ``number``: of snapshots that were due by the step that the round is of. ``due``: whether it is the first round of
    that snapshot, which is not sent. ``step``: boundaries that this rank has passed. ``newest``: the newest
    iteration that this rank has sealed in the lineage of the job, -1 for none. ``stretch``: by how much it wishes
    snapshots to be rarer; ``cost``: what one costs it, in millionths of an iteration. ``target``: the iteration of
    the target, -1 for none; ``cover``: how far its protection is. ``flush``, ``flushed``: the same of what goes to
    storage; ``flush_interval``: the iterations between two that it wishes for, 0 where it has no wish.
    """

    number: int
    newest: int
    will: Readiness = Readiness.GO
    stretch: int = 1
    cost: int = 0
    target: int = -1
    cover: TaskState = TaskState.READY
    flush: int = -1
    flushed: TaskState = TaskState.DONE
    flush_interval: int = 0
    due: bool = True
    step: int = 0

    def words(self) -> tuple[int, ...]:
        """What goes into an element-wise minimum over all ranks.

        ``newest`` goes in twice, once negated: the minimum of the second is minus the largest. A minimum of
        ``newest`` alone would name a snapshot that a rank with a newer one may have overwritten; only where least
        and largest are the same do all ranks have it. ``target`` likewise. Wishes, ``number`` and ``step``
        are negated because the largest one counts.
        """
        wishes = -self.stretch, -self.cost, -self.flush_interval
        protect = self.target, -self.target, self.cover
        flush = self.flush, -self.flush, self.flushed
        return self.newest, -self.newest, self.will, *wishes, *protect, *flush, -self.number, -self.step


class VoteResult(NamedTuple):
    """What the rounds of all ranks mean together: the same on each of them.

    ``whole``: the iteration that all ranks have sealed, -1 where they do not name the same one. ``will``: of the
    least willing. ``stretch``, ``cost``, ``flush_interval``: the largest. ``target``: what all take for the target,
    -1 where they differ. ``cover``: of the node that is least far. ``flush``, ``flushed``: the same of what goes to
    storage. ``number``: the same on all ranks, but for one that turns all off without knowing it. ``step``: of the
    rank that was furthest. ``replicas``: what the sample of that snapshot says.
    """

    number: int
    whole: int
    will: Readiness = Readiness.GO
    stretch: int = 1
    cost: int = 0
    target: int = -1
    cover: TaskState = TaskState.READY
    flush: int = -1
    flushed: TaskState = TaskState.DONE
    flush_interval: int = 0
    step: int = 0
    replicas: SampleOutcome = SampleOutcome.UNKNOWN

    @classmethod
    def of(cls, minima: Sequence[int]) -> VoteResult:
        """Read the minimum of ``Vote.words`` over all ranks."""
        newest, negated_newest, will, stretch, cost, flush_interval, *tasks = minima
        target, negated_target, cover, flush, negated_flush, flushed, negated_number, negated_step = tasks
        return cls(
            -negated_number,
            newest if newest == -negated_newest else -1,
            Readiness(will),
            -stretch,
            -cost,
            target if target == -negated_target else -1,
            TaskState(cover),
            flush if flush == -negated_flush else -1,
            TaskState(flushed),
            -flush_interval,
            -negated_step,
        )


class AgreementError(RuntimeError):
    """The other ranks cannot be reached any more."""


class _PostedRound(NamedTuple):
    """A round on its way; ``rows`` where samples go with it, and how they are compared."""

    work: Any
    minima: Any
    sample: Any = None
    rows: Any = None
    comparison: Comparison | None = None

    @property
    def works(self) -> tuple[Any, ...]:
        return (self.work,) if self.sample is None else (self.work, self.sample)


class Agreement:
    """Rounds that this rank has posted, and verdicts that it has not read yet.

    ``group`` is used for nothing else: a collective of another purpose must not come between two rounds.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._posted: deque[_PostedRound] = deque()
        self._unread: list[VoteResult] = []
        self._ended = False  # all turn off: nobody posts behind that

    @property
    def broken(self) -> bool:
        """Whether the other ranks cannot be reached."""
        return self._group.broken

    def post(
        self, round_: Vote, words: npt.NDArray[np.int64] | None = None, comparison: Comparison | None = None
    ) -> None:
        """Post this rank's round; never waits. ``words``: of its sample of that snapshot, on all ranks or on none,
        for ``comparison``.

        Raises:
            AgreementError: nothing was posted.
        """
        try:
            posted = _PostedRound(*self._group.start_minimum(round_.words()))
            if words is not None:
                sample, rows = self._group.start_gather(words)
                posted = posted._replace(sample=sample, rows=rows, comparison=comparison)
            self._posted.append(posted)
        except RuntimeError as error:
            raise AgreementError(str(error)) from error

    def read(self, timeout_secs: float) -> tuple[VoteResult, ...] | None:
        """Verdicts of all rounds posted since the last ones were read; None when one is missing after the time.

        All or none: ranks that know the missing one may have reused slots since, so what the others say is no
        ground to write on. They come with the next read, and none of them is lost: an earlier one may name a
        snapshot that the last one does not. With the first that turns off the sequence ends, as nobody posts again.

        Raises:
            AgreementError: the verdict will never come.
        """
        deadline = time.monotonic() + timeout_secs
        while self._posted and not self._ended:
            if not self._finish_first(deadline):
                return None
        return self._take_unread()

    def read_complete(self) -> tuple[VoteResult, ...]:
        """Verdicts of the rounds that all ranks have posted, up to the first that one has not; never waits.

        Raises:
            AgreementError: the other ranks cannot be reached.
        """
        while self._posted and not self._ended and self._group.is_complete(self._posted[0].works):
            self._finish_first(deadline=math.inf)
        return self._take_unread()

    def _take_unread(self) -> tuple[VoteResult, ...]:
        verdicts, self._unread = tuple(self._unread), []
        return verdicts

    def _finish_first(self, deadline: float) -> bool:
        """Whether the verdict of the first round was there before the deadline."""
        posted = self._posted[0]
        try:
            if not self._group.finish(posted.work, deadline - time.monotonic()):
                return False
            verdict = VoteResult.of(posted.minima.values.tolist())
            # A rank that turns all off may not know whether a sample goes with its last round.
            wait_secs = deadline - time.monotonic() if verdict.will != Readiness.OFF else 0.0
            has_sample = posted.sample is None or self._group.finish(posted.sample, wait_secs)
            if not has_sample and verdict.will != Readiness.OFF:
                return False
        except RuntimeError as error:
            raise AgreementError(str(error)) from error
        # Only here: a read that gave up finds the same round again.
        self._posted.popleft()
        self._group.give_back(posted.minima)
        if has_sample and posted.comparison is not None:
            verdict = verdict._replace(replicas=posted.comparison.outcome(posted.rows.values))
            self._group.give_back(posted.rows)
        self._unread.append(verdict)
        self._ended = verdict.will == Readiness.OFF
        return True


class GroupPair:
    """``group`` carries collectives that ranks enter together, ``agreement`` the rounds.

    A rank that cannot reach the others through one of them gives up both, so that all ranks learn it.

    Args:
        start_timeout_secs: longest wait for other ranks at start and end.
        connect_timeout_secs: longest wait for a broken group to be connected again at the end.
        group: all ranks; a new one where None.
    """

    def __init__(self, start_timeout_secs: float, connect_timeout_secs: float, group: Group | None = None) -> None:
        self.group = group or Group(start_timeout_secs)
        # A group of its own: nothing else may come between two rounds, which pair up by their order alone.
        self._rounds = Group(start_timeout_secs, partners=0)
        self.agreement = Agreement(self._rounds)
        self._start_timeout_secs, self._connect_timeout_secs = start_timeout_secs, connect_timeout_secs

    @property
    def broken(self) -> bool:
        """Whether some rank cannot be reached."""
        return self.group.broken or self.agreement.broken

    def give_up(self, reason: str) -> None:
        """Break both groups: other ranks that wait in one of them learn it."""
        self.group.give_up(reason)
        self._rounds.give_up(reason)

    def part(self, leave: Callable[[], None]) -> None:
        """``leave``, and nothing after it; raises as ``meet``."""
        self.meet("end", leave)
        self._rounds.close()

    def meet(self, place: str, action: Callable[[], T]) -> T:
        """Run ``action``, which is collective and can be repeated, at the end of the job, where all ranks come. A
        broken group is connected again for it, once. ``place`` is not used a second time.

        Raises:
            RuntimeError: of ``action``.
            LaunchError: the group could not be connected again.
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
