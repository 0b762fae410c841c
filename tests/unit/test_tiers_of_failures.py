"""What failures cost in the model, and that the intervals which it names are the best ones."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.model.tiers import (
    JOB,
    KINDS,
    NODE,
    PROCESS,
    Tier,
    mtbf_secs,
    shortest_interval,
    storage_interval_secs,
    storage_mtbf_secs,
)

COSTS = st.floats(1e-3, 1e4)
MTBFS = st.floats(60.0, 1e8)


@given(COSTS, MTBFS, st.floats(0, 1e4), st.floats(0, 1e4))
def test_no_other_interval_wastes_less(cost: float, mtbf: float, late: float, restart: float) -> None:
    """By brute force: from a thousandth of the best to a thousand times that."""
    tier = Tier(mtbf, cost, late, restart)
    best = tier.best_secs()
    others = [best * 10 ** (step / 100) for step in range(-300, 301) if step]
    assert tier.waste(best).total <= min(tier.waste(other).total for other in others) * (1 + 1e-9)


@pytest.mark.parametrize("mtbf", [3600.0, 1e6])
def test_small_costs_come_to_youngs_formula_and_large_ones_to_dalys(mtbf: float) -> None:
    young = math.sqrt(2 * 1e-3 * mtbf)
    assert Tier(mtbf, 1e-3).best_secs() == pytest.approx(young, rel=1e-3)
    cost = mtbf / 10
    root = math.sqrt(cost / (2 * mtbf))
    daly = math.sqrt(2 * cost * mtbf) * (1 + root / 3 + root * root / 9) - cost  # equation 37 of his
    assert Tier(mtbf, cost).best_secs() == pytest.approx(daly, rel=1e-3)


def played(tier: Tier, interval: float, seed: int) -> float:
    """The share of time beyond training, of a long job that is played through failure by failure."""
    dice, spent, done, saved = random.Random(seed), 0.0, 0.0, 0
    fails = dice.expovariate(1 / tier.mtbf_secs)
    while saved < 20_000:
        period = interval + tier.cost_secs
        if spent + period <= fails:
            spent, saved = spent + period, saved + 1
            continue
        spent = fails
        # Late work is done again like a restart, and both may fail, too.
        again = tier.restart_secs + tier.late_secs
        while True:
            fails = spent + dice.expovariate(1 / tier.mtbf_secs)
            if spent + again <= fails:
                break
            spent = fails
        spent += again
    done = saved * interval
    return spent / done - 1


@pytest.mark.parametrize(("interval", "restart"), [(100.0, 0.0), (300.0, 60.0), (900.0, 200.0)])
def test_the_waste_is_that_of_a_job_that_is_played_through(interval: float, restart: float) -> None:
    tier = Tier(1000.0, 5.0, restart / 2, restart / 2)
    mean = sum(played(tier, interval, seed) for seed in range(3)) / 3
    assert tier.waste(interval).total == pytest.approx(mean, rel=0.05)


def test_overhead_and_loss_are_told_apart() -> None:
    waste = Tier(1e6, 1.0, late_secs=50.0).waste(100.0)
    assert waste.overhead == 0.01 and waste.total == waste.overhead + waste.lost
    assert waste.lost == pytest.approx((50 + 50 + 1 / 2) / 1e6, rel=0.05), "half an interval, and what it is late by"


def test_what_never_gets_on_is_infinite_waste_and_no_error() -> None:
    assert Tier(1.0, 1.0).waste(1e6).total == math.inf
    assert Tier(1.0, 1.0, restart_secs=1e6).waste(1.0).total == math.inf


@given(st.floats(1e-6, 1e3), st.floats(1e-4, 1.0))
def test_the_shortest_interval_keeps_the_budget_and_a_shorter_one_does_not(cost: float, budget: float) -> None:
    interval = shortest_interval(cost, budget, 1 << 40)
    assert cost / interval <= budget * (1 + 1e-9)
    assert interval == 1 or cost / (interval - 1) > budget * (1 - 1e-9)


def test_a_budget_next_to_nothing_is_no_overflow() -> None:
    assert shortest_interval(1.0, 5e-324, 1000) == 1000


def test_storage_rests_as_long_as_it_works() -> None:
    assert storage_interval_secs(Tier(1e6, 0.0, late_secs=70.0)) == 140.0
    dear = Tier(1e6, 100.0, late_secs=70.0)
    assert storage_interval_secs(dear) == dear.best_secs() > 1e4


def test_rates_follow_the_number_of_nodes_unless_they_are_given() -> None:
    """Of 1000 nodes 6.5 end a job each day, by both kinds together."""
    rates = mtbf_secs({}, 1000)
    assert tuple(rates) == KINDS
    assert 86400 / rates[PROCESS] + 86400 / rates[NODE] == pytest.approx(6.5)
    assert rates[JOB] == 7 * 86400 == mtbf_secs({}, 1)[JOB]
    assert mtbf_secs({NODE: 5.0}, 1000) == {**rates, NODE: 18000.0}


def test_storage_answers_nodes_where_memory_does_not() -> None:
    rates = mtbf_secs({NODE: 20.0, JOB: 30.0}, 4)
    assert storage_mtbf_secs(rates, survives_nodes=True) == 30 * 3600
    assert storage_mtbf_secs(rates, survives_nodes=False) == pytest.approx(12 * 3600)
