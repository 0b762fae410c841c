"""Reader of a snapshot's chunks: each rank reads its own, and all report their progress to each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from ftckpt.array_types import Buffer
from ftckpt.errors import DamagedError, StorageError
from ftckpt.events import Events, Progress
from ftckpt.group import Group, gather_all
from ftckpt.memory.destinations import LoadTarget, scratch
from ftckpt.memory.image import SlotImage
from ftckpt.persist.commit import CheckpointName, folder_of
from ftckpt.persist.shard_file import ShardFile
from ftckpt.persist.shards import StoredSnapshot
from ftckpt.persist.storage import Storage
from ftckpt.restore.storage_catalog import ask
from ftckpt.restore.threads import in_order

READERS = 4
"""Chunks of a rank in flight: storage has a high latency and a high bandwidth."""

T = TypeVar("T")

_TURN_SECS = 10.0
"""Interval at which reading ranks gather their progress, so that none times out while it waits."""


class ShardFiles:
    """The files of one snapshot's shards, each opened once."""

    def __init__(self, storage: Storage, stored: StoredSnapshot) -> None:
        self.stored = stored
        self._checkpoint = CheckpointName.parse(stored.name) or CheckpointName(stored.snapshot.iteration)
        self._storage = storage
        self._open: dict[str, ShardFile] = {}

    def get(self, shard: str) -> ShardFile:
        """The file of a shard; raises StorageError if it is missing or not as expected."""
        if shard not in self._open:
            self._open[shard] = self._opened(shard)
        return self._open[shard]

    def read_ahead(self, shards: Collection[str], most_bytes: int) -> None:
        """Prefetch up to ``most_bytes`` of each file, if the backend can."""
        for shard in shards:
            self._storage.read_ahead(self._name(shard), min(self.stored.shards[shard].needed_bytes, most_bytes))

    def _ask(self, action: Callable[[], T]) -> T:
        """As ``ask``; the error is lasting if the manifest is readable, so that only this file is not."""
        try:
            return ask(action)
        except StorageError as error:
            try:
                self._storage.read(self._checkpoint.manifest)
            except StorageError:
                raise StorageError(str(error)) from None
            raise StorageError(str(error), lasting=True) from None

    def _name(self, shard: str) -> str:
        return f"{folder_of(self.stored.snapshot.iteration)}/{self.stored.shards[shard].file}"

    def _opened(self, shard: str) -> ShardFile:
        entry, name = self.stored.shards[shard], self._name(shard)
        where = f"{self._storage.where}/{name}"
        if self._ask(lambda: self._storage.size(name)) != entry.nbytes:
            raise DamagedError(f"{where}: is missing, or does not have its {entry.nbytes} bytes")

        def read(begin: int, nbytes: int) -> bytes:
            return self._ask(lambda: self._storage.read(name, begin, nbytes))

        def read_into(begin: int, memories: Sequence[memoryview]) -> None:
            self._ask(lambda: self._storage.read_into(name, begin, memories))

        return ShardFile(where, shard, entry, read, read_into)


class Source(Protocol):
    """One shard in a slot or on storage."""

    @property
    def image(self) -> SlotImage: ...

    def stored_bytes(self, number: int) -> int:
        """The bytes that are read for a chunk."""

    def scatter(self, number: int, landings: Sequence[LoadTarget]) -> None:
        """Fill ``landings``, ascending and disjoint, from a chunk; raises if it is corrupt, and may have filled them
        then."""

    def objects(self) -> Buffer:
        """The encoded objects, verified."""


def proven(file: Source, number: int) -> memoryview:
    """A verified chunk, in a buffer that this thread's next read overwrites; raises as ``Source.scatter``."""
    span = file.image.chunks[number]
    memory = scratch(span.nbytes)
    file.scatter(number, [LoadTarget(span.begin, memory)])
    return memory


class Job(NamedTuple):
    """One chunk: its size, and the function that reads, verifies and stores it."""

    nbytes: int
    run: Callable[[], object]


class _Turn(NamedTuple):
    """The progress of one rank: whether it is done; chunks and bytes read."""

    done: bool
    chunks: int
    bytes: int


class ChunkReader:
    """One rank's reader, on ``threads`` of its own or, if 1, the caller's. ``begin`` (optional), ``bring``
    (collective), ``close`` in any case. ``what`` describes the read in progress logs.

    ``usage``: chunks and bytes read, of this rank until ``bring`` has returned, then of all ranks.
    """

    def __init__(self, group: Group, what: str, threads: int = READERS) -> None:
        self._group = group
        self._what, self._num_threads = what, threads
        self._begun: threading.Thread | None = None
        self._bringing: Generator[None] | None = None
        self._begin_secs = time.perf_counter()
        self.usage: dict[str, int] = {"chunks": 0, "bytes": 0}

    def begin(self, action: Callable[[], object]) -> None:
        """Run ``action``, which must not raise, on a thread."""
        self._begun = threading.Thread(target=action, name="ftckpt-ahead", daemon=True)
        self._begun.start()

    def bring(self, jobs: Sequence[Job]) -> None:
        """Run the jobs of this rank, in order, until all ranks are done.

        Raises:
            FtckptError: on all ranks; a job failed, after some chunks were stored.
        """
        bringing = self._bringing = self._bring(jobs)
        done, turns = False, list[_Turn]()

        def turn() -> _Turn:
            deadline = time.monotonic() + _TURN_SECS
            ended = all(time.monotonic() < deadline for _ in bringing)
            return _Turn(ended, **self.usage)

        while not done:
            # In turns: ranks have different amounts to read, and a wait for other ranks has a deadline.
            turns = gather_all(self._group, turn, _Turn)
            done = all(one.done for one in turns)
        self.usage.update({name: sum(getattr(one, name) for one in turns) for name in self.usage})

    def tell(self, events: Events, iteration: int, num_shards: int) -> None:
        """Report that ``num_shards`` were fetched from storage."""
        nbytes, secs = self.usage["bytes"], time.perf_counter() - self._begin_secs
        events.emit("fetched", iteration=iteration, shards=num_shards, bytes=nbytes, secs=secs)

    def close(self) -> None:
        """Stop reading and join the thread of ``begin``; a second call does nothing."""
        if self._bringing is not None:
            self._bringing.close()
        if self._begun is not None:
            self._begun.join()

    def _bring(self, jobs: Sequence[Job]) -> Generator[None]:
        """Run the jobs, and yield after each."""
        total = sum(job.nbytes for job in jobs)
        progress = Progress(f"rank {self._group.rank} {self._what}")

        def run(job: Job) -> int:
            job.run()
            return job.nbytes

        for nbytes in in_order(run, jobs, self._num_threads):
            self.usage["bytes"] += nbytes
            self.usage["chunks"] += 1
            progress(self.usage["bytes"], total)
            yield
