"""Collectives that ftckpt posts, all from the training thread, all with a deadline.

They run on a gloo group of their own, over host memory: no device stream is touched, and no collective of
the framework can come between.

When a rank is gone, gloo fails only where a connection to it was in use. Other ranks may be left in the same
collective, waiting for one that has failed, lives, and will not come again; training, which goes on where ftckpt
fails, would then wait for those. So a rank whose collective failed writes that it gives the group up into the store
of the job, and ranks that wait look there."""

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
import numpy.typing as npt
import torch
import torch.distributed as dist

from ftckpt import forks
from ftckpt.array_types import Buffer
from ftckpt.connections import OWN_DESCRIPTORS, SPARE_DESCRIPTORS, STALL_SECS, connect, is_lazy, make_room
from ftckpt.errors import FtckptError, LaunchError, error_from_json, in_words
from ftckpt.host_memory import host_memory
from ftckpt.model import codec
from ftckpt.notice import Notice, job_store

log = logging.getLogger("ftckpt")

_FIRST_LOOK_SECS, _LONGEST_LOOK_SECS = 0.5, 10.0
"""How long a rank waits before it asks the store whether another gave up; it asks less and less often."""

_CALM_RANKS = 200
"""Up to so many ranks ask their store as often; those of a larger job so much less that it has no more to do."""

_FRAME_HEAD_BYTES = 8
_LEAST_FRAME_BYTES, _MOST_FRAME_BYTES, _FRAMES_BYTES = 1 << 10, 16 << 10, 64 << 10
"""A gather of no more than a frame takes one round of messages, of any more two. What a rank tells of its arena fits
into the least; a job of few ranks, whose frames of ``_FRAMES_BYTES`` in all take no time, has larger ones."""

_immortal: list[Any] = []
"""Groups, and tensors that a thread of torch may have, for as long as the process lives, even without interpreter. A
group that ends waits for its collectives: a rank that fails would end minutes later, and its launcher would see it
only then. And a thread of torch with the last reference of C++ to a tensor needs the interpreter to let go of it;
waiting for one that is at its end aborts the process."""
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_immortal))

_DONE, _FAILED = b"+", b"-"

_MINIMUM = dist.AllreduceOptions()
_MINIMUM.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]

T = TypeVar("T")


_MOST_NAMED = 8
"""Ranks, in a text."""


