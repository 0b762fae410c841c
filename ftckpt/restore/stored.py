"""Snapshots on storage, as one more source of a restart: shards that memory lacks are brought there, and proven.

In memory they are what they were: slots of arenas. What a restart does with them, in any layout, it does as with all
others.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np

from ftckpt.errors import ArenaError, LostError, StorageError
from ftckpt.events import Events, Progress
from ftckpt.group import Group, gather_all, together
from ftckpt.model import codec
from ftckpt.model.failures import LastAttempt
from ftckpt.model.loaded import Checkpoint, is_undone
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import Topology, layouts_differ
from ftckpt.persist import commit, retention
from ftckpt.persist.failures import last_attempt
from ftckpt.persist.shard_file import ShardFile
from ftckpt.persist.shards import StoredSnapshot
from ftckpt.persist.storage import Storage, open_storage, patiently
from ftckpt.restore.build import Build
from ftckpt.restore.choice import worth_keeping
from ftckpt.restore.inventory import Inventory
from ftckpt.restore.load import Copy
from ftckpt.restore.locations import OpenArenas, SlotAt
from ftckpt.restore.rebuild import NEW_SLOT, Fix
from ftckpt.restore.repair import Need, make_room
from ftckpt.restore.straight import READERS, TURN_SECS, StraightFetch, chunk_buffer
from ftckpt.store.arena import Arena
from ftckpt.store.damage import Damage
from ftckpt.store.directory import arena_path
from ftckpt.store.package import Package

_NEWEST = 10
"""Snapshots on storage that a restart looks at: should all of them be bad, older ones are for people to choose."""

_AHEAD_BYTES = 256 << 20
"""Of each file, before there is memory for what it holds: what the disks give in that time, about."""

_PATIENCE_SECS = 30.0
"""How long a restart tries what storage does not give: less than ranks wait for each other."""

_SHORT_TURN_SECS = 0.1
"""``TURN_SECS`` where others copy what a rank has read: what comes in that time is copied when all is there."""

_LITTLE_BYTES = 16 << 20
"""Of that much it is no matter when it is copied."""

_ALL = sys.maxsize
"""Behind every byte of a slot."""

T = TypeVar("T")


@dataclass(frozen=True)
class Shelf:
    """The newest snapshots on storage, newest first, the same on all ranks; none without storage."""

    storage: Storage | None = None
    snapshots: tuple[StoredSnapshot, ...] = ()
    problem: str = ""
    """Why there may be more than can be seen."""
    reader: str = ""
    """As whom this restart keeps what is there from being removed."""
    last: LastAttempt | None = None
    """The last attempt of the job, as storage knows of it."""
    bad: tuple[int, ...] = ()
    """Iterations that have proven bad."""

    def close(self) -> None:
        """What this restart has not read it reads no more."""
        if self.storage is not None and self.reader:
            with suppress(StorageError):  # the claim of the run that follows does so, too
                retention.let_go(self.storage, self.reader)

    @property
    def lost(self) -> LostError | None:
        """What it means that nothing of it can be used, where memory has nothing either."""
        if there := [*self.bad, *(one.snapshot.iteration for one in self.snapshots)]:
            return LostError(
                f"none of the snapshots on storage ({', '.join(map(str, there))}) can be used; the log says why"
            )
        return LostError(f"what is on storage cannot be seen: {self.problem}") if self.problem else None

    @property
    def origins(self) -> list[Checkpoint]:
        """What the snapshots went on from."""
        return [one.origin for one in self.snapshots]

    def without_undone(self, origin: Checkpoint) -> Shelf:
        """Without snapshots of a history that an operator has undone since."""
        return replace(self, snapshots=tuple(one for one in self.snapshots if not is_undone(one.origin, origin)))

    def before(self, iteration: int) -> Shelf:
        """Without snapshots of this iteration and behind it."""
        return replace(self, snapshots=tuple(one for one in self.snapshots if one.snapshot.iteration < iteration))

    def without(self, snapshot: SnapshotId) -> Shelf:
        """Without a snapshot that has proven bad."""
        left = tuple(one for one in self.snapshots if one.snapshot != snapshot)
        return replace(self, snapshots=left, bad=(*self.bad, snapshot.iteration))

    def void_from(self, iteration: int) -> list[SnapshotId]:
        """No later start takes what storage has of this iteration and behind it; returns what that is. Called by one
        rank.

        Raises:
            StorageError: storage fails, or cannot be seen.
        """
        if self.storage is None:
            text = f"restore_before: storage cannot be seen, and what is newer there not be undone: {self.problem}"
            raise StorageError(text, lasting=True)
        storage, undone = self.storage, list[SnapshotId]()
        for number in _patiently(lambda: commit.committed(storage)):
            if number >= iteration:
                try:
                    undone.append(_manifest(storage, number).snapshot)
                except StorageError as error:
                    if not error.lasting:
                        raise  # what is damaged no start can take
        _patiently(lambda: retention.void(storage, undone))
        return undone

    @property
    def newest(self) -> int:
        """The newest iteration, -1 for none."""
        return max((one.snapshot.iteration for one in self.snapshots), default=-1)


NO_SHELF = Shelf()


class Look(NamedTuple):
    """What one rank sees of storage: why it cannot reach it, and the length of what it is to tell the others."""

    away: str
    length: int


class ShelfLook:
    """How ranks look at storage, one for all of them: ``see`` on each, ``join`` with what all have seen."""

    def __init__(self, group: Group, where: str, events: Events, before: int = 0, job: str = "") -> None:
        self._group, self._events = group, events
        self._where, self._before, self._job = where, before, job
        self._storage: Storage | None = None
        self._told = b""

    @property
    def _reader(self) -> str:
        return self._group.name.rpartition("/")[2]

    def see(self) -> Look:
        """Whether this rank can reach storage; the first looks what is there, of which nothing is removed from here
        on.

        Raises:
            StorageError: it cannot, and trying again is of no use.
        """
        if not self._where:
            return Look("", 0)
        self._storage, away = _open(self._where)
        if self._storage is not None and self._group.rank == 0:
            _require_own(self._storage)
            _hold(self._storage, self._reader, self._events)
            found = *_read(self._storage, self._events, self._before), self._last_attempt(self._storage)
            self._told = codec.encode(found)
        return Look(away, len(self._told))

    def join(self, seen: Sequence[Look]) -> Shelf:
        """What is there; with ``before`` the newest before that iteration, too. Collective."""
        if not self._where:
            return NO_SHELF
        leads = self._group.rank == 0
        if away := next((one.away for one in seen if one.away), ""):
            self._events.emit("storage_fails", error=away)  # memory may do
            if leads and self._storage is not None:
                with suppress(StorageError):
                    retention.let_go(self._storage, self._reader)
            return Shelf(problem=away)
        # The length is known: a broadcast takes as many bytes on all ranks.
        data = self._group.broadcast(self._told.ljust(max(one.length for one in seen), b" "))
        texts, problem, last = codec.decode(data, tuple[list[str], str, LastAttempt | None])
        snapshots = tuple(StoredSnapshot.decode(text.encode(), self._where) for text in texts)
        return Shelf(self._storage, snapshots, problem, self._reader if leads else "", last)

    def _last_attempt(self, storage: Storage) -> LastAttempt | None:
        try:
            return _patiently(lambda: last_attempt(storage, self._job))
        except StorageError as error:
            self._events.emit("storage_fails", error=f"failures of the job are not known: {error}")
            return None


def _open(where: str) -> tuple[Storage | None, str]:
    """Storage, or why it is away."""
    try:
        return _patiently(lambda: open_storage(where, "persist")), ""
    except StorageError as error:
        if error.lasting:
            raise
        return None, str(error)


def _require_own(storage: Storage) -> None:
    try:
        _patiently(lambda: commit.require_own(storage))
    except StorageError as error:
        if error.lasting:
            raise StorageError(f"persist: {error}", lasting=True) from None


def _hold(storage: Storage, reader: str, events: Events) -> None:
    try:
        retention.hold(storage, reader)
    except StorageError as error:  # a place that is full can be read
        events.emit("storage_fails", error=f"it may remove what this restart reads: {error}")


def _read(storage: Storage, events: Events, before: int) -> tuple[list[str], str]:
    """The newest manifests that count, those before an iteration among them, and why there may be more."""
    texts, problem = list[str](), ""
    try:
        void = _patiently(lambda: retention.voided(storage))
        there = _patiently(lambda: commit.committed(storage))
        wanted = [_NEWEST, _NEWEST if before else 0]  # of all, of those before it
        for iteration in there:
            is_older = iteration < before
            if wanted[0] <= 0 and not (is_older and wanted[1] > 0):
                continue
            try:
                stored = _manifest(storage, iteration)
            except StorageError as error:
                if not error.lasting:
                    raise
                events.emit("storage_damaged", iteration=iteration, error=str(error))
                problem = problem or str(error)
            else:
                if stored.snapshot in void:
                    continue
                texts.append(stored.encode().decode())
            wanted = [wanted[0] - 1, wanted[1] - is_older]
    except StorageError as error:
        events.emit("storage_fails", error=str(error))
        problem = str(error)
    return texts, problem


def _manifest(storage: Storage, iteration: int) -> StoredSnapshot:
    name = commit.manifest_of(iteration)
    return StoredSnapshot.decode(_patiently(lambda: storage.read(name)), f"{storage.where}/{name}")


def _patiently(action: Callable[[], T]) -> T:
    return patiently(action, _PATIENCE_SECS)


class _Turn(NamedTuple):
    """How far one rank has come: whether it has brought all of its chunks; how many, and their bytes; and of each of
    its shards, up to which byte of the slot everything is proven."""

    done: bool
    chunks: int
    bytes: int
    proven: Mapping[str, int]


class ShardFetch:
    """Brings the shards of one snapshot that memory lacks from storage. ``begin``, ``bring``, then ``seal`` on every
    rank, or ``run`` for all of that; ``close`` in any case. ``begin``, ``bring`` and ``run`` are collective.

    Args:
        inventory: of all nodes; ``bad`` are slots in it that did not verify, and what of them did not.
        slots: of an arena that must be created.
    """

    def __init__(
        self, group: Group, topology: Topology, events: Events, arenas: OpenArenas, *,
        storage: Storage, stored: StoredSnapshot, inventory: Inventory, bad: Mapping[SlotAt, Damage], slots: int,
    ) -> None:  # fmt: skip
        self._group = group
        self._topology = topology
        self._events = events
        self._arenas = arenas
        self._storage = storage
        self._stored = stored
        self._inventory = inventory
        self._slots = slots
        self._bad = bad
        self._missing = sorted(stored.shards.keys() - _in_memory(inventory, stored, bad))
        self._files: dict[str, ShardFile] = {}
        self._builds: dict[str, Build] = {}
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="ftckpt-fetch")
        self._begin_secs = time.perf_counter()
        self._proven: dict[SlotAt, int] = {}
        self.places: dict[str, SlotAt] = {}
        """Where each shard that is brought lies, of all ranks; from ``begin`` on."""
        self.usage: dict[str, int] = {"chunks": 0, "bytes": 0}
        """What was brought: of this rank until ``bring`` has ended, then of all ranks."""

    @property
    def is_all(self) -> bool:
        """Whether memory has no shard of the snapshot."""
        return len(self._missing) == len(self._stored.shards)

    @property
    def stored(self) -> StoredSnapshot:
        """What is brought."""
        return self._stored

    def straight(self) -> StraightFetch | None:
        """What brings all of the snapshot into the live state, and not to memory; None where this job's ranks or
        memory ask for slots."""
        if not self.is_all or not StraightFetch.fits(self._topology, self._stored):
            return None
        return StraightFetch(
            self._group, self._topology, self._events, self._stored, self._file
        )  # fmt: skip

    def run(self) -> list[SlotAt]:
        """Where the shards lie that were brought.

        Raises:
            StorageError: something on storage is bad, or away; no shard counts that is not whole.
            MemoryBudgetError, ArenaError: a node has no room, or another process writes there.
        """
        try:
            self.begin()
            self.bring()
            together(self._group, self.seal)
        finally:
            self.close()
        return list(self.places.values())

    def begin(self) -> Mapping[str, SlotAt]:
        """Have a slot for each shard, into which chunks begin to come; where, as ``places``. Raises as ``run``."""

        def look() -> Need:
            self._files.update((shard, self._file(shard)) for shard in self._mine())
            self._builds.update((shard, self._build(file)) for shard, file in self._files.items())
            # Until slots have their memory; behind the small reads, which would wait for all of it.
            new = [shard for shard, build in self._builds.items() if not build.fix.in_place]
            self._readers.submit(self._read_ahead, new)
            return Need.of(self._builds.values())

        self._arenas.close()  # files may be freed or replaced from here on, by any rank of the node
        make_room(
            self._group, self._topology, self._arenas.node_dir, self._events, chosen=self._stored.snapshot,
            need=look, keep=self._keep(),
        )  # fmt: skip
        for opened in gather_all(self._group, self._open, dict[str, SlotAt]):
            self.places.update(opened)
        self._proven = dict.fromkeys(self.places.values(), 0)
        self._proven.update((build.at, _ALL) for build in self._builds.values() if not build.fix.chunks)
        self._filling = self._fill()
        next(self._filling)  # chunks are on their way while ranks plan
        return self.places

    def bring(self, copies: Iterable[Copy] = ()) -> None:
        """Bring all chunks, and run each of ``copies`` of them once what it reads is proven.

        Raises:
            StorageError: as ``run``; some of the copies were made.
        """
        waiting: dict[SlotAt, deque[Copy]] = {}
        for copy in sorted(copies, key=lambda one: one.end):
            assert isinstance(copy.source, SlotAt)
            waiting.setdefault(copy.source, deque()).append(copy)
        own = {build.at for build in self._builds.values()}
        foreign_bytes = sum(copy.nbytes for at, of in waiting.items() if at not in own for copy in of)
        # In turns: ranks have more and less to read, and wait for each other only so long. Where much comes
        # from others it is copied as soon as they say how far they are.
        turn_secs = _SHORT_TURN_SECS if foreign_bytes > _LITTLE_BYTES else TURN_SECS
        done = False
        while not done:
            # Nothing is sealed before every chunk of every rank has the right checksum.
            turns = gather_all(self._group, partial(self._turn, waiting, turn_secs), _Turn)
            done = all(one.done for one in turns)
            for shard, end in (item for one in turns for item in one.proven.items()):
                self._proven[self.places[shard]] = end
        self._copy_proven(waiting)
        self.usage.update({name: sum(getattr(one, name) for one in turns) for name in self.usage})
        self._events.emit(
            "fetched", iteration=self._stored.snapshot.iteration, shards=len(self.places),
            bytes=self.usage["bytes"], secs=time.perf_counter() - self._begin_secs,
        )  # fmt: skip

    def seal(self) -> None:
        """What this rank has brought is a snapshot; behind ``bring``."""
        for shard, build in self._builds.items():
            if damage := build.finish():
                raise StorageError(f"{shard}: {', '.join(damage.names[:3])} is bad yet", lasting=True)

    def close(self) -> None:
        """Give the arenas up; what is not sealed does not count. A second call does nothing."""
        self._readers.shutdown(cancel_futures=True)  # first: what they write into is closed
        for build in self._builds.values():
            build.close()
        self._arenas.close()

    def _open(self) -> dict[str, SlotAt]:
        for build in self._builds.values():
            build.open()
        return {shard: build.at for shard, build in self._builds.items()}

    def _turn(self, waiting: Mapping[SlotAt, deque[Copy]], turn_secs: float) -> _Turn:
        """Some seconds of bringing chunks and of copying what was proven."""
        deadline = time.monotonic() + turn_secs
        self._copy_proven(waiting)
        done = True
        for _ in self._filling:
            self._copy_proven(waiting)
            if time.monotonic() >= deadline:
                done = False
                break
        return _Turn(done, **self.usage, proven={shard: self._proven[self.places[shard]] for shard in self._builds})

    def _copy_proven(self, waiting: Mapping[SlotAt, deque[Copy]]) -> None:
        for at, copies in waiting.items():
            while copies and copies[0].end <= self._proven[at]:
                copies.popleft().run()

    def _mine(self) -> Iterator[str]:
        """Shards that this rank brings: the one that it continues, or, of another layout, its part of all."""
        same, ranks = not layouts_differ(self._topology.layout, self._stored.layout), self._topology.rank_of
        for number, shard in enumerate(self._missing):
            if (ranks[shard] if same else number % len(ranks)) == self._group.rank:
                yield shard

    def _name(self, shard: str) -> str:
        return f"{commit.folder_of(self._stored.snapshot.iteration)}/{self._stored.shards[shard].file}"

    def _read_ahead(self, shards: Sequence[str]) -> None:
        for shard in shards:
            self._storage.read_ahead(self._name(shard), min(self._stored.shards[shard].nbytes, _AHEAD_BYTES))

    def _file(self, shard: str) -> ShardFile:
        entry, name = self._stored.shards[shard], self._name(shard)
        where = f"{self._storage.where}/{name}"
        if _patiently(lambda: self._storage.size(name)) != entry.nbytes:
            raise StorageError(f"{where}: is not there with its {entry.nbytes} bytes", lasting=True)

        def read(begin: int, nbytes: int) -> bytes:
            return _patiently(lambda: self._storage.read(name, begin, nbytes))

        def read_into(begin: int, memory: memoryview) -> None:
            _patiently(lambda: self._storage.read_into(name, begin, memory))

        return ShardFile(where, shard, entry, read, read_into)

    def _package(self, file: ShardFile) -> Package:
        """What a slot is built around: all but its stepped chunks."""
        image = file.image
        volatile = [file.chunk(number) for number in range(image.num_stepped_chunks, len(image.chunks))]
        hashes, objects = file.entry.chunk_hashes, bytes(file.objects())
        return Package(image.manifest, self._stored.snapshot, 1, hashes, objects, b"".join(volatile))

    def _build(self, file: ShardFile) -> Build:
        """What is bad is brought where it lies, or all of the shard to a new slot."""
        image, node_dir, package = file.image, self._arenas.node_dir, self._package(file)
        name = arena_path(node_dir, image.manifest).name
        fix = Fix(
            package.shard, SlotAt(self._topology.me.node, name, NEW_SLOT), tuple(range(image.num_stepped_chunks))
        )
        for at, damage in self._bad.items():
            if (at.node, at.arena) == (fix.at.node, name) and self._is_of_file(at, damage, file):
                chunks = tuple(chunk for chunk in damage.chunks if chunk < image.num_stepped_chunks)
                fix = replace(fix, at=at, chunks=chunks, parts=damage.parts)
        return Build(node_dir, fix, package, self._slots, self._keep())

    def _is_of_file(self, at: SlotAt, damage: Damage, file: ShardFile) -> bool:
        """Whether a slot has what the file has, but for a few bad chunks."""
        if damage.useless:
            return False
        try:
            with closing(Arena.open(self._arenas.node_dir / at.arena)) as arena:
                hashes, snapshot = arena.hashes(at.slot), arena.control.record(at.slot).snapshot
        except ArenaError:
            return False
        same = hashes is not None and np.array_equal(hashes, file.entry.chunk_hashes)
        return same and snapshot == self._stored.snapshot

    def _keep(self) -> Sequence[Collection[SnapshotId]]:
        return worth_keeping(self._inventory, self._topology, self._stored.snapshot)

    def _fill(self) -> Iterator[None]:
        """Bring all chunks, in the order in which they lie in their slots, and stop for a moment after each."""
        builds = self._builds
        total = sum(build.length(chunk) for build in builds.values() for chunk in build.fix.chunks)
        progress = Progress(f"rank {self._group.rank} reads iteration {self._stored.snapshot.iteration} from storage")
        wanted = ((shard, chunk) for shard, build in builds.items() for chunk in build.fix.chunks)
        coming: deque[tuple[str, int, Future[int]]] = deque()

        def order(count: int) -> None:
            for shard, chunk in islice(wanted, count):
                coming.append((shard, chunk, self._readers.submit(_bring, self._files[shard], builds[shard], chunk)))

        order(READERS)
        yield
        while coming:
            shard, chunk, brought = coming.popleft()
            self.usage["bytes"] += brought.result()
            self.usage["chunks"] += 1
            order(1)
            self._proven[builds[shard].at] = builds[shard].arena.image.chunks[chunk].end
            if not coming or coming[0][0] != shard:
                self._proven[builds[shard].at] = _ALL
            progress(self.usage["bytes"], total)
            yield


def _bring(file: ShardFile, build: Build, chunk: int) -> int:
    """Read a chunk, prove it, and write it where it belongs in memory; returns its bytes."""
    nbytes = build.length(chunk)
    memory = chunk_buffer(nbytes)
    file.fill(chunk, memory)
    build.put(chunk, 0, np.frombuffer(memory, np.uint8))
    return nbytes


def _in_memory(inventory: Inventory, stored: StoredSnapshot, bad: Collection[SlotAt]) -> set[str]:
    """Shards of a snapshot that lie in good slots."""
    return {
        report.shard
        for report in inventory.arenas
        for slot in report.slots
        if slot.snapshot == stored.snapshot and SlotAt(report.node, report.name, slot.index) not in bad
    }
