"""Files of checkpoints: mapped to be read; a destination that is whole or not there, and a journal of its files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from ftckpt.errors import ConvertError
from ftckpt.persist.files import sync_directory

PARTIAL = ".partial"
"""Behind the name of a destination that is being written, or whose writing was broken off."""
_LOCK_NAME = ".lock"
_NEW = ".new"
_JOURNAL = ".jsonl"
_JOURNAL_VERSION = 1
_STEP_BYTES = 64 << 20
"""Of a file whose checksum is taken, at a time."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


Part = TypeVar("Part", bound=Hashable)


class CheckedOnce(Generic[Part]):
    """Which parts of a source have been compared with their checksums. Any thread may ask."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[Part, threading.Lock] = {}
        self._good: set[Part] = set()

    def check(self, part: Part, compare: Callable[[], object]) -> None:
        """Call ``compare``, which raises where ``part`` is damaged, unless that was done before."""
        with self._guard:
            if part in self._good:
                return
            lock = self._locks.setdefault(part, threading.Lock())
        with lock:  # others that want the same part wait until it is known to be good
            if part not in self._good:
                compare()
                with self._guard:
                    self._good.add(part)
                    self._locks.pop(part, None)


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """All bytes of a file, mapped read-only; they stay as long as the array, or a view of it, does.

    Raises:
        ConvertError: missing, not a plain file, or not permitted.
    """
    with explained(path):
        if path.stat().st_size == 0:
            return np.empty(0, np.uint8)
        data: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, "r").view(np.ndarray)
        return data


def fingerprint_of(files: Iterable[Path]) -> str:
    """Of the names, sizes and times of change of ``files``. Raises ConvertError where one is not there."""
    digest = xxhash.xxh3_128()
    for file in sorted(files):
        with explained(file):
            status = file.stat()
        # Not the bytes: of a checkpoint of terabytes this must cost nothing. A file that is replaced has another
        # time.
        digest.update(repr((file.name, status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()


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
        # A link counts, also one that leads nowhere: the rename would replace it.
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
        # Named for process and thread, so that two that write the same name never share a half-written file.
        fresh = final.with_name(f".{final.name}-{os.getpid()}-{threading.get_ident()}{_NEW}")
        with explained(final):
            final.parent.mkdir(parents=True, exist_ok=True)
            file = open(fresh, "wb")
            try:
                yield file
                # Bytes are on the disk before the name is: a kill or a power cut never leaves a name on a torn file.
                file.flush()
                os.fsync(file.fileno())
                file.close()
                fresh.rename(final)
            except BaseException:  # an interrupt, too, must leave no part of a file
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
            # The names of files are on the disk before the directory gets its own, which makes them a checkpoint.
            for directory, names in [(Path(at), files) for at, _, files in os.walk(self.partial)]:
                for name in names:
                    if name.startswith(".") and name.endswith(_NEW):
                        (directory / name).unlink()
                sync_directory(directory)
            # A rename would replace an empty directory without a word.
            if os.path.lexists(self.path):
                raise ConvertError(
                    f"{self.path}: was made by somebody else meanwhile; what was written is {self.partial}"
                )
            # The lock is on the open file, and holds without its name, which is no part of a checkpoint.
            (self.partial / _LOCK_NAME).unlink(missing_ok=True)
            self.partial.rename(self.path)
            # The new name is an entry of the directory above.
            sync_directory(self.path.parent)
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
            # Goes with the descriptor, however the process ends: no lock outlives its writer.
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


class Journal:
    """What a conversion that was broken off has finished, so that the same command goes on with the rest.

    A text file beside the partial directory: one line of JSON that says what is converted into what, then one for
    each finished file with its size and checksum. It is gone when the destination has its name. ``identity`` is all
    that decides what is written, as texts by name.
    """

    def __init__(self, destination: Destination, identity: Mapping[str, str]) -> None:
        self._destination = destination
        self._identity = dict(identity)
        self._path = destination.partial.with_name(destination.partial.name + _JOURNAL)

    def already_done(self, names: Iterable[str]) -> bool:
        """Whether the destination is whole and this very conversion made it, but was killed before it said so.

        Then the partial one has become it, with all files ``names`` as they were finished.
        """
        path, lines = self._destination.path, self._lines()
        # Where the partial one is there too, something else made the destination.
        if not path.is_dir() or self._destination.partial.exists() or lines[:1] != [self._head()]:
            return False
        return set(names) <= {line.get("file") for line in lines[1:] if _unchanged(path, line)}

    def begin(self) -> set[str]:
        """The names of files that are finished and unchanged; the destination has begun, and a journal is there.

        Raises:
            ConvertError: the partial destination was begun for something else.
        """
        lines = self._lines()
        partial = self._destination.partial
        if not lines:
            others = [entry.name for entry in partial.iterdir() if not entry.name.startswith(".")]
            if others:
                raise ConvertError(f"{partial}: was begun by something else ({others[0]} is in it); remove it first")
            with explained(self._path):
                self._path.write_text(json.dumps(self._head()) + "\n")
            return set()
        begun = lines[0].get("identity", {})
        differing = sorted(
            name for name in begun.keys() | self._identity.keys() if begun.get(name) != self._identity.get(name)
        )
        if differing or lines[0] != self._head():
            raise ConvertError(
                f"{partial}: was begun with another {', '.join(differing) or 'version of ftckpt'}; "
                f"use the same again, or remove it and {self._path.name} to start afresh"
            )
        return {line["file"] for line in lines[1:] if _unchanged(partial, line)}

    def add(self, name: str) -> None:
        """The file ``name`` is finished."""
        # Of the file as it is on the disk, not of what was meant to be written: the next attempt compares with this.
        nbytes, checksum = _measured(self._destination.partial / name)
        # Behind a line feed: what a kill or a full disk left of the line before must not take this one along.
        line = "\n" + json.dumps({"file": name, "bytes": nbytes, "xxh3-64": checksum}) + "\n"
        with explained(self._path):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                # In one call: lines of several workers never mix.
                if os.write(descriptor, line.encode()) < len(line.encode()):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)

    def end(self) -> None:
        """The destination has its name: there is nothing left to go on with."""
        self._path.unlink(missing_ok=True)

    def _head(self) -> dict[str, Any]:
        return {"version": _JOURNAL_VERSION, "identity": self._identity}

    def _lines(self) -> list[dict[str, Any]]:
        """All whole lines; a kill can leave half of the last one."""
        lines: list[dict[str, Any]] = []
        try:
            text = self._path.read_text(errors="replace")
        except FileNotFoundError:
            return lines
        for line in text.split("\n")[:-1]:
            try:
                value = json.loads(line)
            except json.JSONDecodeError:
                continue
            lines += [value] if isinstance(value, dict) else []
        return lines


def _unchanged(directory: Path, line: Mapping[str, Any]) -> bool:
    path = directory / str(line.get("file"))
    # The size first: it costs no reading.
    if not path.is_file() or path.stat().st_size != line.get("bytes"):
        return False
    return _measured(path) == (line["bytes"], line.get("xxh3-64"))


def _measured(path: Path) -> tuple[int, str]:
    data = map_file(path)
    checksum = xxhash.xxh3_64()
    for begin in range(0, len(data), _STEP_BYTES):
        checksum.update(data[begin : begin + _STEP_BYTES].data)
    return len(data), checksum.hexdigest()
