"""The benchmark of the limits runs, and its goals can be missed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import limits

pytestmark = pytest.mark.multiproc


def test_small_sizes(arena_root: Path) -> None:
    rows = limits.measure(limits.QUICK, arena_root)
    assert [row["mib"] for row in rows] == [8, 32] and not list(arena_root.iterdir())
    assert all(len(row["copy"]) == len(row["plain"]) == limits.QUICK.snapshots for row in rows)
    found = limits.found(rows)
    assert all(found[name] > 0 for name in ("copy_secs", "copy_limit_secs", "restore_limit_secs"))


def test_what_a_gib_takes_is_what_the_larger_state_takes_more() -> None:
    small = {"mib": 512, "copy": [0.1], "plain": [0.1], "verified": [0.1], "restore": [0.15]}
    large = {"mib": 1024, "copy": [0.21], "plain": [0.2], "verified": [0.2], "restore": [0.25]}
    found = limits.found([small, large])
    assert found["restore_secs"] == pytest.approx(0.2) and found["restore_fixed_secs"] == pytest.approx(0.05)
    assert limits.missed(found) == []
    assert "restore: 1.50 times" in limits.missed({**found, "restore_secs": 0.3})[0]
    assert "copy: 1.20 times" in limits.missed({**found, "copy_secs": 0.24})[0]
