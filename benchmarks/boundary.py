"""The processor time that a snapshot takes of the training thread, at its boundary and fence, and that of a restart.

    python benchmarks/boundary.py --json FILE

Two ranks train models of many small tensors under Megatron-core, DeepSpeed and plain torch, with a snapshot in each
iteration; then they restart from memory. The exit code is 1 if a goal is missed, with a line for each.
"""

from __future__ import annotations

import statistics
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import boundary_jobs
from benchmarks.boundary_jobs import FRAMEWORKS, WARM_UP, Case
from benchmarks.common import conclude, environment, parser_of, print_table, scratch
from ftckpt.memory.directory import clean_job
from tests.support.pool import run_ranks

RANKS = 2
TIMEOUT_SECS = 280.0
MAX_MS = {300: 0.3, 3000: 1.0}
"""Processor time by number of tensors; the median of all counted snapshots."""
MAX_OUTLIER_MS = 3.0
MAX_RESTORE_MS = {300: 50.0, 3000: 200.0}
"""Time of ``restore()`` by number of tensors; the state has some MB."""


class Sizes(NamedTuple):
    """Tensors of the jobs; counted iterations; restarts."""

    pieces: Sequence[int]
    counted: int
    restarts: int


FULL = Sizes((30, 300, 3000), 24, 5)
QUICK = Sizes((30,), 12, 1)


@contextmanager
def settings_of(arena: Path, more: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The settings of a job, of which nothing is left afterwards."""
    job = f"bench-{uuid.uuid4().hex[:8]}"
    with scratch(arena) as [folder]:
        (folder / "stored").mkdir()
        storage = {"persist": str(folder / "stored")} if more.get("persist") else {}
        settings = {"enabled": True, "job": job, "node": "node", "arena": str(folder), "protect": "none"}
        settings |= {"interval": 1, "objects_size": "1MiB", "replica_check_interval": 1000, "on_error": "raise"}
        try:
            yield {**settings, **more, **storage}
        finally:
            clean_job(folder, job)


def run_case(case: Case, sizes: Sizes, arena: Path) -> dict[str, Any]:
    """Starts the ranks once, and restarts them; the row."""
    framework = FRAMEWORKS[case.framework]
    with settings_of(arena, framework.settings) as settings:
        options: dict[str, Any] = {"stand_in": framework.stand_in, "timeout_secs": TIMEOUT_SECS}
        started = run_ranks(boundary_jobs.measure, RANKS, case, settings, sizes.counted, **options)
        ranks = [one.value for one in started]
        restarts = [
            [one.value for one in run_ranks(boundary_jobs.resume, RANKS, case, settings, **options)]
            for _ in range(sizes.restarts)
        ]
    cpu = [ms for rank in ranks for ms in rank["cpu_ms"][WARM_UP:]]
    slowest = {name: [max(rank[name] for rank in ranks) for ranks in restarts] for name in ("wall_ms", "cpu_ms")}
    return {
        "framework": case.framework,
        "asked": case.pieces,
        "pieces": max(rank["pieces"] for rank in ranks),
        "bytes": max(rank["bytes"] for rank in ranks),
        "snapshots": len(cpu),
        "cpu_ms_median": statistics.median(cpu),
        "cpu_ms_least": min(cpu),
        "cpu_ms_most": max(cpu),
        # At these snapshots replicas and derived tensors are verified.
        "proofs_ms": {str(n): max(rank["cpu_ms"][n - 1] for rank in ranks) for n in (1, 2, 4, 8)},
        "wall_ms_median": statistics.median(ms for rank in ranks for ms in rank["wall_ms"][WARM_UP:]),
        "restore": {
            **{f"{name}_median": statistics.median(times) for name, times in slowest.items()},
            **{f"{name}_each": times for name, times in slowest.items()},
        },
    }


def missed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line per missed goal."""
    lines = []
    for row in rows:
        name, limit = f"{row['framework']}, {row['pieces']} tensors", MAX_MS.get(row["asked"])
        if limit is not None and not row["cpu_ms_median"] <= limit:
            lines.append(f"{name}: {row['cpu_ms_median']:.2f} ms a snapshot, more than {limit}")
        worst = max(row["cpu_ms_most"], *row["proofs_ms"].values())
        if not worst <= MAX_OUTLIER_MS:
            lines.append(f"{name}: a snapshot of {worst:.1f} ms, more than {MAX_OUTLIER_MS:g}")
        limit, ms = MAX_RESTORE_MS.get(row["asked"]), row["restore"]["wall_ms_median"]
        if limit is not None and not ms <= limit:
            lines.append(f"{name}: restored in {ms:.0f} ms, more than {limit:.0f}")
    return lines


HEADS = ["", "tensors", "cpu ms", "least", "most", "1st", "2nd", "4th", "8th", "restore ms", "its cpu"]


def cells(row: Mapping[str, Any]) -> list[str]:
    """A line of the table."""
    spent = [f"{row[name]:.2f}" for name in ("cpu_ms_median", "cpu_ms_least", "cpu_ms_most")]
    proofs = [f"{row['proofs_ms'][number]:.1f}" for number in "1248"]
    restore = [f"{row['restore'][name]:.0f}" for name in ("wall_ms_median", "cpu_ms_median")]
    return [row["framework"], str(row["pieces"]), *spent, *proofs, *restore]


def main(argv: Sequence[str]) -> int:
    """Measures, prints the table and writes the file; returns the exit code."""
    parser = parser_of(__doc__, arena=True)
    parser.add_argument("--only", action="append", choices=tuple(FRAMEWORKS), help="may be given several times")
    args = parser.parse_args(argv)
    sizes, about = QUICK if args.quick else FULL, environment(argv, "benchmarks/boundary.py")
    cases = [Case(name, pieces) for name in args.only or FRAMEWORKS for pieces in sizes.pieces]
    rows = [run_case(case, sizes, args.arena) for case in cases]
    print_table(HEADS, [cells(row) for row in rows])
    return conclude(args.json, {"environment": about, "jobs": rows}, missed(rows), args.quick)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
