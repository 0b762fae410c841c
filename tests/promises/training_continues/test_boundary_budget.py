"""What a snapshot takes of the training thread at its boundary and its fence, in processor time."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from benchmarks.boundary import settings_of
from benchmarks.boundary_jobs import WARM_UP, Case, measure
from tests.support.pool import run_ranks
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc

SNAPSHOTS = 30
"""That count: a median of so many is steady on a busy machine."""
FIXED_MS, LOOKS = 1.5, 3.5
"""The budget: a fixed part, and reads of every tensor's version counter. A boundary takes 0.8 ms and three reads."""


@pytest.mark.parametrize("pieces", by_default([30, 1000, 3000], [30, 1000]))
def test_a_boundary_takes_little_of_the_training_thread(pieces: int, arena_root: Path) -> None:
    """Replicas are compared with each snapshot. Beside other load the unit, a read of each tensor, grows, too."""
    changes = {"overhead_budget": 0.0, "interval": 1}
    with settings_of(arena_root, changes) as settings:
        case = Case("plain, replicas", pieces)
        ranks = [one.value for one in run_ranks(measure, 2, case, settings, SNAPSHOTS, stand_in=False)]
    spent = [ms for rank in ranks for ms in rank["cpu_ms"][WARM_UP:]]
    looks = [ms for rank in ranks for ms in rank["look_ms"]]
    assert len(spent) == 2 * SNAPSHOTS and max(rank["pieces"] for rank in ranks) >= 0.9 * pieces
    assert statistics.median(spent) <= FIXED_MS + LOOKS * statistics.median(looks)
