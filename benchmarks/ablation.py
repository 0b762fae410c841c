"""What each idea of the literature is worth: ftckpt with one of them switched off, beside ftckpt whole and off.

    python benchmarks/ablation.py --json FILE

Four ranks, two of them a node, train under Megatron-core (PP2 x DP2), FSDP2 and DeepSpeed (ZeRO-2). Whole ftckpt
takes a snapshot every other iteration, protects each, and flushes one in ten iterations. Rows take turns; FILE has
each block when it ends, and the same command resumes. Nothing else may run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import ablation_jobs
from benchmarks.ablation_jobs import SAVE_EVERY
from benchmarks.common import Blocks, environment, parser_of, print_tables, turns
from benchmarks.cost import HEADS, OFF, Plan, Row, Sizes, cells, figures_of, run_block

JOBS = ("megatron", "fsdp2", "deepspeed")
WHOLE: dict[str, Any] = {"interval": 2, "protect_interval": 1, "protect": "peer", "persist_interval": SAVE_EVERY}


def _without(system: str = "ftckpt, two nodes", **changed: Any) -> Row:
    settings = {name: value for name, value in {**WHOLE, **changed}.items() if value is not None}
    return Row(system, settings, is_stored=True)


ROWS = {
    OFF: Row("off", {}),
    "off again": Row("off", {}),
    "whole": _without(),
    "a checkpoint blocks training": _without("waiting saves"),
    "training waits at the boundary": _without(schedule="sync"),
    "copies outside bubbles": _without(schedule="stream"),
    "copies by a thread": _without(schedule="thread"),
    "slots allocated by each snapshot": _without("new slots"),
    "each iteration": _without(interval=1),
    "every tenth iteration": _without(interval=10),
    "interval auto": _without(interval="auto"),
    "not protected": _without(protect="none", protect_interval=None),
    "protected within the node": _without(protect="node"),
    "no storage": _without(persist_interval=None),
    "storage compressed": _without(persist_compress="zstd"),
}
_MODEL = ("--layers", "4", "--hidden", "384", "--seq", "32")
FULL = Sizes(0, _MODEL, 0.1, 40, 40)
QUICK = Sizes(0, ("--layers", "2", "--hidden", "64", "--seq", "32"), 0.01, 20, 20)


def more_of(blocks: Sequence[Mapping[str, Any]], job: str, row: str) -> dict[str, Any]:
    """The figures of a row: those of ``cost.py``, and received bytes per iteration beyond those without ftckpt."""
    found = figures_of(blocks, job, "idle", row)
    mine = [one for one in blocks if one["job"] == job and "error" not in one]
    received = {name: [one["network_bytes"] for one in mine if one["row"] == name] for name in (row, OFF)}
    if found:
        found["network_bytes_more"] = statistics.median(received[row]) - statistics.median(received[OFF])
    return found


def main(argv: Sequence[str]) -> int:
    """Measures, prints the tables and writes the file; returns the exit code."""
    parser = parser_of(__doc__, arena=True, disk="where checkpoints are written")
    parser.add_argument("--repeats", type=int, help="default: 5, 1 with --quick")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS, help="default: all")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="default: all")
    args = parser.parse_args(argv)
    sizes, repeats = (QUICK, 1) if args.quick else (FULL, 5)
    head = {"benchmark": "ablation", "environment": environment(argv, "benchmarks/ablation.py")}
    run = Blocks(args.json, {**head, "sizes": {**sizes._asdict(), "script": [*sizes.script]}})
    plans = [
        Plan(job, "idle", repeat, row)
        for repeat in range(args.repeats or repeats)
        for job in args.jobs
        for row in turns(args.rows, 5 * repeat)
    ]

    def measure(plan: Plan) -> dict[str, Any]:
        places = args.arena.absolute(), args.disk.absolute()
        return run_block(plan, ROWS[plan.row], sizes, places, ablation_jobs.measure)

    run.measure(plans, measure, lambda block: f"iteration {block['iteration_secs'] * 1e3:.1f} ms")
    tables = {job: {row: more_of(run.content["blocks"], job, row) for row in args.rows} for job in args.jobs}

    def line(found: Mapping[str, Any], table: Any) -> list[str]:
        return [*cells(found, table), f"{found['network_bytes_more'] / 1e6:+.1f}"]

    print_tables(tables, [*HEADS, "received MB"], line, {})
    return run.conclude(tables, {}, [], args.quick)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