class Group:
    """All ranks of the job. ``timeout_secs`` bounds every call that waits for other ranks.

    Collective: every rank constructs it, at the same point of its program. A collective that fails on one rank fails
    on all that wait in it, within some seconds, and the group is of no use from then on: it is ``broken``, until all
    ranks ``renew`` it. A collective that is late is not: it completes when the last rank comes, however late.

    Collectives use the connections of a ring alone; with messages a rank may have one to each of ``partners`` others,
    by default all.

    Raises:
        LaunchError: this process may not open as many files as that takes (``ulimit -n``); ranks did not come here.
        RuntimeError: from torch.distributed, when a peer is gone; when the deadline passes; when another rank gave
            the group up; when the store of the job, where ranks post that, cannot be reached.
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
        # Counted in the store: ranks that begin anew in a process that lives begin at the same number again.
        number = store.add(f"ftckpt/groups/{self.rank}", 1)
        self._notice: Notice | None = None  # while its name is agreed on there is nothing to look for
        begin = time.monotonic()
        try:
            self._connect(f"ftckpt/group/{number}")
            # All together: a rank that refused alone would leave the others waiting.
            words = gather_bytes(self, self._begin)
        except RuntimeError as error:
            names = {str(rank): f"ftckpt/groups/{rank}" for rank in range(self.size)}
            is_late = time.monotonic() - begin >= timeout_secs  # before that others may only not be here yet
            if is_late and (absent := [rank for rank, name in names.items() if not store.check([name])]):
                raise LaunchError(
                    f"rank(s) {', '.join(absent[:_MOST_NAMED])} did not come to ftckpt within {timeout_secs:g} s: "
                    "switch it on for all, or for none; where some start slowly raise --ftckpt-start-timeout-secs"
                ) from error
            raise
        # A name of this attempt alone: some launchers keep one store for all of them.
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
        """Break the group; ranks that wait in a collective of it learn it."""
        if not self._given_up:
            self._give_up(reason)

    def outlast_stalls(self) -> None:
        """Wait for ranks from here on as long as one may stand still while training runs."""
        self.timeout_secs = max(self.timeout_secs, STALL_SECS)

    def renew(self, name: str, timeout_secs: float) -> None:
        """Connect all ranks again, broken or not before, under a ``name`` that was not used before. Collective.

        Raises:
            LaunchError, RuntimeError: the group is broken.
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
        self._unfinished: list[dist.Work] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []  # each with a view of it
        make_room(OWN_DESCRIPTORS + (0 if is_lazy() else self.size), self._descriptors, self.rank)
        self._group = connect(name, job_store(), self.rank, self.size, self.timeout_secs)
        self._spare: defaultdict[tuple[int, ...], list[CollectiveBuffer]] = defaultdict(
            list
        )  # by the shape of the values
        self._reused: list[CollectiveBuffer] = []  # kept for good: no thread of torch is the last to have a tensor
        self._kept: list[Any] = [self._group, self._tensors, self._reused]
        _immortal.append(self._kept)

    def close(self) -> None:
        """Let go of connections and their threads, when all ranks have agreed that nothing more is posted.

        A collective that is not finished keeps them: who ends a group waits for all of those. So does a child that
        this process has forked: its copies of closed connections stay in gloo's epoll, and an event of one aborts or
        hangs this process.
        """
        self._given_up = self._given_up or f"rank {self.rank} has closed the group"
        if not forks.has_forked and all(work.is_completed() for work in self._unfinished):
            self._kept[0] = None  # its tensors stay
            del self._group

    def gather(self, data: Buffer) -> list[bytes]:
        """Every rank's ``data``, in rank order."""
        return self._gather(data, self.timeout_secs)

    def _gather(self, data: Buffer, timeout_secs: float) -> list[bytes]:
        # An all-gather takes as many bytes of each rank: the length, and the begin, which mostly is all of it.
        room = self._frame_bytes - _FRAME_HEAD_BYTES
        begin, end = memoryview(data).cast("B")[:room], memoryview(data).cast("B")[room:]
        head = len(data).to_bytes(_FRAME_HEAD_BYTES, "little")
        frames = self._all_gather(head + begin, self._frame_bytes, timeout_secs)
        sizes = [int.from_bytes(frame[:_FRAME_HEAD_BYTES], "little") for frame in frames]
        begins = [frame[_FRAME_HEAD_BYTES:][:size] for frame, size in zip(frames, sizes, strict=True)]
        longest = max(sizes) - room
        # Known to all ranks alike: none of them posts a second collective.
        if longest <= 0:
            return begins
        ends = self._all_gather(end, longest, timeout_secs)
        lengths = (max(0, size - room) for size in sizes)
        return [first + rest[:length] for first, rest, length in zip(begins, ends, lengths, strict=True)]

    def _all_gather(self, data: Buffer, nbytes: int, timeout_secs: float) -> list[bytes]:
        """``data`` of all ranks, each filled up to ``nbytes``."""
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
        """Return when every rank is here."""
        self.gather(b"")

    def start_send(self, data: torch.Tensor, to: int, tag: int = 0) -> Message:
        """Post a message, a contiguous 1-D uint8 tensor; when its ``wait`` returns, ``data`` may be overwritten.

        Messages of one ``tag`` between two ranks are received in the order in which they were sent.
        """
        return Message(self._try(lambda: self._group.send([data], to, tag)), self.timeout_secs)

    def start_receive(self, into: torch.Tensor, source: int, tag: int = 0) -> Message:
        """Post the receipt of a message of exactly the size of ``into``, which is filled when ``wait`` returns."""
        return Message(self._try(lambda: self._group.recv([into], source, tag)), self.timeout_secs)

    def start_minimum(self, values: Sequence[int]) -> tuple[dist.Work, CollectiveBuffer]:
        """Post an element-wise MIN; returns the work, for ``finish``, and what will have it."""
        posted = self._memory(len(values))
        posted.values[:] = values
        return self._start(lambda: self._group.allreduce([posted.tensor], _MINIMUM)), posted

    def start_gather(self, values: npt.NDArray[np.int64]) -> tuple[dist.Work, CollectiveBuffer]:
        """Post an all-gather of as many values on all ranks; returns the work, for ``finish``, and what will have the
        values of each rank, a row for each."""
        posted = self._memory(self.size, len(values))
        posted.own.numpy()[:] = values
        return self._start(lambda: self._group._allgather_base(posted.tensor, posted.own)), posted

    def _memory(self, *shape: int) -> CollectiveBuffer:
        if spare := self._spare[shape]:
            return spare.pop()
        tensor = torch.empty(math.prod(shape), dtype=torch.int64, device="cpu")
        own = tensor if len(shape) == 1 else torch.empty(shape[1], dtype=torch.int64, device="cpu")
        self._keep(tensor, *([own] if own is not tensor else []))
        return CollectiveBuffer(own, tensor, tensor.numpy().reshape(shape))

    def _start(self, post: Callable[[], dist.Work]) -> dist.Work:
        self._unfinished = [work for work in self._unfinished if not work.is_completed()]
        work = self._try(post)
        self._unfinished.append(work)
        return work

    def give_back(self, read: CollectiveBuffer) -> None:
        """What ``start_minimum`` or ``start_gather`` gave is finished and read: the next one of as many values has it
        again."""
        self._spare[read.values.shape].append(read)
        if not any(read is one for one in self._reused):
            self._reused.append(read)

    def _keep(self, *tensors: torch.Tensor) -> None:
        """Keep ``tensors``, which gloo may write into after the caller has forgotten them, until no thread of torch
        has them: that a collective is finished is said a moment before its thread lets go of them."""
        # C++ refers to a tensor twice where it is kept and nobody else has it: for Python's object and for the view's
        # base. Without the view a thread's would be the last but that of Python's object, and need the interpreter.
        self._tensors[:] = [(base, view) for base, view in self._tensors if base._use_count() > 2]  # type: ignore[attr-defined]
        with torch.inference_mode(False):  # in which views know no base
            self._tensors.extend((tensor, tensor.view(-1)) for tensor in tensors)

    @staticmethod
    def is_complete(works: Iterable[dist.Work]) -> bool:
        """Whether ``finish`` of each of ``works`` would not wait."""
        return all(work.is_completed() for work in works)

    def finish(self, work: dist.Work, timeout_secs: float) -> bool:
        """Wait for a collective that was posted; False: it is not finished within ``timeout_secs``."""
        deadline, look_secs = time.monotonic() + timeout_secs, self._first_look_secs
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
            # At the deadline too: a short one must not keep a rank from hearing that nobody comes.
            self._look()
            if time.monotonic() >= deadline:
                return False
            look_secs = min(2 * look_secs, self._longest_look_secs)

    def _run(self, post: Callable[[], dist.Work], timeout_secs: float, *tensors: torch.Tensor) -> None:
        self._keep(*tensors)
        if not self.finish(self._try(post), timeout_secs):
            self._give_up(f"the other ranks did not come within {timeout_secs:g} s")
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


