"""When and which bytes are copied for a snapshot, in two parts; each prints tables.

ladder: each way to copy (--ftckpt-schedule sync, thread, stream, bubble) against ftckpt off, run by run in turn, on
    pipelines whose compute and copies are timed waits: where in the schedule the bytes are copied, and what that is
    worth in a model of how copies slow the compute beside them.
shares: bytes that each rank copies against its share of the state.

Exits with 1 where a claim does not hold, with a line for each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "launch"))

from benchmarks import ladder, ladder_report, shares
from benchmarks.common import conclude, environment, parser_of

PARTS = ("ladder", "shares")
INTERFERENCE = 0.3
"""An assumption: a side stream alone cost 17 to 38 % in the measurements of REFT (arXiv 2310.12670)."""


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Flags."""
    parser = parser_of(__doc__)
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all", help="default: %(default)s")
    parser.add_argument("--layout", choices=sorted(ladder.LAYOUTS), help="of the ladder; default: all")
    parser.add_argument("--repeats", type=int, default=5, help="of each rung of the ladder")
    parser.add_argument("--rounds", type=int, default=10, help="snapshots of the shares")
    parser.add_argument(
        "--interference", type=float, default=INTERFERENCE, help="slowdown of compute beside a copy, of 1"
    )
    parser.add_argument("--arena", type=Path, default=Path("/dev/shm"), help="a tmpfs for the arenas")
    parser.add_argument("--quick", action="store_true", help="one small layout, small models, loose bounds")
    args = parser.parse_args(argv)
    if min(args.repeats, args.rounds) < 1 or not 0 <= args.interference <= 1:
        parser.error("--repeats and --rounds: at least 1; --interference: 0 to 1")
    return args


def run_ladder(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Cases of all layouts, and which claims do not hold."""
    layouts = [ladder.LAYOUTS[args.layout]] if args.layout else list(ladder.LAYOUTS.values())
    if args.quick:
        layouts = [ladder.QUICK_LAYOUT]
    print(
        "ladder: Megatron's schedules and messages, ftckpt's hooks and copies; compute is timed waits, copies have a "
        f"given rate.\nRatios are those of a model: compute beside a copy takes {1 + args.interference:.2f}x as long"
    )
    cases = []
    for layout in layouts:
        cases += ladder_report.cases_of(layout, ladder.run_layout(layout, args), args.interference)
        ladder_report.show(cases[-(len(ladder.RUNGS) - 1) :])
    bounds = ladder_report.QUICK_BOUNDS if args.quick else ladder_report.Bounds()
    return cases, ladder_report.verdict(cases, bounds)


def run_shares(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Cases of both optimizers, and which claims do not hold."""
    cases = []
    for optimizer in shares.OPTIMIZERS:
        cases.append(shares.run_case(optimizer, args))
        shares.show(cases[-1])
    return cases, shares.verdict(cases)


def main(argv: Sequence[str]) -> int:
    """Run what was asked for; returns the exit code."""
    args = parse_args(argv)
    result: dict[str, Any] = {"benchmark": "capture", "environment": environment(argv, "benchmarks/capture.py")}
    problems = []
    for part, key, run in (("ladder", "cases", run_ladder), ("shares", "shares", run_shares)):
        if args.part in (part, "all"):
            result[key], failed = run(args)
            problems += failed
    return conclude(args.json, result, problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
