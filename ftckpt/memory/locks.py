"""Record locks on files: released when their process is killed, not inherited by forked workers.

The kernel drops a process's record locks on a file as soon as that process closes *any* descriptor of it. So this
module keeps a table of files that its own process has locked, and never opens these again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ftckpt.errors import ArenaError

JOB_LOCK_NAME = "job.lock"
_REMOVALS = 100
"""Attempts to create directories that other processes delete concurrently."""
_POLL_SECS = 0.02
"""Poll interval: the kernel has no wait for a record lock with a deadline."""
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid

_locked: dict[tuple[int, int], int] = {}
"""(device, inode) of each locked file → pid of the process that locked it; entries are stale in a forked child."""
_guard = threading.Lock()


class FileLock:
    """An exclusive lock on ``path``, which is created (0600) if missing.

    Args:
        deadline_secs: maximum wait for another holder; 0 tries once.
        what: subject of the error text (``arena tp0-pp0``).
        remedy: advice to the operator if another process has the lock.

    Raises:
        ArenaError: locked by another process (named by pid) or by this one, or not a plain file.
    """

    def __init__(self, path: Path, deadline_secs: float, what: str, remedy: str) -> None:
        self.path = path
        self._fd = -1
        deadline = time.monotonic() + deadline_secs
        while True:
            holder = self._try()
            if holder is None:
                return
            # Waiting for its own process would never end.
            if holder == os.getpid():
                remedy, deadline = "close() the first checkpointer before this process attaches another", 0.0
            if time.monotonic() >= deadline:
                raise ArenaError(f"{what} is held by {_named(holder)}; {remedy}")
            time.sleep(_POLL_SECS)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        with _guard:
            # Atomic for other threads: the table never has a lock that the kernel has dropped.
            _locked.pop(_identity(os.fstat(fd)), None)
            os.close(fd)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _try(self) -> int | None:
        """Try once: None if the lock is acquired, otherwise the holder's pid (0 if unknown)."""
        with _guard:
            while True:
                # Before it is opened: closing that descriptor would drop this process's lock.
                if _locked_here(self.path):
                    return os.getpid()
                try:
                    fd = self._open()
                except OSError as error:
                    raise ArenaError(f"{self.path}: cannot be opened for locking: {error.strerror}") from None
                try:
                    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    holder = _holder(fd)
                    os.close(fd)
                    if error.errno in (errno.EACCES, errno.EAGAIN):
                        return holder
                    raise ArenaError(f"{self.path}: cannot be locked: {error.strerror}") from None
                if _still_named(fd, self.path):
                    _locked[_identity(os.fstat(fd))] = os.getpid()
                    self._fd = fd
                    return None
                os.close(fd)  # the file was deleted after it was opened: its lock protects nothing

    def _open(self) -> int:
        """Open the file, creating it if missing. Raises OSError."""
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


class JobLock(FileLock):
    """The lock of a job on a node, which one process has for the duration of an attempt.

    Raises:
        ArenaError: a live process of a job with this name runs on this node.
    """

    def __init__(self, node_dir: Path, deadline_secs: float) -> None:
        job = node_dir.parent.name.removeprefix("ftckpt-")
        remedy = "wait for it, end it, or give this job another name with --ftckpt-job"
        super().__init__(
            node_dir / JOB_LOCK_NAME, deadline_secs, f"a live job named {job!r} runs on this node: it", remedy
        )

    def _open(self) -> int:
        # A process that ends or cleans an attempt may delete the directories between any two steps.
        for _ in range(_REMOVALS):
            # FileExistsError: ``mkdir`` found the directory, and it was deleted before its type was checked.
            with suppress(FileNotFoundError, FileExistsError):
                for directory in (self.path.parent.parent, self.path.parent):
                    directory.mkdir(mode=0o700, exist_ok=True)
                return super()._open()
        return super()._open()


def holder_of(path: Path) -> int | None:
    """Pid of the process that has the lock file ``path``, 0 for one in another container; None if it is free.

    A query, which does not disturb other processes that try to acquire the lock.
    """
    with _guard:
        try:
            if _locked_here(path):
                return os.getpid()
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            kind, pid = _blocking(fd)
        finally:
            os.close(fd)
    # The kernel reports 0 for a process in another pid namespace, -1 for a lock that belongs to no process.
    return None if kind == fcntl.F_UNLCK else max(0, pid)


def _locked_here(path: Path) -> bool:
    try:
        return _locked.get(_identity(os.stat(path, follow_symlinks=False))) == os.getpid()
    except FileNotFoundError:
        return False


def _holder(fd: int) -> int:
    """Pid of the process whose lock conflicts; 0 if it has exited or is in another container."""
    kind, pid = _blocking(fd)
    return pid if kind != fcntl.F_UNLCK and pid > 0 else 0


def _blocking(fd: int) -> tuple[int, int]:
    """Kind and pid of the conflicting lock, from F_GETLK."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, request))
    return kind, pid


def _still_named(fd: int, path: Path) -> bool:
    try:
        return _identity(os.fstat(fd)) == _identity(os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _named(pid: int) -> str:
    if pid == os.getpid():
        return f"this process (pid {pid})"
    return f"process {pid}" if pid else "a process in another container"
