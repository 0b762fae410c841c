"""Storage in files below a directory: a local disk, NFS, Lustre."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ftckpt.array_types import Buffer
from ftckpt.errors import StorageError
from ftckpt.memory.destinations import fill
from ftckpt.persist.storage import PART, ObjectEntry, Storage

_FRESH = ".put.new"
"""Suffix of the temporary name of a file; conversions use another suffix."""
_UNFINISHED = re.compile(rf"\..+-\d+-\d+{re.escape(_FRESH)}")
"""A temporary name: a dot, the final name, host, process, thread and the suffix."""

_NAMES = """
    ENOENT EACCES EPERM ENOTDIR EISDIR EEXIST EINVAL ENAMETOOLONG ELOOP EXDEV ENOSYS EOPNOTSUPP EFBIG EBADMSG EUCLEAN
"""
_LASTING = (*(getattr(errno, name) for name in _NAMES.split()), None)  # None: raised by Python, without an errno
"""Errors for which a retry is useless: names, permissions, damage. All others may pass: a full, unreachable or
temporarily read-only file system, for which clients have various numbers."""

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of a file system without hard links."""

_TRIES = 100
"""Attempts to create a directory that another process removes."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _open(path: str, flags: int) -> int:
    """Opens without blocking on a FIFO, which any user may have created there."""
    return os.open(path, flags | os.O_NONBLOCK)


class FileStorage(Storage):
    """Objects as files below ``where``, a directory that exists.

    A file is written under a temporary name, synced and renamed.

    Raises:
        StorageError: ``where`` is missing, not a directory, or not writable.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self._root = Path(where).absolute()
        with self._explained(self._root):
            if not self._root.exists():
                # Not created: with the file system unmounted, that would fill the disk below the mount point.
                raise StorageError(
                    f"{where}: does not exist: a wrong path, or not created yet; create it with mkdir -p on storage "
                    "that all nodes share",
                    lasting=True,
                )
            status = self._root.stat()
        if not self._root.is_dir():
            raise StorageError(f"{where}: is not a directory; name one", lasting=True)
        if not os.access(self._root, os.W_OK | os.X_OK):
            if os.statvfs(self._root).f_flag & os.ST_RDONLY:
                text = "is on a read-only file system; mount it writable, or name another directory"
                raise StorageError(f"{where}: {text}", lasting=True)
            raise StorageError(f"{where}: is not writable for this user; change its owner or mode", lasting=True)
        self._identity = (status.st_dev, status.st_ino)

    def create(self, name: str, data: Buffer) -> bool:
        path = self._path(name)
        fresh, _ = self._write_fresh(path, [data])
        with self._explained(path):
            try:
                _name_once(fresh, path)
            except FileExistsError:
                return False
            finally:
                fresh.unlink(missing_ok=True)
            self._sync_names(path)
        return True

    def write(self, name: str, chunks: Iterable[Buffer]) -> int:
        path = self._path(name)
        fresh, nbytes = self._write_fresh(path, chunks)
        with self._explained(path):
            fresh.rename(path)
            self._sync_names(path)
        return nbytes

    def read(self, name: str, begin: int = 0, nbytes: int | None = None) -> bytes:
        path = self._path(name)
        with self._explained(path), open(path, "rb", opener=_open) as file:
            size = os.fstat(file.fileno()).st_size
            end = size if nbytes is None else begin + nbytes
            if 0 <= begin <= end <= size:
                file.seek(begin)
                return file.read(end - begin)
        raise StorageError(f"{path}: has {size} bytes, not {begin} to {end}", lasting=True)

    def read_into(self, name: str, begin: int, memories: Sequence[memoryview]) -> None:
        path, end = self._path(name), begin + sum(map(len, memories))
        with self._explained(path), open(path, "rb", buffering=0) as file:
            if (position := fill(file.fileno(), begin, memories)) < end:
                raise StorageError(f"{path}: has {position} bytes, not {begin} to {end}", lasting=True)

    def size(self, name: str) -> int | None:
        path = self._path(name)
        with self._explained(path):
            try:
                return path.stat().st_size
            except FileNotFoundError:
                return None

    def list(self, prefix: str = "") -> Iterator[ObjectEntry]:
        with self._explained(self._root / prefix):
            for path in self._files(prefix):
                # ftckpt writes no links: a link is another program's.
                if not path.name.startswith(".") and not path.is_symlink():
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        yield ObjectEntry(str(path.relative_to(self._root)), path.stat().st_size)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._unlink(self._path(name))

    def unfinished(self, is_active: Callable[[str], bool] = lambda name: False) -> Sequence[str]:
        with self._explained(self._root):
            hidden = [path for path in self._files("") if _UNFINISHED.fullmatch(path.name)]
        names = [path.relative_to(self._root) for path in hidden]
        return [str(name) for name in names if not is_active(str(name.with_name(name.name[1:])))]

    def discard(self, unfinished: Sequence[str]) -> None:
        for name in unfinished:
            self._unlink(self._root / name)

    def _unlink(self, path: Path) -> None:
        with self._explained(path):
            path.unlink(missing_ok=True)
            # Directories are not objects: empty ones are removed.
            for parent in path.relative_to(self._root).parents[:-1]:
                with contextlib.suppress(OSError):
                    (self._root / parent).rmdir()

    def _path(self, name: str) -> Path:
        path = self._root / self._check(name)
        with self._explained(self._root):
            self._require_root()
            # A link must not lead out of the root.
            if not path.parent.resolve().is_relative_to(self._root.resolve()) or path.is_symlink():
                raise StorageError(f"{path}: leads out of {self.where}; remove the link", lasting=True)
        return path

    def _require_root(self) -> None:
        # After an unmount, the directory below the mount point must be neither written nor read.
        status = self._root.stat()
        if (status.st_dev, status.st_ino) != self._identity:
            raise StorageError(f"{self.where}: is not the directory of the start: unmounted; mount it again")

    def _files(self, prefix: str) -> Iterator[Path]:
        """All files below ``prefix``, without private directories of other users. Raises OSError if any other
        directory cannot be read: its files must not count as absent."""
        self._require_root()
        top = self._root / self._check(prefix) if prefix else self._root

        def fail(error: OSError) -> None:
            is_private = isinstance(error, PermissionError) and error.filename != str(self._root)
            if not is_private and not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise error

        for directory, below, names in os.walk(top, onerror=fail):
            below[:] = filter(PART.fullmatch, below)
            yield from (Path(directory) / name for name in names)

    def _write_fresh(self, path: Path, chunks: Iterable[Buffer]) -> tuple[Path, int]:
        """Writes and syncs a file under a temporary name; the path and its size."""
        # With process and thread in the name: two writers of one object never share a temporary file.
        fresh = path.with_name(f".{path.name}-{os.uname().nodename}-{os.getpid()}-{threading.get_ident()}{_FRESH}")
        with self._explained(path):
            descriptor = _open_fresh(fresh)
        writer = BehindWriter(descriptor)
        try:
            for chunk in chunks:  # errors of ``chunks`` are not errors of storage
                with self._explained(path):
                    writer.write(chunk)
            with self._explained(path):
                writer.finish()
        except BaseException:  # an interrupt must not leave a partial file either
            fresh.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return fresh, writer.nbytes

    def _sync_names(self, path: Path) -> None:
        """Syncs the directories above ``path``: a power failure could lose the new names in them."""
        for parent in path.relative_to(self._root).parents:
            sync_directory(self._root / parent)

    @contextlib.contextmanager
    def _explained(self, path: Path) -> Iterator[None]:
        """Converts OSErrors to StorageErrors that name ``path`` and the remedy."""
        try:
            yield
        except OSError as error:
            lasting = error.errno in _LASTING
            text = "no room: free some" if error.errno in _FULL else error.strerror or error
            raise StorageError(f"{path}: {text}", lasting=lasting) from None


