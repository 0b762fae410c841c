"""The share of a compressed day in which a job trains, with ftckpt and with checkpoints at their best interval.

    python benchmarks/goodput.py --json FILE

FSDP2 on two simulated nodes of two ranks. Ranks, all ranks at once, and nodes with their memory are killed at the
same times in each row; gaps between failures follow a Weibull distribution. A standby waits before each loss of a
node. A failure that is due while the job does not train strikes when it does.

- *torchrun, DCP async*: saves at Young's and Daly's interval, from the cost of a save and the gap between failures,
  both measured before;
- *ftckpt run*: memory with the default settings, and storage every STORED_EVERY iterations.

Useful are iterations that no restart repeats. Goodput is their number x the undisturbed iteration time / wall time.
*predicted* is (1 - cost of saves) x (1 - cost of failures), with the restarts as measured. Repeated work is by model:
half an interval and a save, as Young and Daly have it; of ftckpt half an interval of snapshots and COMMIT_ITERATIONS,
and after the loss of a node one and a half intervals of protection more. Nothing else may run.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import conclude, environment, parser_of, print_tables, scratch, write_json
from benchmarks.recovery import PAUSE_SECS
from benchmarks.recovery_run import Run, StateSource
from ftckpt.config import Config
from ftckpt.errors import FtckptError
from ftckpt.model.flush_interval import best_interval_secs
from tests.support.processes import RunError

JOB = "fsdp2"
USUAL, OURS = "torchrun, DCP async", "ftckpt run"
WEIGHTS = {"rank": 0.7, "node": 0.2, "all": 0.1}
"""Shares of the kinds of failures."""
SHAPE = 0.75
"""Of the Weibull distribution: below 1, failures come in bursts. B. Schroeder, G. A. Gibson, A large-scale study of
failures in high-performance computing systems, DSN 2006, has 0.7 to 0.8."""
STORED_EVERY = 100
COMMIT_ITERATIONS = 2
"""From the boundary of a snapshot until it is committed."""
PROBE_EVERY = 20
"""Iterations from one save to the next while their cost is measured; after half of them training is undisturbed."""


class Times(NamedTuple):
    """Seconds: of the measurement of iterations and saves, of each row, and between failures on average."""

    probe_secs: float
    row_secs: float
    gap_secs: float

    @classmethod
    def of_minutes(cls, minutes: float) -> Times:
        """Starts take the rest."""
        row_secs = 60 * 0.4 * minutes
        return cls(max(20.0, 60 * 0.1 * minutes), row_secs, max(18.0, row_secs / 12))


class DueFailure(NamedTuple):
    """When, from the start of the measurement, and what."""

    due_secs: float
    kind: str


def failures_of(times: Times, seed: int) -> list[DueFailure]:
    """The failures of a row."""
    draw, found, due_secs = random.Random(seed), list[DueFailure](), 0.0
    scale = times.gap_secs / math.gamma(1 + 1 / SHAPE)
    while (due_secs := due_secs + draw.weibullvariate(scale, SHAPE)) < times.row_secs:
        found.append(DueFailure(due_secs, draw.choices([*WEIGHTS], [*WEIGHTS.values()])[0]))
    return found


class Probe(NamedTuple):
    """Seconds of an undisturbed iteration; training time that a save costs, and seconds until it is complete."""

    iteration_secs: float
    cost_secs: float
    save_secs: float


def probe(times: Times, disk: Path) -> Probe:
    """The cost of saves: the iterations of the first half after each, compared with those of the second."""
    source = StateSource(True, every=PROBE_EVERY, is_async=True)
    with scratch(disk) as [folder], Run(JOB, "torchrun", source, PAUSE_SECS, folder) as run:
        run.start()
        run.wait_for_state()
        run.train_until(time.time() + times.probe_secs)
        steps, save_secs = run.steps, run.save_secs
    spans = [(at % PROBE_EVERY, end - begin) for (begin, _), (end, at) in pairwise(steps)]
    spans = spans[PROBE_EVERY:]
    calm = [secs for place, secs in spans if not 0 < place <= PROBE_EVERY // 2]
    disturbed = [secs for place, secs in spans if 0 < place <= PROBE_EVERY // 2]
    iteration_secs = statistics.mean(calm)
    cost_secs = (statistics.mean(disturbed) - iteration_secs) * PROBE_EVERY / 2
    return Probe(iteration_secs, max(cost_secs, 1e-3), statistics.median(save_secs))


def best_every(probed: Probe, gap_secs: float) -> int:
    """Iterations between saves at which saves and failures cost least."""
    secs = best_interval_secs(probed.cost_secs, probed.save_secs, gap_secs)
    return max(1, round(secs / probed.iteration_secs))


def train(row: str, every: int, times: Times, failures: Sequence[DueFailure], disk: Path) -> dict[str, Any]:
    """A row: wall seconds, useful iterations, the restarts; or the error."""
    restarts: list[dict[str, Any]] = []
    try:
        with scratch(disk) as [folder]:
            settings = {"persist": str(folder / "checkpoints"), "persist_interval": STORED_EVERY}
            source = StateSource(True, every=every, is_async=True) if row == USUAL else StateSource(False, settings)
            launcher = "torchrun" if row == USUAL else "ftckpt run"
            with Run(JOB, launcher, source, PAUSE_SECS, folder) as run:
                run.start()
                run.wait_for_state()
                first, begin = run.train_until(0.0), time.time()
                for failure in failures:
                    restarts.append({**failure._asdict(), **run.recover(failure.kind, begin + failure.due_secs)})
                last, end = run.train_until(begin + times.row_secs), time.time()
                steps = [[round(at - begin, 2), number] for at, number in run.steps if at >= begin][::10]
                pace = {} if row == USUAL else pace_of(folder / "events")
        found = {"wall_secs": end - begin, "useful": last - first, "restarts": restarts, "steps": steps}
        return found | pace
    except (RunError, FtckptError, KeyError) as error:
        return {"error": f"{type(error).__name__}: {error}"[-4000:], "restarts": restarts}


def pace_of(events: Path) -> dict[str, float]:
    """Medians of iterations between snapshots, and of seconds between protected ones; 0 if there is none."""
    found: dict[str, list[dict[str, Any]]] = {"snapshot": [], "protected": []}
    for line in (events / "rank0.jsonl").read_bytes().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # the writer was killed
            event = json.loads(line)
            if event["event"] in found:
                found[event["event"]].append(event)

    def median_of(name: str, what: str) -> float:
        pairs = pairwise(found[name])
        return statistics.median([b[what] - a[what] for a, b in pairs if a["pid"] == b["pid"]] or [0.0])

    return {"interval": median_of("snapshot", "iteration"), "protect_secs": median_of("protected", "time")}


def work_secs(row: str, kind: str, found: Mapping[str, Any], probed: Probe, every: int) -> float:
    """The work that a failure makes the job repeat, by model."""
    if row == USUAL:
        return every * probed.iteration_secs / 2 + probed.save_secs
    committed = (found["interval"] / 2 + COMMIT_ITERATIONS) * probed.iteration_secs
    return committed + 1.5 * found["protect_secs"] * (kind == "node")


def figures_of(row: str, found: Mapping[str, Any], probed: Probe, every: int) -> dict[str, Any]:
    """The goodput of a row, measured and predicted."""
    if "error" in found:
        return {}
    wall_secs, restarts = found["wall_secs"], found["restarts"]
    down_secs = sum(one["secs"] for one in restarts)
    repeated_secs = sum(work_secs(row, one["kind"], found, probed, every) for one in restarts)
    save_secs = probed.cost_secs / every if row == USUAL else Config().overhead_budget * probed.iteration_secs
    lost = sum(one["lost"] for one in restarts)
    return {
        "goodput": found["useful"] * probed.iteration_secs / wall_secs,
        "predicted": (1 - save_secs / probed.iteration_secs) * (1 - (down_secs + repeated_secs) / wall_secs),
        "down": down_secs / wall_secs,
        "repeated": lost * probed.iteration_secs / wall_secs,
        "repeated_predicted": repeated_secs / wall_secs,
        "failures": len(restarts),
        "lost": lost / len(restarts) if restarts else 0.0,
    }


HEADS = ("goodput", "predicted", "down", "repeated", "predicted", "failures", "lost each")


def cells(found: Mapping[str, Any], _: Any) -> list[str]:
    """A line of the table."""
    shares = [f"{found[name]:.1%}" for name in ("goodput", "predicted", "down", "repeated", "repeated_predicted")]
    return [*shares, str(found["failures"]), f"{found['lost']:.1f}"]


def main(argv: Sequence[str]) -> int:
    """Measures, prints the table and writes the file; returns the exit code."""
    parser = parser_of(__doc__, disk="where checkpoints are saved")
    parser.add_argument("--minutes", type=float, help="wall time of everything; default: 30, 3 with --quick")
    parser.add_argument("--seed", type=int, default=1, help="of the failures")
    args = parser.parse_args(argv)
    times = Times.of_minutes(args.minutes or (3.0 if args.quick else 30.0))
    disk, failures = args.disk.absolute(), failures_of(times, args.seed)
    about = environment(argv, "benchmarks/goodput.py")
    content: dict[str, Any] = {"benchmark": "goodput", "environment": about, "sizes": times._asdict()}
    probed = probe(times, disk)
    every = best_every(probed, times.gap_secs)
    content |= {"probe": probed._asdict(), "every": every, "rows": {}}
    for row in (USUAL, OURS):
        content["rows"][row] = train(row, every, times, failures, disk)
        write_json(args.json, content)
    table = {row: figures_of(row, found, probed, every) for row, found in content["rows"].items()}
    print_tables({"goodput": table}, HEADS, cells, {})
    missed = [f"{row}: {one['error']}" for row, one in content["rows"].items() if "error" in one]
    ours, usual = table[OURS], table[USUAL]
    if ours and usual and ours["goodput"] <= usual["goodput"]:
        missed.append(f"{OURS}: goodput {ours['goodput']:.3f}, {USUAL}: {usual['goodput']:.3f}")
    return conclude(args.json, {**content, "tables": {"goodput": table}}, missed, args.quick)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
