"""Client of a node's SMP, for trainers and the command line: finds, starts, configures and restarts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftckpt.errors import FtckptError, PeerError, PeerTimeoutError, SmpError, VersionError
from ftckpt.events import log
from ftckpt.memory.directory import SMP_LOCK_NAME, end_smp
from ftckpt.memory.locks import holder_of
from ftckpt.memory.process import Process
from ftckpt.smp import IDLE_SECS, READY
from ftckpt.smp.channel import Trust
from ftckpt.smp.requests import (
    VERSION,
    ConfigureRequest,
    EndRequest,
    PersistRequest,
    Reply,
    SmpRequest,
    StatusRequest,
    request_once,
)

_ANSWER_SECS = 10.0
"""Training has priority on every core: on a busy node an SMP may be slow."""
_POLL_SECS = 0.02
START_SECS = 20.0
"""Twice ``_ANSWER_SECS``: half until a silent SMP is replaced, half for its successor."""
_ATTEMPTS = 3
"""Starts of an SMP that ends at once; the last error is reported."""


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

    def status(self, timeout_secs: float = _ANSWER_SECS) -> dict[str, Any]:
        """The SMP's identity and state, see ``StatusRequest``."""
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
        try:
            reply = request_once(self.node_dir, Trust(), request, timeout_secs)
        except PeerError as error:
            raise SmpError(f"the SMP of job {self.job} on node {self.node} does not answer: {error}") from error
        if reply.error:
            raise reply.refusal(f"the SMP of node {self.node} refused {request.WORD}: ")
        return dict(reply.fields)


def ask_node(description: Mapping[str, Any], node: str, request: SmpRequest, timeout_secs: float) -> Reply:
    """Ask the SMP of ``node`` by the job's ``description``. Raises FtckptError if it does not answer, or refuses."""
    settings = description.get("settings", {})
    try:
        host, port = description["peers"][node]
        trust = Trust(bytes.fromhex(description["secret"]), bool(settings.get("encrypt")))
        reply = request_once((str(host), int(port)), trust, request, timeout_secs)
    except (FtckptError, KeyError, TypeError, ValueError) as error:
        reason = "no address of its SMP is known" if isinstance(error, KeyError) else str(error)
        raise SmpError(reason) from None
    if reply.error:
        raise reply.refusal()
    return reply


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


def find_or_start(
    node_dir: Path, root: Path, job: str, node: str, *, idle_secs: float = IDLE_SECS,
    timeout_secs: float = START_SECS,
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
            if client.status(min(left, _ANSWER_SECS))["version"] == VERSION:
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


def _start(client: SmpClient, timeout_secs: float) -> str:
    """Start a detached SMP; returns the error, or ""."""
    command = [sys.executable or "python3", "-m", "ftckpt.smp", "--detach"]
    command += ["--job", client.job, "--node", client.node, "--arena", str(client.root)]
    command += ["--idle-secs", str(client.idle_secs)]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/",
            env=environment(), umask=0o077, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return f"{command[0]} cannot be started: {error.strerror}"
    with process:
        try:
            output, _ = process.communicate(timeout=timeout_secs)
        except subprocess.TimeoutExpired:
            # The SMP itself, if it already runs, is found by its lock the next time.
            process.kill()
            return f"it was not ready after {timeout_secs:.0f} s"
    if output.endswith(READY):
        return ""
    return output.decode("utf-8", "replace").strip()[-500:] or "it ended before it was ready"


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
