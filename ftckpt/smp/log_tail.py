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
        self._place = self._stat()
        self._last = ""  # the line of the last one

    def new_warnings(self) -> list[str]:
        """Since the last call, one line each, without their times."""
        before, self._place = self._place, self._stat()
        if self._place == before:
            return []
        goes_on = self._place[0] == before[0] and self._place[1] >= before[1]
        lines = self._read(before[1] if goes_on else 0).splitlines()
        if not goes_on and self._last in lines:  # its older half has gone, and the rest was moved
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

    def _read(self, begin: int) -> str:
        try:
            with open(self._path, "rb") as file:
                file.seek(begin)
                return file.read(_MOST_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""
