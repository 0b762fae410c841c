"""A file of lines that is begun anew before it grows too large: what was in it lies beside it, by another name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

OLDER = ".1"
"""What the name of the older half ends in."""

_LEAST_BYTES = 1 << 20
"""Of one half: a line of a long pipeline's timeline is not to drive out all others."""


class EventFile:
    """One process's file at ``path``, to which one thread appends lines.

    Args:
        heading: the first line of a file that was begun anew, by how many bytes of older lines that has cost.
        limit_bytes: of the file and the older half together, each at least 1 MiB; 0: none.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, heading: Callable[[int], bytes], limit_bytes: int) -> None:
        self._path = path
        self._heading = heading
        self._limit_bytes = max(limit_bytes // 2, _LEAST_BYTES) if limit_bytes else 0
        self._bytes = 0
        self._open()

    def write(self, line: bytes) -> None:
        """Append ``line``.

        Raises:
            OSError: it cannot be written.
        """
        if self._limit_bytes and self._bytes + len(line) > self._limit_bytes and self._is_in_place():
            self._begin_anew()
        self._append(line)

    def close(self) -> None:
        self._file.close()

    def _append(self, line: bytes) -> None:
        left = memoryview(line)
        while left:  # the end of a disk may be in the middle of a line
            written = self._file.write(left) or 0
            left, self._bytes = left[written:], self._bytes + written

    def _is_in_place(self) -> bool:
        """Whether the file is still the one that it was; else another process of this name, one that hangs, say, has
        begun it anew, and both go on in that."""
        try:
            if os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path)):
                return True
        except FileNotFoundError:
            pass
        self._file.close()
        self._open()
        return False

    def _open(self) -> None:
        # Unbuffered: a line is there as soon as it was written, whatever becomes of this process.
        self._file = open(self._path, "ab", buffering=0)
        self._bytes = os.fstat(self._file.fileno()).st_size
        if self._bytes and not self._ends_whole():
            self._append(b"\n")

    def _ends_whole(self) -> bool:
        """Whether no line was left half written, by a disk that was full."""
        with open(self._path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"

    def _begin_anew(self) -> None:
        older = self._path.with_name(self._path.name + OLDER)
        lost = older.stat().st_size if older.exists() else 0
        self._path.rename(older)
        self._file.close()
        self._open()
        self._append(self._heading(lost))


def with_older(path: Path) -> list[Path]:
    """The files that hold the lines of ``path``, the older first."""
    older = path.with_name(path.name + OLDER)
    return [older, path] if older.exists() else [path]
