"""What failures of each kind cost a job, and how often snapshots should come to what answers them.

A process that fails goes on from the newest snapshot in memory, a node that is lost from the newest protected one,
and where the whole job is gone what storage has counts. Each of these tiers has a price per snapshot and failures of
its own, so that each has an interval of its own.

Failures of a kind are taken as a Poisson process. Then training for T seconds and paying C for a snapshot takes
``M exp(R/M) (exp((T + C)/M) - 1)`` seconds on average, where M is the mean time between failures and R what a restart
takes: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation
Computer Systems 22 (2006). What a snapshot is late by, until a restart can use it, is work that is done again like R.
To the first order the best T is ``sqrt(2 C M)``: J. W. Young, A first order approximation to the optimum checkpoint
interval, CACM 17 (1974).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

PROCESS, NODE, JOB = KINDS = ("process", "node", "job")
"""Kinds of failure, from the one that loses least."""

_NODE_HOURS = 1000 * 24 / 6.5
"""Between two failures of one node that end a job: 6.5 in 1000 days of a node on a cluster of 16,000 A100 (A. Kokolis
et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, HPCA 2025, arXiv 2410.21680)."""

_JOB_HOURS = 168.0
"""Once a week all is gone: an assumption, as nobody has published how often more is lost than memory survives."""

_STEPS = 100
"""Halvings after which a double has no digits left to win."""


class Waste(NamedTuple):
    """Shares of the time of useful training: what snapshots take, and what is lost to failures."""

    overhead: float
    lost: float

    @property
    def total(self) -> float:
        return self.overhead + self.lost


class Tier(NamedTuple):
    """What answers failures of one kind; all in seconds.

    ``mtbf_secs``: mean time between these failures, of the whole job. ``cost_secs``: of training, that a snapshot
    takes here. ``late_secs``: from the boundary of a snapshot until a restart can use it. ``restart_secs``: of a
    restart.
    """

    mtbf_secs: float
    cost_secs: float
    late_secs: float = 0.0
    restart_secs: float = 0.0

    def waste(self, interval_secs: float) -> Waste:
        """Of a snapshot in each ``interval_secs`` of training; infinite where it never gets on."""
        overhead = self.cost_secs / interval_secs
        again = (self.late_secs + self.restart_secs) / self.mtbf_secs
        try:
            grown = math.expm1((interval_secs + self.cost_secs) / self.mtbf_secs)
            taken = self.mtbf_secs / interval_secs * math.exp(again) * grown
        except OverflowError:
            return Waste(overhead, math.inf)
        return Waste(overhead, max(0.0, taken - 1.0 - overhead))

    def best_secs(self) -> float:
        """The interval of least waste; 0 where a snapshot costs nothing.

        Where the derivative of ``waste`` is zero, ``(1 - u) exp(u) = exp(-C/M)`` for u = T/M: the left side falls
        from 1 to 0 as u goes from 0 to 1, so that halving finds it.
        """
        target = -self.cost_secs / self.mtbf_secs
        low, high = 0.0, 1.0
        for _ in range(_STEPS):
            middle = (low + high) / 2
            # As logarithms: for a small cost both sides are next to 1.
            if middle < 1.0 and math.log1p(-middle) + middle > target:
                low = middle
            else:
                high = middle
        return low * self.mtbf_secs if self.cost_secs > 0 else 0.0


def mtbf_secs(given_hours: Mapping[str, float], nodes: int) -> dict[str, float]:
    """Mean time between failures of each kind for a job of so many nodes, where ``given_hours`` does not say it.

    Half of what ends a job leaves the memory of its nodes as it was, half does not: an assumption.
    """
    half = 2 * _NODE_HOURS / nodes
    default = {PROCESS: half, NODE: half, JOB: _JOB_HOURS}
    return {kind: 3600.0 * given_hours.get(kind, default[kind]) for kind in KINDS}


def storage_mtbf_secs(rates: Mapping[str, float], survives_nodes: bool) -> float:
    """Between failures that storage alone survives; ``survives_nodes``: memory survives the loss of a node."""
    return rates[JOB] if survives_nodes else 1 / (1 / rates[JOB] + 1 / rates[NODE])


def shortest_interval(cost_share: float, budget: float, most: int) -> int:
    """The least number of iterations between snapshots at which they keep ``budget``, a share of training.

    ``cost_share``: what one takes, over the length of an iteration. As in CheckFreq (FAST'21), with the whole cost in
    place of the wait for a copy.
    """
    return max(1, math.ceil(min(cost_share / budget, most)))


def storage_interval_secs(tier: Tier) -> float:
    """Training between two snapshots that go to storage, for the tier of lost jobs.

    However little one costs, storage rests for as long as it works: other jobs want it, too.
    """
    return max(tier.best_secs(), 2 * tier.late_secs)
