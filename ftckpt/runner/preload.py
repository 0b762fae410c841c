"""The agent's side of its server: start of servers, their imports, and forked workers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ftckpt.frameworks.launcher import log_to_stderr
from ftckpt.runner import notes
from ftckpt.runner.server import ServerChannel

_QUIET_SECS = 5.0
"""The imports of an attempt count as complete when none was recorded for this long."""
_ANSWER_SECS = 30.0
_MOST_PASSES = 4
"""Maximum number of servers started in sequence, each without the unsafe modules that earlier ones have found."""
_MOST_NAMES = 3
"""Maximum number of modules that the log names as not preloaded."""


class RefusedError(Exception):
    """The server cannot fork a worker; the text has the reason."""


class ForkedProcess:
    """A worker that the server has forked; implements torch's process handler and the process in it."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.proc = self
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        self._server.receive()
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= end:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout)
            self._server.receive(end - time.monotonic())
        return code

    def close(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        """Sends a signal to the worker and its children."""
        try:
            os.killpg(self.pid, death_sig)
        except ProcessLookupError:
            with suppress(ProcessLookupError):
                os.kill(self.pid, death_sig)  # it has just started, and does not lead a process group yet


class ForkServer:
    """One server process; ``report`` is its report after all imports."""

    def __init__(self, env: Mapping[str, str], order: dict[str, Any]) -> None:
        self.report: dict[str, Any] | None = None
        self.workers: dict[int, ForkedProcess] = {}
        """Running workers by process id."""
        self._answers: list[ForkedProcess | RefusedError] = []
        self._options = _options(env)
        ours, theirs = socket.socketpair()
        self.channel = ServerChannel(ours)
        env = {**env, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # NVML is fork-safe
        with theirs:
            ends = theirs.fileno(), os.getpid()
            command = [sys.executable, "-u", "-m", "ftckpt.runner.server", *map(str, ends)]
            self._process = subprocess.Popen(command, env=env, pass_fds=ends[:1], start_new_session=True)
        self.channel.send(order)

    def receive(self, timeout_secs: float = 0.0) -> None:
        """Processes messages of the server; waits at most ``timeout_secs`` for the first one."""
        for message in self.channel.receive(timeout_secs):
            if "ended" in message:
                self.workers.pop(message["ended"]).returncode = message["code"]
            elif "modules" in message:
                self.report = message
            elif "refused" in message:
                self._answers.append(RefusedError(message["refused"]))
            else:  # noted here: the message that this worker has ended may be the next one
                worker = self.workers[message["pid"]] = ForkedProcess(self, message["pid"])
                self._answers.append(worker)
        while self.channel.is_closed and self.workers:  # the kernel also kills them
            _, worker = self.workers.popitem()
            worker.close(signal.SIGKILL)
            worker.returncode = -signal.SIGKILL

    def fork(self, order: dict[str, Any]) -> ForkedProcess:
        """Starts a worker. Raises RefusedError."""
        if differ := {name for name, _ in self._options ^ _options(order["env"])}:
            raise RefusedError(f"changed variables that only a new interpreter reads: {', '.join(sorted(differ))}")
        end = time.monotonic() + _ANSWER_SECS
        self.channel.send(order)
        while not self._answers:
            if self.channel.is_closed or time.monotonic() > end:
                raise RefusedError("the server has ended" if self.channel.is_closed else "the server is unresponsive")
            self.receive(end - time.monotonic())
        answer = self._answers.pop()
        if isinstance(answer, RefusedError):
            raise answer
        return answer

    def close(self) -> None:
        """Ends the server and all its workers."""
        self.channel.close()
        self._process.kill()
        self._process.wait()


def _options(env: Mapping[str, str]) -> set[tuple[str, str]]:
    """Variables that the interpreter reads at startup."""
    return {(name, value) for name, value in env.items() if name.startswith("PYTHON")}


class Preloader:
    """Keeps a preloaded server ready for the next attempt.

    ``extra`` are modules to import in addition to those that workers have imported; None: nothing is preloaded.
    """

    def __init__(self, extra: Sequence[str] | None) -> None:
        self.directory, self._lock = notes.make_directory()
        self._extra = extra
        self.env: dict[str, str] = dict(os.environ)
        self._ready: ForkServer | None = None
        self._coming: ForkServer | None = None
        self._retired: list[ForkServer] = []
        self._left_out: dict[str, str] = {}
        self._num_logged = 0
        self._passes_left = _MOST_PASSES
        self._size = self.served_size = 0
        self._grown = 0.0
        self._log = log_to_stderr()

    def begin(self, env: Mapping[str, str]) -> ForkServer | None:
        """The server for a new attempt, if one is ready; ``env`` is the environment that its workers share."""
        while self._retired:  # the workers of earlier attempts have ended
            self._retired.pop().close()
        self.poll()
        self.env, self._passes_left, self._grown = dict(env), _MOST_PASSES, time.monotonic()
        if self._ready is None and self.served_size:
            self._log.info("ftckpt: workers are started as new processes: no server has imported their modules yet")
        return self._ready

    def poll(self) -> None:
        """Polls servers and starts one if needed; called often, never waits."""
        if self._ready is not None:
            self._ready.receive()
            if self._ready.channel.is_closed:
                self._log.warning("ftckpt: the server from which workers are forked has ended; starting another one")
                self.drop()
        if self._coming is not None:
            self._coming.receive()
            if self._coming.report is not None or self._coming.channel.is_closed:
                self._take(self._coming)
        size = notes.size_of_imports(self.directory)
        if size != self._size:
            self._size, self._grown = size, time.monotonic()
        is_due = self._extra is not None and self._coming is None and size != self.served_size
        if is_due and time.monotonic() - self._grown >= _QUIET_SECS:
            self._start()

    def drop(self) -> None:
        """Retires the ready server; ``look`` starts another one."""
        if self._ready is not None:
            self._retired.append(self._ready)
        self._ready, self.served_size = None, 0

    def wakers(self) -> list[int]:
        """Descriptors that become readable when a server sends a message, such as the end of a worker."""
        return [server.channel.fileno() for server in self._servers() if not server.channel.is_closed]

    def close(self) -> None:
        """Ends all servers and removes the workers' files."""
        for server in self._servers():
            server.close()
        with suppress(OSError):
            notes.remove(self.directory)
        self._lock.close()

    def _servers(self) -> list[ForkServer]:
        return [one for one in (self._ready, self._coming, *self._retired) if one is not None]

    def _start(self) -> None:
        """Starts a server, unless this attempt has started the maximum number."""
        self.served_size = self._size
        if self._passes_left:
            self._passes_left -= 1
            self._coming = ForkServer(
                self.env, {"directory": str(self.directory), "extra": self._extra, "left_out": sorted(self._left_out)}
            )

    def _take(self, server: ForkServer) -> None:
        """Uses a server that has imported all modules, or starts one without the unsafe modules that it has found."""
        self._coming = None
        if server.report is None:
            self._log.warning("ftckpt: preloading failed: the server has ended; see its output above")
            server.close()
            return
        if left_out := server.report["left_out"]:
            self._left_out |= {name: self._left_out.get(name) or why for name, why in left_out.items()}
            server.close()
            self._start()
            if self._coming is None:
                self._log_left_out()
            return
        self._log_left_out()
        served_size = self.served_size
        self.drop()
        self._ready, self.served_size = server, served_size
        text = "ftckpt: %d modules are preloaded (%d MiB): a restart forks its workers from this server"
        self._log.info(text, server.report["modules"], server.report["mib"])

    def _log_left_out(self) -> None:
        if len(self._left_out) == self._num_logged:
            return
        self._num_logged = len(self._left_out)
        first = [name for name, why in self._left_out.items() if why][:_MOST_NAMES]
        names = ", ".join([*first, "..."] if len(first) < self._num_logged else first)
        path = notes.write_left_out(self.directory, self._left_out)
        self._log.info("ftckpt: %d modules are not preloaded (%s): see %s", self._num_logged, names, path)
