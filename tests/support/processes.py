"""Processes of tests: fresh interpreters, the processes of a run by node, and reads of /proc."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.repository import ROOT
from tests.support.waiting import until

ARENA = Path("/dev/shm")
STOP_SECS = 20.0

NODE_VAR = "FTCKPT_NODE"
_TOKEN_VAR = "FTCKPT_RUN_TOKEN"


class RunError(Exception):
    """A run did not go as it should; the text explains how."""


class Processes:
    """The processes of one run, and nobody else's: they carry a random token in their environment."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(16)
        self._agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str, command: Sequence[str], env: dict[str, str], output: Path) -> None:
        """Start the agent of a node in a session of its own, so that Ctrl-C reaches the caller alone."""
        with open(output, "wb") as out:
            self._agents[node] = subprocess.Popen(
                command, env={**env, _TOKEN_VAR: self._token, NODE_VAR: node}, cwd=ROOT, stdin=subprocess.DEVNULL,
                stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip

    @property
    def agents(self) -> list[subprocess.Popen[bytes]]:
        """Agents of nodes that were not lost."""
        return list(self._agents.values())

    def left(self, node: str = "") -> list[int]:
        """Process ids of agents, workers and SMPs that still run, of one node if it is named."""
        return started_with(f"{_TOKEN_VAR}={self._token}", *([f"{NODE_VAR}={node}"] if node else []))

    def lose(self, node: str) -> list[int]:
        """SIGKILL everything of ``node``, its agent first, and return the process ids once all have ended.

        Raises:
            RunError: something of it does not die.
        """
        agent = self._agents.pop(node)
        agent.kill()
        killed = {agent.pid, *self._kill(node)}
        agent.wait(STOP_SECS)
        if left := self.left(node):
            raise RunError(f"{node}: processes {left} do not die")
        return sorted(killed)

    def end(self, nodes: Sequence[str]) -> None:
        """SIGTERM for the agents of ``nodes``; waits for their ends. Processes that they did not start stay."""
        agents = [self._agents.pop(node) for node in nodes]
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.wait(2 * STOP_SECS)

    def stop(self) -> None:
        """Kill what is left: agents first, so that they restart nothing."""
        for agent in self.agents:
            agent.kill()
        self._kill()
        for agent in self.agents:
            agent.wait(STOP_SECS)

    def _kill(self, node: str = "") -> set[int]:
        with contextlib.suppress(AssertionError):  # the caller says what is left
            return kill_all(lambda: self.left(node), STOP_SECS)
        return set()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def running() -> Iterator[int]:
    """All processes of the machine that have not ended."""
    for entry in Path("/proc").glob("[0-9]*"):
        if is_running(int(entry.name)):
            yield int(entry.name)


def started_with(*variables: str) -> list[int]:
    """Processes that run and have all of these in their environment, each with its value."""
    return [pid for pid in running() if {*variables} <= environment(pid)]


def environment(pid: int) -> set[str]:
    """The variables with which a process was started, each with its value; none once it has ended."""
    return {*_read(pid, "environ").split("\0")}


def command_line(pid: int) -> str:
    """The words of a process, with spaces between them; empty once it has ended."""
    return _read(pid, "cmdline").replace("\0", " ")


def mounts_of(pid: int) -> str:
    """The identity of a process's mounts; empty once it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return ""


def kill_all(left: Callable[[], Sequence[int]], secs: float) -> set[int]:
    """SIGKILL for all that ``left`` finds, until it finds none; returns their process ids.

    Raises:
        AssertionError: something does not die within ``secs``.
    """
    killed: set[int] = set()

    def gone() -> bool:
        pids = left()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        return not pids

    until(gone, lambda: f"{left()} dead", secs)
    return killed


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def in_child(action: Callable[[], bool]) -> bool:
    """Whether ``action`` returns True in a fork of this process."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # it ends, whatever it waits for
        code = 2
        try:
            code = 0 if action() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def run_python(code: str, *arguments: object, secs: float = 60.0, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` to its end in a fresh interpreter, with more variables in its environment."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, env={**os.environ, **env},
        capture_output=True, text=True, timeout=secs, check=False,
    )  # fmt: skip


def python(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A fresh interpreter that runs ``code`` and has printed its first line, which is ``up``."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, **options)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


def free_ports(count: int) -> int:
    """The first of ``count`` neighbouring ports that are free now. Another process may take one before it is used."""
    for _ in range(100):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            first = random.randrange(20000, 30000)
            for index in range(count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", first + index))
            return first
    raise AssertionError("no free ports")
