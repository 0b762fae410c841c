"""What intervals waste: failures that are drawn at random, replayed against snapshots taken, protected and stored.

Nothing is trained. A job is its costs, which are assumed and printed, and traces of failures are drawn with a seed:
as a Poisson process; with Weibull gaps of shape 0.7, as failures of clusters have them (B. Schroeder, G. A. Gibson, A
large-scale study of failures in high-performance computing systems, DSN 2006); and in bursts of three on average, ten
minutes apart. Each has the same mean times between failures. A failure throws training back to the newest snapshot of
the tier that answers it; what that loses and what snapshots take, over the time of useful training, is the waste.

Compared are fixed intervals; ``auto``, chosen by the functions that a job calls, as if it had measured its costs
exactly and knew its mean times, and with both wrong; the best pair of intervals that a search over all of them finds
in hindsight; and CheckFreq's rule (FAST'21): a snapshot as soon as the one before is on storage, and no more than the
budget allows, from which every failure restarts.

Exits with 1 where the replay of Poisson failures is not what the model of ``ftckpt.model.tiers`` says, where ``auto``
with the budget of least waste is not next to the best, or where overhead passes twice the budget.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import environment, print_table, write_json
from ftckpt.model.tiers import JOB, KINDS, NODE, PROCESS, Tier, mtbf_secs, shortest_interval, storage_interval_secs

BUDGET = 0.01
MOST = 1 << 30
FIXED = ((1, 500), (10, 500), (100, 500), (500, 500), (10, 5000))
"""Iterations between snapshots, and between those that go to storage."""
BURST, BURST_GAP_SECS = 3, 600.0
WEIBULL_SHAPE = 0.7
NEAR_MODEL, NEAR_BEST = 0.15, 0.10
"""The claims: how far a replay may lie from the model, and a total from the best, relative to it."""

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class SyntheticJob:
    """Costs in seconds, all assumed. ``flush_slows`` is the share of training that a flush takes while it runs."""

    name: str
    nodes: int
    iteration: float
    snapshot: float
    protect: float
    flush: float
    flush_slows: float

    @property
    def store(self) -> float:
        """What a flush costs."""
        return self.flush * self.flush_slows


JOBS = (
    SyntheticJob("34B on 64 nodes", 64, 6.0, 0.1, 8.5, 60.0, 0.02),
    SyntheticJob("34B on 64 nodes, cheap snapshots", 64, 6.0, 0.005, 8.5, 60.0, 0.02),
    SyntheticJob("405B on 2048 nodes", 2048, 10.0, 0.4, 5.0, 180.0, 0.05),
)


class Policy(NamedTuple):
    """Iterations between snapshots and between flushes. Without ``memory`` storage answers all failures."""

    name: str
    snapshot: int
    store: int
    memory: bool = True


class Failure(NamedTuple):
    secs: float
    kind: str


def draw(process: str, means: dict[str, float], horizon: float, seed: int) -> list[Failure]:
    """Failures of all kinds until ``horizon`` seconds, in their order."""
    dice = np.random.default_rng(seed)
    return sorted(Failure(at, kind) for kind in KINDS for at in _times(process, means[kind], horizon, dice))


def _times(process: str, mean: float, horizon: float, dice: np.random.Generator) -> Iterator[float]:
    # Some means of run-in: the first gap of a Weibull process is not that of one that has run for long.
    now = -20 * mean
    while now < horizon:
        if process == "poisson":
            now += dice.exponential(mean)
        elif process == "weibull":
            now += mean / math.gamma(1 + 1 / WEIBULL_SHAPE) * dice.weibull(WEIBULL_SHAPE)
        else:
            now += dice.exponential(mean * BURST)
            size = dice.geometric(1 / BURST)
            times = now + np.append(0.0, np.cumsum(dice.exponential(BURST_GAP_SECS, size - 1)))
            yield from (float(at) for at in times if 0 <= at < horizon)
            continue
        if 0 <= now < horizon:
            yield float(now)


def replay(
    job: SyntheticJob, policies: Sequence[Policy], trace: Sequence[Failure], horizon: float
) -> tuple[Array, Array]:
    """Overhead and lost work of each policy, over useful training."""
    snapshot, store = (np.array([getattr(p, name) for p in policies], float) for name in ("snapshot", "store"))
    memory = np.array([policy.memory for policy in policies])
    # One at a time: those that are due meanwhile are passed over.
    store = np.ceil(np.maximum(1, job.flush / job.iteration / store)) * store
    length = job.iteration + job.snapshot / snapshot + job.store / store
    protect = np.ceil(np.maximum(1, job.protect / job.iteration / snapshot)) * snapshot
    every = {PROCESS: snapshot, NODE: protect, JOB: store}
    late = {PROCESS: job.iteration, NODE: job.iteration + job.protect, JOB: job.flush}
    kept = {kind: np.zeros(len(policies)) for kind in KINDS}
    at, lost, now = np.zeros(len(policies)), np.zeros(len(policies)), 0.0
    for failure in trace:
        at, now = at + (failure.secs - now) / length, failure.secs
        for kind in KINDS:
            newest = np.floor((at - late[kind] / length) / every[kind]) * every[kind]
            kept[kind] = np.maximum(kept[kind], newest)
        back = np.where(memory, kept[failure.kind], kept[JOB])
        lost, at = lost + at - back, back
        for kind in KINDS[: KINDS.index(failure.kind)]:
            kept[kind] = back  # a snapshot that was restored is in memory, and protected soon
    at += (horizon - now) / length
    return (lost + at) * (length - job.iteration) / (at * job.iteration), lost / at


def auto(
    job: SyntheticJob, means: dict[str, float], budget: float = BUDGET, name: str = "auto", wrong: float = 1.0
) -> Policy:
    """What a job would choose; ``wrong``: by how much it is mistaken about costs and mean times."""
    snapshot = shortest_interval(job.snapshot * wrong / job.iteration, budget, MOST)
    tier = Tier(means[JOB] * wrong, job.store * wrong, late_secs=job.flush)
    store = max(snapshot, round(storage_interval_secs(tier) / job.iteration))
    return Policy(name, snapshot, store)


def check_freq(job: SyntheticJob, memory: bool) -> Policy:
    """CheckFreq's rule: what is measured is the wait for a copy, here all that a snapshot costs."""
    interval = max(
        math.ceil(job.flush / job.iteration), shortest_interval(job.snapshot / job.iteration, BUDGET, MOST)
    )
    return Policy("CheckFreq" + (", three tiers" if memory else ""), interval, interval, memory)


