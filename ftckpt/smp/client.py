"""Client of a node's SMP, for trainers and the command line: finds, starts, configures and restarts it."""

from __future__ import annotations

import hashlib
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from ftckpt.errors import FtckptError, PeerError, PeerTimeoutError, SmpError, VersionError
from ftckpt.events import log
from ftckpt.memory.directory import SMP_LOCK_NAME, SMP_LOG_NAME, TOLD_NAME, end_smp
from ftckpt.memory.heartbeat import Heartbeat
from ftckpt.memory.locks import holder_of
from ftckpt.memory.page import pid_of
from ftckpt.memory.process import Process
from ftckpt.smp import BUSY_STATUS, IDLE_SECS, MAX_SILENT_SECS
from ftckpt.smp.channel import Deadlines, Trust, connect
from ftckpt.smp.requests import (
    VERSION,
    ConfigureRequest,
    EndRequest,
    HelloRequest,
    PersistRequest,
    SmpRequest,
    StatusRequest,
    exchange,
)

_ANSWER_SECS = 10.0
"""Training has priority on every core: on a busy node an SMP may be slow."""
_POLL_SECS = 0.02


class SmpClient:
    """Requests to the SMP of one node. Each opens its own connection and ends by its deadline.

    Args:
        node_dir: directory of the node's arenas.
        root, job, node: name that directory; a new SMP is started with them.
        idle_secs: time without a trainer after which an SMP started by this client ends.

    Raises (every method):
        SmpError: no SMP answers in time, or its answer is invalid.
        FtckptError: it refuses; of the class that it raised.
    """

    def __init__(self, node_dir: Path, root: Path, job: str, node: str, idle_secs: float = IDLE_SECS) -> None:
        self.node_dir, self.root, self.job, self.node = node_dir, root, job, node
        self.idle_secs = idle_secs

    def hello(self, timeout_secs: float = _ANSWER_SECS) -> dict[str, Any]:
        """``version``, ``pid``, ``job``, ``node``, ``configured``, ``port`` (0: it does not listen)."""
        return self._call(HelloRequest(), timeout_secs)

    def status(self, timeout_secs: float = _ANSWER_SECS) -> dict[str, Any]:
        """State of the SMP: trainers, its memory, and ``tasks``."""
        return self._call(StatusRequest(), timeout_secs)

    def configure(self, description: Mapping[str, Any], timeout_secs: float = _ANSWER_SECS) -> str:
        """Configure what it protects and where it answers other nodes. It stores the description, so that a restarted
        SMP needs no trainer. Returns why it cannot answer other nodes, "" if it can."""
        return str(self._call(ConfigureRequest(dict(description)), timeout_secs).get("problem", ""))

    def persist(self, request: PersistRequest, timeout_secs: float = _ANSWER_SECS) -> dict[str, Any]:
        """Flush the newest snapshot; returns the progress: ``flush`` (``working``, ``done``, ``cannot``),
        ``iteration``, ``where`` and more, see ``FinalFlush.status``."""
        return self._call(request, timeout_secs)

    def end(self, timeout_secs: float = _ANSWER_SECS) -> None:
        """End the SMP of a job that is over: it removes its files. Returns when the process is gone, at once if none
        runs. An SMP that does not answer is ended by signals."""
        pid = holder_of(self.node_dir / SMP_LOCK_NAME)
        if pid is None:
            return
        # Opened before the request: afterwards its pid may belong to another process.
        deadline = time.monotonic() + timeout_secs
        process = Process.open(pid)
        try:
            # Half of the time for the answer, half for the exit.
            kept = self._call(EndRequest(), timeout_secs / 2).get("log")
            _wait_gone(self.node_dir, process, deadline)
            if kept:
                where = f"its log is kept in {kept}, if that can be written"
                log.info("ftckpt: the SMP of node %s logged warnings: %s", self.node, where)
        except FtckptError:
            if not end_smp(self.node_dir, max(1.0, deadline - time.monotonic())):
                raise
        finally:
            if process is not None:
                process.close()

    def _call(self, request: SmpRequest, timeout_secs: float) -> dict[str, Any]:
        """Send one request and return the fields of the reply."""
        deadline = time.monotonic() + timeout_secs
        deadlines = Deadlines(timeout_secs, timeout_secs, timeout_secs)
        try:
            with closing(connect(self.node_dir, timeout_secs)) as channel:
                channel.end_by(deadline)  # each stage may take what those before it have left
                channel.greet(Trust(), deadline)
                reply = exchange(channel, request, deadlines)
        except PeerError as error:
            raise SmpError(f"the SMP of job {self.job} on node {self.node} does not answer: {error}") from error
        if reply.error:
            raise reply.refusal(f"the SMP of node {self.node} refused {request.WORD}: ")
        return dict(reply.fields)


