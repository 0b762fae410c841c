"""Flush of one snapshot to storage: this node's shards and, on one node, the commit for all nodes.

Runs in a thread of its own, as storage may be slow or away for an hour, plus one for each further file written
concurrently. The threads yield to copies and reductions of the node's ranks and share one rate limit. Bytes are
verified piece by piece as they are read; nothing counts until all nodes are done and one object commits it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeVar

import numpy as np

from ftckpt.array_types import Buffer
from ftckpt.errors import ArenaError, CorruptError, StorageError, in_words
from ftckpt.events import Events
from ftckpt.memory.heartbeat import FlushState
from ftckpt.memory.lineage_file import read_lineage
from ftckpt.model.lineage import Lineage, is_doubtful
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import axes_of, shard_names
from ftckpt.persist import commit, retention
from ftckpt.persist.backend import open_storage
from ftckpt.persist.commit import CheckpointName, CheckpointTransaction, NodeCommitMarker, committed
from ftckpt.persist.compression import packed
from ftckpt.persist.paths import SNAPSHOT, ExportPlace, Place
from ftckpt.persist.shards import ShardImage, StoredShard, StoredSnapshot, contents
from ftckpt.persist.storage import Storage, patiently, pauses
from ftckpt.smp.arenas import CheckedSlot, MonitoredArenas
from ftckpt.smp.export import export
from ftckpt.smp.footprint import yield_disks
from ftckpt.smp.work import Throttle
from ftckpt.units import rate

T = TypeVar("T")

_POLL_SECS = 0.1
_MAX_POLL_SECS = 2.0
"""Maximum interval of polling storage for other nodes' parts: each poll is a listing."""
_FILES = 2
"""Files written concurrently: one file often gets less bandwidth than a node. Each takes memory and a core: 350 MiB
if compressed, to an object store."""
_EXPORTED_BY = 0.9
"""Deadline of the export as a fraction of the flush's: ranks count that from slightly earlier, and must learn of the
commit in time, with or without the export."""
_LOST = (ArenaError, ValueError)
"""Errors of reading memory that was unmapped meanwhile."""


class _Cancellation(Exception):
    """The flush was stopped."""


@dataclass(frozen=True)
class FlushOrders:
    """A node's instructions for flushes: storage ``where``, the ``job``, its run's ``owner`` and all ``nodes``.

    The first of ``nodes`` commits and creates the ``exports``, all within ``timeout_secs``. ``keep``: number of
    newest checkpoints to retain, 0: all. ``bytes_per_sec``: limit of this node, 0: none. ``at_end``: also flush the
    last snapshot of a job. ``compress``: ``none`` or ``zstd``. ``began``: start of the owner, in seconds since the
    epoch, 0: unknown.
    """

    where: str = ""
    job: str = ""
    owner: str = ""
    node: str = ""
    nodes: tuple[str, ...] = ()
    keep: int = 0
    bytes_per_sec: float = 0.0
    at_end: bool = True
    exports: ExportPlace | None = None
    timeout_secs: float = commit.FLUSH_SECS
    compress: str = "none"
    began: float = 0.0

    @classmethod
    def from_json(cls, description: Mapping[str, Any]) -> FlushOrders:
        """Parse a description for the SMP; raises KeyError, ValueError or TypeError if it is invalid."""
        settings = dict(description.get("settings", {}))
        place = Place.of(str(settings.get("persist", "")), str(settings.get("persist_format", SNAPSHOT)))
        return cls(
            place.snapshots, str(description.get("job", "")), str(description.get("owner", "")),
            str(description["node"]), tuple(sorted(map(str, description.get("nodes", [])))),
            int(settings.get("persist_keep", 0)),
            rate(settings.get("persist_rate", "0")), settings.get("persist_at_end", "on") == "on",
            place.exports, float(description.get("flush_secs", cls.timeout_secs)),
            str(settings.get("persist_compress", "none")), float(description.get("began", 0.0)),
        )  # fmt: skip

    @property
    def commits(self) -> bool:
        """Whether this node commits."""
        return self.nodes[:1] == (self.node,)


class Joinable(Protocol):
    """Work on threads of its own."""

    def join(self, timeout_secs: float | None = None) -> None:
        """Wait for its end."""


