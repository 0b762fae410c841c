"""The time of ``ftckpt plan`` for jobs of up to 100,352 ranks, each in a process of its own.

    python benchmarks/plan_job.py --json FILE

CPU seconds count, with the start of Python and imports. The exit code is 1 if a job takes 10 s of a core or more.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import ROOT, conclude, environment, parser_of, print_table

JOBS = {
    "distributed optimizer, 4,096 ranks": "--tp 8 --pp 8 --dp 64 --params 400e9",
    "distributed optimizer": "--tp 8 --pp 16 --dp 784 --params 1e12",
    "distributed optimizer, experts, racks": "--tp 4 --pp 16 --dp 1568 --ep 32 --etp 1 --params 2e12 "
    "--expert-params 18e11 --racks 98",
    "replicated optimizer": "--tp 8 --pp 16 --dp 784 --optimizer replicated --params 1e12",
    "ZeRO 3": "--dp 100352 --zero 3 --params 1e12",
    "FSDP2": "--dp 100352 --fsdp --params 1e12",
    "verdict": "--tp 8 --pp 16 --dp 784 --params 1e12 --node-memory 64GiB",
}
LIMIT_SECS = 10.0


def run_job(arguments: str) -> dict[str, Any]:
    """Seconds and MiB of one plan."""
    words = [sys.executable, "-m", "ftckpt.cli.main", "plan", "--gpus-per-node", "8", *arguments.split()]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"ftckpt plan {arguments}: {done.stderr}")
    return {
        "arguments": arguments,
        "told": next(line for line in done.stdout.splitlines() if " ranks on " in line),
        "cpu_secs": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "wall_secs": time.perf_counter() - began,
        "peak_mib": after.ru_maxrss / 1024,  # of the largest so far
    }


def main(argv: Sequence[str]) -> int:
    """Runs all jobs; returns the exit code."""
    args, about = parser_of(__doc__).parse_args(argv), environment(argv, "benchmarks/plan_job.py")
    cases = [{"job": name, **run_job(arguments)} for name, arguments in JOBS.items()]
    rows = [[c["job"], c["told"], f"{c['cpu_secs']:.1f}", f"{c['wall_secs']:.1f}"] for c in cases]
    print_table(["job", "", "CPU s", "wall s"], rows)
    slow = [f"{case['job']}: {LIMIT_SECS:g} s of a core or more" for case in cases if case["cpu_secs"] >= LIMIT_SECS]
    result = {"benchmark": "plan_job", "environment": about, "cases": cases}
    return conclude(args.json, result, slow, args.quick)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
