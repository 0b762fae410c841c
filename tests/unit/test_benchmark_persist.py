"""What the benchmark of persisting concludes from its rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from benchmarks import persist

ITERATION_SECS = 1.0


def rows(calls: dict[int, tuple[float, float]], longer: dict[int, float], count: int = 12) -> list[list[float]]:
    """An iteration each second from 100 on, with what blocked at its fence and at its boundary."""
    found, at = [], 100.0
    for iteration in range(1, count + 1):
        fence, boundary = calls.get(iteration, (0.001, 0.002))
        secs = ITERATION_SECS + longer.get(iteration, 0.0) + fence
        found.append([iteration, at, at + secs, fence, boundary])
        at += secs + boundary
    return found


def turn(system: str = "ftckpt") -> dict[str, Any]:
    """Two ranks; a first checkpoint that does not count, and one at iteration 6 that is durable in the 9th."""
    calls = {6: (0.001, 0.1), 7: (0.02, 0.002), 8: (0.001, 0.012)}
    slow = rows(calls, {7: 0.5, 8: 0.5, 9: 0.1})
    durable = slow[8][1] + 0.9
    checkpoints = [(3, slow[3][1] + 0.5), (6, durable)]
    loader = [(slow[1][1] + 0.1 * step, 0.01) for step in range(60)]
    loader += [(slow[7][1], 0.03)] * 99
    ranks = [{"rows": slow, "checkpoints": checkpoints, "nbytes": 5, "notes": {}}]
    ranks.append({**ranks[0], "rows": rows({}, {})})
    return {"system": system, "ranks": ranks, "loader": loader}


def test_what_a_checkpoint_costs() -> None:
    (one,) = persist.checkpoints_of(turn())
    assert one["asked"] == 6 and one["iterations_beside"] == 3
    # The boundary of 6, fences and boundaries of 7 to 10, of which 8, 9 and 10 have 3 ms each at any time.
    assert one["calls_secs"] == pytest.approx(0.1 + 0.022 + 0.013 + 2 * 0.003)
    assert one["blocked_secs"] == pytest.approx(one["calls_secs"] - 3 * 0.003)
    assert one["slower"] == pytest.approx(1.5)
    assert one["lost_secs"] == pytest.approx(one["blocked_secs"] + 1.1, abs=1e-3)
    assert one["loader_slower"] == pytest.approx(3)


def test_what_nobody_has_asked_for_is_not_quiet() -> None:
    doctored, expected = turn(), persist.checkpoints_of(turn())[0]["blocked_secs"]
    slow = doctored["ranks"][0]["rows"]
    for iteration in (5, 11, 12):
        slow[iteration - 1][3] = 0.5
    assert persist.checkpoints_of(doctored)[0]["blocked_secs"] < expected / 2
    committed = [{"iteration": 4, "time": slow[4][2]}, {"iteration": 10, "time": slow[11][2]}]
    doctored["ranks"][0]["notes"] = {"committed": committed}
    assert persist.checkpoints_of(doctored)[0]["blocked_secs"] == pytest.approx(expected)


def test_medians_are_over_all_turns() -> None:
    turns = [turn(), turn(), turn("torch.save")]
    found = persist.summary_of(turns)
    assert found["ftckpt"]["checkpoints"] == 2 and found["torch.save"]["checkpoints"] == 1
    assert found["ftckpt"]["blocked_secs"] == persist.checkpoints_of(turn())[0]["blocked_secs"]


def test_rates_are_of_what_counts() -> None:
    flushed = [{"bytes": 8, "secs": 8.0}, {"bytes": 8, "secs": 2.0}]
    turns = [turn(), turn("plain write")]
    turns[0]["ranks"][0]["notes"] = {"flushed": flushed}
    turns[1]["ranks"][0]["notes"] = {"write_secs": [9.0, 2.0]}
    assert persist.write_rates(turns, [1.0], 10) == {"plain, alone": 10.0, "flush": 4.0, "plain, beside": 5.0}


GOOD: dict[str, Any] = {
    "systems": {
        "off": {"blocked_secs": None}, "plain write": {"blocked_secs": 0.0}, "ftckpt": {"blocked_secs": 0.004},
        "torch.save": {"blocked_secs": 0.5}, "DCP, thread": {"blocked_secs": 0.1},
    },
    "rates": {"flush": 0.8, "plain, beside": 1.0, "plain, alone": 9.0},
}  # fmt: skip


def test_goals_that_are_reached_are_not_told() -> None:
    assert persist.verdict(**GOOD) == []


@pytest.mark.parametrize(
    "where, value, words",
    [
        (("systems", "torch.save", "blocked_secs"), 0.4, "blocked: 1.00% of what torch.save blocks"),
        (("systems", "DCP, thread", "blocked_secs"), 0.004, "blocked: 4.0 ms, DCP, thread 4.0 ms"),
        (("rates", "flush"), 0.79, "write rate: 79% of a plain write"),
    ],
)
def test_a_missed_goal_is_told(where: tuple[str, ...], value: float, words: str) -> None:
    doctored = copy.deepcopy(GOOD)
    place = doctored
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    (line,) = persist.verdict(**doctored)
    assert words in line
