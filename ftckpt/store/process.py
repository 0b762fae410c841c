"""A process that stays the same one: signals never reach another that was given its pid."""

from __future__ import annotations

import os
import select
import signal
from types import TracebackType

from ftckpt.store.page import owner_word


class Process:
    """A process of this pid namespace, by a pidfd."""

    def __init__(self, fd: int, pid: int) -> None:
        self.pid = pid
        self._fd = fd

    @classmethod
    def open(cls, pid: int, owner: int | None = None) -> Process | None:
        """The process ``pid``, if it lives and, where it is given, ``owner`` is its owner word; else None."""
        try:
            fd = os.pidfd_open(pid) if pid > 0 else -1
        except OSError:
            return None
        if fd < 0:
            return None
        try:
            now = owner_word(pid)  # after the pidfd: so it is of the same process, or of a dead one
        except (OSError, ValueError):
            now = 0
        if now == 0 or (owner is not None and now != owner):
            os.close(fd)
            return None
        return cls(fd, pid)

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; False where the process is gone or not ours to signal."""
        try:
            signal.pidfd_send_signal(self._fd, number)
        except OSError:
            return False
        return True

    def gone(self, timeout_secs: float) -> bool:
        """Whether it has ended, after ``timeout_secs`` at the latest."""
        # A pidfd becomes readable when its process ends, whether its parent has waited for it or not.
        waiting = select.poll()
        waiting.register(self._fd, select.POLLIN)
        return bool(waiting.poll(max(0.0, timeout_secs) * 1000))

    def close(self) -> None:
        """Let go of it; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
