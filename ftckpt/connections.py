"""Lazy connections between all ranks of a job, and the limit of file descriptors.

By default torch's gloo groups connect all pairs of ranks at once: N descriptors in each of N processes and 8·N³ bytes
through the store. If a process runs out of descriptors, gloo's thread terminates it, which no handler can catch. Most
of these connections are never used, because collectives over host memory use a ring.
"""

from __future__ import annotations

import logging
import os
import resource
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroupGloo

from ftckpt.errors import LaunchError

log = logging.getLogger("ftckpt")

OWN_DESCRIPTORS = 8
"""Descriptors of a group: a listener, an event loop, and two ring connections, which temporarily count twice."""

SPARE_DESCRIPTORS = 64
"""Descriptors reserved for files opened later: slots, logs, the SMP, training's own files."""

STALL_SECS = 1800.0
"""How long a rank may stall, stopped or on a hanging node, without breaking a group while training runs: the default
timeout of torch's collectives."""

_FOREVER = timedelta(days=365)
"""gloo's timeout. A collective that times out in gloo closes all connections of the group, which would break it for
ranks that are only late. So callers have their own deadlines."""


_gloo: Any = ProcessGroupGloo  # torch's type stubs lack most of it
_IS_RECENT = "lazy_init" in (_gloo.create_device.__doc__ or "") and hasattr(_gloo, "set_timeout")
"""Older torch has one timeout per gloo group, for connecting and for collectives."""


def connect(name: str, store: Store, rank: int, size: int, timeout_secs: float) -> Any:
    """Creates a gloo group of all ranks, outside of torch's list of groups, whose order must agree between ranks.

    ``name`` must be new in ``store``. Collective; with lazy connections it returns at once. ``timeout_secs`` limits
    the creation of each connection.
    """
    options = _gloo._Options()
    options._devices = [_device(interface) for interface in _interfaces()]
    options._threads = 1  # collectives run in order, see ``Group``
    options._timeout = timedelta(seconds=timeout_secs)
    if not _IS_RECENT:
        # The group's timeout must outlast a stall, so missing ranks are detected here.
        store.set(f"{name}/here/{rank}", "")
        store.wait([f"{name}/here/{one}" for one in range(size)], timedelta(seconds=timeout_secs))
        options._timeout = timedelta(seconds=max(timeout_secs, STALL_SECS))
    group = _gloo(PrefixStore(name, store), rank, size, options)
    if _IS_RECENT:
        group.set_timeout(_FOREVER)  # for collectives; connections keep the initial timeout
    return group


def is_lazy() -> bool:
    """Whether connections are created on first use; not supported by other transports of gloo and by older torch."""
    return _IS_RECENT and os.environ.get("GLOO_DEVICE_TRANSPORT", "") in ("", "TCP")


def make_room(least: int, wanted: int, rank: int = 0) -> None:
    """Raises the soft limit if needed, so that this process may open ``wanted`` more files, at least ``least``.

    Raises:
        LaunchError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    there = len(os.listdir("/proc/self/fd"))
    if soft == resource.RLIM_INFINITY or there + wanted <= soft:
        return
    most = there + wanted if hard == resource.RLIM_INFINITY else min(hard, there + wanted)
    if there + least > most:
        raise LaunchError(
            f"ulimit -n: this process needs {there + least} open files, connections to other ranks among them, and "
            f"its hard limit is {hard}; raise it (ulimit -Hn, LimitNOFILE of a service, --ulimit of a container)"
        )
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if rank == 0:
            log.info("ftckpt: open files of each rank: limit raised from %d to %d (ulimit -n)", soft, most)


def _interfaces() -> list[str]:
    """The interfaces in GLOO_SOCKET_IFNAME, parsed as torch does."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return [name for name in names.split(",") if name] or [""]


def _device(interface: str) -> Any:
    lazily = {"lazy_init": is_lazy()} if _IS_RECENT else {}
    if interface:
        return _gloo.create_device(interface=interface, **lazily)
    return _gloo.create_default_device(**lazily)
