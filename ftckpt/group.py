"""Collectives that ftckpt posts, all from the training thread, all with a deadline.

They run on a gloo group of their own, over host memory: no device stream is touched, and no collective of
the framework can come between.

When a rank is gone, gloo fails only where a connection to it was in use. Other ranks may be left in the same
collective, waiting for one that has failed, lives, and will not come again; training, which goes on where ftckpt
fails, would then wait for those. So a rank whose collective failed writes that it gives the group up into the store
of the job, and ranks that wait look there."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import takewhile
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from ftckpt import errors

log = logging.getLogger("ftckpt")

_FIRST_LOOK_SECS, _LONGEST_LOOK_SECS = 0.5, 10.0
"""How long a rank waits before it asks the store whether another gave up; it asks less and less often, since all
ranks of a large job ask the same store."""

_immortal: list[Any] = []
"""Groups, and the tensors of their latest and of all unfinished collectives, for as long as the process lives, even
without interpreter. A group that ends waits for its collectives: a rank that fails would end minutes later, and its
launcher would see it only then. And a thread of torch with the last reference to a tensor needs the interpreter to
let go of it; waiting for one that is at its end aborts the process."""
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_immortal))

T = TypeVar("T")
Bytes = bytes | bytearray | memoryview


class Group:
    """All ranks of the job. ``timeout_secs`` bounds every call that waits for other ranks.

    Collective: every rank constructs it, at the same point of its program. A collective that fails on one rank fails
    on all that wait in it, within some seconds, and the group is of no use from then on.

    Raises:
        RuntimeError: from torch.distributed, when a peer is gone or the deadline passes; when another rank gave the
            group up; when the store of the job, where ranks post that, cannot be reached.
    """

    def __init__(self, timeout_secs: float) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._timeout_secs = timeout_secs
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_secs))
        self._given_up = ""
        self._notice: Notice | None = None  # while its name is agreed on there is nothing to look for
        self._latest: list[torch.Tensor] = []
        self._minima: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._num_finished = 0  # of the minima, as of the last post
        _immortal.append((self._group, self._latest, self._minima))
        # A name of this attempt alone: some launchers keep one store for all of them.
        self._notice = Notice(f"ftckpt/given-up/{self.broadcast(os.urandom(8)).hex()}")

    def gather(self, data: Bytes) -> list[bytes]:
        """Every rank's ``data``, in rank order."""
        mine = torch.tensor([len(data)], dtype=torch.int64)
        # Lengths first: an all-gather takes tensors of one size, so all are padded to the longest.
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._run(lambda: dist.all_gather(sizes, mine, group=self._group, async_op=True), mine, *sizes)
        longest = max(int(size) for size in sizes)
        # Known to all ranks alike: none of them posts a second collective.
        if longest == 0:
            return [b""] * self.size
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = _tensor(data)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        self._run(lambda: dist.all_gather(parts, padded, group=self._group, async_op=True), padded, *parts)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def broadcast(self, data: bytes, source: int = 0) -> bytes:
        """``data`` of rank ``source``; its length must be the same on all ranks."""
        tensor = _tensor(data)
        self._run(lambda: dist.broadcast(tensor, src=source, group=self._group, async_op=True), tensor)
        return tensor.numpy().tobytes()

    def barrier(self) -> None:
        """Return when every rank is here."""
        self.gather(b"")

    def start_send(self, data: torch.Tensor, to: int, tag: int = 0) -> dist.Work:
        """Post a message, a contiguous 1-D uint8 tensor; when its ``wait`` returns, ``data`` may be overwritten.

        Messages of one ``tag`` between two ranks are received in the order in which they were sent.
        """
        return self._try(lambda: dist.isend(data, dst=to, group=self._group, tag=tag))

    def start_receive(self, into: torch.Tensor, source: int, tag: int = 0) -> dist.Work:
        """Post the receipt of a message of exactly the size of ``into``, which is filled when ``wait`` returns."""
        return self._try(lambda: dist.irecv(into, src=source, group=self._group, tag=tag))

    def start_minimum(self, values: Sequence[int]) -> tuple[dist.Work, torch.Tensor]:
        """Post an element-wise MIN; returns the work, for ``finish``, and the tensor that will have it."""
        tensor = torch.tensor(list(values), dtype=torch.int64)
        work = self._try(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group, async_op=True))
        # gloo writes into the tensor after the caller may have forgotten it: it must outlive the collective.
        # No number bounds those that are not finished: a rank posts one at each snapshot, whether it could read the
        # one before in time or not. Time does. They are read before the next slot is needed; a rank that reads none
        # for ``error_limit`` snapshots turns all off; and gloo ends each that is older than the group's deadline.
        # One that is finished stays until the next is posted, a snapshot later: torch says so a moment before its
        # thread lets go of the tensor.
        for _ in range(self._num_finished):
            self._minima.popleft()
        self._num_finished = sum(1 for _ in takewhile(lambda posted: posted[0].is_completed(), self._minima))
        self._minima.append((work, tensor))
        return work, tensor

    def finish(self, work: dist.Work, timeout_secs: float) -> bool:
        """Wait for a collective that was posted; False: it is not finished within ``timeout_secs``."""
        deadline, look_secs = time.monotonic() + timeout_secs, _FIRST_LOOK_SECS
        while True:
            left = deadline - time.monotonic()
            try:
                # In pieces: that another rank gave up shows in the store alone. torch takes a timeout of 0 for none.
                work.wait(timedelta(seconds=max(0.001, min(left, look_secs))))
                return True
            except RuntimeError:
                # A wait that ran out raises as a collective that failed does; only the latter is completed.
                if work.is_completed():
                    self._try(work.wait)  # at once: it came in this instant, or it raises what made it fail
                    return True
            if time.monotonic() >= deadline:
                return False
            self._look()
            look_secs = min(2 * look_secs, _LONGEST_LOOK_SECS)

    def _run(self, post: Callable[[], dist.Work | None], *tensors: torch.Tensor) -> None:
        # In place: the list is among what outlives the interpreter.
        self._latest[:] = tensors
        if not self.finish(self._try(post), self._timeout_secs):
            self._give_up(f"the other ranks did not come within {self._timeout_secs:g} s")
            raise RuntimeError(self._given_up)

    def _try(self, action: Callable[[], T | None]) -> T:
        if self._given_up:
            raise RuntimeError(self._given_up)
        try:
            value = action()
        except RuntimeError as error:
            self._give_up(str(error))
            raise
        if value is None:  # torch gives no work to a process that is no member of the group
            raise RuntimeError("this process is not in ftckpt's group")
        return value

    def _give_up(self, reason: str) -> None:
        # For good: from here on ranks may stand in different collectives, which would answer each other.
        self._given_up = f"rank {self.rank} gave up: {reason}"
        if self._notice is not None:
            self._notice.post(self._given_up)

    def _look(self) -> None:
        """Raises when another rank has given up. Where the store does not answer the deadline of the call holds."""
        if self._notice is not None and not self._given_up:
            self._given_up = self._notice.read()
        if self._given_up:
            raise RuntimeError(self._given_up)


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
        # As text, not as a pickle: the class is looked up among ftckpt's own on the other side.
        failure = json.dumps([type(error).__name__, str(error)])
    except Exception as error:
        log.exception("ftckpt: rank %d failed", group.rank)
        failure = json.dumps(["FtckptError", f"{type(error).__name__}: {error}"])
    # Every rank comes here, failed or not: nobody waits for one that does not come.
    for rank, text in enumerate(group.gather(failure.encode())):
        if text:
            name, message = json.loads(text)
            raise getattr(errors, name, errors.FtckptError)(f"rank {rank}: {message}")
    return cast(T, value)


