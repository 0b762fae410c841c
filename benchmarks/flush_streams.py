"""How many files of a node should be written at once: 1, 2 or 4, to a disk and to an object store.

    python benchmarks/flush_streams.py --json FILE

Four images in shared memory go to storage by what a flush writes with, hashed twice on their way. The disk has a data
loader beside. The object store is a real one on this machine (Swift), behind a proxy that gives each connection
``--connection-mb`` MB/s, as stores across a network do; without Swift there are no such rows.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import disk_ways, persist_beside
from benchmarks.common import environment, print_table, write_json
from ftckpt.persist.files import FileStorage
from ftckpt.persist.objects import ObjectStorage
from ftckpt.persist.storage import Storage
from ftckpt.smp.footprint import yield_disks
from tests.support.s3_server import BUCKET
from tests.support.swift import swift

FILES = 4
AT_ONCE = (1, 2, 4)
QUIET_SECS = 2.0
_PIECE_BYTES = 64 << 10


@contextmanager
def limited(port: int, bytes_per_sec: float) -> Iterator[int]:
    """A port of a proxy to ``port``; what is sent through a connection goes at that rate at most."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, into: socket.socket, rate: float) -> None:
        due = time.monotonic()
        with suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                due = max(due, time.monotonic()) + len(data) / rate
                into.sendall(data)
                time.sleep(max(0.0, due - time.monotonic()))
            into.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", port))
                for args in ((near, far, bytes_per_sec), (far, near, float("inf"))):
                    threading.Thread(target=pump, args=args, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()


def write_files(storage: Storage, image: memoryview, at_once: int) -> float:
    """Four files; returns the seconds it took."""
    left = iter(range(FILES))

    def work() -> None:
        yield_disks()
        for number in left:
            storage.write(f"file{number}", disk_ways.hashed(image))

    threads = [threading.Thread(target=work) for _ in range(at_once)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def on_disk(disk: Path, image: memoryview, at_once: int) -> dict[str, Any]:
    """One turn: seconds, and those of a loader beside, before and meanwhile."""
    where = disk / "storage"
    where.mkdir()
    command = [sys.executable, persist_beside.__file__, "load", str(disk / "data")]
    with (disk / "loaded").open("w") as out:  # no pipe: nobody empties it meanwhile
        loader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out)
    time.sleep(QUIET_SECS)
    begin = time.time()
    secs = write_files(FileStorage(str(where)), image, at_once)
    end = time.time()
    loader.communicate()
    lines = [tuple(map(float, line.split())) for line in (disk / "loaded").read_text().splitlines()]
    shutil.rmtree(where)
    os.sync()
    return {
        "secs": secs, "quiet": [took for at, took in lines if at < begin],
        "loader": [took for at, took in lines if begin <= at and at - took < end],
    }  # fmt: skip


def summary_of(rows: list[dict[str, Any]], nbytes: int) -> list[dict[str, Any]]:
    """By storage and number at once: medians over rounds, of the loader over all its times."""
    found = []
    for where, at_once in dict.fromkeys((row["storage"], row["at_once"]) for row in rows):
        mine = [row for row in rows if (row["storage"], row["at_once"]) == (where, at_once)]
        one: dict[str, Any] = {"storage": where, "at_once": at_once}
        one["bytes_per_sec"] = FILES * nbytes / statistics.median(row["secs"] for row in mine)
        times = sorted(secs for row in mine for secs in row.get("loader", ()))
        quiet = [secs for row in rows for secs in row.get("quiet", ())]
        one["loader_slower"] = statistics.median(times) / statistics.median(quiet) if times else None
        one["loader_p95_secs"] = times[int(0.95 * len(times))] if times else None
        found.append(one)
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a file system on a disk: no tmpfs")
    parser.add_argument("--mib", type=int, default=256, help="of each file on the disk (default: %(default)s)")
    parser.add_argument("--connection-mb", type=float, default=10.0, help="MB/s (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    about = environment(argv, "benchmarks/flush_streams.py")
    disk, rows = Path(tempfile.mkdtemp(dir=args.disk)), list[dict[str, Any]]()
    image = memoryview(mmap.mmap(-1, args.mib << 20))  # shared: anonymous, and in the page cache as a tmpfs is
    for at in range(0, len(image), 1 << 20):
        image[at : at + (1 << 20)] = os.urandom(1 << 20)
    # Parts of an upload are 32 MiB.
    small, has_store = image[: max(1, args.mib // 4) << 20], bool(shutil.which("swift-proxy-server"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, disk)
        persist_beside.make_files(disk / "data")
        if has_store:
            server = stack.enter_context(swift(Path(tempfile.mkdtemp(dir=disk))))
            port = stack.enter_context(limited(int(server.url.rpartition(":")[2]), args.connection_mb * 1e6))
            options = server.options(endpoint=f"http://127.0.0.1:{port}")
        for number, shift in itertools.product(range(args.rounds), range(len(AT_ONCE))):
            at_once = AT_ONCE[(number + shift) % len(AT_ONCE)]
            rows.append({"storage": "disk", "at_once": at_once, **on_disk(disk, image, at_once)})
            if has_store:
                secs = write_files(ObjectStorage(f"s3://{BUCKET}/x", **options), small, at_once)
                rows.append({"storage": "object store", "at_once": at_once, "secs": secs})
            print(f"round {number + 1} of {args.rounds}: {at_once}", file=sys.stderr, flush=True)
    summary = summary_of([row for row in rows if row["storage"] == "disk"], len(image))
    summary += summary_of([row for row in rows if row["storage"] != "disk"], len(small))
    print_table(("storage", "at once", "GB/s", "loader", "p95 ms"), [
        (
            one["storage"], str(one["at_once"]), f"{one['bytes_per_sec'] / 1e9:.3f}",
            f"{one['loader_slower'] - 1:+.0%}" if one["loader_slower"] else "",
            f"{one['loader_p95_secs'] * 1e3:.0f}" if one["loader_slower"] else "",
        )
        for one in summary
    ])  # fmt: skip
    if args.json:
        write_json(args.json, {
            "benchmark": "flush_streams", "environment": about, "mib": args.mib, "connection_mb": args.connection_mb,
            "summary": summary, "rows": rows,
        })  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
