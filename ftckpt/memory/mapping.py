"""Files mapped as shared memory, with every page allocated before the first store."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from ftckpt.errors import ArenaError, MemoryBudgetError
from ftckpt.memory.memory_limits import room_in

_libc, _address = ctypes.CDLL(None), ctypes.c_void_p
_libc.mmap.restype = _address
_libc.mmap.argtypes = [_address, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.madvise.argtypes = [_address, ctypes.c_size_t, ctypes.c_int]
# linux/mman.h; the huge page of x86-64, and of arm64 with pages of 4 KiB.
_MAP_FIXED, _MADV_COLLAPSE, _HUGE_BYTES = 0x10, 25, 2 << 20

FileId = tuple[int, int]
"""Device and inode, by which a file differs from one that replaces it."""

_ALWAYS_BYTES = 1 << 20
"""Files up to this size may use the reserve for other programs: no arena is usable without them."""
_RESERVE_STEP_BYTES = 256 << 20
"""Bytes per allocation step. A signal restarts one step, not the entire file; a cancellation waits for one step."""


class Mapping:
    """One mapped file. ``data`` is a view that is valid until ``close``; views of it may outlive it."""

    def __init__(self, fd: int, nbytes: int, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map: mmap.mmap | None = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=protection)
        status = os.fstat(fd)
        self.file_id: FileId = status.st_dev, status.st_ino
        self.data = memoryview(self._map)

    def close(self) -> None:
        """Unmap now, or as soon as the last remaining view is gone."""
        data, self.data = self.data, memoryview(b"")
        self.data.release()  # use after close raises ValueError
        mapped, self._map = self._map, None
        with suppress(BufferError):
            data.release()
            if mapped is not None:
                mapped.close()


def create_mapping(path: Path, nbytes: int, halted: Callable[[], bool] = bool, *, reserves: bool = True) -> Mapping:
    """Create ``path`` (0600, must not exist) with every page allocated. Without ``reserves`` none is: then the
    mapping may be stored to only where ``write_at`` has written.

    Raises:
        MemoryBudgetError: the file system is full.
        ArenaError: ``halted``, polled every 256 MiB, returned true.
    """
    # O_EXCL: a file that another process may have mapped is never overwritten.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # On a full tmpfs the allocation is an error, whereas a store to a missing page is a SIGBUS.
        if reserves:
            reserve(fd, path, 0, nbytes, halted)
        else:
            os.ftruncate(fd, nbytes)
        return Mapping(fd, nbytes, writable=True)
    finally:
        os.close(fd)


def write_at(fd: int, path: Path, begin: int, data: bytes | memoryview) -> None:
    """Write ``data`` at byte ``begin`` of the file ``fd``, opened from ``path``; holes are filled.

    Raises:
        MemoryBudgetError: the file system is full.
    """
    left = memoryview(data).cast("B")
    try:
        while left:
            written = os.pwrite(fd, left, begin)
            begin, left = begin + written, left[written:]
    except OSError as error:
        raise _explained(error, path, len(left)) from None


def open_mapping(path: Path, nbytes: int | None, writable: bool) -> Mapping:
    """Map an existing file of exactly ``nbytes``; None: any length but 0.

    Raises:
        ArenaError: missing, another length, not a plain file, or not permitted.
        MemoryBudgetError: the file has holes and the file system is too full to fill them.
    """
    try:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ArenaError(f"{path}: cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        if status.st_size == 0 or (nbytes is not None and status.st_size != nbytes):
            expected = "" if nbytes is None else f", expected {nbytes}"
            raise ArenaError(f"{path}: has {status.st_size} bytes{expected}")
        # A store to a hole allocates a page, or is a SIGBUS if the file system is full.
        if writable and status.st_blocks * 512 < status.st_size:
            reserve(fd, path, 0, status.st_size)
        return Mapping(fd, status.st_size, writable)
    except OSError as error:
        raise ArenaError(f"{path}: cannot be mapped: {error.strerror}") from None
    finally:
        os.close(fd)


def file_id(path: Path) -> FileId | None:
    """The id of the file at ``path``; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def reserve(fd: int, path: Path, begin: int, end: int, halted: Callable[[], bool] = bool) -> None:
    """Allocate the pages of bytes ``begin`` to ``end`` of the file ``fd``; raises as ``create_mapping``."""
    try:
        joins = True
        for at in range(begin, end, _RESERVE_STEP_BYTES):
            if halted():
                raise ArenaError(f"{path}: allocation cancelled")
            step_bytes = min(_RESERVE_STEP_BYTES, end - at)
            # A file with holes needs at most its missing pages.
            require_room(path, min(step_bytes, end - begin - os.fstat(fd).st_blocks * 512))
            os.posix_fallocate(fd, at, step_bytes)
            joins = joins and join_pages(fd, at, step_bytes)
    except OSError as error:
        raise _explained(error, path, end - begin) from None


def join_pages(fd: int, begin: int, nbytes: int) -> bool:
    """Collapse part of a tmpfs file into huge pages; returns whether the kernel did. Linux 6.1 and later can,
    whatever the mount options. Huge pages are read three times as fast, and one fault maps or pins 512 small ones."""
    nbytes -= nbytes % _HUGE_BYTES  # the kernel rounds lengths up on hugetlbfs
    if begin % _HUGE_BYTES or not nbytes:
        return False
    # Python's mmap cannot align to huge pages: map over an aligned part of ``room``. Closing it unmaps the file too.
    with suppress(OSError), closing(mmap.mmap(-1, nbytes + _HUGE_BYTES, mmap.MAP_PRIVATE)) as room:
        address = -(-ctypes.addressof(ctypes.c_char.from_buffer(room)) // _HUGE_BYTES) * _HUGE_BYTES
        mapped = _libc.mmap(address, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, begin)
        return bool(mapped == address and _libc.madvise(address, nbytes, _MADV_COLLAPSE) == 0)
    return False


def require_room(path: Path, nbytes: int) -> None:
    """Check that ``nbytes`` for a file at ``path`` leave the file system's reserve to other programs.

    Raises:
        MemoryBudgetError: they do not.
    """
    room_bytes = room_in(path.parent)
    if room_bytes is not None and nbytes > max(room_bytes, _ALWAYS_BYTES):
        raise _no_room(path, nbytes)


def _explained(error: OSError, path: Path, nbytes: int) -> Exception:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
        return error
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if error.errno == errno.EFBIG and limit != resource.RLIM_INFINITY:
        return MemoryBudgetError(
            f"{path}: {nbytes} bytes exceed ulimit -f, {limit} bytes; raise it (ulimit -f unlimited, LimitFSIZE of a "
            "service)"
        )
    return _no_room(path, nbytes)


def _no_room(path: Path, nbytes: int) -> MemoryBudgetError:
    return MemoryBudgetError(
        f"{path}: no room for {nbytes} bytes, only {room_in(path.parent) or 0} are available; enlarge the tmpfs "
        "(mount -o remount,size=…; --shm-size for a container) or name another with --ftckpt-arena"
    )
