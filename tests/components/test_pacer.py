"""The window scheduler of one rank: its measurements, plans and interval requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.capture.copier import Flight
from ftckpt.config import Config
from ftckpt.events import Events
from ftckpt.schedule.cost import IntervalRequest
from ftckpt.schedule.window_scheduler import WindowScheduler
from tests.support.event_logs import read_events

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
