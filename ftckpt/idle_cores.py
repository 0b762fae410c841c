"""Whether a core has nothing to run, for work in the background that would take it from training."""

from __future__ import annotations

import os
import threading


def has_idle_core() -> bool:
    """Whether fewer threads than the machine has cores run or wait for one, the caller aside; True where the system
    does not tell."""
    try:
        with open("/proc/loadavg") as file:
            runnable = int(file.read().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return True
    return runnable - 1 < (os.cpu_count() or 1)


def waits(thread: threading.Thread) -> bool:
    """Whether a thread of this process sleeps, for a device, other ranks or a timer."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "R"
    except (OSError, IndexError):
        return True
