"""Scalars for the writers that Megatron-LM has opened: at its interval, on the rank that has them, and no trouble."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from ftckpt.megatron.charts import Charts
from ftckpt.memory.heartbeat import HeartbeatGauge
from ftckpt.model.snapshot import SnapshotId
from ftckpt.session.checkpointer import Checkpointer
from ftckpt.session.counters import RankNumbers


class Writers:
    """Both of ``megatron.training.global_vars``, as far as they are called."""

    def __init__(self) -> None:
        self.board: list[tuple[str, float, int]] = []
        self.wandb: list[tuple[dict[str, float], int]] = []
        self.full = False

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        if self.full:
            raise OSError("No space left on device")
        self.board.append((name, value, iteration))

    def log(self, scalars: dict[str, float], iteration: int) -> None:
        self.wandb.append((scalars, iteration))


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> Writers:
    made, module = Writers(), ModuleType("megatron.training.global_vars")
    module.get_tensorboard_writer = module.get_wandb_writer = lambda: made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def checkpointer() -> Checkpointer:
    return cast(Checkpointer, SimpleNamespace(numbers=lambda who: {"blocked_ms": 1.5, "skipped": 0.0}))


def draw(charts: Charts, iterations: int) -> None:
    for iteration in range(1, iterations + 1):
        charts.draw(checkpointer(), iteration)


def test_both_writers_have_them_at_the_interval_of_megatron(writers: Writers) -> None:
    draw(Charts(SimpleNamespace(tensorboard_log_interval=3)), 6)
    assert writers.board == [
        ("ftckpt/blocked_ms", 1.5, 3), ("ftckpt/skipped", 0.0, 3), ("ftckpt/blocked_ms", 1.5, 6),
        ("ftckpt/skipped", 0.0, 6),
    ]  # fmt: skip
    assert [iteration for _, iteration in writers.wandb] == [3, 6]


def test_a_writer_that_fails_is_left_alone(writers: Writers, caplog: pytest.LogCaptureFixture) -> None:
    writers.full = True
    draw(Charts(SimpleNamespace(tensorboard_log_interval=1)), 5)
    assert caplog.text.count("No space left on device") == 1


def test_numbers_are_of_the_time_since_they_were_asked_for() -> None:
    numbers = RankNumbers()
    for _ in range(4):
        numbers.took(1000)
        numbers.bounded(0.002)
        numbers.fenced(0.001)
    numbers.counts[HeartbeatGauge.SKIPPED] += 1
    numbers.fenced(0.0)  # of a step that no snapshot was taken before
    first = numbers.report("", 20, SnapshotId(b"l" * 16, 18), None)
    assert first["blocked_ms"] == pytest.approx(3.0) and first["blocked_ms_most"] == pytest.approx(3.0)
    assert (first["snapshots"], first["skipped"], first["failed"]) == (4, 1, 0)
    assert first["whole_age"] == 2 and "protected_age" not in first
    assert first["copied_bytes_per_sec"] > 0
    numbers.took(1000)
    numbers.bounded(0.5)
    for _ in range(3):
        numbers.failed(9)  # the fence, its guard, and the boundary
    second = numbers.report("", 21, None, SnapshotId(b"l" * 16, 10))
    assert (second["snapshots"], second["skipped"]) == (1, 0) and second["blocked_ms_most"] == pytest.approx(500)
    assert second["protected_age"] == 11 and "whole_age" not in second and second["failed"] == 1
    assert numbers.report("charts", 21, None, None)["snapshots"] == 0, "who comes later begins with what was told"
    numbers.took(1)
    assert [numbers.report(who, 21, None, None)["snapshots"] for who in ("charts", "")] == [1, 1]
