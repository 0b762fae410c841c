"""Storage of checkpoints: named objects, each either complete and durable or absent.

Two implementations: files below a directory (a local disk, NFS, Lustre) and the objects of a store (S3, GCS, Azure,
and a process's own memory for tests) through obstore. ``tests/components/test_storage.py`` tests both alike.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from ftckpt.array_types import Buffer
from ftckpt.errors import StorageError

T = TypeVar("T")

PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,119}")
"""A part of a name: short enough for a temporary file's name, with host and process, within 255 bytes."""
_MOST_PARTS = 16


class ObjectEntry(NamedTuple):
    """An object in a listing: its name and size."""

    name: str
    nbytes: int


class Storage(ABC):
    """Objects below one place. Names are parts joined by slashes; a part starts with a letter or a digit, followed by
    letters, digits and ``. _ = -``. Any thread may call any method.

    All methods raise StorageError; its ``lasting`` is true if a retry is useless.
    """

    where: str
    """The place as the user wrote it."""

    def put(self, name: str, data: Buffer) -> None:
        """Writes a small object and replaces any of this name: readers find the old one or the new one."""
        self.write(name, [data])

    @abstractmethod
    def create(self, name: str, data: Buffer) -> bool:
        """Writes a small object unless one of this name exists; whether it was written.

        Of concurrent callers one gets True, on stores with conditional writes and file systems with hard links. On
        others, and on some that only claim to have them, several may, and the last one wins: callers must tolerate
        that.
        """

    @abstractmethod
    def write(self, name: str, chunks: Iterable[Buffer]) -> int:
        """Writes an object of any size; returns its size. Chunks are requested one by one and not retained. An error
        of ``chunks`` is raised, and then no object is written."""

    @abstractmethod
    def read(self, name: str, begin: int = 0, nbytes: int | None = None) -> bytes:
        """Reads ``nbytes`` from ``begin``, or all. Raises StorageError also if the object has fewer."""

    def read_into(self, name: str, begin: int, memories: Sequence[memoryview]) -> None:
        """Reads from byte ``begin`` into ``memories``, one after the other. Raises StorageError also if the object
        has fewer bytes."""
        data = memoryview(self.read(name, begin, sum(map(len, memories))))
        for memory in memories:
            memory[:], data = data[: len(memory)], data[len(memory) :]

    @abstractmethod
    def size(self, name: str) -> int | None:
        """The size of an object; None if it does not exist."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        """All objects below ``prefix``, the first parts of a name, in no order."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Removes objects; missing ones are no error."""

    def unfinished(self, is_active: Callable[[str], bool] = lambda name: False) -> Sequence[str]:
        """Partial writes of killed writers, which ``list`` omits, for ``discard``; none on object stores, where a
        lifecycle rule of the bucket removes parts of aborted uploads.

        Args:
            is_active: whether an object whose name starts like this may be being written: then it is omitted.
        """
        return []

    def discard(self, unfinished: Sequence[str]) -> None:
        """Removes what ``unfinished`` has returned."""
        self.remove(unfinished)

    def _check(self, name: str) -> str:
        parts = name.split("/")
        if len(parts) > _MOST_PARTS or not all(map(PART.fullmatch, parts)):
            raise StorageError(f"{self.where}: {name!r} is not a valid name of an object", lasting=True)
        return name


def content(storage: Storage, name: str) -> bytes | None:
    """The content of an object; None if it does not exist, or is removed meanwhile."""
    if storage.size(name) is None:
        return None
    try:
        return storage.read(name)
    except StorageError:
        if storage.size(name) is None:
            return None
        raise


def pauses(first_secs: float, max_secs: float) -> Iterator[float]:
    """Pauses between attempts: each twice the one before, up to ``max_secs``."""
    secs = first_secs
    while True:
        yield secs
        secs = min(2 * secs, max_secs)


def patiently(
    action: Callable[[], T],
    pause: Callable[[float], bool],
    report: Callable[[StorageError], None] = lambda error: None,
) -> T:
    """Calls ``action`` and retries errors that are not lasting.

    Args:
        pause: waits some seconds before the next attempt; false: the last error is raised. May raise, to cancel.
        report: called with each error that is retried.
    """
    pause_secs = pauses(0.5, 30.0)
    while True:
        try:
            return action()
        except StorageError as error:
            if error.lasting:
                raise
            report(error)
            if not pause(next(pause_secs)):
                raise


def pause_within(secs: float) -> Callable[[float], bool]:
    """A ``pause`` for ``patiently`` that gives up after ``secs`` from now."""
    deadline = time.monotonic() + secs

    def pause(pause_secs: float) -> bool:
        if time.monotonic() + pause_secs > deadline:
            return False
        time.sleep(pause_secs)
        return True

    return pause
