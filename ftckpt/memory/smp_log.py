"""Warnings in the log of a node's SMP, for the processes that can show them to the user."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from ftckpt.memory.atomic_files import read_link, replace_link

SMP_LOG_NAME = "smp.log"
TOLD_NAME = ".told"
"""A dangling link whose target says how much of the SMP's log was searched for warnings."""
_LOUD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?:WARNING|ERROR|CRITICAL) (?:ftckpt \S+: )?(.+)")


class LogTail:
    """Reads the warnings in the log of a node's SMP, each once: also those from before the first trainer, or while
    none lived. A missing log has none."""

    def __init__(self, node_dir: Path) -> None:
        self._path, self._mark = node_dir / SMP_LOG_NAME, node_dir / TOLD_NAME
        self._seen = 0, 0  # inode and length of the file at the last read
        self._last = read_link(self._mark)  # the digest of the last reported line

    def new_warnings(self) -> list[str]:
        """Warnings since the last call, one line each, without their times."""
        try:
            found = os.stat(self._path)
            # A FIFO of that name would block the open.
            if (found.st_ino, found.st_size) == self._seen or not stat.S_ISREG(found.st_mode):
                return []
            data = self._path.read_bytes()  # at most 256 KiB, see ``BoundedLog``
            if _version(os.stat(self._path)) != _version(found):
                return []  # it was cut in place during the read: what was read may be of two states
        except OSError:
            return []
        self._seen = found.st_ino, found.st_size
        # An incomplete line is read next time.
        lines = data[: data.rfind(b"\n") + 1].decode("utf-8", "replace").splitlines()
        loud = [(_digest(line), match[1]) for line in lines if (match := _LOUD.match(line))]
        told = [place for place, (digest, _) in enumerate(loud, 1) if digest == self._last]
        loud = loud[told[-1] if told else 0 :]
        if loud:
            self._last = loud[-1][0]
            with suppress(OSError):
                replace_link(self._mark, self._last)
        return [warning for _, warning in loud]


def _version(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _digest(line: str) -> str:
    return hashlib.blake2b(line.encode(), digest_size=16).hexdigest()
