"""What leaves cores and disks to training; an SMP does so first, and nothing of weight is imported for it."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""The number of the system call: the C library has no name for it."""
_IOPRIO_WHO_PROCESS, _IOPRIO_CLASS_IDLE, _IOPRIO_CLASS_SHIFT = 1, 3, 13

NICE = 5
"""A seventh of a core beside two threads that spin on it, as ranks do that wait for their network; at 19 it is a
140th, and neither signs of life nor parity come in time. ``benchmarks/smp_priority.py`` measures it.

Where the kernel weighs sessions against each other, the session gets it as well: the process's own then says nothing
beyond it, and an SMP alone in one would take as much as all threads of a rank together."""


def yield_to_training(own_session: bool) -> None:
    """Training's threads come first, and leave this process a share of each core. Whatever is refused is left."""
    os.nice(NICE)  # from the starter's on, which may be nice itself
    with suppress(OSError):
        # It takes no core from a thread that runs at the moment when this one wakes.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if own_session:  # others in it would be slowed, too
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(NICE))


def yield_disks() -> None:
    """This thread, and those that it starts, read and write when nobody else does. Whatever is refused is left."""
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_CLASS_IDLE << _IOPRIO_CLASS_SHIFT)
