"""Bytes are hashed and copied on several cores at a time: one gets a fraction of what the memory of a node gives."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import TypeVar

import torch

from ftckpt.model.topology import Topology

_MOST = 4
"""Threads of a rank: what eight ranks of a node have then is about what fills its memory."""

T = TypeVar("T")
R = TypeVar("R")


def threads_of(topology: Topology) -> int:
    """How many this rank may use: its part of the cores, or those to which it is bound."""
    cores, local = len(os.sched_getaffinity(0)), len(topology.ranks_on(topology.me.node))
    is_bound = cores < (os.cpu_count() or cores)
    return max(1, min(_MOST, cores if is_bound else cores // local))


def in_order(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
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


def here() -> Callable[[], AbstractContextManager[object]]:
    """For a thread that copies to a device: its copies stand on the stream on which this thread's would."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return nullcontext
    stream = torch.cuda.current_stream()
    return lambda: torch.cuda.stream(stream)