def policies_of(job: SyntheticJob, means: dict[str, float]) -> list[Policy]:
    answered = 1 / (1 / means[PROCESS] + 1 / means[NODE])
    least = Tier(answered, job.snapshot).best_secs()
    return [
        *(Policy(f"every {snapshot}, stored every {store}", snapshot, store) for snapshot, store in FIXED),
        auto(job, means),
        auto(job, means, name="auto, costs and mean times twice too large", wrong=2.0),
        auto(job, means, name="auto, costs and mean times half of it", wrong=0.5),
        auto(job, means, budget=job.snapshot / least, name="auto, budget of least waste"),
        check_freq(job, memory=False),
        check_freq(job, memory=True),
    ]


def searched(job: SyntheticJob, traces: Sequence[Sequence[Failure]], horizon: float) -> Policy:
    """The pair of intervals that wastes least of all, in hindsight."""
    steps = sorted({round(10 ** (step / 12)) for step in range(52)})
    grid = [Policy("best by search", snapshot, store) for snapshot in steps for store in steps if store >= snapshot]
    total = sum(sum(replay(job, grid, trace, horizon)) for trace in traces)
    return grid[int(np.argmin(total))]


def run_case(job: SyntheticJob, process: str, days: float, num_traces: int, seed: int) -> dict[str, Any]:
    """All policies against traces of one kind."""
    means, horizon = mtbf_secs({}, job.nodes), days * 86400
    traces = [draw(process, means, horizon, seed + index) for index in range(num_traces)]
    policies = [*policies_of(job, means), searched(job, traces, horizon)]
    wastes = [replay(job, policies, trace, horizon) for trace in traces]
    rows = []
    for index, policy in enumerate(policies):
        overhead, lost = (float(np.mean([waste[part][index] for waste in wastes])) for part in (0, 1))
        rows.append({**policy._asdict(), "overhead": overhead, "lost": lost, "total": overhead + lost})
    return {
        "job": job.name, "process": process, "days": days, "traces": num_traces,
        "failures": sum(map(len, traces)), "model": model(job, means, auto(job, means)), "rows": rows,
    }  # fmt: skip


