"""What ``ftckpt plan`` predicts: how often snapshots are taken, protected and stored, and what that wastes.

It rests on the model of ``ftckpt.model.tiers`` and on costs that are given or guessed: a job that runs measures them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ftckpt.config import MOST_REST_SECS, Config
from ftckpt.errors import ConfigError
from ftckpt.model.failures import FailureRate, FailureRecord, expected, in_words
from ftckpt.model.tiers import (
    NODE,
    PROCESS,
    Tier,
    Waste,
    mtbf_secs,
    shortest_interval,
    storage_interval_secs,
    storage_mtbf_secs,
)
from ftckpt.setting_checks import check_mtbf

COPY_GBPS = 20.0
"""Assumed rate of copies of a GPU to pinned memory: PCIe 4.0 x16 gives a little more."""
SLOWED = 0.3
"""By how much copies beside them slow compute steps down, as REFT measured for a side stream (17 to 38 %, arXiv
2310.12670)."""
SMP_GBPS = 1.5
"""Assumed rate at which a core checks state and makes parity of it: two checksums and an exclusive or."""
CORES_PER_RANK = 8
"""Assumed of a node."""
STORE_GBPS = 1.0
"""Assumed rate at which a node writes to storage."""
FLUSH_SLOWS = 0.01
"""Share of training that a flush takes while it runs: assumed."""

_LEAST_ITERATION_SECS = 1e-3
"""A large job's takes more: what is less is a slip, of which intervals of billions of iterations would come."""

_MOST = 1 << 30  # iterations


@dataclass(frozen=True)
class Costs:
    """What is known of a job before it runs, in seconds.

    ``iteration``: its length. ``snapshot``: of training, that one takes; ``wait`` of these for copies that an
    iteration has no room for. ``network`` and ``smp``: that those take at the least to protect one; ``rest``: until
    its share of the cores is made up for. ``flush``: until one is on storage.
    """

    iteration: float
    snapshot: float
    wait: float
    network: float
    smp: float
    rest: float
    flush: float

    @property
    def protect(self) -> float:
        """Until one is protected."""
        return max(self.network, self.smp)

    @classmethod
    def guess(
        cls, config: Config, iteration: float, snapshot: float | None, *, rank_bytes: float, ranks: int,
        network: float,
    ) -> Costs:  # fmt: skip
        """``snapshot`` None: guessed as if no byte fitted into windows. ``ranks`` of a node.

        Raises:
            ConfigError: a length that is none.
        """
        if not _LEAST_ITERATION_SECS <= iteration < 1e6:
            raise ConfigError(
                f"--iteration-secs: {iteration:g} is not the length of an iteration in seconds; the least is "
                f"{_LEAST_ITERATION_SECS:g}"
            )
        if snapshot is not None and not 0 <= snapshot < 1e6:
            raise ConfigError(f"--snapshot-cost-secs: {snapshot:g} is not a time in seconds")
        copy_secs = rank_bytes / (COPY_GBPS * 1e9)
        wait = max(0.0, copy_secs - iteration)
        if snapshot is None:
            snapshot = SLOWED * (copy_secs - wait) + wait
        node_bytes = ranks * rank_bytes
        smp = node_bytes / (min(SMP_GBPS, config.smp_gbps or SMP_GBPS) * 1e9)
        share = config.smp_cores * CORES_PER_RANK * ranks if config.protect_interval == "auto" else 0.0
        rest = min(smp / share, MOST_REST_SECS) if share else 0.0
        flush = node_bytes / ((config.persist_gbps or STORE_GBPS) * 1e9)
        return cls(iteration, snapshot, min(wait, snapshot), network, smp, rest, flush)


class Answer(NamedTuple):
    """What answers failures of some kinds: a snapshot of each ``interval`` iterations."""

    kinds: str
    place: str
    interval: int
    tier: Tier
    waste: Waste


class UncoveredLoss(NamedTuple):
    """Failures of some kinds, at which training begins anew."""

    kinds: str
    mtbf_secs: float


@dataclass(frozen=True)
class IntervalForecast:
    """Answers from memory to storage."""

    answers: tuple[Answer, ...]
    uncovered: UncoveredLoss | None
    """What none of them answers."""
    assumed: tuple[str, ...]
    best: int
    """Iterations between snapshots at which most is trained."""
    budget: float
    """Share of training that they would take."""
    stretched: bool
    """Whether ``overhead_budget`` makes that longer than the interval that was set."""
    gap: int
    """Most iterations between snapshots: as ``interval``, or while one is protected, where slots are too few."""
    protected: int
    """Iterations from one protected snapshot to the next."""
    limit: str
    """The setting that keeps them from being fewer; empty: each snapshot is protected."""
    protected_age_secs: float
    """Of the newest one at most."""

    @property
    def interval(self) -> int:
        """Iterations between snapshots."""
        return self.answers[0].interval

    @property
    def waste(self) -> Waste:
        """Of all failures that are answered."""
        wastes = [answer.waste for answer in self.answers]
        return Waste(sum(waste.overhead for waste in wastes), sum(waste.lost for waste in wastes))

    def lines(self) -> Iterator[str]:
        for answer in self.answers:
            yield (
                f"{answer.kinds} lost each {answer.tier.mtbf_secs / 3600:.0f} h: {answer.place} has one iteration of "
                f"{answer.interval}, which takes {_share(answer.waste.overhead)} of training and loses "
                f"{_share(answer.waste.lost)}"
            )
        yield (
            f"most is trained with one iteration of {self.best} in memory: interval auto takes it with "
            f"--overhead-budget {self.budget:.2g}"
        )
        overhead, lost = _share(self.waste.overhead), _share(self.waste.lost)
        yield f"in all {overhead} of training for snapshots, {lost} lost and done again"
        if self.uncovered:
            yield (
                f"not in that: {self.uncovered.kinds} lost each {self.uncovered.mtbf_secs / 3600:.0f} h, and with it "
                "all of training, as nothing is on storage: set --persist"
            )

    def to_json(self) -> dict[str, Any]:
        rows = [
            {"failures": a.kinds, "place": a.place, "interval": a.interval, **a.tier._asdict(), **a.waste._asdict()}
            for a in self.answers
        ]
        best = {"gap": self.gap, "best_interval": self.best, "best_overhead_budget": self.budget}
        uncovered = self.uncovered._asdict() if self.uncovered else None
        totals = {"overhead": self.waste.overhead, "lost": self.waste.lost, "uncovered": uncovered}
        return {"intervals": rows, **best, **totals}


