"""Lines on their way to a file: at once, or beside whoever has something to tell where the file system may hang."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from ftckpt.forks import off_in_children

log = logging.getLogger("ftckpt")

EVERY_SECS = 0.05
"""How often lines are fetched: to wake a thread for each takes training longer than to write one."""

_IDLE_SECS = 1.0
"""After which nothing is fetched until a line comes, which wakes the thread."""

MOST_BYTES = 16 << 20
"""Of lines that wait for a file system that hangs: more are left out."""

_CLOSE_SECS = 5.0
"""Which a file system has for what is left at the end."""


class LineFile(Protocol):
    """What a thread writes to; both may raise OSError."""

    def write(self, line: bytes, /) -> None: ...

    def close(self) -> None: ...


class _Line(NamedTuple):
    data: bytes
    written: Callable[[], None] | None


class DirectWriter:
    """Writes each line to ``file`` as it is put, from any thread: it is there whatever becomes of the process.

    ``failed``: called once, when the file cannot be written; no line is written after that.
    """

    def __init__(self, file: LineFile, failed: Callable[[OSError], None]) -> None:
        self._file, self._failed = file, failed
        self._lock = threading.Lock()
        self._is_closed = False

    def put(self, data: bytes, written: Callable[[], None] | None = None) -> None:
        """Write ``data``, and call ``written`` behind it."""
        with self._lock:
            if self._is_closed:  # by another thread, meanwhile
                return
            try:
                self._file.write(data)
            except OSError as problem:
                error = problem
            else:
                if written is not None:
                    written()
                return
        self._failed(error)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._file.close()


_open: weakref.WeakSet[BackgroundWriter] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """The lines are the parent's, and its thread may have held the lock at the fork."""
    for writer in _open:
        atexit.unregister(writer.close)


off_in_children(_leave_to_parent)


class BackgroundWriter:
    """Brings lines to ``file`` in the order in which they were put, on a thread of its own.

    A line is in the file a moment later: a process that is killed loses what it put in its last ``EVERY_SECS``, one
    that ends in another way nothing.

    Args:
        where: the file is, for people.
        failed: called once, on the thread, when the file cannot be written; no line is written after that.
        lost: the line to write when so many were left out.
    """

    def __init__(
        self, file: LineFile, where: Path, failed: Callable[[OSError], None], lost: Callable[[int], bytes]
    ) -> None:
        self._file, self._where, self._failed, self._lost_line = file, where, failed, lost
        self._lock = threading.Lock()  # never held while the file is written
        self._lines: list[_Line] = []
        self._num_waiting = self._bytes = 0  # of these, and of those that are being written
        self._lost = 0
        self._closing = self._idle = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ftckpt-events", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        _open.add(self)

    def put(self, data: bytes, written: Callable[[], None] | None = None) -> None:
        """Have ``data`` written, and ``written`` called on the thread behind it; from any thread. Never waits."""
        with self._lock:
            if self._closing:
                return
            if self._bytes + len(data) > MOST_BYTES:
                self._lost += 1
                return
            self._lines.append(_Line(data, written))
            self._num_waiting += 1
            self._bytes += len(data)
            idle, self._idle = self._idle, False
        if idle:
            self._wake.set()

    def close(self) -> None:
        """Write what is left, as far as the file system takes it now, and close the file."""
        with self._lock:
            self._closing = True
        self._wake.set()
        atexit.unregister(self.close)
        if threading.current_thread() is self._thread:  # which cannot write, and ends
            return
        self._thread.join(_CLOSE_SECS)
        if self._thread.is_alive():
            left = self._lost + self._num_waiting
            log.warning("ftckpt: %d events did not come to %s, which does not answer", left, self._where)

    def _run(self) -> None:
        quiet_secs = 0.0
        try:
            while True:
                with self._lock:
                    closing = self._closing
                quiet_secs = 0.0 if self._write_all() else quiet_secs + EVERY_SECS
                if closing:
                    return
                self._rest(quiet_secs >= _IDLE_SECS)
        except OSError as error:
            with self._lock:
                self._closing = True
            self._failed(error)
        finally:
            self._file.close()

    def _write_all(self) -> bool:
        """Whether there was anything."""
        with self._lock:
            lines, self._lines = self._lines, []
            lost, self._lost = self._lost, 0
        for line in lines:
            self._file.write(line.data)
            if line.written is not None:
                line.written()
        if lost:
            self._file.write(self._lost_line(lost))
        with self._lock:
            self._num_waiting -= len(lines)
            self._bytes -= sum(len(line.data) for line in lines)
        return bool(lines or lost)

    def _rest(self, idle: bool) -> None:
        with self._lock:
            self._idle = idle = idle and not self._lines and not self._closing
        self._wake.wait(None if idle else EVERY_SECS)
        self._wake.clear()  # whether to close is looked at behind this
