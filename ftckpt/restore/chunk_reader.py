"""Reads the chunks of one snapshot: each rank its own, in turns with all others."""

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
"""Chunks of a rank that are on their way at a time: storage answers late, and then much at once."""

T = TypeVar("T")

_TURN_SECS = 10.0
"""After which a rank that reads tells the others that it lives."""


class ShardFiles:
    """The files of one snapshot's shards, each opened once."""

    def __init__(self, storage: Storage, stored: StoredSnapshot) -> None:
        self.stored = stored
        self._checkpoint = CheckpointName.parse(stored.name) or CheckpointName(stored.snapshot.iteration)
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
            self._storage.read_ahead(self._name(shard), min(self.stored.shards[shard].needed_bytes, most_bytes))

    def _ask(self, action: Callable[[], T]) -> T:
        """As ``ask``; the error is lasting where storage gives this alone not."""
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
            raise DamagedError(f"{where}: is not there with its {entry.nbytes} bytes")

        def read(begin: int, nbytes: int) -> bytes:
            return self._ask(lambda: self._storage.read(name, begin, nbytes))

        def read_into(begin: int, memories: Sequence[memoryview]) -> None:
            self._ask(lambda: self._storage.read_into(name, begin, memories))

        return ShardFile(where, shard, entry, read, read_into)


class Source(Protocol):
    """One shard."""

    @property
    def image(self) -> SlotImage: ...

    def stored_bytes(self, number: int) -> int:
        """What is read for a chunk."""

    def scatter(self, number: int, landings: Sequence[LoadTarget]) -> None:
        """Fill ``landings``, ascending and apart from each other, from a chunk; raises unless it is proven, and they
        may have what it is then."""

    def objects(self) -> Buffer:
        """The encoded objects, proven."""


def proven(file: Source, number: int) -> memoryview:
    """A chunk in memory of this thread, until it reads another; raises as ``Source.scatter``."""
    span = file.image.chunks[number]
    memory = scratch(span.nbytes)
    file.scatter(number, [LoadTarget(span.begin, memory)])
    return memory


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
    """A rank's reading, on ``threads`` of its own or, where that is 1, the caller's. ``bring`` is collective,
    ``close`` in any case. ``what`` it does is for people.

    ``usage``: chunks and bytes that were brought, of this rank until ``bring`` has ended, then of all ranks.
    """

    def __init__(self, group: Group, what: str, threads: int = READERS) -> None:
        self._group = group
        self._what, self._num_threads = what, threads
        self._begun: threading.Thread | None = None
        self._bringing: Generator[None] | None = None
        self._begin_secs = time.perf_counter()
        self.usage: dict[str, int] = {"chunks": 0, "bytes": 0}

    def begin(self, action: Callable[[], object]) -> None:
        """Do something on a thread before chunks are brought; it raises nothing."""
        self._begun = threading.Thread(target=action, name="ftckpt-ahead", daemon=True)
        self._begun.start()

    def bring(self, jobs: Sequence[Job]) -> None:
        """Bring this rank's chunks, in order.

        Raises:
            FtckptError: what a job raises on any rank, on all together; some chunks have come.
        """
        bringing = self._bringing = self._bring(jobs)
        done, turns = False, list[_Turn]()

        def turn() -> _Turn:
            deadline = time.monotonic() + _TURN_SECS
            ended = all(time.monotonic() < deadline for _ in bringing)
            return _Turn(ended, **self.usage)

        while not done:
            # In turns: ranks have more and less to read, and wait for each other only so long.
            turns = gather_all(self._group, turn, _Turn)
            done = all(one.done for one in turns)
        self.usage.update({name: sum(getattr(one, name) for one in turns) for name in self.usage})

    def tell(self, events: Events, iteration: int, num_shards: int) -> None:
        """That so many shards have come from storage."""
        nbytes, secs = self.usage["bytes"], time.perf_counter() - self._begin_secs
        events.emit("fetched", iteration=iteration, shards=num_shards, bytes=nbytes, secs=secs)

    def close(self) -> None:
        """Bring no more; a second call does nothing."""
        if self._bringing is not None:
            self._bringing.close()
        if self._begun is not None:
            self._begun.join()

    def _bring(self, jobs: Sequence[Job]) -> Generator[None]:
        """Stops for a moment after each chunk."""
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
