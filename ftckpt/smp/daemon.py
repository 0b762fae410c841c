"""The SMP as a process: one loop that answers trainers, works on tasks, and monitors which trainers live."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from ftckpt.config import Config
from ftckpt.errors import ArenaError, ConfigError, FtckptError, SmpError
from ftckpt.events import MAX_LOG_BYTES, Events, log
from ftckpt.memory.directory import SMP_LOCK_NAME, node_directory, remove_job_if_empty, remove_smp_files
from ftckpt.memory.end_notes import tell, told_of
from ftckpt.memory.heartbeat import Heartbeat, RankHeartbeat, SmpState
from ftckpt.memory.inventory import read_protection, take_inventory
from ftckpt.memory.locations import OpenArenas
from ftckpt.memory.locks import FileLock, holder_of
from ftckpt.memory.log_archive import keep_logs, kept_path
from ftckpt.memory.memory_limits import may_hang, used_bytes
from ftckpt.model import codec
from ftckpt.smp.exporter import Exporter
from ftckpt.smp.footprint import BoundedLog, anon_bytes, load_description, store_description
from ftckpt.smp.liveness import DeathWatch, Liveness
from ftckpt.smp.reports import MarkHistory, packed, rank_report
from ftckpt.smp.requests import (
    VERSION,
    ConfigureRequest,
    EndRequest,
    HelloRequest,
    PersistRequest,
    ProtectionRequest,
    ReportRequest,
    SmpRequest,
    StatusRequest,
    guard_digest,
)
from ftckpt.smp.server import Handler, Server
from ftckpt.smp.task_queue import TaskQueue

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
_STORE_AGAIN_SECS = 2.0
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
        self.job, self.node, self._root = job, node, root
        self.node_dir = node_directory(root, job, node, makes=makes_directory)
        what, lock = f"job {job!r} on node {node!r} has an SMP: it", self.node_dir / SMP_LOCK_NAME
        try:
            self._lock = FileLock(lock, 0, what, "use that one, or end it first")
        except ArenaError as error:
            if holder_of(lock) is None:  # the lock file itself is unusable
                raise
            raise SmpError(str(error)) from None
        # After the lock is taken: the log, and the socket below, belong to the SMP that serves.
        self.log = BoundedLog(self.node_dir)
        log.addHandler(self.log)
        self.events = Events(None, -1, f"smp-{node}")
        self._pulse = Heartbeat.open(self.node_dir, None)
        if self._pulse.problem is not None:
            self.events.emit("smp_error", error=self._pulse.problem)
        self._living = Liveness(self.node_dir)
        self._duties = TaskQueue(self.node_dir, self.events)
        self._exporter = Exporter(job, node, self._measured, lambda text: self.events.emit("smp_error", error=text))
        self._description: dict[str, Any] | None = None
        self._digest = 0
        self._store_again: float | None = None  # None: the description is stored
        self._idle_secs = idle_secs
        self._deaths = DeathWatch()
        self._whole, self._protected = MarkHistory(_LOOK_SECS), MarkHistory(_LOOK_SECS)
        self._begun = self._last_trainer = time.monotonic()
        self._ending = ""
        self._next_look = self._paused_until = 0.0
        self._last_work = time.monotonic()
        self._look_error = ""
        handlers: dict[type[SmpRequest], Handler] = {
            HelloRequest: self._hello, StatusRequest: self._status, ConfigureRequest: self._configure,
            EndRequest: self._end, PersistRequest: self._persist, ReportRequest: self._report,
            ProtectionRequest: self._protection,
        }  # fmt: skip
        self._server = Server(handlers, find=self._duties.service.find, events=self.events)
        # Last: from now on requests arrive, and wait for ``run``.
        self._server.serve_node(self.node_dir)

    def run(self) -> None:
        """Serve until the job ends, ``idle_secs`` pass without a trainer, or a signal; then close."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _frame: self._end_for(f"signal {signal.Signals(number).name}"))
        log.info("SMP of job %s on node %s: pid %d, %s", self.job, self.node, os.getpid(), self.node_dir)
        self._adopt()
        try:
            while not self._ending:
                worked = self._work()
                self._beat()  # after work: an SMP that hangs in it must look dead to trainers
                self._server.poll(self._wait_secs(worked))
                self._export()
                if time.monotonic() >= self._next_look:
                    self._next_look = time.monotonic() + _LOOK_SECS
                    self._look_safely()
        finally:
            self._close()

    def _adopt(self) -> None:
        """Take over the configuration of a killed SMP of this node; needs no trainer."""
        try:
            description = load_description(self.node_dir)
            if description is None:
                return
            self._take(description)
            self._listen(description)
            log.info("configured as the previous SMP was")
        except Exception as error:  # noqa: BLE001 - trainers will configure it
            log.exception("the configuration of the previous SMP cannot be used")
            self.events.emit("smp_error", error=f"the configuration of the previous SMP is not used: {error}")

    def _work(self) -> bool:
        if time.monotonic() < self._paused_until:
            return False
        try:
            return self._duties.step(time.monotonic() + _STEP_SECS)
        except Exception as error:  # noqa: BLE001 - one failing shard must not stop the others
            log.exception("work failed")
            self.events.emit("smp_error", error=repr(error))
            self._paused_until = time.monotonic() + _PAUSE_SECS
            return False

    def _wait_secs(self, worked: bool) -> float:
        now = time.monotonic()
        if worked or self._duties.busy:
            self._last_work = now
        return 0.0 if worked else min(_QUIET_WAIT_SECS, max(_IDLE_WAIT_SECS, now - self._last_work))

    def _beat(self) -> None:
        # First: a reader that sees an attempt's digest takes the flush state for that attempt's.
        self._pulse.tell_flush(*self._duties.flushing)
        cannot = self._duties.cannot
        if cannot is not None:
            self._pulse.beat_smp(SmpState.CANNOT, cannot.iteration, self._digest)
        else:
            state = SmpState.GUARDING if self._description else SmpState.WAITING
            self._pulse.beat_smp(state, digest=self._digest)

    def _export(self) -> None:
        try:
            self._exporter.step()
        except Exception as error:  # noqa: BLE001 - metrics must not end the SMP
            self.events.emit("smp_error", error=f"metrics: {error}")

    def _look_safely(self) -> None:
        try:
            self._look()
            self._look_error = ""
        except Exception as error:  # noqa: BLE001 - such as a directory that vanishes while listed; retried
            if repr(error) != self._look_error:  # a persistent error would repeat twice a second
                log.exception("checking the node failed")
                self.events.emit("smp_error", error=repr(error))
            self._look_error = repr(error)

    def _look(self) -> None:
        now = time.monotonic()
        if self._store_again is not None and now >= self._store_again:
            self._store()
        self.log.trim()
        if holder_of(self.node_dir / SMP_LOCK_NAME) != os.getpid():
            self._end_for(_REMOVED)
            return
        trained, self._duties.trains = self._duties.trains, self._trainer_lives()
        if trained and not self._duties.trains:
            log.info("no trainer lives: the SMP ends after %g s without one; arenas stay", self._idle_secs)
        if self._duties.trains or self._duties.saving:
            self._last_trainer = now
        elif now - self._last_trainer >= self._idle_secs:
            self._end_for(f"no trainer for {self._idle_secs:g} s; arenas stay")
        for end in self._deaths.look(self._ranks(), told_of(self.node_dir)):
            tell(self.node_dir, end)
            self.events.emit("ranks_ended", text=end.text)
        whole, protected = self._duties.marks()
        self._whole.note(whole, now)
        self._protected.note(protected, now)

    def _trainer_lives(self) -> bool:
        """Whether a process trains on this node; locks also show those in other containers."""
        return any(pulse.lives for pulse in self._pulse.ranks()) or self._living.any_lock_is_held()

    def _ranks(self) -> list[RankHeartbeat]:
        return self._living.judge(self._pulse.ranks())

    def _ends_in_secs(self) -> float | None:
        """Seconds until the SMP ends without a trainer; None while one lives, or a save runs."""
        if self._duties.trains or self._duties.saving:
            return None
        return round(max(0.0, self._last_trainer + self._idle_secs - time.monotonic()), 1)

    def _kept_later(self, text: str) -> str:
        """``text`` with the path of the archived log; "" if it cannot be determined."""
        with suppress(OSError):
            return text.format(kept_path(self.job, self.node))
        return ""

    def _hello(self, _request: HelloRequest | None = None) -> dict[str, Any]:
        return {
            "version": VERSION,
            "pid": os.getpid(),
            "job": self.job,
            "node": self.node,
            "configured": self._description is not None,
            "port": self._server.port,
            "metrics": self._exporter.url,
        }

    def _status(self, _request: StatusRequest | None = None) -> dict[str, Any]:
        return {
            **self._hello(),
            "uptime_secs": round(time.monotonic() - self._begun, 3),
            "ends_in_secs": self._ends_in_secs(),
            "anon_bytes": anon_bytes(),
            "warnings": list(self.log.warnings),
            "events": self.events.last(_EVENTS),
            "whole": self._whole.fields(time.monotonic()),
            "protected": self._protected.fields(time.monotonic()),
            "trainers": [rank_report(pulse) for pulse in self._ranks()],
            "duties": {**self._duties.status(), "connections": self._server.connections},
        }

    def _measured(self) -> dict[str, Any]:
        """The values that metrics are computed from."""
        return {**self._status(), "loud": dict(self.events.loud), "memory_bytes": used_bytes(self.node_dir)}

    def _report(self, _request: ReportRequest) -> dict[str, Any]:
        with closing(OpenArenas(self.node_dir, self._duties.open_arenas)) as arenas:
            return {**self._status(), "inventory": codec.to_json(take_inventory(arenas, self.node))}

    def _protection(self, request: ProtectionRequest) -> dict[str, Any]:
        with closing(OpenArenas(self.node_dir, self._duties.open_arenas)) as arenas:
            found = read_protection(arenas, self.node, request.snapshot, request.shards, request.layout)
        return {"protection": packed(found)}

    def _configure(self, request: ConfigureRequest) -> dict[str, Any]:
        self._take(request.description)
        self._store()
        return {"problem": self._listen(request.description)}

    def _listen(self, description: dict[str, Any]) -> str:
        """Start answering other nodes; returns why that fails, or "". Protection inside the node continues."""
        host, port = str(description.get("address", "")), int(description.get("port", 0))
        if not (host and description.get("secret")):  # without them nothing changes
            return ""
        try:
            got = self._server.listen(host, self._duties.trust, port)
        except ConfigError as error:
            self.events.emit("smp_error", error=f"other nodes are not answered: {error}")
            return str(error)
        if port not in (0, got):
            self.events.emit("smp_error", error=f"port {port} is taken: other nodes do not know port {got}")
        return ""

    def _take(self, description: dict[str, Any]) -> None:
        for name, mine in (("job", self.job), ("node", self.node)):
            if description.get(name) != mine:
                raise SmpError(f"configure: {name} is {description.get(name)!r}, this is the SMP of {mine!r}")
        settings = _settings(description.get("settings", {}))
        # First, because it may raise: nothing has changed then.
        self._duties.configure(description)
        self._living.know(description.get("places", {}))
        self._description, self._digest = description, guard_digest(description)
        try:
            self.events.direct(settings.events_dir, MAX_LOG_BYTES, may_hang(settings.events_dir))
        except OSError as error:
            log.warning("events are not written: %s", error)
        self._exporter.configure(settings.metrics_port, settings.metrics_dir)

    def _store(self) -> None:
        """Store the configuration for the next SMP. A failure delays nothing; it is retried."""
        try:
            store_description(self.node_dir, self._description or {})
        except OSError as error:
            if self._store_again is None:  # once
                problem = f"{self.node_dir}: the configuration cannot be stored: {error.strerror}; it is retried"
                self.events.emit("smp_error", error=problem)
            self._store_again = time.monotonic() + _STORE_AGAIN_SECS
        else:
            self._store_again = None

    def _persist(self, request: PersistRequest) -> dict[str, Any]:
        if any(pulse.lives is not False for pulse in self._ranks()):
            raise SmpError("ranks of the job train on this node: end them first")
        return self._duties.persist(request)

    def _end(self, _request: EndRequest) -> dict[str, Any]:
        self._end_for(_OVER)
        is_loud = self.log.text(self.job, self.node).is_loud
        return {"pid": os.getpid(), "log": self._kept_later("{}") if is_loud else ""}

    def _end_for(self, reason: str) -> None:
        self._ending = self._ending or reason

    def _close(self) -> None:
        """End in an order such that a new SMP can take over after a kill at any point. The lock is released last."""
        log.info("the SMP ends: %s", self._ending or "an error")
        self._pulse.leave_smp()  # first: a trainer that waits for protection must see at once that nobody works on it
        self._server.close()
        self._exporter.close()
        self._duties.close()
        # False if the directory was removed: another SMP may serve in a new one of that name.
        mine = holder_of(self.node_dir / SMP_LOCK_NAME) == os.getpid()
        if mine and self._ending == _OVER:
            remove_smp_files(self.node_dir)
        elif mine:
            # The configuration stays with the arenas, for an SMP that saves them later. The lock file is removed
            # under the lock: after its release it could be another SMP's.
            (self.node_dir / SMP_LOCK_NAME).unlink(missing_ok=True)
        self._lock.release()
        try:
            remove_job_if_empty(self._root, self.job, self.node)
        except (OSError, FtckptError) as error:
            log.warning("%s", error)
        self._deaths.close()
        self.events.close()
        log.removeHandler(self.log)
        if self._ending == _REMOVED or (mine and self._ending == _OVER):  # else the remover archives it
            keep_logs([self.log.text(self.job, self.node)])  # last: home may be on storage that hangs
        self.log.close()


def _settings(given: Any) -> Config:
    try:
        return Config.from_mapping(given)
    except ConfigError as error:
        raise SmpError(f"configure: settings: {error}") from None
