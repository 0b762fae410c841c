"""The SMP as a process: one loop that answers its trainers, does its duties, and watches who lives and who moves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftckpt.arena.directory import (
    LOCK_NAME,
    SMP_LOCK_NAME,
    SMP_STATE_NAME,
    list_arenas,
    node_directory,
    remove_job_if_empty,
    remove_smp_files,
)
from ftckpt.arena.locks import JOB_LOCK_NAME, FileLock, holder_of
from ftckpt.arena.pulse import Pulse, SmpState
from ftckpt.config import Config
from ftckpt.errors import ArenaError, ConfigError, FtckptError, SmpError
from ftckpt.events import Events, log
from ftckpt.smp.duties import Duties
from ftckpt.smp.files import BoundedLog, SmpConfig
from ftckpt.smp.hangs import Abort, HangWatch, describe
from ftckpt.smp.limits import anon_bytes
from ftckpt.smp.memfd import HeldMemory
from ftckpt.smp.protocol import VERSION, guarded
from ftckpt.smp.server import Server

_IDLE_WAIT_SECS = 0.02
_STEP_SECS = 0.05
_LOOK_SECS = 0.5
_OVER = "the job is over"
_PAUSE_SECS = 1.0
"""After duties failed: an error that stays must not fill the log nor take a core."""


class Daemon:
    """One node's SMP. Only the process that holds ``smp.lock`` serves.

    Args:
        root, job, node: name the directory, which is made if it is not there.
        idle_secs: time without any trainer after which it ends; ``configure`` may change it.

    Raises:
        SmpError: another SMP serves this node and job.
        ArenaError: the directory cannot be used.
    """

    def __init__(self, root: Path, job: str, node: str, idle_secs: float) -> None:
        self.job, self.node, self._root = job, node, root
        self.node_dir = node_directory(root, job, node)
        what, lock = f"job {job!r} on node {node!r} has an SMP: it", self.node_dir / SMP_LOCK_NAME
        try:
            self._lock = FileLock(lock, 0, what, "use that one, or end it first")
        except ArenaError as error:
            if holder_of(lock) is None:
                raise
            raise SmpError(str(error)) from None
        self.log = BoundedLog(self.node_dir)
        log.addHandler(self.log)
        self.events = Events(None, -1, f"smp-{node}")
        self._pulse = Pulse.open(self.node_dir, None)
        self._held = HeldMemory(self.node_dir)
        self._duties = Duties(self.node_dir, self.events)
        self._config, self._digest = SmpConfig(), 0
        self._idle_secs = idle_secs
        self._hang_secs, self._on_hang = 0.0, "report"
        self._hangs, self._num_hangs = HangWatch(), 0
        self._abort: Abort | None = None
        self._begun = self._last_trainer = time.monotonic()
        self._ending = ""
        self._next_look = self._paused_until = 0.0
        handlers = {
            "hello": self._hello, "status": self._status, "listen": self._listen, "configure": self._configure,
            "end": self._end, "memfd": self._memfd, "memfd_sweep": self._memfd,
        }  # fmt: skip
        self._server = Server(self.node_dir, handlers)

    def run(self) -> None:
        """Serve until the job is over, nobody has trained for long, or SIGTERM; then leave what must stay."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _frame: self._end_for(f"signal {signal.Signals(number).name}"))
        log.info("SMP of job %s on node %s: pid %d, %s", self.job, self.node, os.getpid(), self.node_dir)
        self._adopt()
        try:
            while not self._ending:
                worked = self._work()
                self._beat()
                self._server.poll(0 if worked else _IDLE_WAIT_SECS)
                if time.monotonic() >= self._next_look:
                    self._next_look = time.monotonic() + _LOOK_SECS
                    self._look_safely()
        finally:
            self._close()

    def _adopt(self) -> None:
        """Go on where an SMP of this node was killed: no trainer is asked."""
        try:
            kept = SmpConfig.load(self.node_dir)
            if kept is None:
                return
            if kept.secret:
                self._open_port(kept.host, kept.secret, kept.port)
            if kept.description is not None:
                self._take(kept.description)
            self._store()
            log.info("configured as the SMP before it was")
        except Exception as error:  # noqa: BLE001 - trainers configure it anew
            log.exception("what the SMP before it kept cannot be used")
            self.events.emit("smp_error", error=f"not adopted: {error}")

    def _work(self) -> bool:
        if time.monotonic() < self._paused_until:
            return False
        try:
            return self._duties.step(time.monotonic() + _STEP_SECS)
        except Exception as error:  # noqa: BLE001 - one shard that cannot be guarded must not end all the rest
            log.exception("duties failed")
            self.events.emit("smp_error", error=repr(error))
            self._paused_until = time.monotonic() + _PAUSE_SECS
            return False

    def _beat(self) -> None:
        cannot = self._duties.cannot
        if cannot is not None:
            self._pulse.beat_smp(SmpState.CANNOT, cannot[1], self._digest)
        else:
            state = SmpState.GUARDING if self._config.description else SmpState.WAITING
            self._pulse.beat_smp(state, digest=self._digest)

    def _look_safely(self) -> None:
        try:
            self._look()
        except Exception:  # noqa: BLE001 - such as a directory that vanishes while it is listed: look again
            log.exception("a look at the node failed")

    def _look(self) -> None:
        now = time.monotonic()
        self.log.trim()
        self._held.sweep()
        if holder_of(self.node_dir / SMP_LOCK_NAME) != os.getpid():
            self._end_for("its directory was removed")
            return
        if self._trainer_lives():
            self._last_trainer = now
        elif now - self._last_trainer >= self._idle_secs:
            self._end_idle()
        self._look_for_hangs()

    def _trainer_lives(self) -> bool:
        """Whether a process trains on this node; locks tell of those in other containers, too."""
        if any(pulse.lives for pulse in self._pulse.ranks()):
            return True
        locks = [self.node_dir / JOB_LOCK_NAME, *(arena / LOCK_NAME for arena in list_arenas(self.node_dir))]
        return any(holder_of(lock) is not None for lock in locks)

    def _end_idle(self) -> None:
        if self._held.held_bytes:
            log.warning("no trainer for %g s; it stays, because arenas live in its memory", self._idle_secs)
            self._last_trainer = time.monotonic()
            return
        self._end_for(f"no trainer for {self._idle_secs:g} s; arenas stay")

    def _look_for_hangs(self) -> None:
        if self._abort is not None and self._abort.step():
            self.events.emit("hang_aborted", killed=self._abort.killed)
            self._abort = None
        hang = self._hangs.look(self._pulse.ranks(), self._hang_secs, time.monotonic_ns())
        if hang is None:
            return
        self._num_hangs += 1
        ends = self._on_hang == "abort"
        self.events.emit("hang", hang_secs=self._hang_secs, on_hang=self._on_hang, **hang.fields())
        if ends:
            if self._abort is not None:
                self._abort.close()
            self._abort = Abort(hang.ranks)
            log.warning("ending trainers that hang: %s", self._abort.pids)

    def _hello(self, _message: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "version": VERSION,
            "pid": os.getpid(),
            "job": self.job,
            "node": self.node,
            "configured": self._config.description is not None,
            "port": self._config.port,
        }

    def _status(self, message: Mapping[str, Any]) -> dict[str, Any]:
        now_ns = time.monotonic_ns()
        return {
            **self._hello(message),
            "uptime_secs": round(time.monotonic() - self._begun, 3),
            "anon_bytes": anon_bytes(),
            "held_bytes": self._held.held_bytes,
            "hangs": self._num_hangs,
            "trainers": [describe(pulse, now_ns) for pulse in self._pulse.ranks()],
            "duties": self._duties.status(),
        }

    def _listen(self, message: Mapping[str, Any]) -> dict[str, Any]:
        host, secret = message.get("host"), message.get("secret")
        if not isinstance(host, str) or not host or not isinstance(secret, str):
            raise SmpError("listen: needs host and secret")
        self._open_port(host, secret, 0)
        self._store()
        return {"port": self._config.port}

    def _open_port(self, host: str, secret: str, port: int) -> None:
        try:
            key = bytes.fromhex(secret)
        except ValueError:
            raise SmpError("listen: the secret is not hexadecimal") from None
        got = self._duties.listen(host, key, port)
        self._config.host, self._config.port, self._config.secret = host, got, secret
        if port not in (0, got):
            self.events.emit("smp_error", error=f"port {port} is taken: other nodes must be told of port {got}")

    def _configure(self, message: Mapping[str, Any]) -> dict[str, Any]:
        description = message.get("description")
        if not isinstance(description, dict):
            raise SmpError("configure: needs a description")
        self._take(description)
        self._store()
        return {}

    def _take(self, description: dict[str, Any]) -> None:
        for name, mine in (("job", self.job), ("node", self.node)):
            if description.get(name) != mine:
                raise SmpError(f"configure: {name} is {description.get(name)!r}, this is the SMP of {mine!r}")
        given = description.get("settings", {})
        settings = _settings(given)
        self._held.hold_own(settings.memory == "memfd")
        self._duties.configure(description)
        self._hang_secs, self._on_hang = settings.hang_secs, settings.on_hang
        self._idle_secs = settings.smp_idle_secs if "smp_idle_secs" in given else self._idle_secs
        self._config.description, self._digest = description, guarded(description)
        try:
            self.events.direct(settings.events_dir)
        except OSError as error:
            log.warning("no events are kept: %s", error)

    def _store(self) -> None:
        try:
            self._config.store(self.node_dir)
        except OSError as error:
            raise SmpError(f"{self.node_dir}: the configuration cannot be kept: {error.strerror}") from None

    def _memfd(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return self._held.answer(dict(message))

    def _end(self, _message: Mapping[str, Any]) -> dict[str, Any]:
        self._end_for(_OVER)
        return {"pid": os.getpid()}

    def _end_for(self, reason: str) -> None:
        self._ending = self._ending or reason

    def _close(self) -> None:
        """End in an order in which a kill half-way leaves what a new SMP takes over. The lock goes last."""
        log.info("the SMP ends: %s", self._ending or "an error")
        self._pulse.leave_smp()
        if self._abort is not None:
            self._abort.close()
        self._server.close()
        self._duties.close()
        self._held.close()
        mine = holder_of(self.node_dir / SMP_LOCK_NAME) == os.getpid()
        if mine and self._ending == _OVER:
            remove_smp_files(self.node_dir)
        elif mine:
            if not self._trainer_lives():  # those that live want the next SMP to know what this one knew
                (self.node_dir / SMP_STATE_NAME).unlink(missing_ok=True)
            (self.node_dir / SMP_LOCK_NAME).unlink(missing_ok=True)
        self._lock.release()
        try:
            remove_job_if_empty(self._root, self.job, self.node)
        except (OSError, FtckptError) as error:
            log.warning("%s", error)
        self.events.close()
        log.removeHandler(self.log)
        self.log.close()


def _settings(given: Any) -> Config:
    try:
        return Config.from_mapping(given)
    except ConfigError as error:
        raise SmpError(f"configure: settings: {error}") from None
