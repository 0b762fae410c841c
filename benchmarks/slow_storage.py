"""Slow storage: files that are not in the page cache, and a disk with a limited rate."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_V1, _V2 = Path("/sys/fs/cgroup/blkio"), Path("/sys/fs/cgroup")


def drop(folder: Path) -> int:
    """Removes the files below ``folder`` from the page cache; returns their bytes. Raises RuntimeError if some stay,
    as on a tmpfs."""
    nbytes = 0
    for path in _files(folder):
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # only what is clean can go
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        nbytes += path.stat().st_size
    if left := cached_bytes(folder):
        raise RuntimeError(f"{folder}: {left} of {nbytes} bytes stay in the page cache")
    return nbytes


def cached_bytes(folder: Path) -> int:
    """Bytes of the files below ``folder`` that are in the page cache, in complete pages."""
    mincore, page = ctypes.CDLL(None, use_errno=True).mincore, os.sysconf("SC_PAGE_SIZE")
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    pages = 0
    for path in _files(folder):
        mapped = np.memmap(path, mode="r")
        present = np.zeros(-(-mapped.nbytes // page), np.uint8)
        if mincore(mapped.ctypes.data, mapped.nbytes, present.ctypes.data):
            raise OSError(ctypes.get_errno(), "mincore", str(path))
        pages += int((present & 1).sum())
    return pages * page


def read_all(folder: Path) -> int:
    """Reads all files below ``folder``, one after the other; returns their bytes."""
    nbytes, buffer = 0, bytearray(4 << 20)
    for path in _files(folder):
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                nbytes += count
    return nbytes


class DiskLimit:
    """A cgroup whose processes together read, or write, at most ``bytes_per_sec`` at the disk of ``path``,
    through the page cache or not: read(), mmap and read-ahead; of writes those that these processes flush.

    Raises:
        OSError: this process may make none, or the kernel has no such limit.
    """

    def __init__(self, name: str, path: Path, bytes_per_sec: int, way: str = "read") -> None:
        root = _V1 if _V1.is_dir() else _V2
        self.folder = root / name
        self.folder.mkdir()
        try:
            if root == _V1:
                limit = self.folder / f"blkio.throttle.{way}_bps_device"
                limit.write_text(f"{_disk_of(path)} {bytes_per_sec}")
            else:
                (self.folder / "io.max").write_text(f"{_disk_of(path)} {way[0]}bps={bytes_per_sec}")
        except OSError:
            self.folder.rmdir()
            raise

    def close(self) -> None:
        """Remove it; no process may be in it."""
        self.folder.rmdir()


@contextlib.contextmanager
def limited(group: str) -> Iterator[None]:
    """This process and what it starts in the DiskLimit whose folder is ``group``; '' for none."""
    if not group:
        yield
        return
    before = _procs_of(Path(group).parent)
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        before.write_text(str(os.getpid()))


def _procs_of(root: Path) -> Path:
    """The ``cgroup.procs`` of this process in the hierarchy at ``root``."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, place = line.split(":", 2)
        if root.name in controllers.split(",") or (root == _V2 and number == "0"):
            return root / place.strip("/") / "cgroup.procs"
    return root / "cgroup.procs"


def _disk_of(path: Path) -> str:
    """major:minor of the disk that holds ``path``: limits are of whole disks."""
    device = path.stat().st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True)
    return ((place.parent if (place / "partition").exists() else place) / "dev").read_text().strip()


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size)
