"""How a rank reaches all others: two groups of their own, which are lost together, and connected anew together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ftckpt.errors import LaunchError
from ftckpt.group import Group
from ftckpt.job.agreement import Agreement
from ftckpt.job.reunion import Reunion
from ftckpt.job.session import Standing
from ftckpt.notice import job_store

T = TypeVar("T")


class Links:
    """``group`` carries collectives that ranks enter together, ``agreement`` the rounds of each snapshot.

    Where ranks cannot reach each other by one of the two they give up both.

    Args:
        start_timeout_secs: how long ranks wait for each other where the job begins and ends.
        renew_timeout_secs: and where they connect anew.
        group: of all ranks; a new one where None.
    """

    def __init__(self, start_timeout_secs: float, renew_timeout_secs: float, group: Group | None = None) -> None:
        self.group = group or Group(start_timeout_secs)
        # A group of its own: nothing else may come between two rounds, which pair up by their order alone.
        self.agreement = Agreement(Group(start_timeout_secs, partners=0))
        self._reunion = Reunion(job_store(), f"{self.group.name}/reunion", self.group.size)
        self._start_timeout_secs, self._renew_timeout_secs = start_timeout_secs, renew_timeout_secs

    @property
    def lost(self) -> bool:
        """Whether some rank cannot be reached."""
        return self.group.lost or self.agreement.lost

    @property
    def stopped(self) -> str:
        """Why some rank does not come any more; "" while all may."""
        return self._reunion.stopped

    def give_up(self, reason: str) -> None:
        """Both groups, as all ranks leave both together."""
        self.group.give_up(reason)
        self.agreement.give_up(reason)

    def stop(self, reason: str) -> None:
        """This rank does not connect anew: the others need not look for it."""
        self._reunion.stop(reason)

    def meets(self, iteration: int) -> str:
        """At each boundary while they are lost: the name under which all connect anew at this one, or ""."""
        return self._reunion.meets(iteration)

    def renew(self, name: str, standing: Standing) -> list[Standing]:
        """Connect all ranks anew, under the ``name`` of this boundary; returns what each of them knows. Collective.

        Raises:
            LaunchError, RuntimeError: not all could; they are given up again.
        """
        try:
            for group, part in ((self.agreement, "rounds"), (self.group, "calls")):
                group.renew(name, part, self._renew_timeout_secs)
            standings = [Standing.decode(data) for data in self.group.gather(standing.encode())]
        except (LaunchError, RuntimeError) as error:
            self.give_up(str(error))
            self._reunion.ended(well=False)
            raise
        self._reunion.ended(well=True)
        return standings

    def part(self, leave: Callable[[], None]) -> None:
        """``leave``, and nothing after it; raises as ``meet``."""
        self.meet("end", leave)
        self.agreement.close()

    def meet(self, place: str, action: Callable[[], T]) -> T:
        """``action``, which is collective and can be done twice: where all come to in the end, ranks that have lost
        each other meet once more. ``place`` is not used a second time.

        Raises:
            RuntimeError: of ``action``.
            LaunchError: connections could not be made anew.
        """
        begin = time.monotonic()
        try:
            return action()
        except RuntimeError:
            left_secs = self._start_timeout_secs - (time.monotonic() - begin)
            if not self.group.lost or left_secs <= 0:
                raise
            self.group.renew(f"{self._reunion.name}/{place}", "calls", min(left_secs, self._renew_timeout_secs))
            return action()
