"""The two groups through which a rank reaches all others. They break together, and are connected again at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ftckpt.group import Group
from ftckpt.job.agreement import Agreement

T = TypeVar("T")


class Links:
    """``group`` carries collectives that ranks enter together, ``agreement`` the rounds of each snapshot.

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

    def begin_training(self) -> None:
        """From here on a rank that is stopped for long breaks nothing: the framework's own groups wait for it too."""
        self.group.outlast_stalls()

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