def look_secs(size: int) -> tuple[float, float]:
    """How long one of ``size`` ranks waits before it asks the store, at first and at most."""
    rarer = max(1.0, size / _CALM_RANKS)
    return _FIRST_LOOK_SECS * rarer, _LONGEST_LOOK_SECS * rarer


class CollectiveBuffer(NamedTuple):
    """What this rank posts, the memory that the collective fills, and its ``values``, which a tensor takes long to
    show."""

    own: torch.Tensor
    tensor: torch.Tensor
    values: npt.NDArray[np.int64]


class Message:
    """One on its way."""

    def __init__(self, work: dist.Work, timeout_secs: float) -> None:
        self._work = work
        self._timeout_secs = timeout_secs

    def wait(self) -> None:
        """Return when its memory may be used again; raises RuntimeError after the group's deadline."""
        # In one piece: gloo takes a wait for a message that runs out for the end of all connections.
        self._work.wait(timedelta(seconds=self._timeout_secs))


def _tensor(data: Buffer) -> torch.Tensor:
    if len(data) == 0:
        return host_memory(0)
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def together(group: Group, action: Callable[[], T]) -> T:
    """Run ``action`` on every rank; when it fails on one, raise that error on all of them.

    Collective: a rank that failed alone would leave the others waiting for it.

    Raises:
        FtckptError: the error of the lowest failing rank, naming it, of its class in ``ftckpt.errors``.
    """
    value: T | None = None

    def act() -> bytes:
        nonlocal value
        value = action()
        return b""

    gather_bytes(group, act)
    return cast(T, value)


def gather_all(group: Group, action: Callable[[], T], kind: type[T]) -> list[T]:
    """What ``action`` returns on every rank, in the order of ranks; it fails as ``together`` does. Collective."""
    return [codec.decode(data, kind) for data in gather_bytes(group, lambda: codec.encode(action()))]


def gather_each(group: Group, *asked: tuple[Callable[[], Any], Any]) -> list[list[Any]]:
    """As ``gather_all`` of each of ``asked``, an action and the type of what it returns, all in one round."""

    def answer() -> bytes:
        return codec.encode([codec.to_json(action()) for action, _ in asked])

    kinds = GenericAlias(tuple, tuple(kind for _, kind in asked))
    rows: list[Any] = [codec.decode(data, kinds) for data in gather_bytes(group, answer)]  # type: ignore[arg-type]
    return [list(column) for column in zip(*rows, strict=True)]


def gather_bytes(group: Group, action: Callable[[], Buffer]) -> list[bytes]:
    """The bytes that ``action`` returns on every rank, in the order of ranks; it fails as ``together`` does.
    Collective."""
    try:
        message = _DONE + action()
    except FtckptError as error:
        message = _FAILED + json.dumps(error.to_json()).encode()
    except Exception as error:  # raised on all ranks, which would wait for this one
        log.exception("ftckpt: rank %d failed", group.rank)
        message = _FAILED + json.dumps(FtckptError(in_words(error)).to_json()).encode()
    # Every rank comes here, failed or not: nobody waits for one that does not come.
    messages = group.gather(message)
    for rank, text in enumerate(messages):
        if text[:1] == _FAILED:
            of_all = error_from_json(json.loads(text[1:]), f"rank {rank}: ")
            of_all.of_all_ranks = True
            raise of_all
    return [data[1:] for data in messages]
