"""What works beside the ranks of ``benchmarks/persist.py``: a data loader, and a plain write. Needs no torch.

    python benchmarks/persist_beside.py load FOLDER   # a line for each file: when it was decoded, seconds it took
    python benchmarks/persist_beside.py write NBYTES  # writes as many bytes to each path that it is told

The second says ``ready`` first; both end with their standard input.
"""

from __future__ import annotations

import os
import select
import sys
import time
import zlib
from pathlib import Path

FILES, FILE_BYTES = 32, 4 << 20
PAUSE_SECS = 0.02
PIECE_BYTES = 8 << 20


def make_files(folder: Path) -> None:
    """What the loader reads: bytes that compress by about a half, as text does."""
    folder.mkdir(parents=True)
    for number in range(FILES):
        noise = os.urandom(FILE_BYTES // 2)
        path = folder / f"{number:02d}"
        path.write_bytes(zlib.compress(noise + bytes(FILE_BYTES // 2), 1))
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # what is not on the disk cannot be dropped from memory
        os.close(descriptor)


def read_cold(path: Path) -> bytes:
    """From the disk: what the last turn has left in memory is dropped first."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.read()


def load(folder: Path) -> None:
    """Read and decode one file after another, with a pause after each, as a loader that keeps ahead of training."""
    paths = sorted(folder.iterdir())
    number = 0
    while not select.select([sys.stdin], [], [], PAUSE_SECS)[0]:
        begin = time.perf_counter()
        zlib.decompress(read_cold(paths[number % len(paths)]))
        print(time.time(), time.perf_counter() - begin, flush=True)
        number += 1


def write(nbytes: int) -> None:
    """For each path that is named: write, fsync, rename, and say how long it took and when it was done."""
    data = memoryview(os.urandom(PIECE_BYTES) * -(-nbytes // PIECE_BYTES))[:nbytes]
    print("ready", flush=True)
    for line in sys.stdin:
        path = Path(line.strip())
        begin = time.perf_counter()
        descriptor = os.open(path.with_suffix(".new"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for at in range(0, nbytes, PIECE_BYTES):
            piece = data[at : at + PIECE_BYTES]
            while piece:
                piece = piece[os.write(descriptor, piece) :]
        os.fsync(descriptor)
        os.close(descriptor)
        path.with_suffix(".new").rename(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)
        print(time.perf_counter() - begin, time.time(), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "load":
        load(Path(sys.argv[2]))
    else:
        write(int(sys.argv[2]))
