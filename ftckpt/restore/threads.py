"""Threads that hash and copy bytes: one core uses only a fraction of a node's memory bandwidth."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from ftckpt.model.topology import Topology

_MOST, _MOST_OF_NODE = 8, 32
"""Maximum threads of a rank, and of all ranks of a node: about as many saturate the memory bandwidth."""

_LEAST = 4
"""Threads of a rank that has the cores, however many ranks its node has: some of them have less to do."""

T = TypeVar("T")
R = TypeVar("R")


def threads_of(topology: Topology) -> int:
    """The number of threads that this rank may use: its share of the cores, or the cores to which it is bound."""
    cores, local = len(os.sched_getaffinity(0)), len(topology.ranks_on(topology.me.node))
    is_bound = cores < (os.cpu_count() or cores)
    most = min(_MOST, max(_LEAST, _MOST_OF_NODE // local))
    return max(1, min(most, cores if is_bound else cores // local))


def in_order(function: Callable[[T], R], items: Iterable[T], threads: int) -> Generator[R]:
    """``map`` on ``threads``, a few items ahead; no item is started after the caller stops."""
    if threads == 1:
        yield from map(function, items)
        return
    waiting, coming = iter(items), deque[Future[R]]()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="ftckpt-bytes")
    try:
        coming.extend(pool.submit(function, item) for item in islice(waiting, 2 * threads))
        while coming:
            yield coming.popleft().result()
            coming.extend(pool.submit(function, item) for item in islice(waiting, 1))
    finally:
        pool.shutdown(cancel_futures=True)
