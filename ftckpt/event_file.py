"""An event log file: size-limited by rotation, and written by a thread if the file system may hang."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from logging import LogRecord
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler, WatchedFileHandler
from pathlib import Path

from ftckpt.forks import off_in_children

log = logging.getLogger("ftckpt")

OLDER = ".1"
"""The suffix of the older half, from ``RotatingFileHandler``."""

MIN_BYTES = 1 << 20
"""Minimum size of one half, so that a line with a long pipeline's timeline does not evict all others."""

MAX_WAITING = 8192
"""Maximum number of lines queued for a file system that hangs; further lines are dropped."""

CLOSE_SECS = 5.0
"""Deadline for writing the remaining lines at the end."""


_Failed = Callable[[BaseException | None], None]


class EventFile(RotatingFileHandler, WatchedFileHandler):
    """Appends lines to ``path``; at half of ``limit_bytes`` the file becomes the older half. 0: no limit.

    Args:
        repeated: events whose last lines are repeated at the start of a new file, as context for later lines.
        failed: called once when the file cannot be written; no more lines are written then.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, limit_bytes: int, repeated: tuple[str, ...], failed: _Failed) -> None:
        half = max(limit_bytes // 2, MIN_BYTES) if limit_bytes else 0
        super().__init__(path, maxBytes=half, backupCount=1, encoding="utf-8")
        self._repeated = repeated
        self._failed = failed
        self._lines: dict[str, str] = {}
        self._statstream()

    def emit(self, record: LogRecord) -> None:
        # Another process of this name, such as one that hangs, may have rotated the file: both use the new one.
        try:
            self.reopenIfNeeded()
        except OSError:
            self.handleError(record)
            return
        super().emit(record)
        if record.name in self._repeated:
            self._lines[record.name] = f'{record.msg[:-1]}, "repeated": true}}'

    def doRollover(self) -> None:
        super().doRollover()
        self._statstream()
        if self.stream is not None:
            self.stream.writelines(f"{line}\n" for line in self._lines.values())

    def handleError(self, record: LogRecord) -> None:
        self.close()
        failed, self._failed = self._failed, lambda error: None
        failed(sys.exc_info()[1])

    def close(self) -> None:
        with suppress(OSError):  # for example a full disk
            super().close()

    def abandon(self) -> None:
        """Detaches the file, in which a thread hangs, so that nothing waits for it, not even at process exit."""
        self.stream, self.lock = None, threading.RLock()

    def release(self) -> None:
        with suppress(RuntimeError):  # the hanging thread returns and releases the replaced lock
            super().release()

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        # A full disk or a kill may have left an incomplete line.
        if os.fstat(stream.fileno()).st_size:
            with open(self.baseFilename, "rb") as file:
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    stream.write("\n")
        return stream


class BackgroundEventFile(QueueHandler):
    """Writes lines to ``file`` on its own thread, so that callers do not wait for the file system.

    A killed process loses the queued lines; a process that exits loses none, unless the file system hangs.
    """

    def __init__(self, file: EventFile) -> None:
        self._waiting: queue.Queue[LogRecord | None] = queue.Queue(MAX_WAITING)
        super().__init__(self._waiting)
        self._file = file
        self._listener = QueueListener(self._waiting, file)
        self._num_dropped, self._is_closed = 0, False
        self._listener.start()
        off_in_children(self._leave)

    def _leave(self) -> None:
        self._is_closed = True  # in a forked child: the parent writes the lines

    def enqueue(self, record: LogRecord) -> None:
        if self._num_dropped:
            record.msg = f'{record.msg[:-1]}, "dropped_lines": {self._num_dropped}}}'
        try:
            self._waiting.put_nowait(record)
            self._num_dropped = 0
        except queue.Full:
            self._num_dropped += 1

    def close(self) -> None:
        """Writes the remaining lines, within a deadline, and closes the file. Also called by Python at exit, when no
        thread can be started."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + CLOSE_SECS
        while self._waiting.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)
        left = self._waiting.unfinished_tasks
        if num := left + self._num_dropped:
            log.warning("ftckpt: %d events lost: file system of %s does not respond", num, self._file.baseFilename)
        if left:
            self._file.abandon()
        else:
            self._listener.stop()
            self._file.close()
        super().close()


def with_older(path: Path) -> list[Path]:
    """The files with the lines of ``path``, the older one first."""
    older = path.with_name(path.name + OLDER)
    return [older, path] if older.exists() else [path]
