"""Ways of writing a file, and what has to live beside it; for ``benchmarks/disk_writes.py``. Needs no torch.

python benchmarks/disk_ways.py write WAY CLASS IMAGE PATH  # the bytes of IMAGE; seconds, and MiB it was ahead at most
python benchmarks/disk_ways.py sync PATH                   # a line for each small write and fsync: when, seconds
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ftckpt.smp.footprint import yield_disks

PIECE_BYTES = 1 << 20
WINDOW_BYTES = 8 << 20
PAUSE_SECS = 0.05
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4

Hashed = Iterator[memoryview]


def hashed(image: memoryview) -> Hashed:
    """Pieces as the flush yields them: compared with the checksum of memory, and hashed for storage."""
    ours, theirs = xxhash.xxh3_64(), xxhash.xxh3_64()
    for at in range(0, len(image), PIECE_BYTES):
        piece = image[at : at + PIECE_BYTES]
        ours.update(piece)
        theirs.update(piece)
        yield piece


def write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def buffered(path: Path, pieces: Hashed) -> None:
    """Into the page cache, and one fsync."""
    descriptor = _open(path)
    for piece in pieces:
        write_all(descriptor, piece)
    os.fsync(descriptor)
    os.close(descriptor)


def advised(path: Path, pieces: Hashed) -> None:
    """Each window is begun to be written when it is full, let go when it has been; nobody waits before the end."""
    descriptor, position, begin = _open(path), 0, 0
    for piece in pieces:
        write_all(descriptor, piece)
        position += len(piece)
        if position - begin >= WINDOW_BYTES:
            os.posix_fadvise(descriptor, max(0, begin - WINDOW_BYTES), 0, os.POSIX_FADV_DONTNEED)
            begin = position
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def behind(path: Path, pieces: Hashed, drops: bool = True) -> None:
    """As above, and the window before must be on the disk before the next one is begun."""
    sync_file_range = ctypes.CDLL(None).sync_file_range
    sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    descriptor, position, begin = _open(path), 0, 0
    for piece in pieces:
        write_all(descriptor, piece)
        position += len(piece)
        if position - begin >= WINDOW_BYTES:
            sync_file_range(descriptor, begin, position - begin, _WRITE)
            if begin:
                last = begin - WINDOW_BYTES
                sync_file_range(descriptor, last, WINDOW_BYTES, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
                if drops:
                    os.posix_fadvise(descriptor, last, WINDOW_BYTES, os.POSIX_FADV_DONTNEED)
            begin = position
    os.fsync(descriptor)
    if drops:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def cached(path: Path, pieces: Hashed) -> None:
    """As above, but what has been written stays in the page cache."""
    behind(path, pieces, drops=False)


def direct(path: Path, pieces: Hashed) -> None:
    """Past the page cache, a window at a time, through a buffer that is aligned whatever the pieces are."""
    descriptor, buffer, filled = _open(path, os.O_DIRECT), mmap.mmap(-1, WINDOW_BYTES), 0
    view = memoryview(buffer)
    for piece in pieces:
        view[filled : filled + len(piece)] = piece
        filled += len(piece)
        if filled == WINDOW_BYTES:
            write_all(descriptor, view)
            filled = 0
    write_all(descriptor, view[:filled])
    os.fsync(descriptor)
    os.close(descriptor)


def direct_twice(path: Path, pieces: Hashed) -> None:
    """As above with two buffers, of which a second thread writes one while the other is filled."""
    descriptor, buffers = _open(path, os.O_DIRECT), [memoryview(mmap.mmap(-1, WINDOW_BYTES)) for _ in range(2)]
    writer: threading.Thread | None = None
    filled = number = 0
    for piece in pieces:
        buffers[number][filled : filled + len(piece)] = piece
        filled += len(piece)
        if filled == WINDOW_BYTES:
            if writer is not None:
                writer.join()
            writer = threading.Thread(target=write_all, args=(descriptor, buffers[number]))
            writer.start()
            number, filled = 1 - number, 0
    if writer is not None:
        writer.join()
    write_all(descriptor, buffers[number][:filled])
    os.fsync(descriptor)
    os.close(descriptor)


WAYS: dict[str, Callable[[Path, Hashed], None]] = {
    "buffered": buffered, "advised": advised, "behind": behind, "cached": cached, "direct": direct,
    "direct, two": direct_twice,
}  # fmt: skip


def _open(path: Path, more: int = 0) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | more, 0o600)


def write(way: str, kind: str, image: Path, path: Path) -> None:
    """Write, and tell how long it took and how many MiB waited to be written at most, in all the machine."""
    if kind == "idle":
        yield_disks()
    with image.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    before, most, done = dirty_bytes(), 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not done.wait(0.01):
            most = max(most, dirty_bytes() - before)

    watcher = threading.Thread(target=look)
    watcher.start()
    begin = time.perf_counter()
    WAYS[way](path, hashed(data))
    secs = time.perf_counter() - begin
    done.set()
    watcher.join()
    print(secs, most / (1 << 20), flush=True)


def dirty_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Dirty:", "Writeback:")))


def sync(path: Path) -> None:
    """What a script does that writes a line to its log, or a database: a few bytes, on the disk at once."""
    descriptor = _open(path)
    while not select.select([sys.stdin], [], [], PAUSE_SECS)[0]:
        begin = time.perf_counter()
        os.write(descriptor, bytes(4096))
        os.fsync(descriptor)
        print(time.time(), time.perf_counter() - begin, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "sync":
        sync(Path(sys.argv[2]))
    else:
        write(sys.argv[2], sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]))
