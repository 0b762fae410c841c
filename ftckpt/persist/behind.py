"""A file that is brought to the disk while it is written, so that little of it waits in memory.

Otherwise all of it waits until fsync: who syncs a few bytes meanwhile waits for gigabytes, and what data loaders read
goes from the page cache for what nobody reads. The writing thread itself starts the I/O, which so is of its I/O class
and its cgroup; what the kernel writes on its own, of pages that have waited too long, would be of neither. Direct I/O
is slower.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress

from ftckpt.persist.storage import Bytes

WINDOW_BYTES = 8 << 20
"""What is begun at a time; up to twice as much is on its way."""

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
"""Of sync_file_range(2)."""
_UNKNOWN = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ESPIPE)
"""From a system or file system that has no such call: all is left to fsync."""


class BehindWriter:
    """Writes to ``descriptor``, a new file, from its begin. Nothing is durable before ``finish``."""

    def __init__(self, descriptor: int) -> None:
        self.nbytes = 0
        self._descriptor = descriptor
        self._window = self._last = 0  # where the one that is being filled begins, and the one before it
        self._follows = True

    def write(self, data: Bytes) -> None:
        """Write all of it. Raises OSError, also for what was written before."""
        view = memoryview(data).cast("B")
        self.nbytes += len(view)
        while view:
            view = view[os.write(self._descriptor, view) :]
        if self._follows and self.nbytes - self._window >= WINDOW_BYTES:
            self._sync(self._window, self.nbytes, _WRITE)
            # Waited for when the disk has the next one to do.
            self._sync(self._last, self._window, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
            # No more than that: what cannot go yet, as on NFS, would be looked at again for each window.
            self._let_go(self._last, self._window)
            self._last, self._window = self._window, self.nbytes

    def finish(self) -> None:
        """Bring all to the disk. Raises OSError."""
        os.fsync(self._descriptor)
        if self._window:  # small ones may be read again soon
            self._let_go(0, self.nbytes)

    def _sync(self, begin: int, end: int, flags: int) -> None:
        if begin == end or not self._follows:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        args = (
            ctypes.c_int(self._descriptor),
            ctypes.c_int64(begin),
            ctypes.c_int64(end - begin),
            ctypes.c_uint(flags),
        )
        if libc.sync_file_range(*args):
            number = ctypes.get_errno()
            # An error of the disk is told once, here: fsync would know of none.
            if number not in _UNKNOWN:
                raise OSError(number, os.strerror(number))
            self._follows = False

    def _let_go(self, begin: int, end: int) -> None:
        if self._follows:
            with suppress(OSError):  # advice that is refused
                os.posix_fadvise(self._descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)
