"""A destination that is whole or not there: built as ``NAME.partial`` beside it, renamed when all is in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ftckpt.errors import ConvertError

PARTIAL = ".partial"
"""Behind the name of a destination that is being written, or whose writing was broken off."""
_LOCK_NAME = ".lock"
_NEW = ".new"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class Destination:
    """The directory ``path`` while it is written: files go below ``partial``, ``commit`` gives it its name.

    A killed process leaves ``partial``, in which every file that has its own name is complete and on the disk.
    Constructing touches nothing.

    Raises:
        ConvertError: ``path`` has no name, as the working directory.
    """

    def __init__(self, path: Path) -> None:
        if not path.name:
            raise ConvertError(f"{path}: exists; name a directory that is to be made")
        self.path = path
        self.partial = path.with_name(path.name + PARTIAL)
        self._lock = -1
        self._guard = threading.Lock()

    def begin(self, fresh: bool = False) -> None:
        """Make ``partial``, or go on with the one that is there; ``fresh`` removes what is in it first.

        No other process can write there until ``commit`` or ``release``. Any thread may call this again.

        Raises:
            ConvertError: the destination exists, another process writes it, or it cannot be made.
        """
        if os.path.lexists(self.path):
            raise ConvertError(f"{self.path}: exists; remove it, or name another destination")
        with explained(self.partial):
            self.partial.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            for entry in list(self.partial.iterdir()) if fresh else []:
                if entry.name != _LOCK_NAME:
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        """Write the file ``name``, below ``partial``: it has its name when it is complete and on the disk.

        On any error nothing of it is left, but after a kill; ``commit`` removes what kills left.

        Raises:
            ConvertError: no room, no permission, or the disk fails.
        """
        final = self.partial / name
        fresh = final.with_name(f".{final.name}-{os.getpid()}-{threading.get_ident()}{_NEW}")
        with explained(final):
            final.parent.mkdir(parents=True, exist_ok=True)
            file = open(fresh, "wb")
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                file.close()
                fresh.rename(final)
            except BaseException:
                with contextlib.suppress(OSError):  # what is buffered has no room either
                    file.close()
                fresh.unlink(missing_ok=True)
                raise

    def commit(self) -> None:
        """Give the destination its name, once all its files are there.

        Raises:
            ConvertError: a destination of this name was made meanwhile, or the disk fails.
        """
        with explained(self.path):
            for directory, names in [(Path(at), files) for at, _, files in os.walk(self.partial)]:
                for name in names:
                    if name.startswith(".") and name.endswith(_NEW):
                        (directory / name).unlink()
                _sync_directory(directory)
            if os.path.lexists(self.path):
                raise ConvertError(
                    f"{self.path}: was made by somebody else meanwhile; what was written is {self.partial}"
                )
            (self.partial / _LOCK_NAME).unlink(missing_ok=True)
            self.partial.rename(self.path)
            _sync_directory(self.path.parent)
        self.release()

    def release(self) -> None:
        """Let others write there; a second call does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> None:
        with self._guard:
            if self._lock < 0:
                self._lock = self._new_lock()

    def _new_lock(self) -> int:
        lock = os.open(self.partial / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConvertError(f"{self.partial}: another process is writing it; wait for it, or end it") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # some file systems have none: then the user sees to it
                os.close(lock)
                raise
        return lock


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Errors of the system, of whatever is done inside, as ConvertErrors that name ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            text = "no room: free some, then start the same command again; what is finished stays"
            raise ConvertError(f"{path}: {text} ({error.strerror})") from None
        where = f" ({error.filename})" if error.filename and str(error.filename) != str(path) else ""
        raise ConvertError(f"{path}: {error.strerror}{where}") from None


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
