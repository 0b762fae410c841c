"""When state is copied for a snapshot, and what that is worth: each --ftckpt-schedule against ftckpt off, in turn.

    python benchmarks/capture.py --json FILE

Pipelines whose compute and copies are timed waits: where in the schedule the bytes are copied, and what that is worth
in a model of how copies slow the compute beside them. The exit code is 1 where a claim does not hold, with a line for
each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "launch"))

from benchmarks import ladder, ladder_report
from benchmarks.common import conclude, environment, parser_of

INTERFERENCE = 0.3
"""An assumption: a side stream alone cost 17 to 38 % in the measurements of REFT (arXiv 2310.12670)."""


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Flags."""
    parser = parser_of(__doc__)
    parser.add_argument("--layout", choices=sorted(ladder.LAYOUTS), help="default: all")
    parser.add_argument("--repeats", type=int, default=5, help="of each schedule")
    parser.add_argument(
        "--interference", type=float, default=INTERFERENCE, help="slowdown of compute beside a copy, of 1"
    )
    parser.add_argument("--arena", type=Path, default=Path("/dev/shm"), help="a tmpfs for the arenas")
    parser.add_argument("--quick", action="store_true", help="one small layout, small models, loose bounds")
    args = parser.parse_args(argv)
    if args.repeats < 1 or not 0 <= args.interference <= 1:
        parser.error("--repeats: at least 1; --interference: 0 to 1")
    return args


def main(argv: Sequence[str]) -> int:
    """Run all layouts; returns the exit code."""
    args = parse_args(argv)
    about = environment(argv, "benchmarks/capture.py")
    layouts = [ladder.LAYOUTS[args.layout]] if args.layout else list(ladder.LAYOUTS.values())
    if args.quick:
        layouts = [ladder.QUICK_LAYOUT]
    print(
        "Megatron's schedules and messages, ftckpt's hooks and copies; compute is timed waits, copies have a given "
        f"rate.\nRatios are those of a model: compute beside a copy takes {1 + args.interference:.2f}x as long"
    )
    cases: list[dict[str, Any]] = []
    for layout in layouts:
        cases += ladder_report.cases_of(layout, ladder.run_layout(layout, args), args.interference)
        ladder_report.show(cases[-(len(ladder.RUNGS) - 1) :])
    bounds = ladder_report.QUICK_BOUNDS if args.quick else ladder_report.Bounds()
    result = {"benchmark": "capture", "environment": about, "cases": cases}
    return conclude(args.json, result, ladder_report.verdict(cases, bounds))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
