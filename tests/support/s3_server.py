"""A real S3 server on this machine, in a folder of its own: what all kinds of it have in common."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

BUCKET = "bucket"
REGION = "us-east-1"

S = TypeVar("S", bound="S3Server")


class S3Server(ABC):
    """With a bucket ``BUCKET`` once it is ``serving``; ``crash`` and ``start`` again as often as wanted.

    Args:
        folder: an empty one, for what it keeps, its configuration and its logs.
        port: of the loopback, where it answers.
    """

    user: ClassVar[str]
    """As Swift's own interface knows the account."""
    key: ClassVar[str]
    secret: ClassVar[str] = "testing"

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{port}"
        self._processes: list[subprocess.Popen[bytes]] = []

    @abstractmethod
    def start(self) -> None:
        """Serve; returns when requests are answered."""

    def options(self, **more: Any) -> dict[str, Any]:
        """Of obstore's S3 store, without retries, which would hide faults."""
        return {
            "endpoint": self.url, "access_key_id": self.key, "secret_access_key": self.secret, "region": REGION,
            "retry_config": {"max_retries": 0}, **more,
        }  # fmt: skip

    def crash(self) -> None:
        """SIGKILL to all of it."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait(10)
        self._processes.clear()

    def _serve(self, command: Sequence[str], **environment: str) -> None:
        """One process more, which ``crash`` ends."""
        with open(self.folder / f"{Path(command[0]).name}.log", "ab") as log:
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            env = {**os.environ, **environment}
            self._processes.append(subprocess.Popen(command, env=env, start_new_session=True, **pipes))

    def _says(self, path: str = "") -> bytes | None:
        """What it answers; None where it does not."""
        with suppress(OSError), urllib.request.urlopen(f"{self.url}{path}", timeout=5) as answer:
            return bytes(answer.read()) if answer.status == 200 else None
        return None

    def make_bucket(self) -> None:
        """By Swift's own interface, which every kind has, too: obstore makes none."""
        account = {"X-Auth-User": self.user, "X-Auth-Key": self.secret}
        ask = urllib.request.Request(f"{self.url}/auth/v1.0", headers=account)
        with urllib.request.urlopen(ask, timeout=10) as answer:
            place, token = answer.headers["X-Storage-Url"], answer.headers["X-Auth-Token"]
        make = urllib.request.Request(f"{place}/{BUCKET}", method="PUT", headers={"X-Auth-Token": token})
        urllib.request.urlopen(make, timeout=10).close()


@contextmanager
def serving(server: S, make_account: Callable[[], None] | None = None) -> Iterator[S]:
    """It runs with an empty bucket; nothing of it does afterwards. ``make_account``: of a kind whose configuration
    names none."""
    with ExitStack() as stack:
        stack.callback(server.crash)
        server.start()
        if make_account is not None:
            make_account()
        server.make_bucket()
        yield server


def free_ports(count: int) -> list[int]:
    """Of the loopback, that nobody listens at now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
