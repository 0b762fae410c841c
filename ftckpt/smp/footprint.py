"""Resources of an SMP on its node: configuration and log files, memory, descriptors, priorities."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftckpt.errors import ArenaError, FtckptError, SmpError
from ftckpt.events import log
from ftckpt.memory.atomic_files import remove_unfinished, replace_file
from ftckpt.memory.directory import (
    SMP_LOCK_NAME,
    SMP_STATE_NAME,
    node_directory,
    remove_job_if_empty,
    remove_smp_files,
)
from ftckpt.memory.locks import FileLock, holder_of
from ftckpt.memory.smp_log import SMP_LOG_NAME
from ftckpt.smp.requests import MAX_REQUEST_BYTES, VERSION, decode_object, encode_object, guard_digest

_M_MMAP_THRESHOLD, _MMAP_BYTES = -3, 1 << 20  # malloc.h; larger blocks are unmapped when freed
# In the tmpfs, where it competes with slots: thousands of lines.
_LOG_BYTES = 256 << 10
# A full tmpfs has room again once a slot or parity file is freed, which takes seconds.
_STORE_AGAIN_SECS = 2.0
_MESSAGE_CHARS = 4000
_WARNINGS, _WARNING_CHARS = 8, 400
_MAX_STATE_BYTES = 2 * MAX_REQUEST_BYTES
"""A received description, with room for JSON escapes."""


def store_description(node_dir: Path, description: Mapping[str, Any]) -> None:
    """Store this node's configuration in ``smp.json`` (0600) for the next SMP. A kill leaves the old file or the new
    one, or none on a full tmpfs.

    Raises:
        OSError: the tmpfs is full or not writable; no file is left.
    """
    data, path = encode_object({"version": VERSION, "description": description}), node_dir / SMP_STATE_NAME
    remove_unfinished(node_dir, f"{SMP_STATE_NAME}*")
    try:
        replace_file(path, data)
    except OSError:
        # Frees the pages of the old one, which an SMP must not take over: it is outdated.
        path.unlink(missing_ok=True)
        replace_file(path, data)


def load_description(node_dir: Path) -> dict[str, Any] | None:
    """The description stored last on this node; None if there is none.

    Raises:
        SmpError: it is corrupt, of another version, or another user's.
    """
    path = node_dir / SMP_STATE_NAME
    try:
        # O_NONBLOCK: opening a FIFO of that name would block forever.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SmpError(f"{path}: cannot be read: {error.strerror}") from None
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_uid != os.geteuid():
            raise SmpError(f"{path} belongs to another user")
        data = file.read(_MAX_STATE_BYTES + 1)
    if len(data) > _MAX_STATE_BYTES:
        raise SmpError(f"{path}: longer than {_MAX_STATE_BYTES} bytes")
    try:
        message = decode_object(data)
    except SmpError as error:
        raise SmpError(f"{path}: {error}") from None
    if message.get("version") != VERSION:
        raise SmpError(f"{path}: of another version of ftckpt")
    description = message.get("description")
    if not isinstance(description, dict):
        raise SmpError(f"{path}: it has no description")
    return description


class DescriptionStore:
    """The node's configuration, stored for the next SMP. A failure delays nothing; it is retried.

    Args:
        report: called with a failure, once until it works again.
    """

    def __init__(self, node_dir: Path, report: Callable[[str], None]) -> None:
        self.description: dict[str, Any] | None = None
        self.digest = 0
        self._node_dir, self._report = node_dir, report
        self._retry_secs = math.inf  # ``time.monotonic``

    def set(self, description: dict[str, Any]) -> None:
        """Replace the description; ``store`` follows."""
        self.description, self.digest = description, guard_digest(description)

    def store(self) -> None:
        """Store it."""
        try:
            store_description(self._node_dir, self.description or {})
        except OSError as error:
            if self._retry_secs == math.inf:  # once
                self._report(f"{self._node_dir}: the configuration cannot be stored: {error.strerror}; it is retried")
            self._retry_secs = time.monotonic() + _STORE_AGAIN_SECS
        else:
            self._retry_secs = math.inf

    def retry(self) -> None:
        """Store it if that has failed, and a retry is due."""
        if time.monotonic() >= self._retry_secs:
            self.store()


class NodeLock:
    """The exclusive right to serve a node and job, and its directory ``node_dir``.

    Args:
        makes_directory: create the directory if it is missing.

    Raises:
        SmpError: another SMP serves this node and job.
        ArenaError: the directory cannot be used.
    """

    def __init__(self, root: Path, job: str, node: str, *, makes_directory: bool) -> None:
        self.job, self.node, self._root = job, node, root
        self.node_dir = node_directory(root, job, node, makes=makes_directory)
        what, self._path = f"job {job!r} on node {node!r} has an SMP: it", self.node_dir / SMP_LOCK_NAME
        try:
            self._lock = FileLock(self._path, 0, what, "use that one, or end it first")
        except ArenaError as error:
            if holder_of(self._path) is None:  # the lock file itself is unusable
                raise
            raise SmpError(str(error)) from None

    @property
    def is_held(self) -> bool:
        """False if the directory was removed: another SMP may serve in a new one of that name."""
        return holder_of(self._path) == os.getpid()

    def release(self, *, removes: bool) -> None:
        """End serving. If the job is over its SMP's files are removed; otherwise the configuration stays with the
        arenas, for an SMP that saves them later."""
        if self.is_held and removes:
            remove_smp_files(self.node_dir)
        elif self.is_held:
            # Under the lock: after its release it could be another SMP's.
            self._path.unlink(missing_ok=True)
        self._lock.release()
        try:
            # Its own warnings, which only its own log would show: the files go with it.
            remove_job_if_empty(self._root, self.job, self.node, log.debug)
        except (OSError, FtckptError) as error:
            log.warning("%s", error)


class BoundedLog(logging.Handler):
    """Logs to ``smp.log`` (0600), which is cut to its newer half at 256 KiB. ``warnings`` has the last messages of
    level warning or above, shortened."""

    def __init__(self, node_dir: Path) -> None:
        super().__init__()
        self.warnings: deque[str] = deque(maxlen=_WARNINGS)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = os.open(node_dir / SMP_LOG_NAME, flags, 0o600)
        os.fchmod(self.fd, 0o600)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Append one message; on failure it is lost."""
        if record.levelno >= logging.WARNING:
            self.warnings.append(" ".join(self.format(record).split())[:_WARNING_CHARS])
        try:
            os.write(self.fd, self.format(record)[:_MESSAGE_CHARS].encode() + b"\n")
            self.trim()
        except (OSError, ValueError):
            pass  # a full tmpfs must not end the SMP

    def trim(self) -> None:
        """Limit the size of the file, including output of the interpreter such as a fatal traceback."""
        size = os.fstat(self.fd).st_size
        if size > _LOG_BYTES:
            tail = os.pread(self.fd, _LOG_BYTES // 2, size - _LOG_BYTES // 2)
            os.ftruncate(self.fd, 0)
            os.write(self.fd, tail[tail.find(b"\n") + 1 :])

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        super().close()


DATA_LIMIT_BYTES = 1 << 30
"""Limit of private writable memory (RLIMIT_DATA), without mapped arenas. The process itself needs about 40 MB."""
_PACKAGE_COPIES = 3
"""A received package, its unpacked parts, and one that is written meanwhile."""
_STACK_BYTES = 512 << 10


_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""Number of the system call, for which the C library has no wrapper."""
_IOPRIO_WHO_PROCESS, _IOPRIO_CLASS_IDLE, _IOPRIO_CLASS_SHIFT = 1, 3, 13

NICE = 10
"""For conversions, which nobody waits for: a tenth of the CPU time of a competing thread."""


def yield_cores() -> None:
    """Lower this process's CPU priority, as far as the system permits.

    With autogrouping niceness has no effect outside of the session, so the session's is set, too.
    """
    os.nice(NICE)
    if os.getsid(0) == os.getpid():  # otherwise the session's other processes slow down, too
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(NICE))


def yield_disks() -> None:
    """Give this thread and its future threads idle I/O priority, if the system permits."""
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_CLASS_IDLE << _IOPRIO_CLASS_SHIFT)


def bound_process() -> None:
    """Limit memory, raise the limit of descriptors, and never preempt a running thread on wake-up.

    The niceness stays the starter's: a higher one would starve beside busy cores. ``CoreShare`` throttles instead.
    """
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with suppress(AttributeError):  # another C library
        # Without this glibc raises its threshold with each freed large block, and caches the next ones.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
    threading.stack_size(_STACK_BYTES)  # the default of 8 MiB each counts in RLIMIT_DATA
    for limit, wanted in ((resource.RLIMIT_DATA, DATA_LIMIT_BYTES), (resource.RLIMIT_NOFILE, None)):
        _, hard = resource.getrlimit(limit)
        soft = hard if wanted is None else wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(limit, (soft, hard))


def allow_packages(most_bytes: int) -> None:
    """Raise the memory limit, as far as the system permits, for packages of ``most_bytes``. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = DATA_LIMIT_BYTES + _PACKAGE_COPIES * most_bytes
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def anon_bytes() -> int:
    """Private memory of this process, without files and arenas."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon:"))
