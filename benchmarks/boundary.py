"""What a snapshot takes of the training thread at its boundary and fence, and a restart, by part, whatever its bytes.

    python benchmarks/boundary.py --json FILE

Two ranks train models of many small tensors under Megatron-core, DeepSpeed and plain torch, with a snapshot in each
iteration, and time all calls of the checkpointer; then they restart from memory. The exit code is 1 where a goal is
missed, with a line for each.
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
MOST_MS = {300: 0.3, 3000: 1.0}
"""Of processor time, by pieces; the median of all snapshots that count."""
MOST_OUTLIER_MS = 3.0
MOST_RESTORE_MS = {300: 50.0, 3000: 200.0}
"""Of all that ``restore()`` takes, by pieces: states are of some MB."""


class Sizes(NamedTuple):
    """Pieces of the jobs; iterations that count; restarts."""

    pieces: Sequence[int]
    counted: int
    restarts: int


FULL = Sizes((30, 300, 3000), 24, 5)
QUICK = Sizes((30,), 12, 1)


@contextmanager
def settings_of(arena: Path, more: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Of a job that leaves nothing."""
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
    """A start of the ranks and some restarts; the row."""
    framework = FRAMEWORKS[case.framework]
    with settings_of(arena, framework.settings) as settings:
        options = {"stand_in": framework.stand_in, "timeout_secs": TIMEOUT_SECS}
        ranks = [
            one.value for one in run_ranks(boundary_jobs.measure, RANKS, case, settings, sizes.counted, **options)
        ]
        restarts = [
            [one.value for one in run_ranks(boundary_jobs.resume, RANKS, case, settings, **options)]
            for _ in range(sizes.restarts)
        ]
    cpu = [ms for rank in ranks for ms in rank["cpu_ms"][WARM_UP:]]
    names = sorted({name for rank in ranks for name in rank["parts_ms"]})
    return {
        "framework": case.framework, "asked": case.pieces, "pieces": max(rank["pieces"] for rank in ranks),
        "bytes": max(rank["bytes"] for rank in ranks), "snapshots": len(cpu),
        "cpu_ms_median": statistics.median(cpu), "cpu_ms_least": min(cpu), "cpu_ms_most": max(cpu),
        # Replicas and what is derived are proven with these.
        "proofs_ms": {str(n): max(rank["cpu_ms"][n - 1] for rank in ranks) for n in (1, 2, 4, 8)},
        "wall_ms_median": statistics.median(ms for rank in ranks for ms in rank["wall_ms"][WARM_UP:]),
        "places_ms_median": statistics.median(ms for rank in ranks for ms in rank["places_ms"][WARM_UP:]),
        "parts_ms": {name: statistics.median(rank["parts_ms"].get(name, 0.0) for rank in ranks) for name in names},
        "restore": restore_row(restarts),
    }  # fmt: skip


def restore_row(restarts: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Medians of restarts: all of it, and what the processor does of it, of the slowest rank; parts of all ranks."""
    ranks = [rank for restart in restarts for rank in restart]
    slowest = {name: [max(rank[name] for rank in restart) for restart in restarts] for name in ("wall_ms", "cpu_ms")}
    return {
        **{f"{name}_median": statistics.median(of) for name, of in slowest.items()},
        **{f"{name}_each": of for name, of in slowest.items()},
        "parts_ms": {name: statistics.median(rank["parts_ms"].get(name, 0.0) for rank in ranks)
                     for name in sorted({name for rank in ranks for name in rank["parts_ms"]})},
    }  # fmt: skip


def missed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each goal that does not hold."""
    lines = []
    for row in rows:
        name, most = f"{row['framework']}, {row['pieces']} pieces", MOST_MS.get(row["asked"])
        if most is not None and not row["cpu_ms_median"] <= most:
            lines.append(f"{name}: {row['cpu_ms_median']:.2f} ms a snapshot, more than {most}")
        worst = max(row["cpu_ms_most"], *row["proofs_ms"].values())
        if not worst <= MOST_OUTLIER_MS:
            lines.append(f"{name}: a snapshot of {worst:.1f} ms, more than {MOST_OUTLIER_MS:g}")
    for row in rows:
        most, ms = MOST_RESTORE_MS.get(row["asked"]), row["restore"]["wall_ms_median"]
        if most is not None and not ms <= most:
            lines.append(f"{row['framework']}, {row['pieces']} pieces: restored in {ms:.0f} ms, more than {most:.0f}")
    return lines


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what was measured."""
    heads = [
        "",
        "pieces",
        "cpu ms",
        "least",
        "most",
        "1st",
        "2nd",
        "4th",
        "8th",
        "places ms",
        "restore ms",
        "its cpu",
    ]
    names = ("cpu_ms_median", "cpu_ms_least", "cpu_ms_most")
    print_table(
        heads,
        [
            [
                row["framework"], str(row["pieces"]), *(f"{row[name]:.2f}" for name in names),
                *(f"{row['proofs_ms'][number]:.1f}" for number in "1248"), f"{row['places_ms_median']:.2f}",
                *(f"{row['restore'][name]:.0f}" for name in ("wall_ms_median", "cpu_ms_median")),
            ]
            for row in rows
        ],
    )  # fmt: skip
    for row in rows:
        for what, of, digits in (("", row["parts_ms"], 3), (", restore", row["restore"]["parts_ms"], 1)):
            parts = ", ".join(f"{name} {ms:.{digits}f}" for name, ms in sorted(of.items(), key=lambda part: -part[1]))
            print(f"{row['framework']}, {row['pieces']}{what}: {parts}")


def main(argv: Sequence[str]) -> int:
    """Returns 1 where a goal is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="a small size without goals")
    parser.add_argument("--only", action="append", choices=tuple(FRAMEWORKS), help="may be given several times")
    parser.add_argument("--arena", type=Path, default=Path("/dev/shm"), help="a tmpfs")
    args = parser.parse_args(argv)
    sizes, names = QUICK if args.quick else FULL, args.only or tuple(FRAMEWORKS)
    where = environment(argv, "benchmarks/boundary.py")
    cases = [Case(name, pieces) for name in FRAMEWORKS if name in names for pieces in sizes.pieces]
    rows = [run_case(case, sizes, args.arena) for case in cases]
    show(rows)
    return conclude(args.json, {"environment": where, "jobs": rows}, missed(rows), args.quick)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
