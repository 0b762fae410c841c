"""What an SMP writes into its log, for those who read it while it does."""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path

from ftckpt.store.directory import SMP_LOG_NAME, TOLD_NAME

_LOUD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?:WARNING|ERROR|CRITICAL) (?:ftckpt \S+: )?(.+)")
_MOST_BYTES = 256 << 10
"""As long as the log ever gets."""


class LogTail:
    """Warnings of the SMP of a node, each told once: those before the first trainer has come, those while none lived,
    and those that come from now on. A log that is not there, or goes, has none."""

    def __init__(self, node_dir: Path) -> None:
        self._path, self._mark = node_dir / SMP_LOG_NAME, node_dir / TOLD_NAME
        self._inode, self._end = 0, 0  # of the file, and of what was read of it
        try:
            self._last = os.readlink(self._mark)  # the digest of the line that was told last
        except OSError:
            self._last = ""

    def new_warnings(self) -> list[str]:
        """Since the last call, one line each, without their times."""
        inode, size = self._stat()
        goes_on = inode == self._inode and size >= self._end
        if goes_on and size == self._end:
            return []
        begin = self._end if goes_on else 0
        data = self._read(begin)
        data = data[: data.rfind(b"\n") + 1]  # what is being written is read when it is there
        self._inode, self._end = inode, begin + len(data)
        lines = data.decode("utf-8", "replace").splitlines()
        # Begun anew after an attempt, or as its older half goes and the rest is moved: then it is empty for a moment.
        digests = [_digest(line) for line in lines] if begin == 0 else []
        if self._last in digests:
            lines = lines[len(digests) - digests[::-1].index(self._last) :]
        loud = [(line, match[1]) for line in lines if (match := _LOUD.match(line))]
        if loud:
            self._last = _digest(loud[-1][0])
            self._keep_mark()
        return [warning for _, warning in loud]

    def _keep_mark(self) -> None:
        """In the name that a link leads to: a file's bytes would need a page, and the tmpfs may be full."""
        with suppress(OSError):
            self._mark.unlink(missing_ok=True)
            self._mark.symlink_to(self._last)

    def _stat(self) -> tuple[int, int]:
        """The inode of the file, and its length."""
        try:
            found = os.stat(self._path)
        except OSError:
            return 0, 0
        return found.st_ino, found.st_size

    def _read(self, begin: int) -> bytes:
        try:
            with open(self._path, "rb") as file:
                file.seek(begin)
                return file.read(_MOST_BYTES)
        except OSError:
            return b""


def _digest(line: str) -> str:
    return hashlib.blake2b(line.encode(), digest_size=16).hexdigest()
