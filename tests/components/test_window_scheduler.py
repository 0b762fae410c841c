"""Windows and intervals: planned, measured, paid for."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.capture.copier import Flight
from ftckpt.config import Config
from ftckpt.events import Events
from ftckpt.schedule.cost import CYCLE, NEAR, CostMeter, IntervalRequest, shortest_interval
from ftckpt.schedule.interval_control import AutoInterval
from ftckpt.schedule.window_scheduler import WindowScheduler
from tests.support.event_logs import read_events

# --- the window scheduler of one rank ---


PLACES = (("window", 2.0), ("forward", 1.0), ("window", 0.0), ("backward", 2.0), ("tail", 1.0), ("fence", 0.0))
MB = 1_000_000


class Clock:
    """Time passes as a test sets it; a device has reached ``reached``."""

    device = torch.device("cpu")

    def __init__(self, on_device: bool = False) -> None:
        self.on_device = on_device
        self.now, self.reached = 0.0, float("inf")

    def mark(self) -> float:
        return self.now

    def provide(self, moments: int) -> None: ...

    def secs(self, begin: float, end: float) -> float | None:
        return None if max(begin, end) > self.reached else end - begin


class Rank:
    """Drives a pacer through iterations of six seconds."""

    def __init__(self, folder: Path, clock: Clock | None = None, **settings: Any) -> None:
        settings = {"interval": 1, **settings}
        self.clock = clock or Clock()
        self.folder = folder
        self.events = Events(folder, 0)
        self.pacer = WindowScheduler(Config(**settings), self.clock, self.events, {"pp": 1})
        self.number = 0
        self.pacer.boundary()

    def iterate(
        self,
        copies: tuple[tuple[float, float, int], ...] = ((0.5, 1.5, 2 * MB),),
        scale: float = 1.0,
        fence: float = 0.0,
    ) -> None:
        """One iteration concurrent with these copies, up to and with its last boundary."""
        self.number += 1
        base = self.pacer.begin(10 * MB, MB)
        flight = Flight([], torch.zeros(0, dtype=torch.uint8), lambda: None, base)
        flight.timed = list(copies)
        flight.end()
        self.pacer.follow(flight, self.number)
        self.pacer.enter("start")
        for kind, secs in PLACES:
            self.pacer.enter(kind)
            self.clock.now += secs * scale if kind != "fence" else fence
        self.pacer.enter("optimizer")
        self.pacer.enter("fence")
        self.pacer.boundary()
        self.pacer.learn()

    def told(self, name: str) -> list[dict[str, Any]]:
        return read_events(self.folder, name)


def test_windows_are_planned_once_they_were_measured(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    plans = []
    for _ in range(6):
        rank.iterate()
        rank.pacer.begin(10 * MB, MB)
        plans.append(len(rank.told("planned")))
    assert plans == [0, 0, 0, 1, 1, 1]
    (planned,) = rank.told("planned")
    assert planned["iteration_secs"] == 6.0 and planned["window_capacity_bytes"] == 6 * MB
    assert planned["bytes_per_sec"] == 2 * MB
    copied = rank.told("copied")
    assert len(copied) == 6
    assert copied[-1]["moved_bytes"] == {"window": 2 * MB} and copied[-1]["share_in_windows"] == 1.0
    assert copied[-1]["window_capacity_bytes"] == 6 * MB


def test_the_plan_is_made_anew_when_windows_have_moved(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    for _ in range(10):
        rank.iterate()
    for _ in range(10):
        rank.iterate(scale=1.05)
    assert len(rank.told("planned")) == 1, "0.05 of the iteration is within the share"
    for _ in range(10):
        rank.iterate(scale=1.5)
    first, second = rank.told("planned")
    assert second["moved_share"] > 0.2
    assert second["window_capacity_bytes"] > first["window_capacity_bytes"]


def test_what_a_device_has_not_come_to_is_learned_later_and_in_order(tmp_path: Path) -> None:
    rank = Rank(tmp_path, Clock(on_device=True))
    rank.clock.reached = 3.0
    rank.iterate()
    rank.iterate()
    assert not rank.told("copied")
    rank.clock.reached = 20.0
    rank.iterate()
    assert [event["iteration"] for event in rank.told("copied")] == [1, 2, 3]
    rank.clock.reached = 0.0
    for _ in range(9):
        rank.iterate()
    rank.clock.reached = float("inf")
    rank.iterate()
    assert [event["iteration"] for event in rank.told("copied")][3:] == list(range(6, 14)), "the oldest are given up"


def test_a_dear_fence_stretches_the_interval_then_lets_go(tmp_path: Path) -> None:
    rank = Rank(tmp_path, overhead_budget=0.1)
    slow = ((0.5, 8.0, 10 * MB),)
    for _ in range(5):
        rank.iterate(slow, fence=2.0)
    assert rank.pacer.intervals.stretch == 3, "a stall of a quarter, at most a tenth of the time"
    for _ in range(20):
        rank.iterate(slow, fence=2.0)
    assert rank.pacer.intervals.stretch == 3
    for _ in range(10):
        rank.iterate()
    assert rank.pacer.intervals.stretch == 1


class Auto(Rank):
    """Snapshots each ``spacing`` iterations of six seconds, which take ``cost`` seconds longer with one."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, interval="auto", **settings)
        self.before_each_snapshot: Callable[[], None] = lambda: None

    def live(self, snapshots: int, cost: float, spacing: int = 6) -> int:
        """The request after them."""
        for number in range(snapshots * spacing):
            if number % spacing == 0:
                self.before_each_snapshot()
                self.iterate(scale=1 + cost / 6)
            else:
                self.pacer.enter("forward")
                self.clock.now += 6.0
                self.pacer.boundary()
                self.pacer.learn()
        return self.pacer.intervals.request.stretch


@pytest.mark.parametrize(("cost", "stretch"), [(0.0, 1), (0.5, 1), (1.3, 3), (60.0, 100)])
def test_auto_wishes_for_the_shortest_interval_whose_whole_cost_keeps_the_budget(
    cost: float, stretch: int, tmp_path: Path
) -> None:
    rank = Auto(tmp_path, overhead_budget=0.1)
    assert rank.live(26, cost) == stretch
    assert rank.pacer.intervals.request.iteration_secs == 6.0
    if stretch > 1:
        assert rank.pacer.intervals.request.cost == pytest.approx(cost / 6)


def test_auto_goes_on_from_what_an_earlier_attempt_has_found(tmp_path: Path) -> None:
    rank = Auto(tmp_path, overhead_budget=0.1)
    rank.pacer.intervals.resume(7)
    assert rank.pacer.intervals.request == IntervalRequest(7, -1.0)
    assert rank.live(26, 4.0, spacing=7) == 7 and rank.pacer.intervals.request.cost == pytest.approx(4 / 6)
    assert rank.live(30, 0.0, spacing=7) == 1


def test_a_dear_fence_alone_does_not_stretch_auto(tmp_path: Path) -> None:
    """It is a part of the whole cost."""
    rank = Auto(tmp_path, overhead_budget=0.1)
    rank.pacer.intervals.resume(1)
    for _ in range(15):
        rank.iterate(((0.5, 8.0, 10 * MB),), fence=2.0)
    assert rank.pacer.intervals.stretch == 1


# --- the interval that a job settles at, by lengths of iterations as they are ---


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


# --- the cost of snapshots, from the lengths of iterations near them and far from them ---


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
