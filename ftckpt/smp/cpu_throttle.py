"""What an SMP takes of its node's cores: a share of those that idle, and of the others little."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from ftckpt.config import BUSY_SHARE, MAX_REST_SECS

_LOOK_SECS = 1.0
"""Between two looks at the cores: what idled is counted in hundredths of a second."""
_FREE_SECS = 0.5
"""What the whole share comes to in this time is never waited for: small states need no more, and a start has many of
them."""
_IDLE, _IOWAIT, _GUEST = 3, 4, 8
"""Columns of ``/proc/stat``. Where a core waits for a disk others may have it; those from guest on count twice."""


class CoreSecs(NamedTuple):
    """What cores were there for, in seconds of one core since boot."""

    idle: float
    all: float


def core_secs(cores: Collection[int]) -> CoreSecs | None:
    """Of ``cores``; None where the system does not tell. What a hypervisor took for others was not idle."""
    idle = everything = 0
    try:
        with open("/proc/stat") as file:
            for line in file:
                name, *columns = line.split(None, 11)[:11]
                if not name.startswith("cpu"):
                    break
                if name[3:].isdigit() and int(name[3:]) in cores:
                    ticks = [int(column) for column in columns[:_GUEST]]
                    idle += ticks[_IDLE] + ticks[_IOWAIT]
                    everything += sum(ticks)
    except (OSError, ValueError, IndexError):
        return None
    ticks_per_sec = os.sysconf("SC_CLK_TCK")
    return CoreSecs(idle / ticks_per_sec, everything / ticks_per_sec)


class CoreShare:
    """Pays for processor time: when all that this process has taken, its threads and what went to storage among it,
    is no more than its share of the cores that idle, and a part of that where none does. However much it has taken,
    that is paid after ``MAX_REST_SECS``.

    Args:
        cores: processor seconds for each second while all cores idle; 0: any.
        look: at the cores; None: unknown, and all count as idle.
    """

    def __init__(
        self,
        cores: float,
        look: Callable[[], CoreSecs | None] = lambda: None,
        used: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cores, self._rate = cores, cores
        self._look, self._used, self._clock = look, used, clock
        self._debt_secs, self._noted_secs = 0.0, used()
        self.due_secs = self._noted = self._looked = clock()
        """When it is paid for what was noted, by ``time.monotonic``."""
        self._seen, self._seen_secs = look(), self._noted_secs
        self.idle = 1.0
        """The part of the cores that nobody wanted but this process, when they were last looked at."""

    def note(self) -> None:
        """Charge what was taken since the last call."""
        if self._cores <= 0:
            return
        used_secs, now = self._used(), self._clock()
        # At the rate by which it was told when it would be paid for.
        left_secs = max(0.0, self._debt_secs - self._rate * (now - self._noted))
        self._look_again(used_secs, now)
        free_secs = _FREE_SECS * self._cores
        # The guaranteed minimum: what is not paid by then never is.
        most_secs = free_secs + MAX_REST_SECS * self._rate
        self._debt_secs = min(left_secs + used_secs - self._noted_secs, most_secs)
        self._noted_secs, self._noted = used_secs, now
        self.due_secs = now + max(0.0, self._debt_secs - free_secs) / self._rate

    def threads(self, most: int) -> int:
        """How many threads may compute at a time: ``most`` where so many cores idle, at least 1."""
        return max(1, min(most, int(self.idle * len(os.sched_getaffinity(0)))))

    def _look_again(self, used_secs: float, now: float) -> None:
        if now - self._looked < _LOOK_SECS:
            return
        seen, before = self._look(), self._seen
        own_secs = used_secs - self._seen_secs
        self._seen, self._seen_secs, self._looked = seen, used_secs, now
        self.idle = 1.0
        if seen is not None and before is not None and (others_secs := seen.all - before.all - own_secs) > 0:
            # Of what this process left: counted as idle, what it took from training would let it take that again.
            self.idle = min(1.0, max(0.0, seen.idle - before.idle) / others_secs)
        self._rate = self._cores * max(BUSY_SHARE, self.idle)
