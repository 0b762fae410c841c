"""The server of an agent: a single-threaded process that has imported the workers' modules, and forks the workers.

It reports each worker's exit to the agent. The kernel ends it with its agent, and its workers with it, even after a
crash.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from ftckpt.forks import end_with_parent
from ftckpt.frameworks import launcher
from ftckpt.runner import guard, notes

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a launcher or a terminal sends to all processes of a job: only the agent handles them."""


class ServerChannel:
    """Messages as lines of JSON between an agent and its server."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = b""
        self.is_closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; ignores a closed peer, which ``receive`` detects."""
        with suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_secs: float | None = 0.0) -> list[dict[str, Any]]:
        """Waits for messages and returns them; none after ``timeout_secs`` or if the peer has closed."""
        if self.is_closed or not select.select([self._socket], [], [], timeout_secs)[0]:
            return []
        try:
            data = self._socket.recv(1 << 20)
        except ConnectionError:
            data = b""
        self.is_closed = not data
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self.is_closed = True
        self._socket.close()


def main(channel: ServerChannel, parent: int) -> None:
    """Imports the modules in the agent's first message, then forks workers until the agent closes the channel."""
    import ftckpt.runner.worker  # noqa: F401 - before any fork; the agent does not need it

    end_with_parent(parent)
    atexit.register(launcher.end_process)  # before any import that registers exit functions, which must run first
    server, known = os.getpid(), guard.harms()
    handlers: dict[int, Any] = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    while not channel.is_closed and not (orders := channel.receive(None)):
        pass
    imports = guard.Guard(orders[0]["left_out"])
    channel.send(_preload(imports, orders[0]))
    files = guard.own_files()
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    while not channel.is_closed:
        select.select([channel.fileno(), woken], [], [])
        for order in channel.receive():
            if why := _refusal(files, known):
                channel.send({"refused": why})
                continue
            if not (pid := os.fork()):
                end_with_parent(server)
                signal.set_wakeup_fd(-1)
                channel.close()
                for fd in (woken, wake):
                    os.close(fd)
                _become_worker(order, handlers, imports.env)
            channel.send({"pid": pid})
        with suppress(BlockingIOError):
            os.read(woken, 4096)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                channel.send({"ended": ended[0], "code": os.waitstatus_to_exitcode(ended[1])})


def _preload(imports: guard.Guard, order: dict[str, Any]) -> dict[str, Any]:
    """Imports modules and returns the report for the agent."""
    imports.preload([*notes.imports(Path(order["directory"])), *([name, ""] for name in order["extra"] if name)])
    gc.collect()
    gc.freeze()  # otherwise a garbage collection in a worker would copy all shared pages
    status = Path("/proc/self/status").read_text()
    return {
        "modules": len(sys.modules),
        "mib": int(status.partition("RssAnon:")[2].split()[0]) >> 10,
        "left_out": imports.found,
    }


def _refusal(files: dict[str, tuple[int, int]], known: Counter[str]) -> str:
    """The reason why no worker may be forked now; empty if one may."""
    if new := guard.harms() - known:
        return f"an imported module {', '.join(new)}"
    changed = next((path for path, state in files.items() if guard.file_state(path) != state), None)
    return f"{changed} has changed" if changed else ""


def _become_worker(order: dict[str, Any], handlers: dict[int, Any], env: dict[str, str]) -> NoReturn:
    """Makes this fork of the server equivalent to a new process; ``env`` has the variables that imports have set."""
    from ftckpt.runner import worker

    try:
        os.setsid()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for path, fd in (order["stdout"], 1), (order["stderr"], 2):
            if path:
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
                os.dup2(file, fd)
                os.close(file)
        launcher.is_forked = True
        os.environ.clear()
        os.environ.update({**order["env"], **env})
        if numbers := sys.modules.get("numpy.random"):
            numbers.seed()  # as in a new process; Python reseeds after a fork, torch's default seed is a constant
        worker.start(Path(order["directory"]), order["words"], order["records"])
    except SystemExit:  # the interpreter runs the exit functions
        raise
    except BaseException:  # noqa: BLE001 - the server's frames must not continue in the fork
        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    main(ServerChannel(socket.socket(fileno=int(sys.argv[1]))), int(sys.argv[2]))
