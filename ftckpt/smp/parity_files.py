"""The parity files of a node, kept open: reading what a file is takes longer than asking what it holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ftckpt.errors import ArenaError, MemoryBudgetError, MismatchError
from ftckpt.protect.parity_file import ParityFile

FILES = 2
"""Parity files of an arena for each mode: one for the protected snapshot, one to write."""


class ParityFiles:
    """Open parity files by path, all writable: the SMP alone writes them. Whoever gets one does not close it."""

    def __init__(self) -> None:
        self._files: dict[Path, tuple[tuple[int, int], ParityFile]] = {}

    def get(self, path: Path) -> ParityFile | None:
        """The file, or None where there is none that can be used."""
        identity = _identity(path)
        known = self._files.get(path)
        if known is not None and known[0] == identity:
            return known[1]
        self.drop(path)
        if identity is None:
            return None
        try:
            file = ParityFile.open(path, writable=True)
        except (ArenaError, MismatchError, MemoryBudgetError):
            return None
        self._files[path] = (identity, file)
        return file

    def add(self, file: ParityFile) -> ParityFile:
        """Keep a file that was just made."""
        identity = _identity(file.path)
        if identity is not None:
            self.drop(file.path)
            self._files[file.path] = (identity, file)
        return file

    def drop(self, path: Path) -> None:
        """Close the file, before it is deleted or because it is gone."""
        known = self._files.pop(path, None)
        if known is not None:
            known[1].close()

    def keep(self, wanted: Callable[[Path], bool]) -> None:
        """Close those whose arena's directory is not ``wanted``."""
        for path in [path for path in self._files if not wanted(path.parent)]:
            self.drop(path)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
