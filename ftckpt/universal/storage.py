"""Files of checkpoints: mapped for reading; an atomic destination, and the journal that lets a conversion resume."""

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
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from ftckpt.errors import ConvertError
from ftckpt.persist.files import sync_directory

PARTIAL = ".partial"
"""Suffix of a destination's name until it is complete."""
_LOCK_NAME = ".lock"
_NEW = ".new"
_JOURNAL = ".jsonl"
_JOURNAL_VERSION = 1
_STEP_BYTES = 64 << 20
"""Bytes that are hashed at a time."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


Part = TypeVar("Part", bound=Hashable)


class CheckedOnce(Generic[Part]):
    """Verifies each part of a source once. Any thread may call ``check``."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[Part, threading.Lock] = {}
        self._good: set[Part] = set()

    def check(self, part: Part, compare: Callable[[], object]) -> None:
        """Call ``compare``, which raises if ``part`` is corrupt, unless it succeeded before."""
        with self._guard:
            if part in self._good:
                return
            lock = self._locks.setdefault(part, threading.Lock())
        with lock:  # other threads that need the part wait for the result
            if part not in self._good:
                compare()
                with self._guard:
                    self._good.add(part)
                    self._locks.pop(part, None)


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """All bytes of a file, mapped read-only for as long as the array, or a view of it, exists.

    Raises:
        ConvertError: missing, not a regular file, or no permission.
    """
    with explained(path):
        if path.stat().st_size == 0:
            return np.empty(0, np.uint8)
        data: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, "r").view(np.ndarray)
        return data


