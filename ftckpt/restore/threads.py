"""Bytes are hashed and copied on several cores at a time: one gets a fraction of what the memory of a node gives."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from ftckpt.model.topology import Topology

_MOST, _MOST_OF_NODE = 8, 32
"""Threads of a rank, and of all ranks of a node: so many are about what fills its memory."""

_LEAST = 4
"""Of a rank that has the cores, however many there are beside it: some of them have less to do."""

T = TypeVar("T")
R = TypeVar("R")


def threads_of(topology: Topology) -> int:
    """How many this rank may use: its part of the cores, or those to which it is bound."""
    cores, local = len(os.sched_getaffinity(0)), len(topology.ranks_on(topology.me.node))
    is_bound = cores < (os.cpu_count() or cores)
    most = min(_MOST, max(_LEAST, _MOST_OF_NODE // local))
    return max(1, min(most, cores if is_bound else cores // local))


def in_order(function: Callable[[T], R], items: Iterable[T], threads: int) -> Generator[R]:
    """As ``map``, a few items ahead on so many threads; nothing is begun any more when the caller stops."""
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
