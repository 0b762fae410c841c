"""Limit of an SMP's use of its node's cores: a share of the idle ones, and a small part of that if none idles."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from ftckpt.config import BUSY_SHARE, MAX_REST_SECS

_LOOK_SECS = 1.0
"""Interval between samples of the cores: the kernel counts idle time in hundredths of a second."""
_FREE_SECS = 0.5
"""The full share of this time is free: small states need no more, and a start has many of them."""
_IDLE, _IOWAIT, _GUEST = 3, 4, 8
"""Columns of ``/proc/stat``. A core that waits for a disk is available; columns from guest on are counted twice."""


class CoreSecs(NamedTuple):
    """Idle and total time of some cores, in core seconds since boot."""

    idle: float
    all: float


def core_secs(cores: Collection[int]) -> CoreSecs | None:
    """Idle and total time of ``cores``; None if the system does not report it. Stolen time counts as used."""
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
    """Throttles this process: it computes when its CPU time so far, of all threads, is within its share of the idle
    cores, or within ``BUSY_SHARE`` of that share if none idles. No debt lasts longer than ``MAX_REST_SECS``.

    Args:
        cores: CPU seconds per second while all cores idle; 0: no limit.
        look: samples the cores; None: unknown, and all count as idle.
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
        """When the charged CPU time is paid off (``time.monotonic``)."""
        self._seen, self._seen_secs = look(), self._noted_secs
        self.idle = 1.0
        """The fraction of the cores that no other process used, at the last sample."""

    def note(self) -> None:
        """Charge the CPU time used since the last call."""
        if self._cores <= 0:
            return
        used_secs, now = self._used(), self._clock()
        # At the rate from which ``due_secs`` was computed.
        left_secs = max(0.0, self._debt_secs - self._rate * (now - self._noted))
        self._look_again(used_secs, now)
        free_secs = _FREE_SECS * self._cores
        # The guaranteed minimum: debt beyond ``MAX_REST_SECS`` is forgiven.
        most_secs = free_secs + MAX_REST_SECS * self._rate
        self._debt_secs = min(left_secs + used_secs - self._noted_secs, most_secs)
        self._noted_secs, self._noted = used_secs, now
        self.due_secs = now + max(0.0, self._debt_secs - free_secs) / self._rate

    def threads(self, most: int) -> int:
        """The number of threads to use: one per idle core, at most ``most``, at least 1."""
        return max(1, min(most, int(self.idle * len(os.sched_getaffinity(0)))))

    def _look_again(self, used_secs: float, now: float) -> None:
        if now - self._looked < _LOOK_SECS:
            return
        seen, before = self._look(), self._seen
        own_secs = used_secs - self._seen_secs
        self._seen, self._seen_secs, self._looked = seen, used_secs, now
        self.idle = 1.0
        if seen is not None and before is not None and (others_secs := seen.all - before.all - own_secs) > 0:
            # Relative to the time that this process left: counted as idle, its own use would entitle it to more.
            self.idle = min(1.0, max(0.0, seen.idle - before.idle) / others_secs)
        self._rate = self._cores * max(BUSY_SHARE, self.idle)
