"""The SMP as a process: one loop that answers trainers, works on tasks, and monitors which trainers live."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from ftckpt.config import Config
from ftckpt.errors import ConfigError, SmpError, in_words
from ftckpt.events import MAX_LOG_BYTES, Events, log
from ftckpt.memory.control_block import ControlBlock
from ftckpt.memory.end_notes import tell, told_of
from ftckpt.memory.heartbeat import Heartbeat, RankHeartbeat
from ftckpt.memory.inventory import read_protection, take_inventory
from ftckpt.memory.locations import OpenArenas
from ftckpt.memory.memory_limits import may_hang, used_bytes
from ftckpt.model import codec
from ftckpt.smp.exporter import Exporter
from ftckpt.smp.footprint import BoundedLog, DescriptionStore, NodeLock, anon_bytes, load_description
from ftckpt.smp.liveness import DeathWatch, Liveness
from ftckpt.smp.reports import MarkAge, packed, rank_report
from ftckpt.smp.requests import (
    VERSION,
    ConfigureRequest,
    EndRequest,
    PersistRequest,
    ProtectionRequest,
    ReportRequest,
    SmpRequest,
    StatusRequest,
)
from ftckpt.smp.server import Handler, Server
from ftckpt.smp.task_queue import TaskQueue

T = TypeVar("T")

_IDLE_WAIT_SECS, _QUIET_WAIT_SECS = 0.02, 0.1
"""Bounds of the wait for a request when idle; it grows with the idle time. A new seal or target is noticed after it,
and each wake-up takes a core from training."""
_STEP_SECS = 0.05
"""One slice of work: a request waits for the rest of it and for one piece of work."""
_LOOK_SECS = 0.5
"""Interval between checks of locks and heartbeats, which cost system calls for each arena and rank."""
_EVENTS = 5
"""Number of recent events in the status."""
_OVER, _REMOVED = "the job is over", "its directory was removed"
_PAUSE_SECS = 1.0
"""After failed work: a persistent error must neither fill the log nor occupy a core."""


class Daemon:
    """One node's SMP. Only the process that holds ``smp.lock`` serves. Call ``run`` in the main thread.

    Args:
        root, job, node: name the directory.
        makes_directory: create it if it is missing.
        idle_secs: time without a trainer after which the SMP ends.

    Raises:
        SmpError: another SMP serves this node and job.
        ArenaError: the directory cannot be used.
    """

    def __init__(self, root: Path, job: str, node: str, idle_secs: float, *, makes_directory: bool = True) -> None:
        self._lock = NodeLock(root, job, node, makes_directory=makes_directory)
        node_dir = self._lock.node_dir
        # After the lock is taken: the log, and the socket below, belong to the SMP that serves.
        self.log = BoundedLog(node_dir)
        log.addHandler(self.log)
        self.events = Events(None, -1, f"smp-{node}")
        self._pulse = Heartbeat.open(node_dir, None)
        if self._pulse.problem is not None:
            self._report_error(self._pulse.problem)
        self._liveness = Liveness(node_dir)
        self._deaths = DeathWatch()
        self._tasks = TaskQueue(node_dir, self.events)
        self._exporter = Exporter(job, node, self._measured, self._report_error)
        self._store = DescriptionStore(node_dir, self._report_error)
        self._marks = {"whole": MarkAge(), "protected": MarkAge()}
        self._idle_secs = idle_secs
        self._last_trainer = time.monotonic()
        self._ending = ""
        self._errors: dict[str, str] = {}  # by action, while it fails
        handlers: dict[type[SmpRequest], Handler] = {
            StatusRequest: self._status, ConfigureRequest: self._configure, EndRequest: self._end,
            PersistRequest: self._persist, ReportRequest: self._report, ProtectionRequest: self._protection,
        }  # fmt: skip
        self._server = Server(handlers, find=self._tasks.service.find, events=self.events)
        # Last: from now on requests arrive, and wait for ``run``.
        self._server.serve_node(node_dir)

    def run(self) -> None:
        """Serve until the job ends, ``idle_secs`` pass without a trainer, or a signal; then close."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _frame: self._end_for(f"signal {signal.Signals(number).name}"))
        log.info(
            "SMP of job %s on node %s: pid %d, %s", self._lock.job, self._lock.node, os.getpid(), self._lock.node_dir
        )
        self._try("adoption of the configuration of the previous SMP", self._adopt)
        try:
            self._serve()
        finally:
            self._close()

    def _serve(self) -> None:
        last_work, paused_until, next_check = time.monotonic(), 0.0, 0.0
        while not self._ending:
            worked: bool | None = False
            if time.monotonic() >= paused_until:
                worked = self._try("work", lambda: self._tasks.step(time.monotonic() + _STEP_SECS))
            if worked is None:
                paused_until = time.monotonic() + _PAUSE_SECS
            self._beat()  # after work: an SMP that hangs in it must look dead to trainers
            now = time.monotonic()
            if worked or self._tasks.busy:
                last_work = now
            self._server.poll(0.0 if worked else min(_QUIET_WAIT_SECS, max(_IDLE_WAIT_SECS, now - last_work)))
            self._try("export of metrics", self._exporter.step)
            if time.monotonic() >= next_check:
                next_check = time.monotonic() + _LOOK_SECS
                # It may fail: a directory vanishes while it is listed.
                self._try("check of the node", self._check_node)

    def _adopt(self) -> None:
        """Take over the configuration of a killed SMP of this node; needs no trainer."""
        description = load_description(self._lock.node_dir)
        if description is not None:
            self._take(description)
            self._listen(description)
            log.info("configured as the previous SMP was")

    def _try(self, what: str, action: Callable[[], T]) -> T | None:
        """Run ``action``; None if it fails, which must not end the SMP. A repeated error is reported once."""
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 - one failing shard must not stop the others
            if self._errors.get(what) != repr(error):
                log.exception("%s failed", what)
                self._report_error(f"{what}: {in_words(error)}")
            self._errors[what] = repr(error)
            return None
        self._errors.pop(what, None)
        return result

    def _beat(self) -> None:
        # First: a reader that sees an attempt's digest takes the flush state for that attempt's.
        self._pulse.tell_flush(*self._tasks.flushes.current)
        cannot = self._tasks.cannot
        self._pulse.beat_smp(cannot.iteration if cannot is not None else -1, self._store.digest)

    def _report_error(self, text: str) -> None:
        self.events.emit("smp_error", error=text)

    def _check_node(self) -> None:
        now = time.monotonic()
        self._store.retry()
        self.log.trim()
        if not self._lock.is_held:
            self._end_for(_REMOVED)
            return
        trained, self._tasks.trains = self._tasks.trains, self._trainer_lives()
        if trained and not self._tasks.trains:
            log.info("no trainer lives: the SMP ends after %g s without one; arenas stay", self._idle_secs)
        if self._tasks.trains or self._tasks.flushes.saving:
            self._last_trainer = now
        elif now - self._last_trainer >= self._idle_secs:
            self._end_for(f"no trainer for {self._idle_secs:g} s; arenas stay")
        for end in self._deaths.look(self._ranks(), told_of(self._lock.node_dir)):
            tell(self._lock.node_dir, end)
            self.events.emit("ranks_ended", text=end.text)
        arenas = self._tasks.arenas
        self._marks["whole"].note(arenas.oldest_mark(ControlBlock.whole), now)
        self._marks["protected"].note(arenas.oldest_mark(ControlBlock.protected), now)

    def _trainer_lives(self) -> bool:
        """Whether a process trains on this node; locks also show those in other containers."""
        return any(pulse.lives for pulse in self._pulse.ranks()) or self._liveness.any_lock_is_held()

    def _ranks(self) -> list[RankHeartbeat]:
        return self._liveness.judge(self._pulse.ranks())

    def _ends_in_secs(self) -> float | None:
        """Seconds until the SMP ends without a trainer; None while one lives, or a save runs."""
        if self._tasks.trains or self._tasks.flushes.saving:
            return None
        return round(max(0.0, self._last_trainer + self._idle_secs - time.monotonic()), 1)

    def _status(self, _request: StatusRequest | None = None) -> dict[str, Any]:
        now = time.monotonic()
        return {
            "version": VERSION,
            "pid": os.getpid(),
            "job": self._lock.job,
            "node": self._lock.node,
            "configured": self._store.description is not None,
            "port": self._server.port,
            "metrics": self._exporter.url,
            "ends_in_secs": self._ends_in_secs(),
            "anon_bytes": anon_bytes(),
            "warnings": list(self.log.warnings),
            "events": self.events.last(_EVENTS),
            **{name: mark.fields(now) for name, mark in self._marks.items()},
            "trainers": [rank_report(pulse) for pulse in self._ranks()],
            "tasks": {**self._tasks.status(), "connections": self._server.connections},
        }

    def _measured(self) -> dict[str, Any]:
        """The values that metrics are computed from."""
        memory_bytes = used_bytes(self._lock.node_dir)
        return {**self._status(), "loud": dict(self.events.loud), "memory_bytes": memory_bytes}

    def _report(self, _request: ReportRequest) -> dict[str, Any]:
        with closing(OpenArenas(self._lock.node_dir, self._tasks.open_arenas)) as arenas:
            return {**self._status(), "inventory": codec.to_json(take_inventory(arenas, self._lock.node))}

    def _protection(self, request: ProtectionRequest) -> dict[str, Any]:
        with closing(OpenArenas(self._lock.node_dir, self._tasks.open_arenas)) as arenas:
            found = read_protection(arenas, self._lock.node, request.snapshot, request.shards, request.layout)
        return {"protection": packed(found)}

    def _configure(self, request: ConfigureRequest) -> dict[str, Any]:
        self._take(request.description)
        self._store.store()
        return {"problem": self._listen(request.description)}

    def _listen(self, description: dict[str, Any]) -> str:
        """Start answering other nodes; returns why that fails, or "". Protection inside the node continues."""
        host, port = str(description.get("address", "")), int(description.get("port", 0))
        if not (host and description.get("secret")):  # without them nothing changes
            return ""
        try:
            got = self._server.listen(host, self._tasks.trust, port)
        except ConfigError as error:
            self._report_error(f"other nodes are not answered: {error}")
            return str(error)
        if port not in (0, got):
            self._report_error(f"port {port} is taken: other nodes do not know port {got}")
        return ""

    def _take(self, description: dict[str, Any]) -> None:
        for name, mine in (("job", self._lock.job), ("node", self._lock.node)):
            if description.get(name) != mine:
                raise SmpError(f"configure: {name} is {description.get(name)!r}, this is the SMP of {mine!r}")
        try:
            settings = Config.from_mapping(description.get("settings", {}))
        except ConfigError as error:
            raise SmpError(f"configure: settings: {error}") from None
        # First, because it may raise: nothing has changed then.
        self._tasks.configure(description)
        self._liveness.know(description.get("places", {}))
        self._store.set(description)
        try:
            self.events.direct(settings.events_dir, MAX_LOG_BYTES, may_hang(settings.events_dir))
        except OSError as error:
            log.warning("events are not written: %s", error)
        self._exporter.configure(settings.metrics_port, settings.metrics_dir)

    def _persist(self, request: PersistRequest) -> dict[str, Any]:
        if any(pulse.lives is not False for pulse in self._ranks()):
            raise SmpError("ranks of the job train on this node: end them first")
        return self._tasks.flushes.persist(request)

    def _end(self, _request: EndRequest) -> dict[str, Any]:
        self._end_for(_OVER)
        return {"pid": os.getpid()}

    def _end_for(self, reason: str) -> None:
        self._ending = self._ending or reason

    def _close(self) -> None:
        """End in an order such that a new SMP can take over after a kill at any point. The lock is released last."""
        log.info("the SMP ends: %s", self._ending or "an error")
        self._pulse.leave_smp()  # first: a trainer that waits for protection must see at once that nobody works on it
        self._server.close()
        self._exporter.close()
        self._tasks.close()
        is_over = self._ending == _OVER and self._lock.is_held
        self._lock.release(removes=is_over)
        self.events.close()
        log.removeHandler(self.log)
        self.log.close()
