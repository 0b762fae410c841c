"""Kills that follow each other, or come with other faults; test_fault_table.py has single ones."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import jobs
from tests.support.fault_rows import KILLS
from tests.support.faults import Fault
from tests.support.tiers import by_default

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

LAYOUT = ["--pp", "2"]
RANKS = 4
UNTIL = 8
AT = 5


@cache
def reference() -> list[jobs.Outcome]:
    return jobs.outcomes(RANKS, jobs.Run(LAYOUT, until=UNTIL))


def attempt(settings: dict[str, Any], *faults: Fault, until: int = UNTIL, **more: Any) -> list[Any]:
    results = jobs.broken(RANKS, jobs.Run(LAYOUT, until, settings, faults=faults, **more))
    for fault in faults:
        ranks = range(RANKS) if fault.rank == "all" else [fault.rank]
        assert all(fault.fired(rank) for rank in ranks), f"{fault} did not fire"
    return results


def resume(settings: dict[str, Any]) -> int:
    resumed = jobs.outcomes(RANKS, jobs.Run(LAYOUT, UNTIL, settings))
    assert not list(Path(settings["arena"]).iterdir()), "an ended job left something behind"
    return jobs.assert_continues(reference(), resumed)


@pytest.mark.parametrize("seed", by_default(range(4), []))
def test_killed_at_a_random_instant(seed: int, settings: dict[str, Any], tmp_path: Path) -> None:
    dice = random.Random(seed)
    point = dice.choice(["forward", "before_step", "boundary", "copy", "begin"])
    fault = Fault(dice.randrange(RANKS), dice.randint(2, UNTIL - 1), point, tmp_path / "fired", "kill")
    results = attempt(settings, fault)
    assert jobs.killed(results[int(fault.rank)])
    assert resume(settings) in {max(0, fault.iteration + offset) for offset in KILLS[point]}


@pytest.mark.parametrize("point", by_default(["void", "load"], ["load"]))
def test_killed_while_restoring(point: str, settings: dict[str, Any], tmp_path: Path) -> None:
    attempt(settings, Fault(1, AT, "before_seal", tmp_path / "first", "kill"))
    victim = 0 if point == "void" else 1
    results = attempt(settings, Fault(victim, AT - 1, point, tmp_path / "second", "kill"))
    assert jobs.killed(results[victim])
    assert resume(settings) == AT - 1


def test_lineages_never_mix(settings: dict[str, Any], tmp_path: Path) -> None:
    """Two attempts each seal the same iteration on some ranks only, the second with other bits."""
    attempt(settings, Fault(1, AT, "before_seal", tmp_path / "first", "kill"))
    attempt(settings, Fault(2, AT, "before_seal", tmp_path / "second", "kill"), perturb=True)
    assert resume(settings) == AT - 1


@pytest.mark.slow
def test_stalled_failing_and_killed_ranks_together(settings: dict[str, Any], tmp_path: Path) -> None:
    argv = ["--pp", "2", "--no-distributed-optimizer", "--overlap-grad-reduce"]
    faults = [
        Fault(0, 4, "fence", tmp_path / "stalled", "stall", secs=1.5),
        Fault(1, 4, "copy", tmp_path / "raised", "raise"),
        Fault(2, 6, "boundary", tmp_path / "killed", "kill"),  # whoever is there has passed all fences
    ]
    whole = jobs.outcomes(RANKS, jobs.Run(argv, UNTIL))
    jobs.broken(RANKS, jobs.Run(argv, UNTIL, settings, faults=faults))
    assert [fault.fired(int(fault.rank)) for fault in faults] == [True] * 3
    errors = jobs.events(settings, "snapshot_error")
    assert {event["rank"] for event in errors} == {1}, errors
    start = jobs.assert_continues(whole, jobs.outcomes(RANKS, jobs.Run(argv, UNTIL, settings)))
    assert start == 5


@pytest.mark.slow
def test_old_arenas_stay_until_a_new_snapshot_is_whole(settings: dict[str, Any], tmp_path: Path) -> None:
    """After nodes swapped, new arenas are empty: until they hold a snapshot the old ones have the only one."""
    here, there = ["a", "a", "b", "b"], ["b", "b", "a", "a"]
    attempt(settings, Fault("all", AT, "boundary", tmp_path / "first", "kill", secs=20), nodes=here)
    attempt(settings, Fault("all", AT, "boundary", tmp_path / "second", "kill", secs=20), nodes=there)
    resumed = jobs.outcomes(RANKS, jobs.Run(LAYOUT, UNTIL, settings, nodes=there))
    assert jobs.assert_continues(reference(), resumed) == AT - 1
    assert not list(Path(settings["arena"]).iterdir()), "old arenas were left behind"


def test_killed_before_anything_was_whole(settings: dict[str, Any], tmp_path: Path) -> None:
    attempt(settings, Fault(1, 1, "before_seal", tmp_path / "fired", "kill"))
    assert resume(settings) == 0
