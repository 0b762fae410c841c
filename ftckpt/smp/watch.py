"""Supervision of a node's SMP by one of its trainers: it replaces a dead or hung one, and reports its warnings."""

from __future__ import annotations

import hashlib
import math
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ftckpt.memory.atomic_files import read_link, replace_link
from ftckpt.memory.directory import SMP_LOCK_NAME, SMP_LOG_NAME, TOLD_NAME, end_smp
from ftckpt.memory.heartbeat import Heartbeat
from ftckpt.memory.locks import holder_of
from ftckpt.memory.page import pid_of
from ftckpt.smp import MAX_SILENT_SECS
from ftckpt.smp.client import START_SECS, SmpClient, find_or_start
from ftckpt.smp.stall import StallWatch

_MOST_WARNINGS = 16
"""Maximum warnings reported at a time."""
_END_SECS = 10.0
"""Maximum wait for the exit of a hung SMP."""
_LOUD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?:WARNING|ERROR|CRITICAL) (?:ftckpt \S+: )?(.+)")


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


class LogTail:
    """Reads the warnings in the log of a node's SMP, each once: also those from before the first trainer, or while
    none lived. A missing log has none."""

    def __init__(self, node_dir: Path) -> None:
        self._path, self._mark = node_dir / SMP_LOG_NAME, node_dir / TOLD_NAME
        self._seen = 0, 0  # inode and length of the file at the last read
        self._last = read_link(self._mark)  # the digest of the last reported line

    def new_warnings(self) -> list[str]:
        """Warnings since the last call, one line each, without their times."""
        try:
            found = os.stat(self._path)
            if (found.st_ino, found.st_size) == self._seen:
                return []
            data = self._path.read_bytes()  # at most 256 KiB, see ``BoundedLog``
            if _version(os.stat(self._path)) != _version(found):
                return []  # it was cut in place during the read: what was read may be of two states
        except OSError:
            return []
        self._seen = found.st_ino, found.st_size
        # An incomplete line is read next time.
        lines = data[: data.rfind(b"\n") + 1].decode("utf-8", "replace").splitlines()
        loud = [(_digest(line), match[1]) for line in lines if (match := _LOUD.match(line))]
        told = [place for place, (digest, _) in enumerate(loud, 1) if digest == self._last]
        loud = loud[told[-1] if told else 0 :]
        if loud:
            self._last = loud[-1][0]
            with suppress(OSError):
                replace_link(self._mark, self._last)
        return [warning for _, warning in loud]


def _version(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _digest(line: str) -> str:
    return hashlib.blake2b(line.encode(), digest_size=16).hexdigest()
