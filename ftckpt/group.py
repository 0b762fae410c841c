"""ftckpt's collectives: all called from the training thread, all with a deadline.

They run on their own gloo group, over host memory, so they touch no device stream and do not interleave with
collectives of the framework.

If a rank dies, gloo fails only on ranks with an active connection to it. The others would wait in the same collective
for ranks that have failed and returned, and training, which continues on those, would wait for the others. So a rank
whose collective fails posts a notice in the job's store that the group is broken, and waiting ranks poll for it."""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import GenericAlias
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from ftckpt import forks
from ftckpt.array_types import Buffer, Integers
from ftckpt.connections import OWN_DESCRIPTORS, SPARE_DESCRIPTORS, STALL_SECS, connect, is_lazy, make_room
from ftckpt.errors import FtckptError, LaunchError, error_from_json, in_words
from ftckpt.host_memory import host_memory
from ftckpt.model import codec
from ftckpt.notice import Notice, job_store

log = logging.getLogger("ftckpt")

_FIRST_LOOK_SECS, _LONGEST_LOOK_SECS = 0.5, 10.0
"""First and maximum interval between polls of the store for another rank's notice; it doubles in between."""

_CALM_RANKS = 200
"""Number of ranks up to which these intervals apply; larger jobs poll less often: the store's load is constant."""

_FRAME_HEAD_BYTES = 8
_LEAST_FRAME_BYTES, _MOST_FRAME_BYTES, _FRAMES_BYTES = 1 << 10, 16 << 10, 64 << 10
"""A gather of data up to the frame size needs one round of messages, of more data two. A rank's description of its
arena fits into the minimum; small jobs have larger frames, of ``_FRAMES_BYTES`` in total."""

_immortal: list[Any] = []
"""Groups, and tensors that torch threads may reference, kept for the life of the process, even after the interpreter.
A group's destructor waits for its collectives: a failed rank would exit, and its launcher detect it, minutes later. A
torch thread that releases the last C++ reference to a tensor needs the interpreter; during finalization that aborts
the process."""
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_immortal))

_DONE, _FAILED = b"+", b"-"

_MINIMUM = dist.AllreduceOptions()
_MINIMUM.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]

T = TypeVar("T")


_MOST_NAMED = 8
"""Maximum number of ranks named in a message."""


