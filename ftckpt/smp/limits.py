"""What an SMP may take of a node that trains."""

from __future__ import annotations

import os
import resource
import threading

DATA_LIMIT_BYTES = 1 << 30
"""Of private writable memory (RLIMIT_DATA): mapped arenas do not count. By itself the process needs some 40 MB."""
_STACK_BYTES = 1 << 20


def bound_process() -> None:
    """Lowest priority, bounded memory, as many descriptors as allowed."""
    os.nice(19)
    threading.stack_size(_STACK_BYTES)
    for limit, wanted in ((resource.RLIMIT_DATA, DATA_LIMIT_BYTES), (resource.RLIMIT_NOFILE, None)):
        _, hard = resource.getrlimit(limit)
        soft = hard if wanted is None else wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(limit, (soft, hard))


def anon_bytes() -> int:
    """Memory of this process that is its own: neither files nor arenas."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon:"))