def forecast(
    config: Config, costs: Costs, nodes: int, survives_nodes: bool, seen: FailureRecord | None = None, *,
    is_short: bool = False,
) -> IntervalForecast:  # fmt: skip
    """How often snapshots are taken, protected and stored as ``config`` says, and what that wastes.

    ``survives_nodes``: memory survives the loss of a node; where it does not, storage answers that, too. ``seen``: of
    failures, by a job that has trained. ``is_short``: a snapshot that is being protected leaves no slot for others.
    """
    failures = expected(mtbf_secs(check_mtbf(config.mtbf), nodes), seen, nodes)
    rates = {kind: rate.mtbf_secs for kind, rate in failures.items()}
    iteration = costs.iteration
    every = config.least_interval
    if config.overhead_budget:
        # Of an interval that is set, as a job does it: what training waits for makes it longer.
        cost = costs.snapshot if config.interval == "auto" else costs.wait
        every *= shortest_interval(cost / iteration, config.overhead_budget, _MOST)
    # One is taken beside the one that is being protected, and no other until that is done.
    gap = max(every, math.ceil(costs.protect / iteration)) if is_short else every
    memory = Tier(rates[PROCESS], costs.snapshot, late_secs=(1 + gap - every) * iteration)
    protected, limit = _protected(config, costs, every)
    answers = [_answer("a process", "memory", every, memory, iteration)]
    if survives_nodes:
        # What one costs is counted above.
        tier = Tier(rates[NODE], 0.0, late_secs=iteration + costs.protect)
        answers.append(_answer("a node", "protected memory", protected, tier, iteration))
    kinds = "the whole job" if survives_nodes else "a node, or the whole job,"
    secs = storage_mtbf_secs(rates, survives_nodes)
    uncovered = None if config.persist else UncoveredLoss(kinds, secs)
    if config.persist:
        tier = Tier(secs, FLUSH_SLOWS * costs.flush, late_secs=costs.flush)
        stored = max(every, round(min(storage_interval_secs(tier) / iteration, _MOST)))
        if config.persist_interval != "auto":
            stored = config.persist_interval
        answers.append(_answer(kinds, "storage", stored, tier, iteration))
    # What memory answers, protected or not: each snapshot is in both.
    secs = 1 / (1 / rates[PROCESS] + survives_nodes / rates[NODE])
    best = max(1, math.ceil(Tier(secs, costs.snapshot).best_secs() / iteration))
    return IntervalForecast(
        tuple(answers), uncovered, tuple(_assumed(config, costs, failures, seen)),
        best, costs.snapshot / (best * iteration), config.interval != "auto" and every > config.interval,
        gap, protected, limit, (protected + 1) * iteration + costs.protect,
    )  # fmt: skip


def _protected(config: Config, costs: Costs, every: int) -> tuple[int, str]:
    """Iterations from one protected snapshot to the next, and the setting that keeps them from being fewer."""
    least = 1 if config.protect_interval == "auto" else config.protect_interval
    # A target that takes longer than those between makes these go unprotected.
    longest, limit = max(
        (costs.network, "--ftckpt-network-gbps"),
        (costs.smp, "--ftckpt-smp-gbps" if 0 < config.smp_gbps < SMP_GBPS else "one core of the SMP"),
        (costs.rest, "--ftckpt-smp-cores"),
    )
    iterations = math.ceil(longest / costs.iteration)
    if iterations > every * least:
        return iterations, limit
    return every * least, "--ftckpt-protect-interval" if least > 1 else ""


def _share(part: float) -> str:
    return "less than 0.001%" if 0 < part < 1e-5 else f"{part:.3%}"


def _answer(kinds: str, place: str, interval: int, tier: Tier, iteration_secs: float) -> Answer:
    return Answer(kinds, place, interval, tier, tier.waste(interval * iteration_secs))


def _assumed(
    config: Config, costs: Costs, failures: Mapping[str, FailureRate], seen: FailureRecord | None
) -> Iterator[str]:
    if seen is not None:
        yield f"failures come as seen and given: {in_words(failures)}"
    yield f"a snapshot takes {costs.snapshot:.3g} s of training; a job with interval auto measures it"
    yield (
        f"an SMP checks and encodes {SMP_GBPS:g} GB/s, and a node has {CORES_PER_RANK} idle cores per rank: the log "
        "of a job tells how old its snapshots really get"
    )
    if not config.mtbf:
        yield "failures: 6.5 of 1000 nodes a day, half of them with the node; of the whole job one a week; set --mtbf"
    if config.persist:
        yield f"a flush takes {costs.flush:.3g} s and {FLUSH_SLOWS:.0%} of training meanwhile"
    yield "what a restart itself takes is not counted: it is the same for all intervals"
