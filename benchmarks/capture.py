"""The spans of an iteration in which each --ftckpt-schedule copies a snapshot, compared to ftckpt off.

    python benchmarks/capture.py --json FILE

Pipelines whose compute and copies are timed waits: the shares of bytes by span are measured, the ratios follow from a
model of how copies slow concurrent compute. The exit code is 1 if a claim does not hold, with a line for each.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import ladder, ladder_report
from benchmarks.common import conclude, environment, parser_of

INTERFERENCE = 0.3
"""An assumption: a side stream alone cost 17 to 38 % in the measurements of REFT (arXiv 2310.12670)."""


def main(argv: Sequence[str]) -> int:
    """Runs all layouts; returns the exit code."""
    parser = parser_of(__doc__, arena=True)
    parser.add_argument("--layout", choices=sorted(ladder.LAYOUTS), help="default: all")
    parser.add_argument("--repeats", type=int, default=5, help="of each schedule")
    parser.add_argument(
        "--interference", type=float, default=INTERFERENCE, help="slowdown of compute by a copy, of 1"
    )
    args = parser.parse_args(argv)
    if args.repeats < 1 or not 0 <= args.interference <= 1:
        parser.error("--repeats: at least 1; --interference: 0 to 1")
    about = environment(argv, "benchmarks/capture.py")
    layouts = [ladder.LAYOUTS[args.layout]] if args.layout else list(ladder.LAYOUTS.values())
    if args.quick:
        layouts = [ladder.QUICK_LAYOUT]
    cases: list[dict[str, Any]] = []
    for layout in layouts:
        reports = ladder.run_layout(layout, args.repeats, args.interference, args.arena)
        cases += ladder_report.cases_of(layout, reports, args.interference)
        ladder_report.show(cases[-(len(ladder.RUNGS) - 1) :])
    result = {"benchmark": "capture", "environment": about, "cases": cases}
    return conclude(args.json, result, ladder_report.verdict(cases), args.quick)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
