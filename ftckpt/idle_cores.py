"""Detection of idle cores, for background work that would otherwise preempt training."""

from __future__ import annotations

import os
from pathlib import Path

_LOAD = Path("/proc/loadavg")


def has_idle_core() -> bool:
    """Whether the machine has more cores than runnable threads, without the caller.

    True if this is unknown: the system does not report it, or the process is bound to some of the cores."""
    num_cores = os.cpu_count() or 1
    try:
        runnable = int(_LOAD.read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return True
    return runnable - 1 < num_cores or len(os.sched_getaffinity(0)) < num_cores
