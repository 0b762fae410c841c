"""The newest snapshot of a job that trains no more, on its way to storage: without trainers, by the SMPs alone.

Each node writes to storage which snapshots its arenas hold; the SMPs flush the newest that every node holds. What a
node has written counts while it goes on writing: one that is lost may have written before. Nothing changes meanwhile,
as nobody writes the arenas. Where a node is missing nothing is flushed, and the reason names it.
"""

from __future__ import annotations

import secrets
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
from ftckpt.persist.storage import Storage
from ftckpt.smp.arenas import MonitoredArenas
from ftckpt.smp.flush import Flush, FlushOrders, Joinable
from ftckpt.smp.work import Throttle

_POLL_SECS = 0.2
_NODES_SECS = 120.0
"""Longest wait for other nodes, and at most half of the time that there is: the rest is for writing."""
_AGAIN_SECS = 1.0
_BEAT_SECS = 1.0

T = TypeVar("T")


class FinalFlush:
    """The work of one node, on a thread of its own; given up after ``timeout_secs``."""

    def __init__(
        self, orders: FlushOrders, arenas: MonitoredArenas, pace: Throttle, events: Events, *, timeout_secs: float,
        before: Joinable | None = None,
    ) -> None:  # fmt: skip
        self.orders = orders
        self._arenas = arenas
        self._pace = pace
        self._events = events
        self._before = before
        self._deadline = time.monotonic() + timeout_secs
        self._halted = threading.Event()
        self._state, self._reason = FlushState.WORKING, ""
        self._snapshot: SnapshotId | None = None
        self._flush: Flush | None = None
        self._nodes_by = time.monotonic() + min(_NODES_SECS, timeout_secs / 2)
        self._thread = threading.Thread(target=self._run, name="smp-final-flush", daemon=True)
        self._thread.start()

    @property
    def working(self) -> bool:
        """Whether it has not come to its end."""
        return self._state == FlushState.WORKING

    def stop(self) -> None:
        """Leave it."""
        self._halted.set()
        if self._flush is not None:  # its thread may be in a call of storage that takes long
            self._flush.stop()

    def join(self, timeout_secs: float | None = None) -> None:
        """Wait for the end of one that was stopped, and of what was begun before it."""
        begin = time.monotonic()
        self._thread.join(timeout_secs)
        last = self._flush or self._before
        if last is not None:
            last.join(None if timeout_secs is None else max(0.0, timeout_secs - (time.monotonic() - begin)))

    @property
    def status(self) -> dict[str, Any]:
        """How far it is, as JSON values."""
        return {
            "flush": self._state.name.lower(),
            "iteration": self._snapshot.iteration if self._snapshot is not None else -1,
            "where": self.orders.exports.root if self.orders.exports is not None else self.orders.where,
            "storage": self.orders.where,
            "reason": self._reason,
        }

    def _run(self) -> None:
        try:
            self._bring_newest(self._patiently(lambda: open_storage(self.orders.where, "--ftckpt-persist")))
            self._state = FlushState.DONE
        except Exception as error:  # noqa: BLE001 - told to who waits
            self._reason = in_words(error)
            self._state = FlushState.CANNOT
            iteration = self._snapshot.iteration if self._snapshot is not None else -1
            self._events.emit("flush_failed", iteration=iteration, reason=self._reason)

    def _bring_newest(self, storage: Storage) -> None:
        held = self._held()
        there = self._patiently(lambda: self._newest(storage, {one.lineage for one in held}))
        call = Membership(storage, self.orders, held)
        self._patiently(call.beat)  # before this node may go: another may hold more, and ask who has what is there
        # One iteration more: what others load may have to be made of that which is there.
        floor = max((one.iteration for one in held), default=-1) + (self.orders.exports is not None)
        if there is not None and there.iteration >= floor:
            self._snapshot = there  # memory has no more than the job has brought there before
            return
        is_over = False  # nobody can count any more on what this node holds
        try:
            chosen = self._choose(call, there)
            if there is not None and there.iteration > chosen.iteration:
                self._snapshot = there  # what all have is of a past that the job has left
                return
            self._snapshot = chosen
            is_over = self._bring(call, chosen)
        except BaseException:  # what was held for it is released, whatever failed
            is_over = True
            raise
        finally:
            # Of what was there before other nodes may not have read yet what this one holds.
            if is_over:
                with suppress(StorageError):
                    call.leave()

    def _bring(self, call: Membership, chosen: SnapshotId) -> bool:
        """Whether the snapshot was not there before; it is now."""
        flush = self._flush = Flush(self.orders, self._arenas, self._pace, self._events, chosen, before=self._before)
        if self._halted.is_set():  # and whoever did that may not have seen it
            flush.stop()
        while flush.state == FlushState.WORKING:
            with suppress(StorageError):  # the flush itself tells
                call.beat()
            if self._late(_POLL_SECS):
                flush.stop()
                where = f"is at {self.orders.where}, what others load is not" if flush.committed else "was not there"
                why = f": {flush.problem}" if flush.problem else ""
                raise StorageError(f"iteration {chosen.iteration} {where} in time{why}", lasting=True)
        if flush.state != FlushState.DONE:
            raise StorageError("it did not come there: the log of the SMP says why", lasting=True)
        if flush.unexported:
            raise StorageError(f"iteration {chosen.iteration} is at {self.orders.where}, but {flush.unexported}")
        return not flush.found

    def _choose(self, call: Membership, there: SnapshotId | None) -> SnapshotId:
        """The newest snapshot that all arenas of all nodes hold, in doubt only where all are; ``there``: what is on
        storage, and nobody waits who had no more than that."""
        while True:
            self._patiently(call.beat)
            held = self._patiently(call.present)
            missing = set(self.orders.nodes) - held.keys()
            if not missing:
                break
            if self._late(_POLL_SECS) or time.monotonic() >= self._nodes_by:
                if there is not None and self._patiently(lambda: call.knew_all(there)):
                    return there
                raise StorageError(
                    f"nodes are missing: {', '.join(sorted(missing))}: no snapshot is complete without what they "
                    "hold; save on every node at once, or start the job again, which reconstructs from parity",
                    lasting=True,
                )
        everywhere = set.intersection(*held.values())
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
        """The newest that the job has on storage in its history.

        Args:
            lineages: those of memory. Where this run writes by itself others count, too: it has begun with what is
                there. Elsewhere they are of another training under the name of the job.
        """
        if not self._arenas.all:
            return None
        is_own = self._owns(storage)
        head, void = read_lineage(self._arenas.node_dir), retention.voided(storage)
        for name in commit.checkpoints(storage):
            try:
                there = retention.read_manifest(storage, name)
            except StorageError as error:
                if not error.lasting:
                    raise  # it may be the newest
                continue  # one that is damaged is nothing to rely on
            counts = there.snapshot not in void and Selection(head).takes(there.lineage, there.snapshot)
            is_ours = there.job == self.orders.job and (is_own or there.snapshot.lineage in lineages)
            if is_ours and counts:
                return there.snapshot
        return None

    def _owns(self, storage: Storage) -> bool:
        """Whether this run has claimed the place."""
        try:
            return commit.require_owner(storage, self.orders.owner)
        except StorageError as error:
            if not error.lasting:
                raise
            return False  # another run has; whether that is an error is seen where something is to be written

    def _held(self) -> set[SnapshotId]:
        """Snapshots of which every arena of this node has a slot."""
        # The newest may lie in a slot that has just got its memory: another thread maps it.
        while not self._arenas.complete or any(arena.behind for arena in self._arenas.all):
            if self._late(_POLL_SECS):
                raise StorageError(f"arenas cannot be read: {dict(self._arenas.problems)}", lasting=True)
        found = [set(arena.mapped.snapshots()) for arena in self._arenas.all]
        return set.intersection(*found) if found else set()

    def _patiently(self, action: Callable[[], T]) -> T:
        """``action``, again and again while storage fails in a way that may pass, until the deadline."""
        while True:
            try:
                return action()
            except StorageError as error:
                if error.lasting or self._late(_AGAIN_SECS):
                    raise

    def _late(self, wait_secs: float) -> bool:
        return self._halted.wait(wait_secs) or time.monotonic() >= self._deadline