def fingerprint_of(files: Iterable[Path]) -> str:
    """A hash of names, sizes and modification times of ``files``. Raises ConvertError if one is missing."""
    digest = xxhash.xxh3_128()
    for file in sorted(files):
        with explained(file):
            status = file.stat()
        # Not of the bytes: a checkpoint may have terabytes.
        digest.update(repr((file.name, status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()


class Destination:
    """The directory ``path`` while it is written: files go into ``partial``, which ``commit`` renames.

    Call ``begin``, ``file`` for each file, ``commit``, and ``release`` in any case; the constructor touches no file.
    After a kill ``partial`` remains: every file in it that has its final name is complete and durable.

    Raises:
        ConvertError: ``path`` has no name, such as the working directory.
    """

    def __init__(self, path: Path) -> None:
        if not path.name:
            raise ConvertError(f"{path}: exists; give a directory that does not")
        self.path = path
        self.partial = path.with_name(path.name + PARTIAL)
        self._lock = -1
        self._guard = threading.Lock()

    def begin(self, fresh: bool = False) -> None:
        """Create ``partial`` or resume an existing one, whose content ``fresh`` removes first; lock it.

        No other process can write there until ``commit`` or ``release``. Any thread may call this, repeatedly.

        Raises:
            ConvertError: the destination exists, another process writes it, or it cannot be created.
        """
        # Also a dangling link, which the rename would replace.
        if os.path.lexists(self.path):
            raise ConvertError(f"{self.path}: exists; remove it, or give another destination")
        with explained(self.partial):
            self.partial.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            for entry in list(self.partial.iterdir()) if fresh else []:
                if entry.name != _LOCK_NAME:
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        """Write the file ``name`` below ``partial``; it gets its name once it is complete and durable.

        An error leaves no part of it. A kill leaves a temporary file, which ``commit`` removes. Any thread may call
        this.

        Raises:
            ConvertError: no space, no permission, or an I/O error.
        """
        final = self.partial / name
        # With process and thread: two writers of one name never share a temporary file.
        fresh = final.with_name(f".{final.name}-{os.getpid()}-{threading.get_ident()}{_NEW}")
        with explained(final):
            final.parent.mkdir(parents=True, exist_ok=True)
            file = open(fresh, "wb")
            try:
                yield file
                # Bytes are durable before the rename: neither a kill nor a power loss leaves a torn file.
                file.flush()
                os.fsync(file.fileno())
                file.close()
                fresh.rename(final)
            except BaseException:  # also for KeyboardInterrupt
                with contextlib.suppress(OSError):  # flushing the buffer may fail again
                    file.close()
                fresh.unlink(missing_ok=True)
                raise

    def scratch(self, name: str) -> IO[bytes]:
        """A file without a name in the directory of the file ``name``. If a kill leaves it, ``commit`` removes it."""
        return TemporaryFile(dir=(self.partial / name).parent, prefix=".", suffix=_NEW)

    def commit(self) -> None:
        """Rename ``partial`` to ``path``, after all files are written, and release it.

        Raises:
            ConvertError: another process created ``path`` meanwhile, or an I/O error.
        """
        with explained(self.path):
            # The names of files are durable before the directory gets its own, which makes it a checkpoint.
            for directory, names in [(Path(at), files) for at, _, files in os.walk(self.partial)]:
                for name in names:
                    if name.startswith(".") and name.endswith(_NEW):
                        (directory / name).unlink()
                sync_directory(directory)
            # A rename would silently replace an empty directory.
            if os.path.lexists(self.path):
                raise ConvertError(
                    f"{self.path}: another process created it meanwhile; the files written are in {self.partial}"
                )
            # The lock is on the open file and outlives its name, which is no part of a checkpoint.
            (self.partial / _LOCK_NAME).unlink(missing_ok=True)
            self.partial.rename(self.path)
            # The new name is an entry of the directory above.
            sync_directory(self.path.parent)
        self.release()

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
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
            # The system releases it with the descriptor, however the process ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConvertError(f"{self.partial}: another process is writing it; wait for it, or stop it") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # without locks in the file system the user must avoid two writers
                os.close(lock)
                raise
        return lock


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns OSErrors of its body into ConvertErrors that name ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            text = "no room: free some, then start the same command again, which keeps finished files"
            raise ConvertError(f"{path}: {text} ({error.strerror})") from None
        where = f" ({error.filename})" if error.filename and str(error.filename) != str(path) else ""
        raise ConvertError(f"{path}: {error.strerror}{where}") from None


class Journal:
    """Records finished files of a conversion, so that the same command resumes it after a kill.

    A text file next to the partial directory: a line of JSON with the conversion's identity, then one for each
    finished file with its size and checksum. ``end`` removes it after the destination is committed. ``identity``:
    names and values that determine the output. Any thread may call ``add``.
    """

    def __init__(self, destination: Destination, identity: Mapping[str, str]) -> None:
        self._destination = destination
        self._identity = dict(identity)
        self._path = destination.partial.with_name(destination.partial.name + _JOURNAL)

    def already_done(self, names: Iterable[str]) -> bool:
        """Whether this conversion committed the destination, with all files ``names`` intact, and was killed before
        ``end``."""
        path, lines = self._destination.path, self._lines()
        # With a partial directory next to it, something else created the destination.
        if not path.is_dir() or self._destination.partial.exists() or lines[:1] != [self._head()]:
            return False
        return set(names) <= {line.get("file") for line in lines[1:] if _unchanged(path, line)}

    def begin(self) -> set[str]:
        """Start the journal, or return the finished, unchanged files of an existing one; after ``destination.begin``.

        Raises:
            ConvertError: the partial destination belongs to another conversion.
        """
        lines = self._lines()
        partial = self._destination.partial
        if not lines:
            others = [entry.name for entry in partial.iterdir() if not entry.name.startswith(".")]
            if others:
                raise ConvertError(f"{partial}: not of this conversion: it holds {others[0]}; remove it first")
            with explained(self._path):
                self._path.write_text(json.dumps(self._head()) + "\n")
            return set()
        begun = lines[0].get("identity", {})
        differing = sorted(
            name for name in begun.keys() | self._identity.keys() if begun.get(name) != self._identity.get(name)
        )
        if differing or lines[0] != self._head():
            raise ConvertError(
                f"{partial}: was started with another {', '.join(differing) or 'version of ftckpt'}; "
                f"use the same again, or remove it and {self._path.name} to start over"
            )
        return {line["file"] for line in lines[1:] if _unchanged(partial, line)}

    def add(self, name: str) -> None:
        """Record that the file ``name`` is finished."""
        nbytes, checksum = _measured(self._destination.partial / name)
        # After a line feed: the previous line may be torn by a kill or a full disk.
        line = "\n" + json.dumps({"file": name, "bytes": nbytes, "xxh3-64": checksum}) + "\n"
        with explained(self._path):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                # One call: lines of several workers never interleave.
                if os.write(descriptor, line.encode()) < len(line.encode()):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(descriptor)

    def end(self) -> None:
        """Remove the journal, after the destination was committed."""
        self._path.unlink(missing_ok=True)

    def _head(self) -> dict[str, Any]:
        return {"version": _JOURNAL_VERSION, "identity": self._identity}

    def _lines(self) -> list[dict[str, Any]]:
        """All valid lines; a kill may leave a torn one."""
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
    # The size first: it needs no read.
    if not path.is_file() or path.stat().st_size != line.get("bytes"):
        return False
    return _measured(path) == (line["bytes"], line.get("xxh3-64"))


def _measured(path: Path) -> tuple[int, str]:
    data = map_file(path)
    checksum = xxhash.xxh3_64()
    for begin in range(0, len(data), _STEP_BYTES):
        checksum.update(data[begin : begin + _STEP_BYTES].data)
    return len(data), checksum.hexdigest()