def _wait_gone(node_dir: Path, process: Process | None, deadline: float) -> None:
    """Wait until the SMP is gone. Without ``process``, as for another container's SMP, its lock is polled.

    Raises:
        SmpError: it still runs at the deadline.
    """
    while time.monotonic() < deadline:
        if process is not None and process.gone(deadline - time.monotonic()):
            return
        if process is None and holder_of(node_dir / SMP_LOCK_NAME) is None:
            return
        time.sleep(_POLL_SECS)
    raise SmpError("it does not end")


_START_SECS = 20.0
"""Twice ``_ANSWER_SECS``: half until a silent SMP is replaced, half for its successor."""
_MOST_WARNINGS = 16
"""Maximum warnings reported at a time."""
_ATTEMPTS = 3
"""Starts of an SMP that ends at once; the last error is reported."""


def find_or_start(
    node_dir: Path, root: Path, job: str, node: str, *, idle_secs: float = IDLE_SECS,
    timeout_secs: float = _START_SECS,
) -> SmpClient:  # fmt: skip
    """Find the running SMP of this node and job, or start one. Any number of ranks may call this at once.

    ``node_dir`` must exist. A new SMP takes over arenas and configuration of a dead one. It replaces an SMP of
    another version, and one that accepts connections but sends no hello for ten seconds, such as a stopped process.

    Raises:
        SmpError: none could be started, or the running one does not answer, within ``timeout_secs``.
    """
    client = SmpClient(node_dir, root, job, node, idle_secs)
    deadline = time.monotonic() + timeout_secs
    attempts, problem = 0, ""
    while time.monotonic() < deadline:
        left = deadline - time.monotonic()
        if holder_of(node_dir / SMP_LOCK_NAME) is None:
            if attempts == _ATTEMPTS:
                break  # it ends each time: its output says why, and more attempts would not help
            attempts += 1
            problem = _start(client, left) or problem
        try:
            if client.hello(min(left, _ANSWER_SECS))["version"] == VERSION:
                return client
            unfit = "it is of another version of ftckpt, and does not end"
        except (FtckptError, KeyError) as error:
            unfit = ""
            if isinstance(error.__cause__, VersionError):
                unfit = "it is of another version of ftckpt, and does not end"
            elif isinstance(error.__cause__, PeerTimeoutError) and left >= _ANSWER_SECS:
                # With less time this proves nothing: a starting SMP on a busy node may be as slow.
                unfit = "it sends no hello, and does not end"
            else:  # it is starting or ending
                problem = problem or str(error)
                time.sleep(_POLL_SECS)
        if unfit:
            problem = unfit
            end_smp(node_dir, deadline - time.monotonic())
    raise SmpError(f"no SMP for job {job} on node {node} within {timeout_secs:g} s: {problem}")


