"""The cost of snapshots, from the lengths of iterations near them and far from them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.schedule.cost import CYCLE, NEAR, CostMeter, shortest_interval


def lived(
    spacing: int,
    snapshots: int,
    costs: tuple[float, ...] = (0.3,),
    noise: float = 0.0,
    meter: CostMeter | None = None,
) -> CostMeter:
    """Iterations of a second; the one ``place`` iterations after a snapshot takes ``costs[place]`` longer."""
    dice, meter = random.Random(1), meter or CostMeter()
    for number in range(5 + spacing * snapshots + 1):
        place = (number - 5) % spacing
        cost = costs[place] if place < len(costs) else 0.0
        meter.add(place, 1.0 + cost + dice.gauss(0, noise), flushing=False)
    return meter


@pytest.mark.parametrize("spacing", [CYCLE, 7, 40])
def test_all_that_is_longer_near_a_snapshot_is_its_cost(spacing: int) -> None:
    cost = lived(spacing, 24, (0.3, 0.1, 0.05)).cost
    assert cost is not None and cost.share == pytest.approx(0.45) and cost.error < 1e-9


def test_spacings_without_an_iteration_far_from_snapshots_show_nothing() -> None:
    assert lived(CYCLE - 1, 50).cost is None
    assert lived(1, 50).cost is None


def test_a_cost_is_known_from_the_8th_snapshot_on_and_can_be_forgotten() -> None:
    assert lived(CYCLE, 7).cost is None
    meter = lived(CYCLE, 8)
    assert meter.cost is not None and meter.num_snapshots == 8 and not meter.is_full
    meter.forget_cost()
    assert meter.cost is None
    assert lived(CYCLE, 64).is_full


def test_an_iteration_that_was_not_measured_spoils_its_cycle_alone() -> None:
    meter = CostMeter()
    for number in range(5 + 8 * 26 + 1):
        place = (number - 5) % 8
        if (number - 5) // 8 == 3 and place == 1:
            continue
        meter.add(place, 1.2 if place < NEAR else 1.0, flushing=False)
    assert meter.cost is not None and meter.cost.share == pytest.approx(0.6)


def test_the_first_iterations_say_nothing() -> None:
    meter = CostMeter()
    for _ in range(5):
        assert not meter.add(1, 60.0, flushing=False)
    assert meter.iteration_secs == 0.0
    for _ in range(5):
        meter.add(1, 1.0, flushing=False)
    assert meter.iteration_secs == 1.0


@pytest.mark.parametrize("near", [False, True])
def test_what_a_flush_slows_down_is_told_among_iterations_of_one_kind(near: bool) -> None:
    meter = CostMeter()
    for number in range(205):
        beside = number % 100 > 50
        place = 0 if near else 1 + number % 3
        meter.add(place, 1.1 if beside else 1.0, beside)
        for _ in range(0 if near else 2):
            meter.add(0, 5.0, beside)  # dear snapshots, which are as dear beside a flush
    assert meter.flush_share == pytest.approx(0.1)


@given(st.floats(1e-6, 1e3), st.floats(1e-4, 1.0))
def test_the_shortest_interval_keeps_the_budget_and_a_shorter_one_does_not(cost: float, budget: float) -> None:
    interval = shortest_interval(cost, budget, 1 << 40)
    assert cost / interval <= budget * (1 + 1e-9)
    assert interval == 1 or cost / (interval - 1) > budget * (1 - 1e-9)
