"""Connections between all ranks of a job, each made when it is first used, and the file descriptors they take.

A gloo group as torch makes it by itself connects each rank to every other at once: N descriptors in each of N
processes, 8·N³ bytes through the store, and a process that runs out of descriptors is terminated by gloo's thread,
which no handler catches. Most of these connections are never used: collectives over host memory go round a ring.
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
"""Of a group: it listens, has an event loop, and two connections of its ring, which a listener holds twice for a
moment."""

SPARE_DESCRIPTORS = 64
"""For what this process opens later: slots, logs, the SMP, what training itself opens."""

STALL_SECS = 1800.0
"""How long a rank may stand still, stopped or on a node that hangs, without breaking a group while training runs: as
long as torch's own collectives wait by default."""

_FOREVER = timedelta(days=365)
"""What gloo waits at most. A collective that it ends takes all of the group's connections with it, so ranks that are
late, but alive, must not come to it: whoever waits has a deadline of its own."""


_gloo: Any = ProcessGroupGloo  # torch's types leave out most of it
_IS_RECENT = "lazy_init" in (_gloo.create_device.__doc__ or "") and hasattr(_gloo, "set_timeout")
"""Older torch knows one timeout of a gloo group, for connecting and for collectives."""


def connect(name: str, store: Store, rank: int, size: int, timeout_secs: float) -> Any:
    """A gloo group of all ranks, unknown to torch's own list of groups: which ones a rank has made, and which it has
    failed to make, says nothing about those of the framework.

    ``name`` is new in ``store``. Collective; where connections are made when they are used it returns at once, and
    ``timeout_secs`` bounds the making of each.
    """
    options = _gloo._Options()
    options._devices = [_device(interface) for interface in _interfaces()]
    options._threads = 2 * len(options._devices)
    options._timeout = timedelta(seconds=timeout_secs)
    if not _IS_RECENT:
        # That timeout must outlast a stall, so ranks that do not come are waited for here.
        store.set(f"{name}/here/{rank}", "")
        store.wait([f"{name}/here/{one}" for one in range(size)], timedelta(seconds=timeout_secs))
        options._timeout = timedelta(seconds=max(timeout_secs, STALL_SECS))
    group = _gloo(PrefixStore(name, store), rank, size, options)
    if _IS_RECENT:
        group.set_timeout(_FOREVER)  # of collectives: connections keep that of the group's beginning
    return group


def is_lazy() -> bool:
    """Whether connections are made when they are used; other transports of gloo, and older torch, cannot do that."""
    return _IS_RECENT and os.environ.get("GLOO_DEVICE_TRANSPORT", "") in ("", "TCP")


def make_room(least: int, wanted: int, rank: int = 0) -> None:
    """See to it that this process may open ``least`` files more, and as many as it may of ``wanted``, by raising its
    soft limit where that is lower.

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
    """As torch reads it."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return [name for name in names.split(",") if name] or [""]


def _device(interface: str) -> Any:
    lazily = {"lazy_init": is_lazy()} if _IS_RECENT else {}
    if interface:
        return _gloo.create_device(interface=interface, **lazily)
    return _gloo.create_default_device(**lazily)