class Watch:
    """A thread that replaces the node's SMP within about a second of its death, and reports its warnings. Only one
    rank of a node runs it.

    A hung SMP is ended first: it protects nothing and would keep its lock. If it was only slow nothing is lost, as an
    SMP may be killed at any time. The new SMP takes over the stored configuration. Call ``stop`` before
    ``SmpClient.end``.

    Args:
        report: called with an event's name and fields: ``smp_restarted``, ``smp_error``.
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
        self._log = LogTail(client.node_dir)
        self._pulse = Heartbeat.open(client.node_dir, None)
        self._most_silent = math.ceil(silent_secs / every_secs)
        self._seen, self._silent = (0, 0), 0  # the last heartbeat, and the number of polls since
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftckpt-smp-watch", daemon=True)
        self._thread.start()

    def stop(self, timeout_secs: float = _START_SECS + 1) -> None:
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
        return end_smp(self._client.node_dir, _ANSWER_SECS)


def _start(client: SmpClient, timeout_secs: float) -> str:
    """Start a detached SMP; returns the error, or ""."""
    command = [sys.executable or "python3", "-m", "ftckpt.smp", "--detach"]
    command += ["--job", client.job, "--node", client.node, "--arena", str(client.root)]
    command += ["--idle-secs", str(client.idle_secs)]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/",
            env=environment(), start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return f"{command[0]} cannot be started: {error.strerror}"
    with process:
        try:
            _, complaint = process.communicate(timeout=timeout_secs)
        except subprocess.TimeoutExpired:
            # Kills the starter. The SMP itself, if it already runs, is found by its lock the next time.
            process.kill()
            return f"it was not ready after {timeout_secs:.0f} s"
    if process.returncode in (0, BUSY_STATUS):
        return ""
    return complaint.decode("utf-8", "replace").strip()[-500:] or f"it ended with status {process.returncode}"


def environment() -> dict[str, str]:
    """This process's environment, changed for an SMP: the same package, and no idle threads."""
    package_root = Path(__file__).parents[2]
    # glibc creates up to eight malloc arenas per core, each with its own memory; two suffice.
    variables = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    if package_root.name not in ("site-packages", "dist-packages"):  # must not precede the standard library
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(package_root))))
    # It joins no rendezvous. Before an attempt launchers kill orphans that have all variables of a worker.
    variables.pop("MASTER_PORT", None)
    return variables


_LOUD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?:WARNING|ERROR|CRITICAL) (?:ftckpt \S+: )?(.+)")
_MOST_LOG_BYTES = 256 << 10
"""Maximum size of the log."""


class LogTail:
    """Reads the warnings in the log of a node's SMP, each once: also those from before the first trainer, or while
    none lived. A missing log has none."""

    def __init__(self, node_dir: Path) -> None:
        self._path, self._mark = node_dir / SMP_LOG_NAME, node_dir / TOLD_NAME
        self._inode, self._end = 0, 0  # of the file, and the end of the read part
        try:
            self._last = os.readlink(self._mark)  # the digest of the last reported line
        except OSError:
            self._last = ""

    def new_warnings(self) -> list[str]:
        """Warnings since the last call, one line each, without their times."""
        inode, size = self._stat()
        goes_on = inode == self._inode and size >= self._end
        if goes_on and size == self._end:
            return []
        begin = self._end if goes_on else 0
        data = self._read(begin)
        data = data[: data.rfind(b"\n") + 1]  # an incomplete line is read next time
        self._inode, self._end = inode, begin + len(data)
        lines = data.decode("utf-8", "replace").splitlines()
        # The log restarts with an attempt, or when its older half is dropped; then it is empty for a moment.
        digests = [_digest(line) for line in lines] if begin == 0 else []
        if self._last in digests:
            lines = lines[len(digests) - digests[::-1].index(self._last) :]
        loud = [(line, match[1]) for line in lines if (match := _LOUD.match(line))]
        if loud:
            self._last = _digest(loud[-1][0])
            self._keep_mark()
        return [warning for _, warning in loud]

    def _keep_mark(self) -> None:
        """Store the digest as the target of a symlink: a file would need a page, and the tmpfs may be full."""
        with suppress(OSError):
            self._mark.unlink(missing_ok=True)
            self._mark.symlink_to(self._last)

    def _stat(self) -> tuple[int, int]:
        """The inode of the file, and its length."""
        try:
            found = os.stat(self._path)
        except OSError:
            return 0, 0
        return found.st_ino, found.st_size

    def _read(self, begin: int) -> bytes:
        try:
            with open(self._path, "rb") as file:
                file.seek(begin)
                return file.read(_MOST_LOG_BYTES)
        except OSError:
            return b""


def _digest(line: str) -> str:
    return hashlib.blake2b(line.encode(), digest_size=16).hexdigest()