class Membership:
    """One node's part in telling who is there; ``held`` are the snapshots of which it has all its shards.

    All methods but ``leave`` raise StorageError where storage fails; they may be called again.
    """

    def __init__(self, storage: Storage, orders: FlushOrders, held: Collection[SnapshotId]) -> None:
        self._storage, self._orders, self._held = storage, orders, set(held)
        self._name, self._number, self._told = secrets.token_hex(4), 0, 0.0
        self._first: dict[str, str | None] | None = None

    def beat(self) -> None:
        """Write that this node is there, once a second at most."""
        if time.monotonic() - self._told >= _BEAT_SECS:
            self._number += 1
            beat = f"{self._name}-{self._number}"
            commit.tell_holdings(self._storage, self._orders.node, self._orders.owner, self._held, beat)
            self._told = time.monotonic()

    def present(self) -> dict[str, set[SnapshotId]]:
        """What each node holds that has written since the first call."""
        told = self._read()
        if self._first is None:
            self._first = {node: beat for node, (beat, _) in told.items()}
        found = {node: held for node, (beat, held) in told.items() if beat != self._first.get(node)}
        return {**found, self._orders.node: self._held}

    def knew_all(self, snapshot: SnapshotId) -> bool:
        """Whether every node has written at some time that it holds ``snapshot``: once it is on storage they go."""
        told = self._read()
        return all(node in told and snapshot in told[node][1] for node in self._orders.nodes)

    def leave(self) -> None:
        """Withdraw what this node has written."""
        commit.forget_holdings(self._storage, self._orders.node)

    def _read(self) -> dict[str, tuple[str, set[SnapshotId]]]:
        return commit.holdings(self._storage, self._orders.nodes, self._orders.owner)
