"""The trainers' side of the SMP: find or start the one of this node, tell it what to do, and bring it back."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftckpt.arena.directory import SMP_LOCK_NAME, end_smp
from ftckpt.arena.locks import holder_of
from ftckpt.arena.process import Process
from ftckpt.errors import SmpError
from ftckpt.smp.protocol import (
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    VERSION,
    decode_line,
    encode_line,
    peer_uid,
    socket_address,
)

BUSY_STATUS = 3
"""Exit status of a starting SMP that found another one serving."""
_ANSWER_SECS = 10.0
_START_SECS = 20.0
_POLL_SECS = 0.02
_ATTEMPTS = 3


class SmpClient:
    """Requests to the SMP of one node. Each opens a connection of its own and ends by its deadline.

    Args:
        node_dir: where the node's arenas lie.
        root, job, node: what names that directory; a new SMP is started with them.
        settings: of Config's fields only ``smp_idle_secs`` is read here; the others go with ``configure``.

    Raises (every method):
        SmpError: no SMP answers in time, it refuses, or it answers nonsense.
    """

    def __init__(self, node_dir: Path, root: Path, job: str, node: str, settings: Mapping[str, Any]) -> None:
        self.node_dir, self.root, self.job, self.node = node_dir, root, job, node
        self.settings = dict(settings)

    def hello(self, timeout_secs: float = _ANSWER_SECS) -> dict[str, Any]:
        """``version``, ``pid``, ``job``, ``node``, ``configured``, ``port`` (0: it does not listen)."""
        return self.call({"request": "hello"}, timeout_secs)

    def status(self, timeout_secs: float = _ANSWER_SECS) -> dict[str, Any]:
        """What the SMP does: trainers it sees, its memory, hangs, and ``duties``."""
        return self.call({"request": "status"}, timeout_secs)

    def listen(self, host: str, secret: bytes, timeout_secs: float = _ANSWER_SECS) -> int:
        """Let it answer other nodes at ``host``, to those who know ``secret``; returns the port."""
        reply = self.call({"request": "listen", "host": host, "secret": secret.hex()}, timeout_secs)
        port = reply.get("port")
        if not isinstance(port, int):
            raise SmpError(f"the SMP of node {self.node} names no port: {reply}")
        return port

    def configure(self, description: Mapping[str, Any], timeout_secs: float = _ANSWER_SECS) -> None:
        """Tell it what to protect. It keeps the description, so that a restarted one needs no trainer."""
        self.call({"request": "configure", "description": dict(description)}, timeout_secs)

    def end(self, timeout_secs: float = _ANSWER_SECS) -> None:
        """The job is over: it removes its files and ends; returns when the process is gone.

        Returns at once where none runs. One that does not answer is ended by signals.
        """
        pid = holder_of(self.node_dir / SMP_LOCK_NAME)
        if pid is None:
            return
        deadline = time.monotonic() + timeout_secs
        process = Process.open(pid)
        try:
            self.call({"request": "end"}, timeout_secs / 2)
            _wait_gone(self.node_dir, process, deadline)
        except SmpError:
            if not end_smp(self.node_dir, max(1.0, deadline - time.monotonic())):
                raise
        finally:
            if process is not None:
                process.close()

    def call(self, request: Mapping[str, Any], timeout_secs: float) -> dict[str, Any]:
        """Send one request and return the fields of the reply."""
        line = encode_line(request)
        if len(line) > MAX_REQUEST_BYTES:
            raise SmpError(f"a request of {len(line)} bytes; the most is {MAX_REQUEST_BYTES}")
        try:
            reply = decode_line(_exchange(self.node_dir, line, time.monotonic() + timeout_secs))
        except (OSError, SmpError) as error:
            raise SmpError(f"the SMP of job {self.job} on node {self.node} does not answer: {error}") from None
        if reply.get("ok") is not True:
            raise SmpError(f"the SMP of node {self.node} refused {request['request']}: {reply.get('error')}")
        return reply


def find_or_start(
    node_dir: Path, root: Path, job: str, node: str, settings: Mapping[str, Any], *, timeout_secs: float = _START_SECS
) -> SmpClient:
    """The SMP of this node and job: the one that runs, or a new one. Any number of ranks may call this at once.

    ``node_dir`` must exist. A new SMP takes over arenas and configuration of one that died.

    Raises:
        SmpError: none could be started, or the one that runs does not answer, within ``timeout_secs``.
    """
    client = SmpClient(node_dir, root, job, node, settings)
    deadline = time.monotonic() + timeout_secs
    attempts, problem = 0, ""
    while time.monotonic() < deadline:
        left = deadline - time.monotonic()
        if holder_of(node_dir / SMP_LOCK_NAME) is None:
            if attempts == _ATTEMPTS:
                break
            attempts += 1
            problem = _start(client, left) or problem
        try:
            if client.hello(min(left, _ANSWER_SECS))["version"] == VERSION:
                return client
            problem = "it is of another version of ftckpt, and does not end"
            end_smp(node_dir, left)
        except (SmpError, KeyError) as error:  # it is starting or ending
            problem = problem or str(error)
            time.sleep(_POLL_SECS)
    raise SmpError(f"no SMP for job {job} on node {node} within {timeout_secs:g} s: {problem}")


class Watch:
    """A thread that starts a new SMP within about a second when the node's has died. For one rank of the node.

    The new one configures itself by what the old one kept. ``stop`` it before ``SmpClient.end``.

    Args:
        told: called with an event's name and fields: ``smp_restarted``, ``smp_error``.
    """

    def __init__(self, client: SmpClient, told: Callable[..., None], every_secs: float = 0.5) -> None:
        self._client, self._told, self._every_secs = client, told, every_secs
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftckpt-smp-watch", daemon=True)
        self._thread.start()

    def stop(self, timeout_secs: float = _START_SECS + 1) -> None:
        """Start none any more; waits for one that is being started."""
        self._stopped.set()
        self._thread.join(timeout_secs)

    def _run(self) -> None:
        wait = self._every_secs
        while not self._stopped.wait(wait):
            wait = self._every_secs
            if not self._client.node_dir.is_dir() or holder_of(self._client.node_dir / SMP_LOCK_NAME) is not None:
                continue
            begin = time.monotonic()
            client = self._client
            try:
                find_or_start(client.node_dir, client.root, client.job, client.node, client.settings)
                self._told("smp_restarted", background_secs=time.monotonic() - begin)
            except Exception as error:  # noqa: BLE001 - promise 4: protection is degraded, training goes on
                self._told("smp_error", error=str(error))
                wait = 20 * self._every_secs


def _start(client: SmpClient, timeout_secs: float) -> str:
    """Start an SMP that is nobody's child; returns what went wrong, or nothing."""
    command = [
        sys.executable or "python3",
        "-m",
        "ftckpt.smp",
        "--detach",
        "--job",
        client.job,
        "--node",
        client.node,
    ]
    command += ["--arena", str(client.root)]
    if "smp_idle_secs" in client.settings:
        command += ["--idle-secs", str(float(client.settings["smp_idle_secs"]))]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/",
            env=environment(), start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return f"{command[0]} cannot be started: {error.strerror}"
    with process:
        try:
            _, said = process.communicate(timeout=timeout_secs)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"it was not ready after {timeout_secs:.0f} s"
    if process.returncode in (0, BUSY_STATUS):
        return ""
    return said.decode("utf-8", "replace").strip()[-500:] or f"it ended with status {process.returncode}"


