"""The rank that all others wait for is named, by what heartbeats of all nodes have."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ftckpt.memory.heartbeat import Heartbeat
from ftckpt.smp import stall
from ftckpt.smp.footprint import store_description
from ftckpt.smp.reports import rank_report
from ftckpt.smp.stall import Patience, StallWatch, late_rank

PATIENCE = Patience(5.0, 3.0, 0.4)


def one(rank: int, iteration: int, secs: float, step_secs: float | None, usual: float | None = 2.0) -> dict[str, Any]:
    return {"rank": rank, "iteration": iteration, "phase": "forward", "secs": secs, "step_secs": step_secs,
            "iteration_secs": usual}  # fmt: skip


def test_the_oldest_heartbeat_of_the_lowest_iteration_is_named() -> None:
    collective = {"a": [one(0, 7, 41.0, 41.2), one(1, 7, 41.1, 41.2)], "b": [one(2, 7, 41.2, 41.3)]}
    assert late_rank(collective, PATIENCE) == {"rank": 2, "node": "b", "phase": "forward", "behind": 0, "secs": 41.3}
    boundary = {"a": [one(0, 7, 1.0, 40.0), one(1, 8, 38.0, 38.0)], "b": [one(2, 8, 39.0, 38.0)]}
    late = late_rank(boundary, PATIENCE)
    assert late is not None and (late["rank"], late["behind"]) == (0, 1), "it saves, with heartbeats, between steps"


@pytest.mark.parametrize(
    ("ranks", "behind"),
    [
        ([], None),
        ([one(0, 7, 4.0, 4.9), one(1, 8, 0.1, 0.1)], None),  # under 5 s
        ([one(0, 7, 9.0, 14.0, 5.0)], None),  # under three iterations
        ([one(0, 0, 99.0, 99.0, None)], None),  # the first one may compile
        ([one(0, -1, 99.0, None, None), one(1, 3, 1.0, 1.0)], None),  # it has not begun
        ([one(0, 6, 0.1, 0.3), one(1, 8, 0.1, 0.1)], None),  # a device behind its host
        ([one(0, 6, 0.1, 0.5), one(1, 8, 0.1, 0.1)], 2),
    ],
)
def test_usual_steps_are_not_late(ranks: list[dict[str, Any]], behind: int | None) -> None:
    late = late_rank({"a": ranks}, PATIENCE)
    assert (late and late["behind"]) == behind


def test_a_late_step_is_reported_once(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "EVENT", Patience(0.05, 2.0, 0.05))
    monkeypatch.setattr(stall, "_LOOK_SECS", 0.0)
    node_dir = arena_root / "n1"
    node_dir.mkdir()
    store_description(node_dir, {"nodes": ["n1"]})
    ranks, watch = [Heartbeat.open(node_dir, place, 4 + place) for place in range(2)], StallWatch(node_dir)
    for iteration in (1, 2):
        for rank in ranks:
            rank.beat(iteration, "start")
        time.sleep(0.02)
    assert watch.look() is None
    ranks[1].beat(2, "forward")
    time.sleep(0.01)
    ranks[0].beat(2, "backward")
    [first, second] = map(rank_report, Heartbeat.open(node_dir, None).ranks())
    assert 0.02 <= first["iteration_secs"] < 5 and second["step_secs"] >= 0.03
    time.sleep(0.3)
    late = watch.look()
    assert late is not None and (late["rank"], late["node"], late["phase"]) == (5, "n1", "forward")
    assert late["secs"] >= 0.3 and watch.look() is None
    for rank in ranks:
        rank.beat(3, "pause")
    time.sleep(1.5)
    assert watch.look() is None, "all of them evaluate"
    ranks[0].beat(4, "step")
    time.sleep(1.6)
    late = watch.look()
    assert late is not None and (late["rank"], late["behind"]) == (5, 1), "one evaluates, the other waits"
