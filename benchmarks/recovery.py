"""The time from a kill to the first step after it, by part, launcher and source of the state.

    python benchmarks/recovery.py --json FILE

A job trains on two simulated nodes; one of its ranks is killed, then all of them, then a node with all its memory,
for which a standby waits. FILE has each block when it ends; the same command resumes. The exit code is 1 if a goal is
missed, with a line for each. Nothing else may run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import Blocks, Tables, environment, parser_of, print_tables, quartiles, scratch, turns
from benchmarks.recovery_run import FAULTS, JOBS, LAUNCHERS, PARTS, Run, StateSource
from ftckpt.errors import FtckptError
from tests.support.processes import RunError

MAX_SECS = {"rank": 2.0, "all": 2.0, "node": 4.0}
"""From the kill to the first step, for the job with Megatron's eight ranks."""
MIN_TIMES = 6.0
"""Times as fast as torchrun with checkpoints on disk."""
NUM_LARGEST = 3
"""Loading must not be among so many largest parts."""


class Row(NamedTuple):
    """A launcher, and whether the state is loaded from storage, or from ftckpt's memory."""

    launcher: str
    is_stored: bool = False


USUAL, OURS = "torchrun, DCP", "ftckpt run, memory"
ROWS = {
    USUAL: Row("torchrun", True),
    "torchrun, memory": Row("torchrun"),
    "ft_launcher, memory": Row("ft_launcher"),
    OURS: Row("ftckpt run"),
}


PAUSE_SECS = 0.1
"""Between two iterations, in which a device would compute."""


class Plan(NamedTuple):
    """A block to measure: one start of a job, and all its faults."""

    job: str
    repeat: int
    row: str

    def __str__(self) -> str:
        return f"{self.job}, repeat {self.repeat + 1}, {self.row}"


def rows_of(job: str, rows: Sequence[str]) -> list[str]:
    """The rows of a job: Megatron's has all, the others have ours and the usual one."""
    return [row for row in rows if job == "megatron" or row in (USUAL, OURS)]


def plans_of(jobs: Sequence[str], repeats: int, rows: Sequence[str]) -> list[Plan]:
    """All blocks, one of each row in turn; each repeat begins with another row."""
    return [
        Plan(job, repeat, row)
        for repeat in range(repeats)
        for job in jobs
        for row in turns(rows_of(job, rows), repeat)
    ]


def run_block(plan: Plan, faults: Sequence[str], disk: Path) -> dict[str, Any]:
    """The recoveries from all faults of one start, or the error."""
    row = ROWS[plan.row]
    try:
        with (
            scratch(disk) as [folder],
            Run(plan.job, row.launcher, StateSource(row.is_stored), PAUSE_SECS, folder) as run,
        ):
            return {"faults": run.measure(faults)}
    except (RunError, FtckptError, KeyError) as error:
        return {"error": f"{type(error).__name__}: {error}"[-4000:]}


def why_not(row: str) -> str:
    """The reason why a row cannot be measured here, or ""."""
    launcher = LAUNCHERS[ROWS[row].launcher]
    return "" if launcher.is_there else f"{launcher.package or launcher.needs} is not there"


def figures_of(blocks: Sequence[Mapping[str, Any]], job: str, fault: str, row: str) -> dict[str, Any]:
    """Medians over the repeats of a row."""
    found = [
        block["faults"][fault]
        for block in blocks
        if (block["job"], block["row"]) == (job, row) and fault in block.get("faults", {})
    ]
    if not found:
        return {}
    secs = quartiles([one["secs"] for one in found])
    return {
        "secs": secs.median,
        "quarter": secs.first,
        "three_quarters": secs.third,
        "parts": {part: statistics.median(one["parts"][part] for one in found) for part in PARTS},
        "lost": statistics.median(one["lost"] for one in found),
        "starts": max(one["starts"] for one in found),
    }


def missed(tables: Tables) -> list[str]:
    """A line per missed goal, with the largest parts; rows that did not run are not compared."""
    lines = []
    for place, table in tables.items():
        ours, usual = table.get(OURS), table.get(USUAL)
        if ours is None:
            continue
        if not ours:
            lines.append(f"{place}: {OURS}: not measured")
            continue
        job, _, fault = place.partition("/")
        largest = sorted(ours["parts"].items(), key=lambda part: -part[1])[:NUM_LARGEST]
        why = ", ".join(f"{part} {secs:.2f}" for part, secs in largest)
        if job == "megatron" and ours["secs"] > MAX_SECS[fault]:
            lines.append(f"{place}: back after {ours['secs']:.2f} s, more than {MAX_SECS[fault]:g}: {why}")
        if usual and (times := usual["secs"] / ours["secs"]) < MIN_TIMES:
            lines.append(f"{place}: {times:.1f} times as fast as {USUAL}, less than {MIN_TIMES:g}: {why}")
        if "load" in dict(largest):
            lines.append(f"{place}: load is one of the {NUM_LARGEST} largest parts: {why}")
    return lines


HEADS = ("back s", "quartiles", "times", *PARTS, "lost")


def cells(found: Mapping[str, Any], table: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line of the table."""
    usual = table.get(USUAL)
    times = f"{usual['secs'] / found['secs']:.1f}" if usual else ""
    quarters = f"{found['quarter']:.2f}..{found['three_quarters']:.2f}"
    parts = [f"{found['parts'][part]:.2f}" for part in PARTS]
    return [f"{found['secs']:.2f}", quarters, times, *parts, f"{found['lost']:g}"]


def main(argv: Sequence[str]) -> int:
    """Measures, prints the tables and writes the file; returns the exit code."""
    parser = parser_of(__doc__, disk="where checkpoints are saved")
    parser.add_argument("--repeats", type=int, help="default: 5, 1 with --quick")
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), help="default: all, megatron with --quick")
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), help="default: all, rank with --quick")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="default: all")
    args = parser.parse_args(argv)
    jobs = args.jobs or (["megatron"] if args.quick else list(JOBS))
    faults = args.faults or (["rank"] if args.quick else list(FAULTS))
    reasons = {row: reason for row in args.rows if (reason := why_not(row))}
    about = environment(argv, "benchmarks/recovery.py", [one.package for one in LAUNCHERS.values() if one.package])
    sizes = {"faults": faults, "pause_secs": PAUSE_SECS}
    run = Blocks(args.json, {"benchmark": "recovery", "environment": about, "sizes": sizes})
    repeats = args.repeats or (1 if args.quick else 5)
    run.measure(
        plans_of(jobs, repeats, [row for row in args.rows if row not in reasons]),
        lambda plan: run_block(plan, faults, args.disk.absolute()),
        lambda block: ", ".join(f"{fault} {one['secs']:.1f} s" for fault, one in block["faults"].items()),
    )
    tables = {
        f"{job}/{fault}": {row: figures_of(run.content["blocks"], job, fault, row) for row in rows_of(job, args.rows)}
        for job in jobs
        for fault in faults
    }
    print_tables(tables, HEADS, cells, reasons)
    return run.conclude(tables, reasons, missed(tables), args.quick)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
