"""Collectives that ftckpt posts, all from the training thread, all with a deadline.

They run on a gloo group of their own, over host memory: no device stream is touched, and no collective of
the framework can come between.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from ftckpt import errors

log = logging.getLogger("ftckpt")

_latest: list[torch.Tensor] = []
"""Tensors of the latest collective. A thread of torch may let go of them after the call has returned; were it the
last to hold them it would need the interpreter, and waiting for one that is at its end aborts the process."""

T = TypeVar("T")
Bytes = bytes | bytearray | memoryview


class Group:
    """All ranks of the job. ``timeout_secs`` bounds every call that waits for other ranks.

    Collective: every rank constructs it, at the same point of its program.

    Raises:
        RuntimeError: from torch.distributed, when a peer is gone or the deadline passes.
    """

    def __init__(self, timeout_secs: float) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_secs))

    def gather(self, data: Bytes) -> list[bytes]:
        """Every rank's ``data``, in rank order."""
        mine = torch.tensor([len(data)], dtype=torch.int64)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        _latest[:] = [mine, *sizes]
        dist.all_gather(sizes, mine, group=self._group)
        longest = max(int(size) for size in sizes)
        if longest == 0:
            return [b""] * self.size
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = _tensor(data)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        _latest[:] = [padded, *parts]
        dist.all_gather(parts, padded, group=self._group)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def broadcast(self, data: bytes, source: int = 0) -> bytes:
        """``data`` of rank ``source``; its length must be the same on all ranks."""
        tensor = _tensor(data).clone()
        dist.broadcast(tensor, src=source, group=self._group)
        return tensor.numpy().tobytes()

    def barrier(self) -> None:
        """Return when every rank is here."""
        self.gather(b"")

    def start_send(self, data: torch.Tensor, to: int, tag: int = 0) -> dist.Work:
        """Post a message, a contiguous 1-D uint8 tensor; when its ``wait`` returns, ``data`` may be overwritten.

        Messages of one ``tag`` between two ranks are received in the order in which they were sent.
        """
        return _posted(dist.isend(data, dst=to, group=self._group, tag=tag))

    def start_receive(self, into: torch.Tensor, source: int, tag: int = 0) -> dist.Work:
        """Post the receipt of a message of exactly the size of ``into``, which is filled when ``wait`` returns."""
        return _posted(dist.irecv(into, src=source, group=self._group, tag=tag))

    def start_minimum(self, values: Sequence[int]) -> tuple[Any, torch.Tensor]:
        """Post an asynchronous element-wise MIN; returns the work and the tensor that will hold it."""
        tensor = torch.tensor(list(values), dtype=torch.int64)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
        return work, tensor


class Told(NamedTuple):
    """What all ranks said with the ``number``-th snapshot.

    ``stretch`` is the largest wish, ``newest`` the iteration that all had sealed (-1: not the same one), ``target``
    the one that all took for the target (-1: not the same one), ``cover`` the least that any said of it.
    """

    number: int
    stretch: int
    newest: int
    target: int
    cover: int


class Answer(NamedTuple):
    """Newest iteration sealed by all, the least willing rank, and each answer on the way to this one.

    Every rank reads the same sequence of ``told``, though not the same number of them at a time.
    """

    newest: int
    willing: int
    told: tuple[Told, ...]


class Agreement:
    """What all ranks know together, by one asynchronous MIN all-reduce per snapshot.

    Each rank posts once per snapshot, whether it took it or not, so the n-th posts of all ranks belong
    together. A rank posts the newest iteration that it has sealed, how willing it is to take the next
    snapshot: ``GO``, ``SKIP`` (all skip it) or ``OFF`` (all turn ftckpt off), by how much it wishes the
    interval of snapshots to be stretched, and whether its node has done its part for the snapshot that is to be
    protected: ``DONE``, ``WORKING`` or ``CANNOT``.
    """

    GO, SKIP, OFF = 1, 0, -1
    DONE, WORKING, CANNOT = 1, 0, -1

    def __init__(self, group: Group) -> None:
        self._group = group
        self._pending: deque[tuple[int, Any, torch.Tensor]] = deque()
        self._told: list[Told] = []
        self._newest = -1

    def post(
        self, newest: int, willing: int, number: int = 0, stretch: int = 1, *, target: int = -1, cover: int = DONE
    ) -> None:
        """Say what this rank has, with the ``number``-th snapshot; never waits."""
        values = (newest, -newest, willing, -stretch, target, -target, cover)
        self._pending.append((number, *self._group.start_minimum(values)))

    def read(self, timeout_secs: float) -> Answer | None:
        """The last answer, or None when one is still missing.

        An answer older than the last post is not given: slots may have been reused since, by ranks that
        know more.

        Raises:
            RuntimeError: the answer will never come, because a rank is gone or later than the group's timeout.
        """
        deadline = time.monotonic() + timeout_secs
        willing = self.GO
        while self._pending:
            number, work, tensor = self._pending[0]
            try:
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except RuntimeError:
                if not work.is_completed():
                    return None
                work.wait()  # at once: it came in this instant, or it raises what made it fail
            self._pending.popleft()
            least, neg_most, willing, neg_stretch, target, neg_target, cover = tensor.tolist()
            # A rank that has a newer one may have dropped the least one: only what all name is whole.
            alike = least == -neg_most
            self._newest = least if alike else self._newest
            target = target if target == -neg_target else -1
            self._told.append(Told(number, -neg_stretch, least if alike else -1, target, cover))
            if willing == self.OFF:
                break
        told, self._told = tuple(self._told), []
        newest, self._newest = self._newest, -1
        return Answer(newest, willing, told)


def _posted(work: dist.Work | None) -> dist.Work:
    """torch gives no work to a process that is no member of the group; all ranks are members of ours."""
    if work is None:
        raise RuntimeError("this process is not in ftckpt's group")
    return work


def _tensor(data: Bytes) -> torch.Tensor:
    if len(data) == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def together(group: Group, action: Callable[[], T]) -> T:
    """Run ``action`` on every rank; when it fails on one, raise that error on all of them.

    Collective: a rank that failed alone would leave the others waiting for it.

    Raises:
        FtckptError: the error of the lowest failing rank, naming it: of the same class if it is one of ftckpt's.
    """
    failure = ""
    value: T | None = None
    try:
        value = action()
    except errors.FtckptError as error:
        failure = json.dumps([type(error).__name__, str(error)])
    except Exception as error:
        log.exception("ftckpt: rank %d failed", group.rank)
        failure = json.dumps(["FtckptError", f"{type(error).__name__}: {error}"])
    for rank, text in enumerate(group.gather(failure.encode())):
        if text:
            name, message = json.loads(text)
            raise getattr(errors, name, errors.FtckptError)(f"rank {rank}: {message}")
    return cast(T, value)
