"""One snapshot on its way to storage: this node's shards, and, on one node, the commit of all nodes' parts.

A thread of its own, as storage may be slow, or away for an hour, and one more for each file but one that it writes at
a time. They take a piece at a time, behind whatever ranks of the node copy and reduce, and together at most as many
bytes a second as they may. What they read is proven piece by piece; nothing counts before all nodes are done and one
object says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

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
from ftckpt.persist.commit import CheckpointName, CheckpointTransaction, NodeCommitMarker
from ftckpt.persist.compression import packed
from ftckpt.persist.paths import SNAPSHOT, ExportPlace, Place
from ftckpt.persist.shards import ShardImage, StoredShard, StoredSnapshot, contents, files_of
from ftckpt.persist.storage import Storage
from ftckpt.smp.arenas import CheckedSlot, MonitoredArena, MonitoredArenas
from ftckpt.smp.export import export
from ftckpt.smp.footprint import yield_disks
from ftckpt.smp.work import Throttle
from ftckpt.units import rate

_POLL_SECS = 0.1
_MOST_POLL_SECS = 2.0
"""Between looks at storage for the parts of other nodes: each is a listing."""
_AGAIN_SECS = 1.0
_MOST_AGAIN_SECS = 60.0
"""Between attempts while storage fails, each pause twice the one before it."""
_FILES = 2
"""Written at a time: what storage gives one file is often less than what it gives a node. Each takes memory and a
core: compressed, to an object store, 350 MiB."""
_EXPORTED_BY = 0.9
"""Of the time that a flush has: ranks count it from a moment earlier, and are to hear by then that the snapshot is
there, with what others load or without."""
_LOST = (ArenaError, ValueError)
"""What reading memory raises that was unmapped meanwhile."""


class _Cancellation(Exception):
    """The snapshot is not wanted on storage any more."""


@dataclass(frozen=True)
class FlushOrders:
    """What a node must know to write to storage: ``where``, for which ``job``, as which ``owner``, and with whom.

    The first of ``nodes`` commits, and makes the ``exports``, all within ``timeout_secs``. ``keep``: how many
    checkpoints stay, the newest, 0: all; ``bytes_per_sec``: of this node, 0 for no limit. ``at_end``:
    whether the last snapshot of a job goes there, too. ``compress``: ``none`` or ``zstd``. ``began``: when the owner
    did, in seconds of the time of day; 0: not known.
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
        """What a description for the SMP says; raises KeyError, ValueError or TypeError if it is unusable."""
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
        """Whether this node does."""
        return self.nodes[:1] == (self.node,)


class Joinable(Protocol):
    """Work on threads of its own."""

    def join(self, timeout_secs: float | None = None) -> None:
        """Wait for its end."""