class Group:
    """All ranks of the job. ``timeout_secs`` limits every call that waits for other ranks.

    The constructor is collective. All methods are called from the training thread. A collective that fails on one
    rank fails on all waiting ranks within seconds. The group is ``broken`` then, until all ranks ``renew`` it. A late
    collective does not break it: it completes when the last rank arrives.

    Collectives use only ring connections; with messages a rank may have connections to ``partners`` other ranks, by
    default all.

    Raises:
        LaunchError: this process may not open enough files (``ulimit -n``), or ranks are missing.
        RuntimeError: from torch.distributed if a peer is lost; a deadline passed; another rank broke the group; or
            the job's store is unreachable.
    """

    def __init__(self, timeout_secs: float, partners: int | None = None) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._frame_bytes = min(_MOST_FRAME_BYTES, max(_LEAST_FRAME_BYTES, _FRAMES_BYTES // self.size))
        self.timeout_secs = timeout_secs
        self._first_look_secs, self._longest_look_secs = look_secs(self.size)
        others = self.size - 1 if partners is None else partners
        self._descriptors = OWN_DESCRIPTORS + others + SPARE_DESCRIPTORS
        store = job_store()
        # Counted in the store, because ranks may restart within a living process.
        number = store.add(f"ftckpt/groups/{self.rank}", 1)
        self._notice: Notice | None = None  # until ranks have agreed on its name
        begin = time.monotonic()
        try:
            self._connect(f"ftckpt/group/{number}")
            # Collective, because a rank that raises alone would leave the others waiting.
            words = gather_bytes(self, self._begin)
        except RuntimeError as error:
            names = {str(rank): f"ftckpt/groups/{rank}" for rank in range(self.size)}
            is_late = time.monotonic() - begin >= timeout_secs  # before that, others may still be starting
            if is_late and (absent := [rank for rank, name in names.items() if not store.check([name])]):
                raise LaunchError(
                    f"rank(s) {', '.join(absent[:_MOST_NAMED])} did not start ftckpt within {timeout_secs:g} s: "
                    "switch it on for all ranks or none; if some start slowly, raise --ftckpt-start-timeout-secs"
                ) from error
            raise
        # Unique per attempt, because some launchers keep one store for all attempts.
        self.name = f"ftckpt/group/{words[0].hex()}"
        self._notice = Notice(f"{self.name}/given-up")

    def _begin(self) -> bytes:
        make_room(self._descriptors, self._descriptors, self.rank)
        return os.urandom(8)

    @property
    def broken(self) -> bool:
        """Whether a collective has failed."""
        return bool(self._given_up)

    def give_up(self, reason: str) -> None:
        """Breaks the group and notifies ranks that wait in a collective."""
        if not self._given_up:
            self._give_up(reason)

    def outlast_stalls(self) -> None:
        """Raises the timeout to the longest stall of a rank that is tolerated while training runs."""
        self.timeout_secs = max(self.timeout_secs, STALL_SECS)

    def renew(self, name: str, timeout_secs: float) -> None:
        """Reconnects all ranks, whether the group is broken or not, under a new ``name``. Collective.

        Raises:
            LaunchError, RuntimeError: the group is broken again.
        """
        self._notice = Notice(f"{name}/given-up")
        try:
            self._connect(name)
            self._gather(b"", timeout_secs)
        except (LaunchError, RuntimeError) as error:
            self.give_up(str(error))
            raise

    def _connect(self, name: str) -> None:
        self._given_up = ""
        self._posted: list[tuple[dist.Work, tuple[torch.Tensor, ...]]] = []
        """Collectives in order, each with its tensors, until a later one is complete."""
        make_room(OWN_DESCRIPTORS + (0 if is_lazy() else self.size), self._descriptors, self.rank)
        self._group = connect(name, job_store(), self.rank, self.size, self.timeout_secs)
        # By the shape of the values.
        self._spare: defaultdict[tuple[int, ...], list[CollectiveBuffer]] = defaultdict(list)
        self._kept: list[Any] = [self._group, self._posted, self._spare]
        _immortal.append(self._kept)

    def close(self) -> None:
        """Releases connections and their threads, after all ranks have agreed that no collective will follow.

        They are not released while a collective is unfinished, because the destructor would wait for it; nor after
        this process has forked a child: its copies of closed connections stay in gloo's epoll set, and an event of
        one would abort or hang this process.
        """
        self._given_up = self._given_up or f"rank {self.rank} has closed the group"
        if not forks.has_forked and all(work.is_completed() for work, _ in self._posted):
            self._kept[0] = None  # the tensors stay
            del self._group

    def gather(self, data: Buffer) -> list[bytes]:
        """Every rank's ``data``, in rank order."""
        return self._gather(data, self.timeout_secs)

    def _gather(self, data: Buffer, timeout_secs: float) -> list[bytes]:
        # An all-gather needs equal sizes: a frame has the length and the first bytes, which usually are all.
        room = self._frame_bytes - _FRAME_HEAD_BYTES
        begin, end = memoryview(data).cast("B")[:room], memoryview(data).cast("B")[room:]
        head = len(data).to_bytes(_FRAME_HEAD_BYTES, "little")
        frames = self._all_gather(head + begin, self._frame_bytes, timeout_secs)
        sizes = [int.from_bytes(frame[:_FRAME_HEAD_BYTES], "little") for frame in frames]
        begins = [frame[_FRAME_HEAD_BYTES:][:size] for frame, size in zip(frames, sizes, strict=True)]
        longest = max(sizes) - room
        # The same on all ranks, so none of them posts a second collective.
        if longest <= 0:
            return begins
        ends = self._all_gather(end, longest, timeout_secs)
        lengths = (max(0, size - room) for size in sizes)
        return [first + rest[:length] for first, rest, length in zip(begins, ends, lengths, strict=True)]

    def _all_gather(self, data: Buffer, nbytes: int, timeout_secs: float) -> list[bytes]:
        """``data`` of all ranks, each padded to ``nbytes``."""
        padded = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        padded[: len(data)] = _tensor(data)
        parts = [host_memory(nbytes) for _ in range(self.size)]
        self._run(lambda: self._group.allgather([parts], [padded]), timeout_secs, padded, *parts)
        return [part.numpy().tobytes() for part in parts]

    def broadcast(self, data: bytes, source: int = 0) -> bytes:
        """``data`` of rank ``source``; its length must be the same on all ranks."""
        tensor = _tensor(data)
        self._run(lambda: self._group.broadcast(tensor, source), self.timeout_secs, tensor)
        return tensor.numpy().tobytes()

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self.gather(b"")

    def start_send(self, data: torch.Tensor, to: int, tag: int = 0) -> Message:
        """Posts a message, a contiguous 1-D uint8 tensor; when its ``wait`` returns, ``data`` may be overwritten.

        Messages with the same ``tag`` between two ranks are received in order.
        """
        return Message(self._try(lambda: self._group.send([data], to, tag)), self.timeout_secs)

    def start_receive(self, into: torch.Tensor, source: int, tag: int = 0) -> Message:
        """Posts the receipt of a message of exactly the size of ``into``, which is filled when ``wait`` returns."""
        return Message(self._try(lambda: self._group.recv([into], source, tag)), self.timeout_secs)

    def start_minimum(self, values: Sequence[int]) -> tuple[dist.Work, CollectiveBuffer]:
        """Posts an element-wise MIN; returns the work, for ``finish``, and the buffer of the result."""
        posted = self._memory(len(values))
        posted.values[:] = values
        return self._post(lambda: self._group.allreduce([posted.tensor], _MINIMUM), posted.tensor), posted

    def start_gather(self, values: Integers) -> tuple[dist.Work, CollectiveBuffer]:
        """Posts an all-gather of equally many values of all ranks; returns the work, for ``finish``, and the buffer
        of the result, with one row per rank."""
        posted = self._memory(self.size, len(values))
        posted.own.numpy()[:] = values
        post = lambda: self._group._allgather_base(posted.tensor, posted.own)  # noqa: E731
        return self._post(post, posted.tensor, posted.own), posted

    def _memory(self, *shape: int) -> CollectiveBuffer:
        if spare := self._spare[shape]:
            return spare.pop()
        tensor = torch.empty(math.prod(shape), dtype=torch.int64, device="cpu")
        own = tensor if len(shape) == 1 else torch.empty(shape[1], dtype=torch.int64, device="cpu")
        return CollectiveBuffer(own, tensor, tensor.numpy().reshape(shape))

    def _post(self, post: Callable[[], dist.Work], *tensors: torch.Tensor) -> dist.Work:
        """Posts a collective and keeps ``tensors`` alive until no torch thread references them.

        A collective is complete shortly before its thread releases them. That thread must not release the last
        reference, which needs the interpreter. gloo's only thread runs collectives in order: once one is complete, it
        has released the tensors of all before it.
        """
        complete = [index for index, (work, _) in enumerate(self._posted) if work.is_completed()]
        del self._posted[: max(complete, default=0)]
        work = self._try(post)
        self._posted.append((work, tensors))
        return work

    def give_back(self, read: CollectiveBuffer) -> None:
        """Returns the buffer of a finished ``start_minimum`` or ``start_gather`` for reuse."""
        self._spare[read.values.shape].append(read)

    @staticmethod
    def is_complete(works: Iterable[dist.Work]) -> bool:
        """Whether ``finish`` of each of ``works`` would not wait."""
        return all(work.is_completed() for work in works)

    def finish(self, work: dist.Work, timeout_secs: float) -> bool:
        """Waits for a posted collective; False if it has not finished within ``timeout_secs``."""
        deadline, look_secs = time.monotonic() + timeout_secs, self._first_look_secs
        while True:
            left = deadline - time.monotonic()
            try:
                # In slices, because another rank's notice is only in the store. In torch a timeout of 0 means none.
                work.wait(timedelta(seconds=max(0.001, min(left, look_secs))))
                return True
            except RuntimeError:
                # A timeout raises the same error as a failed collective, but only the latter is completed.
                if work.is_completed():
                    self._try(work.wait)  # returns at once: it has just finished, or raises its error
                    return True
            # Also at the deadline, so that a rank with short timeouts receives notices.
            self._look()
            if time.monotonic() >= deadline:
                return False
            look_secs = min(2 * look_secs, self._longest_look_secs)

    def _run(self, post: Callable[[], dist.Work], timeout_secs: float, *tensors: torch.Tensor) -> None:
        if not self.finish(self._post(post, *tensors), timeout_secs):
            self._give_up(f"other ranks did not join the collective within {timeout_secs:g} s")
            raise RuntimeError(self._given_up)

    def _try(self, action: Callable[[], T]) -> T:
        if self._given_up:
            raise RuntimeError(self._given_up)
        try:
            return action()
        except RuntimeError as error:
            self._give_up(str(error))
            raise

    def _give_up(self, reason: str) -> None:
        # Permanent: ranks may be in different collectives now, whose messages would be mixed up.
        self._given_up = f"rank {self.rank} gave up: {reason}"
        if self._notice is not None:
            self._notice.post(self._given_up)

    def _look(self) -> None:
        """Raises if another rank has given up; an unresponsive store is ignored, and the call's deadline applies."""
        if self._notice is not None and not self._given_up:
            self._given_up = self._notice.read()
        if self._given_up:
            raise RuntimeError(self._given_up)


def look_secs(size: int) -> tuple[float, float]:
    """First and maximum interval between polls of the store, for a job of ``size`` ranks."""
    rarer = max(1.0, size / _CALM_RANKS)
    return _FIRST_LOOK_SECS * rarer, _LONGEST_LOOK_SECS * rarer


class CollectiveBuffer(NamedTuple):
    """The input of a collective (``own``), its output (``tensor``), and the output as ``values``, a NumPy view, which
    is slow to create."""

    own: torch.Tensor
    tensor: torch.Tensor
    values: Integers


class Message:
    """A posted message or receipt."""

    def __init__(self, work: dist.Work, timeout_secs: float) -> None:
        self._work = work
        self._timeout_secs = timeout_secs

    def wait(self) -> None:
        """Returns when its memory may be used again; raises RuntimeError after the group's deadline."""
        # Not in slices: if a wait for a message times out, gloo closes all connections.
        self._work.wait(timedelta(seconds=self._timeout_secs))


def _tensor(data: Buffer) -> torch.Tensor:
    if len(data) == 0:
        return host_memory(0)
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def together(group: Group, action: Callable[[], T]) -> T:
    """Runs ``action`` on every rank; if it fails on one, raises that error on all of them. Collective.

    A rank that raised alone would leave the others waiting in their next collective.

    Raises:
        FtckptError: the error of the lowest failing rank, with its class in ``ftckpt.errors``; names the rank.
    """
    value: T | None = None

    def act() -> bytes:
        nonlocal value
        value = action()
        return b""

    gather_bytes(group, act)
    return cast(T, value)


def gather_all(group: Group, action: Callable[[], T], kind: type[T]) -> list[T]:
    """The results of ``action`` on all ranks, in rank order; errors as in ``together``. Collective."""
    return [codec.decode(data, kind) for data in gather_bytes(group, lambda: codec.encode(action()))]


def gather_each(group: Group, *asked: tuple[Callable[[], Any], Any]) -> list[list[Any]]:
    """Like ``gather_all`` for several actions, each given with its result type, in one round."""

    def answer() -> bytes:
        return codec.encode([codec.to_json(action()) for action, _ in asked])

    kinds = GenericAlias(tuple, tuple(kind for _, kind in asked))
    rows: list[Any] = [codec.decode(data, kinds) for data in gather_bytes(group, answer)]  # type: ignore[arg-type]
    return [list(column) for column in zip(*rows, strict=True)]


def gather_bytes(group: Group, action: Callable[[], Buffer]) -> list[bytes]:
    """The bytes that ``action`` returns on all ranks, in rank order; errors as in ``together``. Collective."""
    try:
        message = _DONE + action()
    except FtckptError as error:
        message = _FAILED + json.dumps(error.to_json()).encode()
    except Exception as error:  # raised on all ranks
        log.exception("ftckpt: rank %d failed", group.rank)
        message = _FAILED + json.dumps(FtckptError(in_words(error)).to_json()).encode()
    # Reached by every rank, failed or not, so no rank waits in vain.
    messages = group.gather(message)
    for rank, text in enumerate(messages):
        if text[:1] == _FAILED:
            of_all = error_from_json(json.loads(text[1:]), f"rank {rank}: ")
            of_all.of_all_ranks = True
            raise of_all
    return [data[1:] for data in messages]