class Flush:
    """The flush of one snapshot, started by construction. Any thread may read ``state``.

    Args:
        before: the previous flush to this storage. This one waits for its end, as it may still be removing files.
    """

    def __init__(
        self, orders: FlushOrders, arenas: MonitoredArenas, pace: Throttle, events: Events, snapshot: SnapshotId, *,
        before: Joinable | None = None,
    ) -> None:  # fmt: skip
        self.snapshot = snapshot
        self.state = FlushState.WORKING
        self.found = False
        """Whether the snapshot was on storage before; valid at the end."""
        self.problem = ""
        """Why the flush failed, or what delays it; empty if nothing does."""
        self.is_committed = False
        self.unexported = ""
        """Why it was not exported; valid at the end."""
        self.orders = orders
        self._arenas = arenas
        self._pace = pace
        self._events = events
        self.halted = False
        """Whether it was stopped."""
        self.read_bytes: dict[str, int] = {}
        """Bytes read so far, by shard: two are read at a time, and one may be read again."""
        self.total_bytes = 0
        self._over = threading.Event()
        """Set when it was stopped, or one of its files has failed."""
        export_by = time.monotonic() + _EXPORTED_BY * orders.timeout_secs
        self._thread = threading.Thread(target=self._run, args=(before, export_by), name="smp-flush", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Cancel the flush. This node's partial files are removed; after its marker it removes nothing."""
        self.halted = True
        self._over.set()

    def join(self, timeout_secs: float | None = None) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout_secs)

    def _run(self, before: Joinable | None, export_by: float) -> None:
        # I/O priority applies to this thread and those that it starts, which write the files, not to the file
        # system's own writes, such as a journal. CPU priority is the process's: a thread inherits it.
        yield_disks()
        if before is not None:
            before.join()
        try:
            storage = self._patiently(lambda: open_storage(self.orders.where, "--ftckpt-persist"))
            pending = CheckpointTransaction(storage, self.snapshot, self.orders.node)
            # Before the first write: an earlier run that sweeps leftovers must see that they have another owner.
            self._patiently(lambda: self._owns(storage))
            if self.orders.commits:
                # The previous flush has ended, and no node of this run writes an older snapshot.
                self._patiently(lambda: self._sweep(storage))
            # In this order: a commit removes the markers only once it is complete. With neither, the snapshot is not
            # committed before this node writes its marker. An SMP killed after a commit leaves nothing to do.
            promised = self._patiently(pending.own_mark)
            self.found = self._patiently(lambda: self._is_there(storage))
            if not self.found:
                self._write(storage, pending, promised)
                self._settle(storage, pending)
            self.is_committed = True
            if self.orders.commits and self.orders.exports is not None:
                # After the commit is visible: until then memory keeps the snapshot, and the job may end.
                self._export(storage, self.orders.exports, export_by)
            self.problem, self.state = "", FlushState.DONE
        except _Cancellation:
            pass
        except Exception as error:  # noqa: BLE001 - reported; training continues whatever storage does
            reason = in_words(error)
            self.problem, self.state = reason, FlushState.CANNOT  # in this order, for readers
            self._events.emit("flush_failed", iteration=self.snapshot.iteration, reason=reason)

    def _export(self, storage: Storage, exports: ExportPlace, deadline: float) -> None:
        head = read_lineage(self._arenas.node_dir)
        try:
            if is_doubtful(head, self.snapshot.iteration, head):
                raise StorageError("replicas differed, so that it may mix their states", lasting=True)
            export(
                storage, Place(self.orders.where, exports), self.snapshot, self._events, owner=self.orders.owner,
                deadline=deadline, pause=self._pause,
            )  # fmt: skip
        except (StorageError, OSError, _Cancellation) as error:
            # The flush succeeds all the same: a restart needs no export.
            self.unexported = f"it was not exported as {exports.form}: {error}"
            self._events.emit(
                "not_exported", iteration=self.snapshot.iteration, format=exports.form, reason=str(error)
            )

    def _write(self, storage: Storage, pending: CheckpointTransaction, promised: NodeCommitMarker | None) -> None:
        """Write all shards of this node; each gets its name only when it is complete and verified.

        Args:
            promised: the marker that this node has written before.
        """
        # A killed SMP, or an attempt that failed on another node, may have written everything. If that node was
        # lost, a restart may have placed its shards on this one, which then has more to write.
        shards = {arena.shard for arena in self._arenas.all}
        marks = [promised] if promised is not None and shards <= promised.parts.keys() else []
        if marks and not self._patiently(lambda: pending.lacks(*marks)):
            return
        started_secs, (lineage, slots) = time.monotonic(), self._checked()
        self.total_bytes = sum(ShardImage.of(slot.arena.mapped.image).image.file_bytes for slot in slots)
        try:
            written = self._put_all(pending, slots)
        except BaseException:
            # Not after this node wrote its marker: the committing node may rely on the files.
            if promised is None:
                self._withdraw(storage, pending)
            raise
        parts = {name: one.to_json() for name, one in written.items()}
        self._patiently(lambda: pending.done(parts, lineage))
        nbytes, secs = sum(one.nbytes for one in written.values()), round(time.monotonic() - started_secs, 3)
        self._events.emit("flushed", iteration=self.snapshot.iteration, bytes=nbytes, secs=secs)

    def _checked(self) -> tuple[Lineage, list[CheckedSlot]]:
        """Wait until all arenas of the node have the snapshot checked; returns its lineage and slots."""
        while True:
            # First: a job that branches invalidates slots, then writes its lineage. Slots that hold the snapshot
            # until they are read completely were valid when the lineage was read.
            lineage = read_lineage(self._arenas.node_dir)
            if (slots := self._arenas.find_all(self.snapshot)) is not None:
                return lineage, slots
            self._pause(_POLL_SECS)

    def _put_all(self, pending: CheckpointTransaction, slots: Sequence[CheckedSlot]) -> dict[str, StoredShard]:
        """Write the shards, a few concurrently. The first failure cancels the others; returns after all threads."""
        left, errors, threads = iter(slots), list[BaseException](), list[threading.Thread]()
        written: dict[str, StoredShard] = {}

        def work() -> None:
            try:
                for slot in left:  # threads share the iterator
                    written[slot.arena.shard] = self._patiently(partial(self._put, pending, slot))
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)
                self._over.set()

        for _ in slots[1:_FILES]:
            thread = threading.Thread(target=work, name="smp-flush-file", daemon=True)
            with suppress(RuntimeError):  # no memory for a thread: the others write all
                thread.start()
                threads.append(thread)
        work()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return written

    def _put(self, pending: CheckpointTransaction, slot: CheckedSlot) -> StoredShard:
        arena, record, image = slot.arena, slot.record, slot.arena.mapped.image
        shard = ShardImage.of(image)
        compresses, lengths = self.orders.compress == "zstd", list[int]()
        name = f"{arena.shard}.{'zst' if compresses else 'safetensors'}"
        entry = StoredShard(
            name, shard.image.file_bytes, "", shard.image.manifest.digest.hex(),
            record.objects_used, record.objects_hash, slot.hashes[list(shard.chunks)],
        )  # fmt: skip
        try:
            pieces = self._paced(arena.shard, contents(shard, image, arena.mapped.slot(slot.slot), entry))
            if compresses:
                pieces = packed(shard.image, entry.objects_used, pieces, lengths)
            file = pending.write(entry.file, pieces)
        except (CorruptError, *_LOST) as error:
            # ValueError: memory was unmapped meanwhile, as the node's arenas were reallocated.
            if isinstance(error, ValueError) or not slot.still_holds():
                raise ArenaError(f"{arena.shard}: its slot was needed for a newer snapshot") from None
            raise
        # After the last byte: earlier ones may have been overwritten while the slot was read.
        if not slot.still_holds():
            raise ArenaError(f"{arena.shard}: its slot was needed for a newer snapshot")
        frames = np.array(lengths, np.uint64) if compresses else None
        spare_bytes = 0 if compresses else shard.image.file_bytes - shard.image.objects.begin - entry.objects_used
        return replace(
            entry, file=file.name, nbytes=file.nbytes, checksum=file.checksum, frames=frames, spare_bytes=spare_bytes
        )

    def _paced(self, shard: str, pieces: Iterable[memoryview]) -> Iterator[Buffer]:
        self.read_bytes[shard] = 0
        for piece in pieces:
            # Storage shares the network with other nodes' transfers.
            for wait_secs in chain(self._pace.memory(len(piece)), self._pace.receive()):
                self._pause(wait_secs)
            if self._over.is_set():
                raise _Cancellation
            yield piece
            self.read_bytes[shard] += len(piece)

    def _settle(self, storage: Storage, pending: CheckpointTransaction) -> None:
        """Wait until the snapshot is committed, by one node after all are done."""
        for poll_secs in pauses(_POLL_SECS, _MAX_POLL_SECS):
            if self._patiently(
                lambda: self._commit(storage, pending) if self.orders.commits else self._is_there(storage)
            ):
                break
            self._pause(poll_secs)

    def _is_there(self, storage: Storage) -> bool:
        """Whether exactly this snapshot is committed."""
        there = committed(storage, CheckpointName(self.snapshot.iteration))
        return there is not None and there.snapshot == self.snapshot

    def _commit(self, storage: Storage, pending: CheckpointTransaction) -> bool:
        """Commit the snapshot if all nodes are done; returns whether it is committed."""
        marks = pending.marks()
        if not set(self.orders.nodes) <= marks.keys():
            return self._is_there(storage)  # a commit removes the markers
        own = {node: marks[node] for node in self.orders.nodes}
        parts = [(str(name), entry) for mark in own.values() for name, entry in mark.parts.items()]
        shards = {name: StoredShard.from_json(entry) for name, entry in parts}
        arena = self._arenas.all[0].mapped
        layout = arena.manifest.layout
        lineage = min((mark.lineage for mark in own.values()), key=lambda one: one.generation)
        if lacking := set(shard_names(layout, axes_of(arena.manifest.shard))) - shards.keys():
            # A node that took over shards of a lost one has not yet renewed its marker.
            self._report(f"no node has written {', '.join(sorted(lacking)[:3])} yet")
            return False
        stored = StoredSnapshot(self.snapshot, self.orders.job, layout, shards, lineage)
        if self._over.is_set():
            raise _Cancellation
        # Right before the commit: by now the job may run elsewhere.
        if is_owner := self._owns(storage):
            retention.set_aside(storage, self.snapshot)
        path = f"{self.orders.where}/{pending.folder}"
        if not pending.commit(stored.encode(), own, replaces=is_owner):
            raise StorageError(f"{path}/{commit.MANIFEST_NAME}: exists and belongs to another run", lasting=True)
        self._events.emit(
            "committed", iteration=self.snapshot.iteration, path=path, bytes=stored.nbytes, shards=len(shards)
        )
        try:
            self._retain(storage, lineage)
            self._sweep(storage)
        except (StorageError, *_LOST) as error:
            self._report(str(error))  # the checkpoint is committed; the next one cleans up
        return True

    def _retain(self, storage: Storage, lineage: Lineage) -> None:
        """Remove surplus checkpoints and update ``latest``."""
        # The lineage may have become doubtful since it was read for this snapshot.
        now = read_lineage(self._arenas.node_dir)
        lineage = now if now == lineage else lineage
        for name in retention.retain(storage, self.snapshot, lineage, self.orders.keep, lambda: self._owns(storage)):
            self._events.emit("removed", iteration=name.iteration, path=f"{self.orders.where}/{name}")

    def _sweep(self, storage: Storage) -> None:
        """Remove files of flushes that were never committed."""
        if self._owns(storage):
            # A snapshot that other nodes may already be flushing is committed, and so in a slot of this node too.
            lineages = {one.lineage for arena in self._arenas.all for one in arena.mapped.snapshots()}
            # A stopped flush may have hung here: others have since written files that it does not know.
            commit.sweep(storage, self.snapshot, lambda: not self._over.is_set() and self._owns(storage), lineages)

    def _owns(self, storage: Storage) -> bool:
        return commit.require_owner(storage, self.orders.owner, self.orders.began)

    def _withdraw(self, storage: Storage, pending: CheckpointTransaction) -> None:
        try:
            # A run that continues elsewhere may have restored this snapshot and written it under the same names.
            self._owns(storage)
            pending.withdraw()
        except StorageError as error:
            self._report(str(error))  # swept after the next commit

    def _patiently(self, action: Callable[[], T]) -> T:
        """Run ``action``; retry it while storage fails temporarily."""
        return patiently(action, self._pause, lambda error: self._report(str(error)))

    def _pause(self, secs: float) -> bool:
        if self._over.wait(secs):
            raise _Cancellation("it was stopped: the job has ended, rolled back, is being saved or restarts")
        return True

    def _report(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self._events.emit("storage_fails", iteration=self.snapshot.iteration, error=problem)
