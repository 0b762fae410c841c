"""Flush of a stopped job's newest snapshot, by the SMPs alone, without trainers.

Each node publishes on storage which snapshots its arenas hold, and the SMPs flush the newest that all nodes have. A
node's entry counts only while the node renews it: a lost node may have left one. Nothing changes meanwhile, as nobody
writes the arenas. If a node is missing, nothing is flushed, and the reason names it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, TypeVar

from ftckpt.errors import StorageError, in_words
from ftckpt.events import Events
from ftckpt.memory.heartbeat import FlushState
from ftckpt.memory.lineage_file import read_lineage
from ftckpt.model.lineage import Selection, is_doubtful
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist import commit, retention
from ftckpt.persist.backend import open_storage
from ftckpt.persist.membership import Membership
from ftckpt.persist.storage import Storage, patiently
from ftckpt.smp.arenas import MonitoredArenas
from ftckpt.smp.flush import Flush, FlushOrders, Joinable
from ftckpt.smp.work import Throttle

_POLL_SECS = 0.2
_MOST_PAUSE_SECS = 1.0
"""Longest pause between two attempts while storage fails: after longer ones nodes would miss each other."""
_NODES_SECS = 120.0
"""Longest wait for other nodes, but at most half of the timeout: the rest is for writing."""

T = TypeVar("T")


class FinalFlush:
    """The final flush of one node, in a thread that starts at construction and fails after the orders' timeout."""

    def __init__(
        self, orders: FlushOrders, arenas: MonitoredArenas, pace: Throttle, events: Events, *,
        before: Joinable | None = None,
    ) -> None:  # fmt: skip
        self.orders = orders
        self._arenas = arenas
        self._pace = pace
        self._events = events
        self._before = before
        self._deadline = time.monotonic() + orders.timeout_secs
        self._halted = threading.Event()
        self._state, self._reason = FlushState.WORKING, ""
        self._snapshot: SnapshotId | None = None
        self._flush: Flush | None = None
        self._thread = threading.Thread(target=self._run, name="smp-final-flush", daemon=True)
        self._thread.start()

    @property
    def working(self) -> bool:
        """Whether it has neither succeeded nor failed."""
        return self._state == FlushState.WORKING

    def stop(self) -> None:
        """Cancel it."""
        self._halted.set()
        if self._flush is not None:  # its thread may be in a long call to storage
            self._flush.stop()

    def join(self, timeout_secs: float | None = None) -> None:
        """Wait for the end of its threads, and of the flush before it."""
        begin = time.monotonic()
        self._thread.join(timeout_secs)
        last = self._flush or self._before
        if last is not None:
            last.join(None if timeout_secs is None else max(0.0, timeout_secs - (time.monotonic() - begin)))

    @property
    def status(self) -> dict[str, Any]:
        """The progress, as JSON values."""
        return {
            "flush": self._state.name.lower(),
            "iteration": self._snapshot.iteration if self._snapshot is not None else -1,
            "where": self.orders.exports.root if self.orders.exports is not None else self.orders.where,
            "storage": self.orders.where,
            "bytes": sum(self._flush.read_bytes.copy().values()) if self._flush is not None else 0,
            "total_bytes": self._flush.total_bytes if self._flush is not None else 0,
            "reason": self._reason,
        }

    def _run(self) -> None:
        try:
            nodes_by = time.monotonic() + min(_NODES_SECS, self.orders.timeout_secs / 2)
            storage = self._patiently(lambda: open_storage(self.orders.where, "--ftckpt-persist"))
            self._flush_newest(storage, nodes_by)
            self._state = FlushState.DONE
        except Exception as error:  # noqa: BLE001 - reported to the client
            self._reason = in_words(error)
            self._state = FlushState.CANNOT
            iteration = self._snapshot.iteration if self._snapshot is not None else -1
            self._events.emit("flush_failed", iteration=iteration, reason=self._reason)

    def _flush_newest(self, storage: Storage, nodes_by: float) -> None:
        held = self._held()
        there = self._patiently(lambda: self._newest(storage, {one.lineage for one in held}))
        members = Membership(storage, self.orders.node, self.orders.nodes, self.orders.owner, held)
        # Before this node may leave: another may hold newer snapshots and need its entry.
        self._patiently(members.beat)
        # One more with exports: the snapshot on storage may still need one.
        floor = max((one.iteration for one in held), default=-1) + (self.orders.exports is not None)
        if there is not None and there.iteration >= floor:
            self._snapshot = there  # memory has nothing newer than storage
            return
        is_over = False  # whether no node needs this one's entry any more
        try:
            chosen = self._choose(members, there, nodes_by)
            if there is not None and there.iteration > chosen.iteration:
                self._snapshot = there  # the common snapshot is older than the one on storage
                return
            self._snapshot = chosen
            is_over = self._flush_chosen(members, chosen)
        except BaseException:  # the flush has failed: other nodes must not wait for this one
            is_over = True
            raise
        finally:
            # If it was on storage before, other nodes may not have read this node's entry yet.
            if is_over:
                with suppress(StorageError):
                    members.leave()

    def _flush_chosen(self, members: Membership, chosen: SnapshotId) -> bool:
        """Flush ``chosen``; returns whether it was not on storage before."""
        flush = self._flush = Flush(self.orders, self._arenas, self._pace, self._events, chosen, before=self._before)
        if self._halted.is_set():  # ``stop`` may have missed the new flush
            flush.stop()
        while flush.state == FlushState.WORKING:
            with suppress(StorageError):  # the flush reports it
                members.beat()
            if self._late(_POLL_SECS):
                flush.stop()
                where = (
                    f"is at {self.orders.where}, but its export is not" if flush.is_committed else "was not flushed"
                )
                why = f": {flush.problem}" if flush.problem else ""
                raise StorageError(f"iteration {chosen.iteration} {where} in time{why}", lasting=True)
        if flush.state != FlushState.DONE:
            raise StorageError("the flush failed: the log of the SMP says why", lasting=True)
        if flush.unexported:
            raise StorageError(f"iteration {chosen.iteration} is at {self.orders.where}, but {flush.unexported}")
        return not flush.found

    def _choose(self, members: Membership, there: SnapshotId | None, nodes_by: float) -> SnapshotId:
        """The newest snapshot in all arenas of all nodes; a doubtful one only if all are. ``there``: the newest on
        storage; nodes that have nothing newer leave without waiting."""
        while True:
            self._patiently(members.beat)
            held = self._patiently(members.present)
            missing = set(self.orders.nodes) - held.keys()
            if not missing:
                break
            if self._late(_POLL_SECS) or time.monotonic() >= nodes_by:
                if there is not None and self._patiently(lambda: members.all_have(there)):
                    return there
                raise StorageError(
                    f"nodes are missing: {', '.join(sorted(missing))}: no snapshot is complete without their "
                    "shards; save on every node at once, or start the job again, which reconstructs from parity",
                    lasting=True,
                )
        everywhere = frozenset.intersection(*held.values())
        if not everywhere:
            newest = (f"{node} {max(one).iteration if one else 'none'}" for node, one in sorted(held.items()))
            raise StorageError(
                f"no snapshot is complete on all nodes (newest of each: {', '.join(newest)}); start the job again, "
                "which reconstructs from parity",
                lasting=True,
            )
        head = read_lineage(self._arenas.node_dir)
        certain = {one for one in everywhere if not is_doubtful(head, one.iteration, head)}
        return max(certain or everywhere)

    def _newest(self, storage: Storage, lineages: Collection[bytes]) -> SnapshotId | None:
        """The newest snapshot on storage in the job's history.

        Args:
            lineages: those in memory. If this run owns the storage, others count too, as it has started from there.
                Otherwise they may belong to another training of the same job name.
        """
        if not self._arenas.all:
            return None
        is_own = self._owns(storage)
        head, void = read_lineage(self._arenas.node_dir), retention.voided(storage)
        for name in commit.checkpoints(storage):
            if (there := commit.committed(storage, name)) is None:
                continue  # a corrupt one does not count
            counts = there.snapshot not in void and Selection(head).takes(there.lineage, there.snapshot)
            is_ours = there.job == self.orders.job and (is_own or there.snapshot.lineage in lineages)
            if is_ours and counts:
                return there.snapshot
        return None

    def _owns(self, storage: Storage) -> bool:
        """Whether this run owns the storage."""
        try:
            return commit.require_owner(storage, self.orders.owner)
        except StorageError as error:
            if not error.lasting:
                raise
            return False  # another run does, which is an error only when this one writes

    def _held(self) -> set[SnapshotId]:
        """The snapshots that every arena of this node has."""
        # The newest may be in a newly allocated slot, which another thread maps.
        while not self._arenas.complete or any(arena.behind for arena in self._arenas.all):
            if self._late(_POLL_SECS):
                raise StorageError(f"arenas cannot be read: {dict(self._arenas.problems)}", lasting=True)
        found = [set(arena.mapped.snapshots()) for arena in self._arenas.all]
        return set.intersection(*found) if found else set()

    def _patiently(self, action: Callable[[], T]) -> T:
        """Run ``action``; retry it while storage fails temporarily, until the deadline."""
        return patiently(action, lambda secs: not self._late(min(secs, _MOST_PAUSE_SECS)))

    def _late(self, wait_secs: float) -> bool:
        return self._halted.wait(wait_secs) or time.monotonic() >= self._deadline