def environment() -> dict[str, str]:
    """For an SMP: this process's, with the package that it imported, and without threads that do nothing."""
    package_root = Path(__file__).parents[2]
    variables = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    if package_root.name not in (
        "site-packages",
        "dist-packages",
    ):  # those shall not come before the standard library
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(package_root))))
    return variables


def _exchange(node_dir: Path, line: bytes, deadline: float) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, socket_address(node_dir) as address:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        connection.connect(address)
        if peer_uid(connection) != os.geteuid():
            raise SmpError("it belongs to another user")
        with suppress(BrokenPipeError):  # refused half-way: the reply says why
            connection.sendall(line)
        received = bytearray()
        while b"\n" not in received:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                raise SmpError("no reply in time")
            piece = connection.recv(1 << 16)
            if not piece:
                raise SmpError("it hung up")
            received += piece
            if len(received) > MAX_REPLY_BYTES:
                raise SmpError("its reply is too long")
        return bytes(received)


def _wait_gone(node_dir: Path, process: Process | None, deadline: float) -> None:
    """Until the SMP is gone; None: one of another container, whose lock must tell.

    Raises:
        SmpError: it is still there at the deadline.
    """
    while time.monotonic() < deadline:
        if process is not None and process.gone(deadline - time.monotonic()):
            return
        if process is None and holder_of(node_dir / SMP_LOCK_NAME) is None:
            return
        time.sleep(_POLL_SECS)
    raise SmpError("it does not end")