def _name_once(fresh: Path, path: Path) -> None:
    """Renames ``fresh`` to ``path``. Raises FileExistsError if ``path`` exists."""
    try:
        # link(2) is atomic, also on NFS: of concurrent callers one succeeds.
        os.link(fresh, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        fresh.rename(path)  # without links, of concurrent callers the last one wins


def _open_fresh(path: Path) -> int:
    for _ in range(_TRIES):
        # Retried: a process that removes the last file of the directory also removes the directory.
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            continue
        except FileExistsError:  # removed before ``mkdir`` checked its type, or not a directory
            if path.parent.exists() and not path.parent.is_dir():
                raise
    raise OSError(errno.EBUSY, "its directory is removed again and again", str(path))


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


WINDOW_BYTES = 8 << 20
"""Bytes per writeback request; up to twice as much is in flight."""

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
"""Flags of sync_file_range(2)."""
_UNKNOWN = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ESPIPE)
"""Errors of a system or file system without that call: then fsync does it all."""


class BehindWriter:
    """Writes a new file through ``descriptor`` and starts writeback while it is written. Nothing is durable before
    ``finish``.

    Without it, all data would stay dirty until fsync: other processes' fsync calls would wait for gigabytes, and the
    dirty pages would evict data loaders' files from the page cache. I/O started by the writing thread has its I/O
    class and cgroup, unlike the kernel's own writeback. Direct I/O is slower.
    """

    def __init__(self, descriptor: int) -> None:
        self.nbytes = 0
        self._descriptor = descriptor
        self._window = self._last = 0  # offsets of the window being filled and of the one before it
        self._follows = True

    def write(self, data: Buffer) -> None:
        """Writes all of ``data``. Raises OSError, also for earlier writes."""
        view = memoryview(data).cast("B")
        self.nbytes += len(view)
        while view:
            view = view[os.write(self._descriptor, view) :]
        if self._follows and self.nbytes - self._window >= WINDOW_BYTES:
            self._sync(self._window, self.nbytes, _WRITE)
            # Waits for the previous window while the disk writes this one.
            self._sync(self._last, self._window, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
            # Only that window: pages that stay dirty, as on NFS, would be scanned again for each window.
            self._let_go(self._last, self._window)
            self._last, self._window = self._window, self.nbytes

    def finish(self) -> None:
        """Makes all of it durable. Raises OSError."""
        os.fsync(self._descriptor)
        if self._window:  # small files may be read again soon and stay cached
            self._let_go(0, self.nbytes)

    def _sync(self, begin: int, end: int, flags: int) -> None:
        if begin == end or not self._follows:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        args = (
            ctypes.c_int(self._descriptor),
            ctypes.c_int64(begin),
            ctypes.c_int64(end - begin),
            ctypes.c_uint(flags),
        )
        if libc.sync_file_range(*args):
            number = ctypes.get_errno()
            # The kernel reports a disk error once: fsync would not report it again.
            if number not in _UNKNOWN:
                raise OSError(number, os.strerror(number))
            self._follows = False

    def _let_go(self, begin: int, end: int) -> None:
        if self._follows:
            with suppress(OSError):  # refused advice is harmless
                os.posix_fadvise(self._descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)
