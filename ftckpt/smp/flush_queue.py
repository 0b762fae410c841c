"""The flushes of a node: of snapshots that ranks choose, and the final flush without ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ftckpt.errors import SmpError
from ftckpt.events import Events
from ftckpt.memory.heartbeat import FlushState
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist.paths import Place
from ftckpt.smp.arenas import MonitoredArenas
from ftckpt.smp.final_flush import FinalFlush
from ftckpt.smp.flush import Flush, FlushOrders, Joinable
from ftckpt.smp.requests import PersistRequest
from ftckpt.smp.work import Throttle

_CLOSE_SECS = 2.0
"""For a flush to remove its partial files: whoever ends the SMP does not wait for storage."""


class FlushQueue:
    """Starts and cancels flushes, at most one at a time; each runs in threads of its own.

    Args:
        new_pace: makes the throttle of a flush with a limit in bytes per second.
    """

    def __init__(self, arenas: MonitoredArenas, events: Events, new_pace: Callable[[float], Throttle]) -> None:
        self._arenas, self._events, self._new_pace = arenas, events, new_pace
        self._orders = FlushOrders()
        self._flush: Flush | None = None
        self._final: FinalFlush | None = None
        # The last flush at each place; the next one there waits for its end. Another place may hang forever.
        self._last_at: dict[str, Joinable] = {}

    @property
    def current(self) -> tuple[SnapshotId | None, FlushState]:
        """The snapshot to flush, and this node's progress."""
        flush = self._flush
        return (None, FlushState.NONE) if flush is None or flush.halted else (flush.snapshot, flush.state)

    @property
    def is_final(self) -> bool:
        """Whether a final flush was requested since ranks trained."""
        return self._final is not None

    @property
    def saving(self) -> bool:
        """Whether a final flush runs."""
        return self._final is not None and self._final.working

    @property
    def status(self) -> dict[str, Any]:
        """The job's storage, as JSON values."""
        problem = self._flush.problem if self._flush is not None else ""
        return {"where": self._orders.where, "at_end": self._orders.at_end, "problem": problem}

    def resume(self) -> None:
        """Cancel a final flush: the job trains again."""
        if self._final is not None:
            self._final.stop()
            self._final = None

    def configure(self, orders: FlushOrders) -> None:
        """Set the orders of later flushes. A flush with other orders is cancelled, and restarted if ranks still want
        it: its state belongs to an earlier attempt."""
        if self._flush is not None and orders != self._orders:
            self._flush.stop()
        self._orders = orders

    def want(self, snapshot: SnapshotId | None) -> None:
        """Flush ``snapshot``, which all ranks of the node have chosen; None: cancel."""
        if snapshot == self.current[0] or self._final is not None:
            return
        if self._flush is not None:
            self._flush.stop()
        orders = self._orders
        if snapshot is not None and orders.where:
            pace, before = self._new_pace(orders.bytes_per_sec), self._last_at.get(orders.where)
            flush = Flush(orders, self._arenas, pace, self._events, snapshot, before=before)
            self._flush = self._last_at[orders.where] = flush

    def persist(self, request: PersistRequest) -> dict[str, Any]:
        """Start flushing the newest snapshot without ranks, or only report the progress.

        Raises:
            SmpError: no save runs, the node is not configured, no place is named, or a save to another one runs.
        """
        if not request.anew:
            if self._final is None:
                raise SmpError("no save is running: the SMP that was asked for it has ended")
            return self._final.status
        orders = replace(self._orders, timeout_secs=request.timeout_secs)
        if request.where:
            place = Place.of(request.where, request.form)
            orders = replace(orders, where=place.snapshots, exports=place.exports, keep=0)
        if not (orders.node and orders.where):
            raise SmpError("no storage is named: neither in the request nor by the job's --ftckpt-persist")
        if self._final is not None and self._final.working:
            if (self._final.orders.where, self._final.orders.exports) != (orders.where, orders.exports):
                raise SmpError(f"another save is running, to {self._final.orders.where}: wait for its end")
            return self._final.status  # a second request shares the save
        if self._flush is not None:
            self._flush.stop()
        # Yields to nobody: no rank trains.
        pace, before = Throttle(bool, bool, orders.bytes_per_sec), self._last_at.get(orders.where)
        self._final = FinalFlush(orders, self._arenas, pace, self._events, before=before)
        self._last_at[orders.where] = self._final
        return self._final.status

    def close(self) -> None:
        """Cancel all flushes."""
        for started in (self._flush, self._final):
            if started is not None:
                started.stop()
        deadline = time.monotonic() + _CLOSE_SECS
        for last in self._last_at.values():
            last.join(max(0.0, deadline - time.monotonic()))