_PATIENCE_SECS = 1.0
"""How long a rank waits for the store at a stretch."""


class Notice:
    """One notice, at ``name`` in the store of torch's default process group."""

    def __init__(self, name: str) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._name = name
        self._lookup: _Call | None = None

    def post(self, text: str) -> None:
        """Write the notice, if the store answers: otherwise the others find out by themselves."""
        if self._lookup is None or self._lookup.ended():
            _Call(lambda: self._store.set(self._name, text)).ended()

    def read(self) -> str:
        """What somebody posted, or that the store cannot be reached; "" if there is nothing, or no answer yet."""
        # One at a time: a store that does not answer must not collect threads.
        self._lookup = self._lookup or _Call(self._look_up)
        if not self._lookup.ended():
            return ""
        text, self._lookup = self._lookup.value, None
        return text or ""

    def _look_up(self) -> str:
        try:
            return self._store.get(self._name).decode() if self._store.check([self._name]) else ""
        except RuntimeError as error:
            return f"the job's store cannot be reached: {error}"


class _Call:
    """A call of the store on a thread of its own; ``value`` is what it returned."""

    def __init__(self, call: Callable[[], str | None]) -> None:
        self.value: str | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, name="ftckpt-store", daemon=True)
        self._thread.start()

    def ended(self) -> bool:
        """Whether the call has ended, now or within moments."""
        self._thread.join(_PATIENCE_SECS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.value = self._call()
