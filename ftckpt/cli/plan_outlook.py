"""The outlook of a planned job: seconds that a failure costs, and the probability that memory survives a month."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ftckpt.cli.plan_holdings import StartPlan
from ftckpt.model.text import aligned, human_secs
from ftckpt.parity.survive import Forecast
from ftckpt.units import in_words

MONTH_SECS = 30 * 86400.0
_RESTART_SECS = 300.0
"""Assumed time from the loss of a node until the job trains again, on another node."""
_COMMIT_ITERATIONS = 2
"""A snapshot is committed that many iterations after its boundary."""
_LOAD_BYTES_PER_SEC = 5e9
"""Assumed rate at which a rank loads its state from memory."""
_SAMPLES = 400
_MAX_AT_ONCE = 4
"""Losses at once that are sampled; more count as not survived."""
_MAX_SAMPLED_RANKS = 20_000
"""In a larger job, sampling takes too long."""
ASSUMPTIONS = (
    f"a rank loads {in_words(_LOAD_BYTES_PER_SEC)} from memory; each failure also costs what any start costs: "
    "rendezvous, imports, building the model",
    "with --interval auto, each iteration has a snapshot",
    f"a lost node is replaced within {human_secs(_RESTART_SECS)}; nodes fail independently (--node-mtbf)",
)


@dataclass(frozen=True)
class Pace:
    """Seconds: of an iteration, between snapshots, of the protection and of the flush of a snapshot, between flushes,
    between losses of all memory; bytes per second of a link between nodes."""

    iteration_secs: float
    snapshot_secs: float
    protect_secs: float
    flush_secs: float
    flush_interval_secs: float
    mtbf_secs: float
    link_rate: float


@dataclass(frozen=True)
class FailureCost:
    """The mean cost of a kind of failure: training that is repeated, and the load of the snapshot. The time of a new
    start without a snapshot (rendezvous, imports, building the model) is not included."""

    lost: str
    source: str
    work_secs: float
    load_secs: float


@dataclass(frozen=True)
class Outlook:
    """The costs of failures, and the probability that memory survives those of a month: ``at_least`` that much by the
    exact counts of single and double losses, with more lost at once counted as not survived; ``sampled`` by
    simulation, None if the job is too large for it."""

    costs: Sequence[FailureCost]
    exposed_secs: float
    at_least: float
    sampled: float | None

    def lines(self) -> Iterator[str]:
        """The outlook as text."""
        rows: list[tuple[str, ...]] = [("failure", "restart from", "work lost", "load", "sum")]
        for one in self.costs:
            secs = (one.work_secs, one.load_secs, one.work_secs + one.load_secs)
            rows.append((one.lost, one.source, *map(human_secs, secs)))
        yield aligned(rows, 2)
        by_simulation = f", {self.sampled:.4%} by simulation" if self.sampled is not None else ""
        yield (
            f"a month without a restart from storage: {self.at_least:.4%} or more{by_simulation}; losses within "
            f"{human_secs(self.exposed_secs)} of each other count as simultaneous"
        )

    def to_json(self) -> dict[str, Any]:
        """The outlook as JSON values."""
        month = {"at_least": self.at_least, "sampled": self.sampled, "exposed_secs": self.exposed_secs}
        return {"costs": [asdict(one) for one in self.costs], "month_survived": month}


def outlook_of(planned: StartPlan, pace: Pace, node_mtbf_secs: float) -> Outlook:
    """The outlook of a job whose nodes lose their memory once in ``node_mtbf_secs`` each."""
    exposed_secs = _RESTART_SECS + pace.snapshot_secs + pace.protect_secs
    job, arrangement = planned.arrangement.job, planned.arrangement
    month = (job.nodes, node_mtbf_secs, exposed_secs)
    at_least = month_survived(lambda at_once: share_survived(planned, at_once), *month)
    sampled = None
    if job.ranks <= _MAX_SAMPLED_RANKS:
        forecast = Forecast(arrangement.groups, arrangement.mirrors, arrangement.holdings)
        sampled = month_survived(
            lambda num: share_survived(planned, num) if num <= 2 else sampled_share(forecast, num), *month
        )
    return Outlook(failure_costs(planned, pace), exposed_secs, at_least, sampled)


def failure_costs(planned: StartPlan, pace: Pace) -> list[FailureCost]:
    """The costs of the loss of a rank, of a node, and of more than parity makes up for."""
    rank_bytes = planned.arrangement.copied_bytes
    node_bytes = rank_bytes * planned.arrangement.job.gpus_per_node
    from_memory = rank_bytes / _LOAD_BYTES_PER_SEC
    committed = pace.snapshot_secs / 2 + _COMMIT_ITERATIONS * pace.iteration_secs
    # Snapshots are protected one after the other: at a failure the newest protected one is one to two transfers old.
    protected = committed + 1.5 * pace.protect_secs
    rebuild = from_memory + node_bytes / pace.link_rate
    stored = pace.flush_interval_secs / 2 + pace.flush_secs
    # A node reads its part as fast as it writes it.
    from_storage = FailureCost("more than that", "storage", stored, pace.flush_secs)
    costs = [FailureCost("one rank", "memory", committed, from_memory)]
    if share_survived(planned, 1) == 1:
        costs.append(FailureCost("one node", "parity", protected, rebuild))
    else:
        costs.append(FailureCost("one node", "storage", from_storage.work_secs, from_storage.load_secs))
    return [*costs, from_storage]


def share_survived(planned: StartPlan, at_once: int) -> float:
    """The share of cases of so many lost nodes that are survived, by the exact counts of the table; 0 for three and
    more, which it does not have."""
    name = {1: "one node", 2: "any two nodes"}.get(at_once)
    return next((row.survived / row.cases for row in planned.table.failures if row.lost == name), 0.0)


def sampled_share(forecast: Forecast, at_once: int, samples: int = _SAMPLES, seed: int = 0) -> float:
    """The same by simulation, for any number of nodes: random losses, decided as a restart decides them."""
    draw, nodes = random.Random(seed), sorted(forecast.on_node)
    if at_once > len(nodes):
        return 0.0
    return (
        sum(forecast.survived(frozenset(), frozenset(draw.sample(nodes, at_once))) for _ in range(samples)) / samples
    )


def month_survived(share_of: Callable[[int], float], nodes: int, node_mtbf_secs: float, exposed_secs: float) -> float:
    """The probability that no failure of a month makes the job restart from storage.

    Losses of memory are a Poisson process. Further losses within ``exposed_secs`` of one, until a snapshot is
    protected again, are at once with it; ``share_of`` has the share of cases of so many losses that are survived.
    """
    failures = nodes * MONTH_SECS / node_mtbf_secs
    more = (nodes - 1) * exposed_secs / node_mtbf_secs
    numbers = range(1, min(nodes, _MAX_AT_ONCE) + 1)
    survived = sum(
        math.exp(-more) * more ** (number - 1) / math.factorial(number - 1) * share_of(number) for number in numbers
    )
    return math.exp(-failures * (1 - survived))
