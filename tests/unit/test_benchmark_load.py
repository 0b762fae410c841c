"""What the benchmark of loading concludes from its rows."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import load

SECS = {
    ("ftckpt", "memory"): 0.5, ("ftckpt", "parity"): 9.0, ("ftckpt", "disk"): 1.0, ("ftckpt", "nfs"): 6.0,
    ("DCP", "tmpfs"): 0.5, ("DCP", "disk"): 1.0, ("DCP", "nfs"): 6.0, ("plain read", "disk"): 0.1,
}  # fmt: skip


def rows(**changes: float) -> list[dict[str, Any]]:
    """Three repeats, of which the middle one counts."""
    given = SECS | {tuple(name.split("_")): secs for name, secs in changes.items()}
    return [
        {
            "framework": "plain", "layout": "same", "who": who, "source": source, "repeat": repeat,
            "secs": secs * factor / 2, "whole_secs": secs * factor,
        }
        for (who, source), secs in given.items()
        for repeat, factor in enumerate((1.0, 3.0, 0.1))
    ]  # fmt: skip


def test_medians_are_over_repeats() -> None:
    found = {(one["who"], one["source"]): one for one in load.medians(rows())}
    assert found.keys() == SECS.keys()
    assert found["ftckpt", "memory"]["whole_secs"] == 0.5 and found["ftckpt", "memory"]["secs"] == 0.25


def test_goals_that_are_reached_are_not_told() -> None:
    assert load.verdict(load.medians(rows())) == []


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"ftckpt_memory": 0.51, "ftckpt_nfs": 9.0, "DCP_nfs": 9.0}, ["memory: 0.51 s, DCP 0.50 s"]),
        ({"ftckpt_disk": 1.1}, ["disk: 1.10 s, DCP 1.00 s"]),
        ({"ftckpt_nfs": 6.1}, ["nfs: 6.10 s, DCP 6.00 s"]),
        ({"ftckpt_nfs": 5.5}, ["memory: 11.0 times faster than from nfs; the goal is 12"]),
    ],
)
def test_a_missed_goal_is_told(changes: dict[str, float], words: list[str]) -> None:
    found = load.verdict(load.medians(rows(**changes)))
    assert [line.removeprefix("plain, same layout, ") for line in found] == words


def test_without_a_limit_the_rest_counts() -> None:
    mine = [row for row in rows() if row["source"] != "nfs"]
    found = load.medians(mine)
    assert load.verdict(found) == []
    load.show(found)
