"""How a flush should write: ways of writing a large file, at what rate, and what they do to others at the disk.

    python benchmarks/disk_writes.py --disk /var/tmp --json FILE

Each way brings the same image in shared memory to the disk, hashed on its way as a flush does, in a process of its
own; as everybody, and in the I/O class ``idle``. Beside it a data loader reads files past the page cache and decodes
them, and somebody syncs a few bytes now and then. Ways take turns, in another order in each round.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import disk_ways, persist_beside
from benchmarks.common import environment, print_table, write_json
from benchmarks.slow_storage import cached_bytes

CLASSES = ("usual", "idle")
QUIET_SECS = 2.0
"""Before each turn: what others take with nobody at the disk but them."""


def file_system_of(path: Path) -> str:
    """Type, device and I/O scheduler of what holds ``path``."""
    words = ["findmnt", "-no", "FSTYPE,SOURCE", "-T", str(path)]
    found = subprocess.run(words, capture_output=True, text=True, check=True)
    number = f"{os.major(path.stat().st_dev)}:{os.minor(path.stat().st_dev)}"
    scheduler = Path(f"/sys/dev/block/{number}/queue/scheduler")
    return (
        f"{' '.join(found.stdout.split())}, scheduler {scheduler.read_text().strip() if scheduler.exists() else '?'}"
    )


def run_turn(way: str, kind: str, image: Path, disk: Path, beside: bool) -> dict[str, Any]:
    """One file written; raw times of those beside, before and while."""
    ways = [sys.executable, disk_ways.__file__]
    commands = {
        "loader": [sys.executable, persist_beside.__file__, "load", str(disk / "data")],
        "synced": [*ways, "sync", str(disk / "small")],
    }
    written, others = disk / "written", {}
    for name, command in commands.items() if beside else ():
        with (disk / name).open("w") as out:  # no pipe: nobody empties it meanwhile
            others[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out)
    if beside:
        time.sleep(QUIET_SECS)
    begin = time.time()
    told = subprocess.run([*ways, "write", way, kind, str(image), str(written)], capture_output=True, check=True)
    end = time.time()
    row: dict[str, Any] = {"way": way, "class": kind, "beside": beside}
    row["secs"], row["ahead_mib"] = map(float, told.stdout.split())
    for name, process in others.items():
        process.communicate()
        lines = [tuple(map(float, line.split())) for line in (disk / name).read_text().splitlines()]
        row[f"{name}_quiet"] = [secs for at, secs in lines if at < begin]
        # Its last seconds alone: the process takes some to start, and says when it is done.
        row[name] = [secs for at, secs in lines if end - row["secs"] <= at and at - secs < end]
    (disk / "left").mkdir(exist_ok=True)
    row["cached_mib"] = cached_bytes(written.rename(disk / "left" / "file").parent) / (1 << 20)
    shutil.rmtree(disk / "left")
    os.sync()
    return row


def summary_of(rows: list[dict[str, Any]], nbytes: int) -> list[dict[str, Any]]:
    """By way and class: medians over rounds, of others over all their times."""
    found = []
    for way, kind in dict.fromkeys((row["way"], row["class"]) for row in rows):
        mine = [row for row in rows if (row["way"], row["class"]) == (way, kind)]
        beside = [row for row in mine if row["beside"]]
        one: dict[str, Any] = {"way": way, "class": kind}
        for name, some in (("beside", beside), ("alone", [row for row in mine if not row["beside"]])):
            one[f"bytes_per_sec_{name}"] = nbytes / statistics.median(row["secs"] for row in some) if some else None
        for name in ("loader", "synced"):
            quiet = [secs for row in rows if row["beside"] for secs in row[f"{name}_quiet"]]
            times = sorted(secs for row in beside for secs in row[name])
            one[f"{name}_slower"] = statistics.median(times) / statistics.median(quiet)
            one[f"{name}_p95_secs"], one[f"{name}_most_secs"] = times[int(0.95 * len(times))], times[-1]
        one["ahead_mib"] = statistics.median(row["ahead_mib"] for row in mine)
        one["cached_mib"] = statistics.median(row["cached_mib"] for row in mine)
        found.append(one)
    return found


def show(summary: list[dict[str, Any]]) -> None:
    heads = (
        "way",
        "class",
        "GB/s beside",
        "alone",
        "loader",
        "p95 ms",
        "sync",
        "p95 ms",
        "most ms",
        "ahead",
        "cached",
    )
    print_table(heads, [
        (
            one["way"], one["class"], f"{one['bytes_per_sec_beside'] / 1e9:.2f}",
            f"{(one['bytes_per_sec_alone'] or 0) / 1e9:.2f}", f"{one['loader_slower'] - 1:+.0%}",
            f"{one['loader_p95_secs'] * 1e3:.0f}", f"x{one['synced_slower']:.1f}",
            f"{one['synced_p95_secs'] * 1e3:.0f}", f"{one['synced_most_secs'] * 1e3:.0f}",
            f"{one['ahead_mib']:.0f}", f"{one['cached_mib']:.0f}",
        )
        for one in summary
    ])  # fmt: skip


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a file system on a disk: no tmpfs")
    parser.add_argument("--mib", type=int, default=512, help="of the image (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--way", choices=list(disk_ways.WAYS), action="append", help="default: all")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    about = environment(argv, "benchmarks/disk_writes.py") | {"file_system": file_system_of(args.disk)}
    disk, image = Path(tempfile.mkdtemp(dir=args.disk)), Path(tempfile.mkdtemp(dir="/dev/shm")) / "image"
    rows: list[dict[str, Any]] = []
    try:
        image.write_bytes(os.urandom(args.mib << 20))
        persist_beside.make_files(disk / "data")
        turns = list(itertools.product(args.way or disk_ways.WAYS, CLASSES))
        for number in range(args.rounds):
            shift = number * len(turns) // args.rounds
            for way, kind in turns[shift:] + turns[:shift]:
                for beside in (True, False):
                    rows.append(run_turn(way, kind, image, disk, beside))
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(disk)
        shutil.rmtree(image.parent)
    summary = summary_of(rows, args.mib << 20)
    show(summary)
    if args.json:
        write_json(args.json, {
            "benchmark": "disk_writes", "environment": about, "mib": args.mib, "summary": summary, "rows": rows,
        })  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
