"""The server of an agent: a process with one thread that has imported what workers import, and forks them.

It tells the agent how each of them has ended. It ends with its agent, and its workers end with it: the kernel sees to
that, however a process has died.
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
"""Which a launcher or a terminal sends to all processes of a job: the agent alone answers them."""


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
        """The messages that are there, once one is; none after ``timeout_secs``, or where the other end is closed."""
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
    """Import what the agent's first message names, then fork workers until the agent closes the channel."""
    import ftckpt.runner.worker  # noqa: F401 - before any fork; the agent needs nothing of it

    end_with_parent(parent)
    atexit.register(launcher.end_process)  # before any import that registers what a worker must do at its end
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
    gc.freeze()  # else a collection in a worker would copy all pages that it shares with the others
    status = Path("/proc/self/status").read_text()
    return {
        "modules": len(sys.modules),
        "mib": int(status.partition("RssAnon:")[2].split()[0]) >> 10,
        "left_out": imports.found,
    }


def _refusal(files: dict[str, tuple[int, int]], known: Counter[str]) -> str:
    """Why no worker may be forked now; empty where one may."""
    if new := guard.harms() - known:
        return f"what was imported {', '.join(new)}"
    changed = next((path for path, state in files.items() if guard.file_state(path) != state), None)
    return f"{changed} has changed" if changed else ""


def _become_worker(order: dict[str, Any], handlers: dict[int, Any], env: dict[str, str]) -> NoReturn:
    """Turn this fork of the server into what the agent would have started as a new process; ``env`` is what imports
    have set."""
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
            numbers.seed()  # as a new process draws it; Python's own does so by itself, torch's is a constant
        worker.start(Path(order["directory"]), order["words"], order["records"])
    except SystemExit:  # the interpreter runs the exit functions
        raise
    except BaseException:  # noqa: BLE001 - no frame of the server may go on here
        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    main(ServerChannel(socket.socket(fileno=int(sys.argv[1]))), int(sys.argv[2]))
