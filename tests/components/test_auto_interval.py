"""The interval that a job settles at, by lengths of iterations as they are: with noise, drift, and other load."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field

import pytest

from ftckpt.schedule.cost import CostMeter
from ftckpt.schedule.interval_control import AutoInterval

BUDGET = 0.01
DELAY = 8
"""Snapshots from a request to when it is in force."""


@dataclass
class Attempt:
    """One attempt of a job: iterations of a second with noise, one beside a snapshot longer by ``cost``.

    ``load``: another job that comes and goes and makes iterations longer by half, for this share of the time.
    ``protection``: iterations in which a snapshot is protected, each longer by ``slow``.
    """

    cost: float
    noise: float
    load: float = 0.0
    seed: int = 0
    begin: int = 0
    protection: int = 0
    slow: float = 0.0
    told: list[str] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    def run(self, iterations: int) -> int:
        """The interval that it has concluded after so many."""
        dice, meter, loaded = random.Random(self.seed), CostMeter(), False
        auto = AutoInterval(BUDGET, 10_000, meter, self.told.append)
        if self.begin:
            auto.resume(self.begin)
        spacing, last, wishes = auto.request[0], 0, [auto.request[0]] * DELAY
        target, left = -1, 0
        for iteration in range(1, iterations + 1):
            if dice.random() < 0.02:
                loaded = dice.random() < self.load
            place = iteration - last
            if place >= spacing:
                place, last = 0, iteration
                self.taken.append(iteration)
                wishes.append(auto.request[0])
                spacing = wishes[-DELAY]
                if not left:
                    target, left = iteration, self.protection
            left = max(0, left - 1)
            target = target if left else -1
            secs = (1.0 + 0.2 * iteration / iterations) * (1.5 if loaded else 1.0)
            secs *= 1 + (self.cost if place == 0 else 0.0) + abs(dice.gauss(0, self.noise))
            secs *= 1 + (self.slow if target >= 0 else 0.0)
            if place == 0:
                auto.took()
            if meter.add(place, secs, False, target):
                auto.judge()
        return auto.interval


@pytest.mark.parametrize("noise", [0.002, 0.01])
@pytest.mark.parametrize("cost", [0.04, 0.1, 0.3])
def test_five_attempts_settle_within_a_quarter_of_their_median(cost: float, noise: float) -> None:
    """Two of them under other load; each starts with the conclusion of the one before."""
    for seed in range(10):
        intervals = [0]
        for number, load in enumerate((0.0, 0.5, 0.0, 0.5, 0.0)):
            attempt = Attempt(cost, noise, load, 10 * seed + number, begin=intervals[-1])
            intervals.append(attempt.run(1200))
            assert number == 0 or attempt.taken[0] == intervals[number], "it begins there"
        median = statistics.median(intervals[1:])
        assert all(abs(one - median) <= median / 4 for one in intervals[1:]), intervals
        assert abs(median - cost / BUDGET) <= 0.3 * cost / BUDGET, "and that is what it costs"


def test_a_cost_that_cannot_be_measured_leaves_a_snapshot_each_iteration_and_one_line_says_so() -> None:
    told = 0
    for seed in range(10):
        attempt = Attempt(cost=0.005, noise=0.05, seed=seed)
        assert attempt.run(1500) == 1
        assert len(attempt.told) <= 1
        told += len(attempt.told)
    assert told >= 5


@pytest.mark.parametrize("cost", [0.1, 0.2, 0.5])
def test_the_budget_is_kept_while_the_cost_is_measured(cost: float) -> None:
    attempt = Attempt(cost, noise=0.03)
    attempt.run(1000)
    assert len([iteration for iteration in attempt.taken if iteration > 150]) * cost <= 1.3 * BUDGET * 850


def test_protection_that_takes_long_counts_in_all_of_its_iterations() -> None:
    """A host without idle cores. A snapshot costs 1.04 iterations, most of it long after its boundary."""
    attempt = Attempt(cost=0.04, noise=0.01, protection=20, slow=0.05)
    assert abs(attempt.run(6000) - 104) <= 0.3 * 104
    assert len([iteration for iteration in attempt.taken if 300 < iteration <= 1000]) <= 20, "and soon"


def test_an_interval_too_short_to_show_its_cost_is_measured_again_now_and_then() -> None:
    attempt = Attempt(cost=0.05, noise=0.0, begin=1)
    assert attempt.run(1500) == 5
    assert attempt.taken[:1000] == list(range(1, 1001))
