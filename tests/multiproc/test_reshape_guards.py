"""What is made sure of in every old arena before a job goes on in another layout."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from test_restart_layout import LAST, NEW, OLD, Attempt, Layout, broken, restarted

from ftckpt.store.arena import Arena
from tests.support.choosing import inventory_of
from tests.support.pool import RankFailure

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]


@pytest.fixture
def plan(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {
        "chunk_size": "64KiB",
        "objects_size": "1MiB",
        "schedule": "thread",
        "on_error": "raise",
        "slots": 2,
    }


def sealed(arena_root: Path) -> set[int]:
    """Iterations of which a slot is there, on any node."""
    folders = arena_root.glob("ftckpt-test/n*")
    reports = inventory_of(*folders).arenas
    assert len(reports) == OLD.size and not any(report.problems for report in reports)
    return {slot.snapshot.iteration for report in reports for slot in report.slots}


def test_slots_of_the_old_layout_that_are_newer_are_void(plan: dict[str, Any], arena_root: Path) -> None:
    """Else they would count again, beside what was trained since, when the one that is missing comes back."""
    restarted(Attempt(OLD, LAST, plan))
    (path,) = arena_root.glob("ftckpt-test/n1/tp1-pp0-dp1.*")
    with closing(Arena.open(path, writable=True)) as arena:
        for snapshot, slot in arena.snapshots().items():
            if snapshot.iteration == LAST:
                arena.control.void(slot)
    assert sealed(arena_root) == {LAST - 1, LAST}
    broken(Attempt(NEW, LAST + 1, plan, kill="objects there"))
    assert sealed(arena_root) == {LAST - 1}


def test_each_copy_of_a_buffer_is_compared(plan: dict[str, Any]) -> None:
    """All copies are read by the one rank that is left, and the one that differs is not the first."""
    restarted(Attempt(Layout(tp=2, dp=2), LAST, plan, spoil="buffer/bias"))
    differs = r"buffer/bias\S* does not have the same bits in tp0-pp0-dp0 and tp0-pp0-dp1"
    with pytest.raises(RankFailure, match=differs):
        restarted(Attempt(Layout(), LAST, plan))
