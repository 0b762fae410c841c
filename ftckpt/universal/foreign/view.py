"""Bytes in memory, or mapped from a file, as a file to read."""

from __future__ import annotations

import io
from typing import Any


class View(io.RawIOBase):
    """A file to read of bytes that are not copied as a whole."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._at = 0

    def readable(self) -> bool:
        """See RawIOBase."""
        return True

    def seekable(self) -> bool:
        """See RawIOBase."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See RawIOBase."""
        self._at = max(0, offset + (0, self._at, len(self._data))[whence])
        return self._at

    def tell(self) -> int:
        """See RawIOBase."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """See RawIOBase."""
        there = self._data[self._at : self._at + len(buffer)]
        buffer[: len(there)] = there
        self._at += len(there)
        return len(there)
