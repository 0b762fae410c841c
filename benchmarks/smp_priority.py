"""How an SMP and threads that spin share cores: what it gets done, how late its signs of life are, what they lose.

    python benchmarks/smp_priority.py [--secs 6] [--per-core 2] [--json FILE]

Each core has as many processes that spin as ``--per-core`` says, as ranks do that wait for their network. Beside them
a process does what an SMP's loop does: work for 50 ms in chunks of 16 MiB, then a sign of life. It runs under several
priorities, in the session of those that spin (as within one cgroup, or container, only nice values count) and in one
of its own (where the kernel weighs sessions). ``ftckpt`` is what an SMP really sets, ``footprint.yield_to_training``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import environment, print_table, write_json

ROOT = Path(__file__).parents[1]
SPIN = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
print("up", flush=True)
count, x, end = 0, 1.0, time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    for _ in range(2000):
        x = x * 1.0000001
    count += 1
print(count, flush=True)
"""
WORK = """
import os, sys, time
import numpy as np, xxhash
from ftckpt.smp.footprint import yield_to_training
how, own, secs = sys.argv[1], sys.argv[2] == "own", float(sys.argv[3])
if own:
    os.setsid()
if how == "ftckpt":
    yield_to_training(own)
else:
    os.nice(int(how))
data = np.ones(16 << 20, np.uint8)
print("up", flush=True)
sys.stdin.readline()
done, longest, last, end = 0, 0.0, time.monotonic(), time.monotonic() + secs
while last < end:
    while time.monotonic() < last + 0.05:
        xxhash.xxh3_64_intdigest(data)
        done += len(data)
    now = time.monotonic()
    longest, last = max(longest, now - last), now
print(done / secs, longest, flush=True)
"""


class Row(NamedTuple):
    priority: str
    session: str
    hashed_bytes_per_sec: float
    longest_turn_secs: float
    spinners_share: float


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def spin(secs: float, per_core: int) -> list[subprocess.Popen[str]]:
    return [start(SPIN, core, secs) for core in sorted(os.sched_getaffinity(0)) for _ in range(per_core)]


def told(process: subprocess.Popen[str], message: str = "") -> list[float]:
    return [float(word) for word in process.communicate(message)[0].split()]


def measure(secs: float, per_core: int) -> list[Row]:
    alone = sum(told(process)[0] for process in spin(secs, per_core))
    rows = []
    for priority in ("19", "10", "0", "ftckpt"):
        for session in ("same", "own"):
            worker = start(WORK, priority, session, secs)
            spinning = spin(secs, per_core)
            done, longest = told(worker, "go\n")
            rows.append(Row(priority, session, done, longest, sum(told(p)[0] for p in spinning) / alone))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--secs", type=float, default=6.0)
    parser.add_argument("--per-core", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments.secs, arguments.per_core)
    print_table(
        ("priority", "session", "hashed GB/s", "longest turn s", "spinners"),
        [
            (priority, session, f"{hashed / 1e9:.2f}", f"{longest:.3f}", f"{share:.2f}")
            for priority, session, hashed, longest, share in rows
        ],
    )
    if arguments.json:
        content = {"environment": environment(sys.argv[1:], "benchmarks/smp_priority.py")}
        write_json(arguments.json, content | {"rows": [row._asdict() for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
