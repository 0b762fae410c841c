"""The workers of one attempt behind torch's interface: forked from the server, or new processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.multiprocessing import RunProcsResult, SubprocessContext

from ftckpt.frameworks.launcher import log_to_stderr
from ftckpt.runner.preload import ForkServer, Preloader, RefusedError

_GRACE_SECS: Any = 0.5  # torch's type is int
"""Time from SIGTERM to SIGKILL after a failure: the other workers only wait, and their state is in shared memory."""


class Workers(SubprocessContext):
    """The workers of all local ranks; ``settings`` are those of SubprocessContext."""

    def __init__(self, preloader: Preloader, **settings: Any) -> None:
        super().__init__(**settings)
        self._preloader = preloader
        self.is_hurried = False
        """Whether the attempt has failed, so that workers that do not end soon are killed."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called after a worker has failed, before the others are ended."""
        self._pidfds: dict[int, int] = {}

    def wakers(self) -> list[int]:
        """Descriptors that become readable when a worker has ended."""
        running = [rank for rank, handler in self.subprocess_handlers.items() if handler.proc.returncode is None]
        return [self._pidfds[rank] for rank in running if rank in self._pidfds]

    def _start(self) -> None:
        first = self.envs[0]
        same = {name: first[name] for name in first if len({env.get(name) for env in self.envs.values()}) == 1}
        server = self._preloader.begin({**os.environ, **same})
        if server is None or not self._fork(server):
            runner = ("-u", "-m", "ftckpt.runner.worker", str(self._preloader.directory))
            self.args = {rank: (*runner, *args[1:]) for rank, args in self.args.items()}  # "-u" is its first word
            super()._start()  # type: ignore[no-untyped-call]
            with suppress(OSError):  # not supported by the kernel: torch's agent polls
                for rank, handler in self.subprocess_handlers.items():
                    self._pidfds[rank] = os.pidfd_open(handler.proc.pid)

    def _fork(self, server: ForkServer) -> bool:
        """Forks all workers; on failure kills those already forked and returns False."""
        handlers: dict[int, Any] = {}
        try:
            for rank, env in self.envs.items():
                order: dict[str, Any] = {
                    "env": {**os.environ, **env},
                    "words": [str(word) for word in self.args[rank][1:]],
                }
                order |= {"stdout": self.stdouts[rank], "stderr": self.stderrs[rank], "records": rank == 0}
                handlers[rank] = server.fork({**order, "directory": str(self._preloader.directory)})
        except RefusedError as refusal:
            log_to_stderr().warning("ftckpt: workers are started as new processes: %s", refusal)
            for handler in handlers.values():
                handler.close(signal.SIGKILL)
            self._preloader.drop()
            return False
        self.subprocess_handlers = handlers
        return True

    def _poll(self) -> RunProcsResult | None:
        self.is_hurried = True  # if one has failed, ``super()._poll`` ends the others
        try:
            result: RunProcsResult | None = super()._poll()
        finally:
            self.is_hurried = False
        return result

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        if self.is_hurried and self._failures:
            self.on_failure()
        super()._close(death_sig, _GRACE_SECS if self.is_hurried else timeout)
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])
