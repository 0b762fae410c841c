"""A handle of one process: signals never reach another process that reuses its pid."""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from types import TracebackType

from ftckpt.memory.page import owner_lives, owner_word

_NO_SUCH = frozenset({errno.ESRCH, errno.EINVAL, errno.ENOENT})
"""Errors for a missing process or, depending on the kernel, a thread's pid. Others do not mean that it is missing."""
_POLL_SECS = 0.02
"""Poll interval for the exit of a process without a pidfd."""


class Process:
    """A process of this pid namespace.

    It is identified by a pidfd, or, if the kernel or a seccomp filter denies it, by pid and start time. These are
    compared right before each signal; only a pid that is reused between the two calls would be mistaken.
    """

    def __init__(self, fd: int, owner: int, pid: int) -> None:
        self.pid = pid
        self._fd = fd  # -1: no pidfd
        self._owner = owner

    @classmethod
    def open(cls, pid: int, owner: int | None = None) -> Process | None:
        """The process ``pid``; None if it does not live or its owner word differs from ``owner``, if given."""
        if pid <= 0:
            return None
        fd = -1
        try:
            fd = os.pidfd_open(pid)
        except AttributeError:
            pass  # Python was built for a kernel without it
        except OSError as error:
            if error.errno in _NO_SUCH:
                return None
        now = _owner_now(pid)  # after pidfd_open: if the pid is reused by now, the pidfd's process is dead
        if now == 0 or (owner is not None and now != owner):
            if fd >= 0:
                os.close(fd)
            return None
        return cls(fd, now, pid)

    def send(self, number: int) -> bool:
        """Send a signal; False if the process is gone or may not be signalled."""
        try:
            if self._fd >= 0:
                signal.pidfd_send_signal(self._fd, number)
                return True
        except ProcessLookupError:
            return False
        except (OSError, AttributeError):
            pass  # not permitted, or a filter that allows only pidfd_open: kill tells which
        if _owner_now(self.pid) != self._owner:
            return False
        try:
            os.kill(self.pid, number)
        except OSError:
            return False
        return True

    def gone(self, timeout_secs: float) -> bool:
        """Wait until the process exits, at most ``timeout_secs``; returns whether it has."""
        deadline = time.monotonic() + timeout_secs
        if self._fd >= 0:
            # A pidfd becomes readable when its process exits, even before it is reaped.
            waiting = select.poll()
            waiting.register(self._fd, select.POLLIN)
            return bool(waiting.poll(max(0.0, timeout_secs) * 1000))
        while owner_lives(self._owner):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECS)
        return True

    def fileno(self) -> int:
        """The pidfd, which becomes readable when the process exits; -1: there is none."""
        return self._fd

    def close(self) -> None:
        """Close the pidfd; a second call does nothing."""
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
    """The owner word of the process that has ``pid`` now; 0 if there is none, or it is a zombie."""
    try:
        return owner_word(pid)
    except (OSError, ValueError):
        return 0
