"""Supervision of a node's SMP by one of its trainers: it replaces a dead or hung one, and reports its warnings."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from ftckpt.memory.directory import SMP_LOCK_NAME, end_smp
from ftckpt.memory.heartbeat import Heartbeat
from ftckpt.memory.locks import holder_of
from ftckpt.memory.page import pid_of
from ftckpt.memory.smp_log import SMP_LOG_NAME, LogTail
from ftckpt.smp import MAX_SILENT_SECS
from ftckpt.smp.client import START_SECS, SmpClient, find_or_start
from ftckpt.smp.stall import StallWatch

_MOST_WARNINGS = 16
"""Maximum warnings reported at a time."""
_END_SECS = 10.0
"""Maximum wait for the exit of a hung SMP."""


class Watch:
    """A thread that replaces the node's SMP within about a second of its death, and reports its warnings and late
    steps. Only one rank of a node runs it.

    A hung SMP is ended first: it protects nothing and would keep its lock. If it was only slow nothing is lost, as an
    SMP may be killed at any time. The new SMP takes over the stored configuration. Call ``stop`` before
    ``SmpClient.end``.

    Args:
        report: called with an event's name and fields: ``smp_restarted``, ``smp_error``, ``step_late``.
        tell: called with each warning of the SMP, one line.
        silent_secs: heartbeat age from which it counts as hung.
    """

    def __init__(
        self,
        client: SmpClient,
        report: Callable[..., None],
        every_secs: float = 0.5,
        silent_secs: float = MAX_SILENT_SECS,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._client, self._report, self._every_secs, self._tell = client, report, every_secs, tell
        self._log, self._stalls = LogTail(client.node_dir), StallWatch(client.node_dir)
        self._pulse = Heartbeat.open(client.node_dir, None)
        self._most_silent = math.ceil(silent_secs / every_secs)
        self._seen, self._silent = (0, 0), 0  # the last heartbeat, and the number of polls since
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftckpt-smp-watch", daemon=True)
        self._thread.start()

    def stop(self, timeout_secs: float = START_SECS + 1) -> None:
        """Stop replacing SMPs; waits for one that is starting."""
        self._stopped.set()
        self._thread.join(timeout_secs)
        # After the thread: both would read the log, and report a warning twice.
        self._tell_warnings()

    def _run(self) -> None:
        wait = self._every_secs
        while not self._stopped.wait(wait):
            wait = self._every_secs
            client, begin = self._client, time.monotonic()
            try:
                if not client.node_dir.is_dir():  # the job was cleaned up
                    continue
                self._tell_warnings()
                if late := self._stalls.look():
                    self._report("step_late", **late)
                holder = holder_of(client.node_dir / SMP_LOCK_NAME)
                if holder is not None and not self._stands_still(holder):
                    continue
                find_or_start(client.node_dir, client.root, client.job, client.node, idle_secs=client.idle_secs)
                self._report("smp_restarted", background_secs=time.monotonic() - begin)
            except Exception as error:  # noqa: BLE001 - promise 4: protection is degraded, training continues
                self._report("smp_error", error=str(error))
                # Retry more slowly: each attempt starts a process on a node that trains.
                wait = 20 * self._every_secs

    def _tell_warnings(self) -> None:
        warnings = self._log.new_warnings()
        for warning in warnings[:_MOST_WARNINGS]:
            self._tell(warning)
        if len(warnings) > _MOST_WARNINGS:
            self._tell(f"{len(warnings) - _MOST_WARNINGS} more warnings are in {SMP_LOG_NAME}")

    def _stands_still(self, holder: int) -> bool:
        """End the SMP that holds the lock if it is hung; returns whether it was ended."""
        now = self._pulse.smp_beat()
        # Counts polls, not time: while the node, or this thread, was suspended, no poll was made. An SMP of another
        # container, or before its first heartbeat, cannot be judged.
        self._silent = self._silent + 1 if now == self._seen and pid_of(now[0]) == holder else 0
        self._seen = now
        if self._silent < self._most_silent or not self._pulse.smp_lives():
            return False
        secs, self._silent = self._silent * self._every_secs, 0
        self._report("smp_error", error=f"pid {holder} has had no heartbeat for {secs:.0f} s: it is replaced")
        return end_smp(self._client.node_dir, _END_SECS)