class Flush:
    """The work on one snapshot. ``state`` may be read by any thread.

    Args:
        before: what was begun for storage before this. It must have ended: it may be removing things.
    """

    def __init__(
        self, orders: FlushOrders, arenas: MonitoredArenas, pace: Throttle, events: Events, snapshot: SnapshotId, *,
        before: Joinable | None = None,
    ) -> None:  # fmt: skip
        self.snapshot = snapshot
        self.state = FlushState.WORKING
        self.found = False
        """Whether it was there before; known at the end."""
        self.problem = ""
        """Why it cannot come there, or what keeps it; empty where nothing does."""
        self.committed = False
        self.unexported = ""
        """Why what others load was not made of it; known at the end."""
        self.orders = orders
        self._arenas = arenas
        self._pace = pace
        self._events = events
        self._begun = time.monotonic()
        self.halted = False
        """Whether it was stopped."""
        self._over = threading.Event()
        """Nothing more is to be done: it was stopped, or one of its files has failed."""
        self.written: dict[str, StoredShard] = {}
        self._thread = threading.Thread(target=self._run, args=(before,), name="smp-flush", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave it. What this node was writing is removed; once it is done, the rest is no more its own."""
        self.halted = True
        self._over.set()

    def join(self, timeout_secs: float | None = None) -> None:
        """Wait for the end of one that was stopped."""
        self._thread.join(timeout_secs)

    def _run(self, before: Joinable | None) -> None:
        # Files are written by this thread and those that it starts, and so in its class; what the file system writes
        # of its own, such as a journal, is not. Of cores they have what the process has: a thread inherits that.
        yield_disks()
        if before is not None:
            before.join()
        try:
            storage = self._patiently(lambda: open_storage(self.orders.where, "--ftckpt-persist"))
            pending = CheckpointTransaction(storage, self.snapshot, self.orders.node)
            path = f"{pending.folder}/{commit.MANIFEST_NAME}"
            # Before anything is written: an earlier run that removes leftovers must see that they are of another.
            self._patiently(lambda: self._owns(storage))
            if self.orders.commits:
                # The one before this has ended, and no other of this run writes an older one.
                self._patiently(lambda: self._sweep(storage))
            # In this order: a commit is there before it takes the marks away. What has neither is not committed
            # before this node says that it is done; an SMP that was killed behind a commit leaves nothing to do.
            promised = self._patiently(pending.own_mark)
            self.found = self._patiently(lambda: self._is_there(storage))
            if not self.found:
                self._write(storage, pending, promised)
                self._settle(storage, pending, path)
            self.committed = True
            if self.orders.commits and self.orders.exports is not None:
                # Not before others are told that it is there: memory has it until then, and the job may end.
                self._export(storage, self.orders.exports)
            self.problem, self.state = "", FlushState.DONE
        except _Cancellation:
            pass
        except Exception as error:  # noqa: BLE001 - training goes on whatever storage does, and is told
            reason = in_words(error)
            self.problem, self.state = reason, FlushState.CANNOT  # in this order: who sees the state asks why
            self._events.emit("flush_failed", iteration=self.snapshot.iteration, reason=reason)

    def _export(self, storage: Storage, exports: ExportPlace) -> None:
        head = read_lineage(self._arenas.node_dir)
        try:
            if is_doubtful(head, self.snapshot.iteration, head):
                raise StorageError("replicas differed, so that it may mix their states", lasting=True)
            export(
                storage, Place(self.orders.where, exports), self.snapshot, self._events, owner=self.orders.owner,
                deadline=self._begun + _EXPORTED_BY * self.orders.timeout_secs, pause=self._pause,
            )  # fmt: skip
        except (StorageError, OSError, _Cancellation) as error:
            # No failure of the flush: what a restart needs is there.
            self.unexported = f"{exports.form} was not made of it: {error}"
            self._events.emit(
                "not_exported", iteration=self.snapshot.iteration, format=exports.form, reason=str(error)
            )

    def _write(self, storage: Storage, pending: CheckpointTransaction, promised: NodeCommitMarker | None) -> None:
        """All shards of this node, each whole and of this snapshot when it has its name.

        Args:
            promised: what this node has said before.
        """
        # By an SMP that was killed, or by an attempt that another node gave up; unless that node is lost, and this
        # one holds more than it did then, as a restart placed its shards here.
        shards = {arena.shard for arena in self._arenas.all}
        marks = [promised] if promised is not None and shards <= promised.parts.keys() else []
        if marks and not self._patiently(lambda: pending.lacks(*marks)):
            return
        begun, (lineage, slots) = time.monotonic(), self._checked()
        try:
            with ExitStack() as leases:
                for arena, checked in slots:
                    leases.enter_context(arena.lease(checked.slot))
                self._put_all(pending, slots)
        except BaseException:
            # Only before this node has said that it is done: the commit, elsewhere, may count on its files.
            if promised is None:
                self._withdraw(storage, pending)
            raise
        parts = {name: one.to_json() for name, one in self.written.items()}
        self._patiently(lambda: pending.done(parts, lineage))
        nbytes, secs = sum(one.nbytes for one in self.written.values()), round(time.monotonic() - begun, 3)
        self._events.emit("flushed", iteration=self.snapshot.iteration, bytes=nbytes, secs=secs)

    def _checked(self) -> tuple[Lineage, list[tuple[MonitoredArena, CheckedSlot]]]:
        """Waits until all arenas of the node hold the snapshot with its checksums; its lineage, and where it lies."""
        while True:
            # First: a job that branches voids slots, then writes its lineage. Slots that hold the snapshot to the end
            # of the reading were not void when this was read.
            lineage, arenas = read_lineage(self._arenas.node_dir), self._arenas.all
            slots = [(arena, arena.find(self.snapshot)) for arena in arenas]
            ready = [(arena, one) for arena, one in slots if one is not None]
            if self._arenas.complete and len(ready) == len(slots):
                return lineage, ready
            self._pause(_POLL_SECS)

    def _put_all(self, pending: CheckpointTransaction, slots: Sequence[tuple[MonitoredArena, CheckedSlot]]) -> None:
        """A few at a time. At the first that fails the others are left; all threads have ended when it returns."""
        left, errors, threads = iter(slots), list[BaseException](), list[threading.Thread]()

        def work() -> None:
            try:
                for arena, checked in left:  # each is given to one thread
                    self.written[arena.shard] = self._patiently(partial(self._put, pending, arena, checked))
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)
                self._over.set()

        for _ in slots[1:_FILES]:
            thread = threading.Thread(target=work, name="smp-flush-file", daemon=True)
            with suppress(RuntimeError):  # no memory for one more: the others do all
                thread.start()
                threads.append(thread)
        work()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _put(self, pending: CheckpointTransaction, arena: MonitoredArena, checked: CheckedSlot) -> StoredShard:
        slot, record = arena.mapped.image, checked.record
        shard = ShardImage.of(slot)
        compresses, lengths = self.orders.compress == "zstd", list[int]()
        name = f"{arena.shard}.{'zst' if compresses else 'safetensors'}"
        entry = StoredShard(
            name, shard.image.file_bytes, "", shard.image.manifest.digest.hex(),
            record.objects_used, record.objects_hash, checked.hashes[list(shard.chunks)],
        )  # fmt: skip
        try:
            pieces = self._paced(arena, checked.slot, contents(shard, slot, arena.mapped.slot(checked.slot), entry))
            if compresses:
                pieces = packed(shard.image, entry.objects_used, pieces, lengths)
            file = pending.write(entry.file, pieces)
        except (CorruptError, *_LOST) as error:
            # A ValueError: memory was unmapped in the middle, as the node's arenas were laid out anew.
            if isinstance(error, ValueError) or not arena.still_holds(checked.slot, record):
                raise ArenaError(f"{arena.shard}: its slot was needed for a newer snapshot") from None
            raise
        # Behind the last byte: what was read before that may have been written over meanwhile.
        if not arena.still_holds(checked.slot, record):
            raise ArenaError(f"{arena.shard}: its slot was needed for a newer snapshot")
        frames = np.array(lengths, np.uint64) if compresses else None
        spare_bytes = 0 if compresses else shard.image.file_bytes - shard.image.objects.begin - entry.objects_used
        return replace(
            entry, file=file.name, nbytes=file.nbytes, checksum=file.checksum, frames=frames, spare_bytes=spare_bytes
        )

    def _paced(self, arena: MonitoredArena, slot: int, pieces: Iterable[memoryview]) -> Iterator[Buffer]:
        for piece in pieces:
            for wait_secs in self.before_piece(len(piece)):
                self._pause(wait_secs)
            arena.renew(slot)
            if self._over.is_set():
                raise _Cancellation
            yield piece

    def before_piece(self, nbytes: int) -> Iterator[float]:
        yield from self._pace.memory(nbytes)
        yield from self._pace.receive()  # what goes to storage takes the network as what comes from other nodes

    def _settle(self, storage: Storage, pending: CheckpointTransaction, path: str) -> None:
        """Wait until the snapshot is committed; one node does it, when all are done."""
        poll_secs = _POLL_SECS
        while not self._patiently(
            lambda: self._commit(storage, pending, path) if self.orders.commits else self._is_there(storage)
        ):
            self._pause(poll_secs)
            poll_secs = min(2 * poll_secs, _MOST_POLL_SECS)

    def _is_there(self, storage: Storage) -> bool:
        """Whether this very snapshot is committed."""
        there = _committed(storage, CheckpointName(self.snapshot.iteration))
        return there is not None and there.snapshot == self.snapshot

    def _commit(self, storage: Storage, pending: CheckpointTransaction, path: str) -> bool:
        """Whether all nodes were done, and the snapshot is committed."""
        marks = pending.marks()
        if not set(self.orders.nodes) <= marks.keys():
            return self._is_there(storage)  # marks go behind the commit
        own = {node: marks[node] for node in self.orders.nodes}
        parts = [(str(name), entry) for mark in own.values() for name, entry in mark.parts.items()]
        shards = {name: StoredShard.from_json(entry) for name, entry in parts}
        arena = self._arenas.all[0].mapped
        layout = arena.manifest.layout
        lineage = min((mark.lineage for mark in own.values()), key=lambda one: one.generation)
        if lacking := set(shard_names(layout, axes_of(arena.manifest.shard))) - shards.keys():
            # A node that holds more since another was lost has not yet said so anew.
            self._tell(f"no node has written {', '.join(sorted(lacking)[:3])} yet")
            return False
        stored = StoredSnapshot(self.snapshot, self.orders.job, layout, shards, lineage)
        if self._over.is_set():
            raise _Cancellation
        # Right before: the job may go on elsewhere by now.
        if is_owner := self._owns(storage):
            self._set_aside(storage, path)
        if not pending.commit(stored.encode(), own, replaces=is_owner):
            raise StorageError(f"{self.orders.where}/{path}: is there already, of another run", lasting=True)
        self._events.emit(
            "committed", iteration=self.snapshot.iteration, path=f"{self.orders.where}/{pending.folder}",
            bytes=stored.nbytes, shards=len(shards),
        )  # fmt: skip
        try:
            self._retain(storage, lineage)
            self._sweep(storage)
        except (StorageError, *_LOST) as error:
            self._tell(str(error))  # the checkpoint is there; the next one tidies up
        return True

    def _set_aside(self, storage: Storage, path: str) -> None:
        """What another branch of the job has left where this snapshot goes stays, under another name."""
        if storage.size(path) is None:
            return
        there = _committed(storage, CheckpointName(self.snapshot.iteration))
        if there is None or there.snapshot != self.snapshot:
            retention.set_aside(storage, self.snapshot.iteration, there)

    def _retain(self, storage: Storage, lineage: Lineage) -> None:
        """Remove checkpoints beyond those that are kept."""
        # Doubts may have come up since the snapshot's own lineage was read.
        now = read_lineage(self._arenas.node_dir)
        lineage = now if now == lineage else lineage
        there = self._whole(storage)
        lineages = {name: stored.lineage for name, stored in there.items()}
        surplus = retention.surplus(lineages, lineage, self.orders.keep)
        doomed = {name: there[name].snapshot for name in surplus if there[name].snapshot != self.snapshot}
        if not self._owns(storage):
            return
        # What it names may be of a branch that is abandoned, or in doubt by now.
        certain = retention.restorable(lineages, lineage)
        newest = max((name.iteration for name in certain), default=self.snapshot.iteration)
        if commit.latest(storage) != newest:
            commit.name_latest(storage, newest)
        snapshots = {stored.snapshot for stored in there.values()}
        retention.forget_void(storage, [one for one in retention.voided(storage) if one not in snapshots])
        if doomed:
            for name in retention.retire(storage, doomed, newest, lambda: self._owns(storage)):
                self._events.emit("removed", iteration=name.iteration, path=f"{self.orders.where}/{name}")

    def _whole(self, storage: Storage) -> dict[CheckpointName, StoredSnapshot]:
        """Checkpoints that can be read: others are nobody's to remove."""
        found = {name: _committed(storage, name) for name in commit.checkpoints(storage)}
        return {name: stored for name, stored in found.items() if stored is not None}

    def _sweep(self, storage: Storage) -> None:
        """Remove what came to nothing."""
        if self._owns(storage):
            # What other nodes may have gone on to is whole on all, and in a slot of this one.
            lineages = {one.lineage for arena in self._arenas.all for one in arena.mapped.snapshots()}
            commit.sweep(storage, self.snapshot, files_of, lambda: self._may_remove(storage), lineages)

    def _may_remove(self, storage: Storage) -> bool:
        # One that was stopped may have been at this for long: others have gone on to what it does not know of.
        return not self._over.is_set() and self._owns(storage)

    def _owns(self, storage: Storage) -> bool:
        return commit.require_owner(storage, self.orders.owner, self.orders.began)

    def _withdraw(self, storage: Storage, pending: CheckpointTransaction) -> None:
        try:
            # A run that goes on elsewhere may have restored this snapshot, and written it under the same names.
            self._owns(storage)
            pending.withdraw()
        except StorageError as error:
            self._tell(str(error))  # swept behind the next commit

    def _patiently(self, action: Callable[[], Any]) -> Any:
        """``action``, again and again while storage fails in a way that may pass."""
        pause_secs = _AGAIN_SECS
        while True:
            try:
                return action()
            except StorageError as error:
                if error.lasting:
                    raise
                self._tell(str(error))
            self._pause(pause_secs)
            pause_secs = min(2 * pause_secs, _MOST_AGAIN_SECS)

    def _pause(self, secs: float) -> None:
        if self._over.wait(secs):
            raise _Cancellation("it was stopped: the job has ended, went back, is being saved or starts anew")

    def _tell(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self._events.emit("storage_fails", iteration=self.snapshot.iteration, error=problem)


def _committed(storage: Storage, name: CheckpointName) -> StoredSnapshot | None:
    """What a manifest says; None where there is none, or it is not to be read."""
    if storage.size(name.manifest) is None:
        return None
    try:
        return retention.read_manifest(storage, name)
    except StorageError as error:
        if not error.lasting:
            raise
        return None
