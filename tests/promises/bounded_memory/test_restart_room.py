"""A restart in another layout on nodes that are nearly full: what is refused cannot be done, and what is not can."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftckpt.memory.directory import end_smp, list_arenas
from ftckpt.memory.ledger import Ledger, size_of
from ftckpt.memory.locks import holder_of
from ftckpt.session.protection import Protection
from tests.promises.bit_exact.test_restart_layout import (
    LAST,
    OLD,
    Attempt,
    Layout,
    broken,
    events,
    restarted,
    train,
    train_until_protected,
)
from tests.support.mounting import leave_free, tmpfs, used
from tests.support.pool import run_ranks
from tests.support.waiting import until

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

WIDE = 48 << 10
MANY = Layout(tp=2, dp=2, nodes=("n0", "n0", "n0", "n1"), width=2 * WIDE)
FEW = Layout(dp=2, nodes=("n0", "n1"), width=2 * WIDE)
OLD, SHRUNK = replace(OLD, width=WIDE), Layout(tp=2, nodes=("n0", "n0"), width=WIDE)
SLACK = 128 << 10
"""Memory for control blocks, files of checks and the log of the SMP."""


@pytest.fixture
def node(arena_root: Path) -> Iterator[Path]:
    """The directory of n0, on a tmpfs of its own."""
    with tmpfs(arena_root / "ftckpt-test" / "n0") as path:
        try:
            yield path
        finally:
            for name in ("n0", "n1"):
                end_smp(arena_root / "ftckpt-test" / name, 10.0)


@pytest.fixture
def plan(settings: dict[str, Any]) -> dict[str, Any]:
    common = {"chunk_size": "64KiB", "objects_size": "1MiB", "schedule": "thread", "on_error": "raise"}
    return settings | common | {"protect": "peer", "layouts": "tp2dp2,dp2,tp2dp1"}


def start_full(rank: int, world_size: int, attempt: Attempt, node: Path, short: bool) -> Any:
    """As ``train_until_protected``. When the memory for parity is checked, n0 has just enough left for the time after
    old arenas are deleted, or a page too little; then as ``train``."""
    check, asked = Protection._require_room, list[bool]()

    def squeezed(self: Protection, mine: Ledger, coming_bytes: int, node_dir: Path, lacking: bool) -> None:
        asked.append(lacking)
        if node_dir == node and len(asked) == 1:
            unmapped = lambda: used(node) <= sum(map(size_of, node.rglob("*")))  # noqa: E731
            until(unmapped, "the SMP unmaps what was freed", secs=30)
            later = max(0, mine.later_bytes)
            assert later + SLACK < mine.now_bytes + coming_bytes and (later >= 4096 or not short)
            leave_free(node, later - 4096 if short else later + SLACK)
            old = [path for path in list_arenas(node) if path.name not in _written(node)]
            assert sum(size_of(file) for path in old for file in path.glob("[sp]*")) > 0
        check(self, mine, coming_bytes, node_dir, lacking)

    Protection._require_room = squeezed  # type: ignore[method-assign]
    return (train if short else train_until_protected)(rank, world_size, attempt)


def _written(node: Path) -> set[str]:
    return {path.name for path in list_arenas(node) if holder_of(path / "lock") is not None}


@pytest.mark.slow
def test_parity_that_fits_only_in_place_of_the_old_one_waits(
    node: Path, plan: dict[str, Any], rarely: dict[str, Any]
) -> None:
    """It is logged; old arenas are deleted once a snapshot is committed: the checked sum is enough."""
    run_ranks(train_until_protected, MANY.size, Attempt(MANY, settings=rarely | {"slots": 3}))
    before = len(events(plan, "protected"))
    run_ranks(start_full, FEW.size, Attempt(FEW, settings=plan | {"slots": 3, "on_error": "continue"}), node, False)
    (waits,) = events(plan, "protection_waits")
    assert f"({waits['need_bytes']} bytes)" in waits["reason"] and waits["rank"] == 0
    assert len(events(plan, "protected")) > before
    assert not events(plan, "turned_off") and not events(plan, "snapshot_error")
    assert events(plan, "not_protected"), "there was room all the same: this test shows nothing"
    (arena,) = list_arenas(node)
    assert len(list(arena.glob("slot*"))) == 3


@pytest.mark.slow
def test_parity_that_will_never_fit_is_said_and_the_job_goes_on(
    node: Path, plan: dict[str, Any], rarely: dict[str, Any]
) -> None:
    """A page is lacking; parity of old arenas is not reclaimed for that of new ones as long as slots need it."""
    run_ranks(train_until_protected, MANY.size, Attempt(MANY, settings=rarely | {"slots": 3}))
    attempt = Attempt(FEW, LAST + 20, plan | {"slots": 4, "on_error": "continue"})
    results = run_ranks(start_full, FEW.size, attempt, node, True)
    (newest,) = {event["iteration"] for event in events(plan, "loaded")}
    assert all(result.value.start == newest and not result.value.wrong for result in results)
    reason = next(one["reason"] for one in events(plan, "protection_waits") if one["rank"] == 0)
    assert "are free in file system" in reason and not events(plan, "turned_off")


@pytest.fixture
def rarely(plan: dict[str, Any]) -> dict[str, Any]:
    """Only the first snapshot is protected."""
    return plan | {"protect_interval": 1000}


def lose_a_node(root: Path, plan: Mapping[str, Any]) -> int:
    """The iteration that was protected when n1 was lost; all other slots hold newer ones."""
    run_ranks(train_until_protected, OLD.size, Attempt(OLD, settings=plan))
    end_smp(root / "ftckpt-test" / "n1", 10.0)
    shutil.rmtree(root / "ftckpt-test" / "n1")
    (protected,) = {event["iteration"] for event in events(plan, "protected")}
    return int(protected)


@pytest.mark.slow
def test_a_full_node_goes_on_alone(node: Path, rarely: dict[str, Any], arena_root: Path) -> None:
    protected = lose_a_node(arena_root, rarely)
    leave_free(node, SLACK)
    ended = restarted(Attempt(SHRUNK, protected + 3, rarely))
    assert {one.start for one in ended} == {protected}
    assert events(rarely, "spare_given_up") and events(rarely, "rebuilt")
    assert all(event["newer"] for event in events(rarely, "spare_given_up"))
    again = restarted(Attempt(SHRUNK, 0, rarely))
    (start,) = {one.start for one in again}
    assert protected < start <= protected + 3  # a snapshot is skipped while the memory for its slot is not back yet


KILLS = ("all is freed", "half rebuilt", "rebuilt", "objects there", "one new arena", "sealed by one rank")


@pytest.mark.slow
@pytest.mark.parametrize("point", KILLS)
def test_a_full_node_is_killed_when_it_goes_on_alone(
    point: str, node: Path, rarely: dict[str, Any], arena_root: Path
) -> None:
    """At each step of the way: the same snapshot comes back, on the same node that is as full."""
    protected = lose_a_node(arena_root, rarely)
    leave_free(node, SLACK)
    broken(Attempt(SHRUNK, protected + 3, rarely, kill=point))
    ended = restarted(Attempt(SHRUNK, protected + 3, rarely))
    assert {one.start for one in ended} == {protected}