def model(job: SyntheticJob, means: dict[str, float], policy: Policy) -> dict[str, float]:
    """What the model says of a policy."""
    protect = max(policy.snapshot, math.ceil(job.protect / job.iteration))
    tiers = [
        (policy.snapshot, Tier(means[PROCESS], job.snapshot, job.iteration)),
        (protect, Tier(means[NODE], 0.0, job.iteration + job.protect)),
        (policy.store, Tier(means[JOB], job.store, job.flush)),
    ]
    wastes = [tier.waste(interval * job.iteration) for interval, tier in tiers]
    return {"overhead": sum(w.overhead for w in wastes), "lost": sum(w.lost for w in wastes)}


def broken(case: dict[str, Any]) -> Iterator[str]:
    """Claims that do not hold."""
    rows = {row["name"]: row for row in case["rows"]}
    found, said, where = rows["auto"], case["model"], f"{case['job']}, {case['process']}"
    for part in ("overhead", "lost") if case["process"] == "poisson" else ():
        if abs(found[part] - said[part]) > NEAR_MODEL * said[part]:
            yield f"{where}: {part} {found[part]:.4%}, and {said[part]:.4%} in the model"
    if rows["auto, budget of least waste"]["total"] > (1 + NEAR_BEST) * rows["best by search"]["total"]:
        yield f"{where}: auto with the budget of least waste is far from the best"
    if found["overhead"] > 2 * BUDGET:  # the budget is that of snapshots alone, storage comes on top
        yield f"{where}: overhead {found['overhead']:.2%} of a budget of {BUDGET:.0%}"


def show(case: dict[str, Any]) -> None:
    print(
        f"\n{case['job']}, {case['process']}: {case['failures']} failures in {case['traces']} × {case['days']:g} days"
    )
    heads = ["policy", "snapshot", "stored", "overhead %", "lost %", "total %"]
    rows = [
        [
            row["name"], str(row["snapshot"]), str(row["store"]),
            *(f"{100 * row[part]:.3f}" for part in ("overhead", "lost", "total")),
        ]
        for row in case["rows"]
    ]  # fmt: skip
    print_table(heads, rows)
    print(f"in the model auto takes {case['model']['overhead']:.3%} and loses {case['model']['lost']:.3%}")


def main(argv: Sequence[str]) -> int:
    """Exit status 1 where a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    parser.add_argument("--days", type=float, default=60.0, help="of each trace (default: %(default)s)")
    parser.add_argument("--traces", type=int, default=100, help="of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=8)
    args = parser.parse_args(argv)
    print(
        "This rests on a model: costs are assumed, failures drawn, and nothing is trained. Shares of useful training."
    )
    for job in JOBS:
        print(f"  {job}")
    cases = []
    for job in JOBS:
        for process in ("poisson", "weibull", "bursts"):
            cases.append(run_case(job, process, args.days, args.traces, args.seed))
            show(cases[-1])
    wrong = [text for case in cases for text in broken(case)]
    for text in wrong:
        print(f"WRONG: {text}")
    write_json(
        args.json,
        {
            "benchmark": "cadence", "rests_on": "a model: assumed costs, drawn failures, nothing is trained",
            "environment": environment(argv, "benchmarks/cadence.py"), "budget": BUDGET,
            "jobs": [asdict(job) for job in JOBS], "cases": cases, "broken": wrong,
        },
    )  # fmt: skip
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
