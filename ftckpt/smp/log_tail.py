"""What an SMP writes into its log, for those who read it while it does."""

from __future__ import annotations

import os
import re
from pathlib import Path

_LOUD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?:WARNING|ERROR|CRITICAL) (?:ftckpt \S+: )?(.+)")
_MOST_BYTES = 256 << 10
"""As long as the log ever gets."""


class LogTail:
    """Warnings that come into ``path`` from now on. A file that is not there, or goes, has none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._end = self._stat()  # of the file, and of what was read of it
        self._last = ""  # the line of the last one

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
        # Its older half goes, and the rest is moved: for a moment it is empty, and then long again.
        if begin == 0 and self._last in lines:
            lines = lines[len(lines) - lines[::-1].index(self._last) :]
        warnings = []
        for line in lines:
            if match := _LOUD.match(line):
                warnings.append(match[1])
                self._last = line
        return warnings

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
