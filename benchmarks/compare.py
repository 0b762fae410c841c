"""Whether one revision is slower than another: their own benchmarks take turns on one machine.

    python benchmarks/compare.py OLD NEW --json FILE [--rounds 5]

OLD and NEW are checkouts. Each round runs every benchmark of ``BENCHMARKS`` once in each of them, in another order
than the round before, so that what else the machine does falls on both. Compared are medians over the rounds; noise
is the range of the same revision over its rounds. The exit code is 1 where a figure of NEW is worse by more than
both 5 % and the noise: even its best round is worse than OLD's worst.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import environment, print_table, write_json

LEAST_CHANGE = 0.05
TIMEOUT_SECS = 900


class Benchmark(NamedTuple):
    """A script with its flags; of its result the figures whose path matches ``figures``."""

    argv: tuple[str, ...]
    figures: str
    more_is_better: bool = False


BENCHMARKS = {
    "capture": Benchmark(
        ("benchmarks/capture.py", "--layout", "tp2 pp2 dp2", "--repeats", "1", "--rounds", "5"),
        r"/cases/\d+/(ratio_median|boundary_share)$|/shares/\d+/(blocked_ms_median|blocked_over_\w+)$",
    ),
    "parity": Benchmark(
        ("benchmarks/parity.py", "--repeats", "5"), r"/rates/.*/median$", more_is_better=True
    ),
    "reshape": Benchmark(("benchmarks/reshape.py", "--repeats", "1", "--alone"), r"/medians_secs/.*/ftckpt.*/total$"),
}  # fmt: skip


def figures(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a result, with the path to it."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from figures(inner, f"{path}/{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from figures(inner, f"{path}/{index}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def run(checkout: Path, benchmark: Benchmark) -> dict[str, float]:
    """The figures of one run in one checkout.

    Raises:
        RuntimeError: the benchmark wrote no result.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        # A claim of the benchmark may not hold with so few repeats: the code is not looked at, the result is.
        ended = subprocess.run(
            [sys.executable, *benchmark.argv, "--json", str(output)], cwd=checkout, timeout=TIMEOUT_SECS, check=False,
            env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}, text=True, capture_output=True,
        )  # fmt: skip
        if not output.exists():
            raise RuntimeError(f"{benchmark.argv[0]} of {checkout} wrote no result:\n{ended.stderr[-2000:]}")
        found = figures(json.loads(output.read_text()))
    return {path: value for path, value in found if re.search(benchmark.figures, path)}


def compare(old: Sequence[float], new: Sequence[float], more_is_better: bool) -> dict[str, Any]:
    """Both revisions' rounds of one figure; ``change`` is that of the median, positive where NEW is worse."""
    medians = statistics.median(old), statistics.median(new)
    sign = -1 if more_is_better else 1
    change = sign * (medians[1] / medians[0] - 1) if medians[0] else 0.0
    apart = min(new) > max(old) if sign > 0 else max(new) < min(old)
    return {
        "old": list(old), "new": list(new), "old_median": medians[0], "new_median": medians[1], "change": change,
        "worse": apart and change > LEAST_CHANGE,
    }  # fmt: skip


def run_rounds(checkouts: Mapping[str, Path], names: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Every figure's comparison, after each round."""
    rows: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for name in names:
            for which in sorted(checkouts, reverse=number % 2 == 0):
                print(f"round {number + 1} of {rounds}: {name}, {which}", flush=True)
                for path, value in run(checkouts[which], BENCHMARKS[name]).items():
                    rows.setdefault(name + path, {"old": [], "new": []})[which].append(value)
        yield {
            path: compare(each["old"], each["new"], BENCHMARKS[path.split("/")[0]].more_is_better)
            for path, each in rows.items()
            if each["old"] and each["new"]
        }


def show(compared: Mapping[str, Mapping[str, Any]]) -> None:
    """The figures, those first that became worse."""
    rows = sorted(compared.items(), key=lambda item: -item[1]["change"])
    print_table(
        ["figure", "old", "new", "worse by", ""],
        [
            [
                path,
                f"{row['old_median']:.4g}",
                f"{row['new_median']:.4g}",
                f"{row['change']:+.1%}",
                "WORSE" * row["worse"],
            ]
            for path, row in rows
        ],
    )


def main(argv: Sequence[str]) -> int:
    """Run what was asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path, help="another")
    parser.add_argument("--json", type=Path, required=True, help="where the result goes; written after each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=BENCHMARKS, action="append", help="default: all")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    checkouts = {"old": args.old.resolve(), "new": args.new.resolve()}
    only = [word for name in args.only or () for word in ("--only", name)]
    about = {
        "benchmark": "compare",
        # Checkouts by their revisions: where they lie on this machine says nothing.
        "environment": environment(["OLD", "NEW", "--rounds", str(args.rounds), *only], "benchmarks/compare.py"),
        "revisions": _revisions(checkouts),
    }
    compared: dict[str, Any] = {}
    for compared in run_rounds(checkouts, args.only or list(BENCHMARKS), args.rounds):
        write_json(args.json, {**about, "figures": compared})
    show(compared)
    return 1 if any(row["worse"] for row in compared.values()) else 0


def _revisions(checkouts: Mapping[str, Path]) -> dict[str, str]:
    command = ["git", "rev-parse", "HEAD"]
    return {
        which: subprocess.run(command, cwd=path, capture_output=True, text=True, check=True).stdout.strip()
        for which, path in checkouts.items()
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
