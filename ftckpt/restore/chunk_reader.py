"""Reads the chunks of one snapshot from storage: each rank its own, on threads, in turns with all others."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

from ftckpt.errors import StorageError
from ftckpt.events import Events, Progress
from ftckpt.group import Group, gather_all
from ftckpt.persist.commit import folder_of
from ftckpt.persist.shard_file import ShardFile
from ftckpt.persist.shards import StoredSnapshot
from ftckpt.persist.storage import Storage
from ftckpt.restore.shelf import ask

READERS = 4
"""Chunks of a rank that are on their way at a time: storage answers late, and then much at once."""

_TURN_SECS = 10.0
"""After which a rank that reads tells the others that it lives."""


class ShardFiles:
    """The files of one snapshot's shards, each opened once."""

    def __init__(self, storage: Storage, stored: StoredSnapshot) -> None:
        self.stored = stored
        self._storage = storage
        self._open: dict[str, ShardFile] = {}

    def get(self, shard: str) -> ShardFile:
        """The file of a shard; raises StorageError where it is not there, or not what it should be."""
        if shard not in self._open:
            self._open[shard] = self._opened(shard)
        return self._open[shard]

    def read_ahead(self, shards: Collection[str], most_bytes: int) -> None:
        """Have the first ``most_bytes`` of each file brought near, where storage can."""
        for shard in shards:
            self._storage.read_ahead(self._name(shard), min(self.stored.shards[shard].nbytes, most_bytes))

    def _name(self, shard: str) -> str:
        return f"{folder_of(self.stored.snapshot.iteration)}/{self.stored.shards[shard].file}"

    def _opened(self, shard: str) -> ShardFile:
        entry, name = self.stored.shards[shard], self._name(shard)
        where = f"{self._storage.where}/{name}"
        if ask(lambda: self._storage.size(name)) != entry.nbytes:
            raise StorageError(f"{where}: is not there with its {entry.nbytes} bytes", lasting=True)

        def read(begin: int, nbytes: int) -> bytes:
            return ask(lambda: self._storage.read(name, begin, nbytes))

        def read_into(begin: int, memory: memoryview) -> None:
            ask(lambda: self._storage.read_into(name, begin, memory))

        return ShardFile(where, shard, entry, read, read_into)


class Job(NamedTuple):
    """One chunk: its bytes, and what reads it, proves it and puts it where it belongs."""

    nbytes: int
    run: Callable[[], object]


class _Turn(NamedTuple):
    """How far one rank has come: whether it has all; chunks and their bytes."""

    done: bool
    chunks: int
    bytes: int


class ChunkReader:
    """A rank's threads. ``bring`` is collective, ``close`` in any case.

    ``usage``: chunks and bytes that were brought, of this rank until ``bring`` has ended, then of all ranks.
    """

    def __init__(self, group: Group, events: Events, files: ShardFiles) -> None:
        self._group = group
        self._events = events
        self._files = files
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="ftckpt-fetch")
        self._begin_secs = time.perf_counter()
        self.usage: dict[str, int] = {"chunks": 0, "bytes": 0}

    def begin(self, action: Callable[[], object]) -> None:
        """Do something on a thread before chunks are brought; what it raises is of no importance."""
        self._threads.submit(action)

    def bring(self, jobs: Sequence[Job], num_shards: int) -> None:
        """Bring this rank's chunks, in order; those of all ranks are of so many shards.

        Raises:
            StorageError: something on storage is bad, or away; on all ranks together, and some chunks have come.
        """
        bringing, done, turns = self._bring(jobs), False, list[_Turn]()

        def turn() -> _Turn:
            deadline = time.monotonic() + _TURN_SECS
            ended = all(time.monotonic() < deadline for _ in bringing)
            return _Turn(ended, **self.usage)

        while not done:
            # In turns: ranks have more and less to read, and wait for each other only so long.
            turns = gather_all(self._group, turn, _Turn)
            done = all(one.done for one in turns)
        self.usage.update({name: sum(getattr(one, name) for one in turns) for name in self.usage})
        self._events.emit(
            "fetched", iteration=self._files.stored.snapshot.iteration, shards=num_shards,
            bytes=self.usage["bytes"], secs=time.perf_counter() - self._begin_secs,
        )  # fmt: skip

    def close(self) -> None:
        """Bring no more; a second call does nothing."""
        self._threads.shutdown(cancel_futures=True)

    def _bring(self, jobs: Sequence[Job]) -> Iterator[None]:
        """Stops for a moment after each chunk."""
        iteration, total = self._files.stored.snapshot.iteration, sum(job.nbytes for job in jobs)
        progress = Progress(f"rank {self._group.rank} reads iteration {iteration} from storage")
        waiting, coming = iter(jobs), deque[tuple[int, Future[object]]]()

        def order(count: int) -> None:
            coming.extend((job.nbytes, self._threads.submit(job.run)) for job in islice(waiting, count))

        order(READERS)
        while coming:
            nbytes, brought = coming.popleft()
            brought.result()
            self.usage["bytes"] += nbytes
            self.usage["chunks"] += 1
            order(1)
            progress(self.usage["bytes"], total)
            yield


_buffers = threading.local()


def chunk_buffer(nbytes: int) -> memoryview:
    """Memory of this thread for a chunk, until it asks again: it stays in the processor's cache, where new memory
    costs a fault for each page."""
    buffer: bytearray = getattr(_buffers, "chunk", bytearray())
    if len(buffer) < nbytes:
        buffer = _buffers.chunk = bytearray(nbytes)
    return memoryview(buffer)[:nbytes]
