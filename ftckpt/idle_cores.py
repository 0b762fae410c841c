"""Whether a core has nothing to run, for work in the background that would take it from training."""

from __future__ import annotations

import os
from pathlib import Path

_LOAD = Path("/proc/loadavg")


def has_idle_core() -> bool:
    """Whether fewer threads than the machine has cores run or wait for one, the caller aside; True where the system
    does not tell, and where this process may run on some of the cores alone, of which nobody knows."""
    num_cores = os.cpu_count() or 1
    try:
        runnable = int(_LOAD.read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return True
    return runnable - 1 < num_cores or len(os.sched_getaffinity(0)) < num_cores
