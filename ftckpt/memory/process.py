"""A process that stays the same one: signals never reach another that was given its pid."""

from __future__ import annotations

import errno
import functools
import os
import select
import signal
import time
from types import TracebackType

from ftckpt.events import log
from ftckpt.memory.page import owner_lives, owner_word

_NO_SUCH = frozenset({errno.ESRCH, errno.EINVAL, errno.ENOENT})
"""No process, or, of old and new kernels, a thread of one. Any other error says nothing about the process."""
_POLL_SECS = 0.02
"""Without a pidfd nothing tells when a process ends: it is looked for again and again."""


class Process:
    """A process of this pid namespace.

    By a pidfd, or, where the kernel or a container's system call filter gives none, by pid and start time, which are
    compared right before each signal: only a pid that goes to another process between the two would be mistaken.
    """

    def __init__(self, fd: int, owner: int, pid: int) -> None:
        self.pid = pid
        self._fd = fd  # -1: no pidfd
        self._owner = owner

    @classmethod
    def open(cls, pid: int, owner: int | None = None) -> Process | None:
        """The process ``pid``, if it lives and, where it is given, ``owner`` is its owner word; else None."""
        if pid <= 0:
            return None
        fd = -1
        try:
            fd = os.pidfd_open(pid)
        except AttributeError:  # a Python that was built for a kernel without it
            _say_once("Python has no os.pidfd_open")
        except OSError as error:
            if error.errno in _NO_SUCH:
                return None
            _say_once(f"pidfd_open: {error.strerror}")
        now = _owner_now(pid)  # after the pidfd: so it is of the same process, or of a dead one
        if now == 0 or (owner is not None and now != owner):
            if fd >= 0:
                os.close(fd)
            return None
        return cls(fd, now, pid)

    def send(self, number: int) -> bool:
        """Send a signal; False where the process is gone or not ours to signal."""
        try:
            if self._fd >= 0:
                signal.pidfd_send_signal(self._fd, number)
                return True
        except ProcessLookupError:
            return False
        except (OSError, AttributeError):
            pass  # not ours to signal, or a filter that allows pidfd_open alone: kill tells which
        if _owner_now(self.pid) != self._owner:
            return False
        try:
            os.kill(self.pid, number)
        except OSError:
            return False
        return True

    def gone(self, timeout_secs: float) -> bool:
        """Whether it has ended, after ``timeout_secs`` at the latest."""
        deadline = time.monotonic() + timeout_secs
        if self._fd >= 0:
            # A pidfd becomes readable when its process ends, whether its parent has waited for it or not.
            waiting = select.poll()
            waiting.register(self._fd, select.POLLIN)
            return bool(waiting.poll(max(0.0, timeout_secs) * 1000))
        while owner_lives(self._owner):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECS)
        return True

    def fileno(self) -> int:
        """Its pidfd, which becomes readable when it ends; -1: there is none."""
        return self._fd

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


def _owner_now(pid: int) -> int:
    """The owner word of the process that has ``pid`` now; 0 where none does, or it has ended."""
    try:
        return owner_word(pid)
    except (OSError, ValueError):
        return 0


@functools.cache
def _say_once(reason: str) -> None:
    log.info("ftckpt: %s: processes are told apart by pid and start time", reason)
