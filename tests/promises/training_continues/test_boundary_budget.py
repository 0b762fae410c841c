"""The processor time that a snapshot takes of the training thread at its boundary and its fence."""

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


@pytest.mark.parametrize(
    ("pieces", "most_ms"), by_default([(30, 1.6), (1000, 2.4), (3000, 6.0)], [(30, 1.6), (1000, 2.4)])
)
def test_a_boundary_takes_little_of_the_training_thread(pieces: int, most_ms: float, arena_root: Path) -> None:
    """Twice the time under other load, where each read of memory usage takes long; replicas are compared."""
    changes = {"overhead_budget": 0.0, "interval": 1}
    with settings_of(arena_root, changes) as settings:
        case = Case("plain, replicas", pieces)
        ranks = [one.value for one in run_ranks(measure, 2, case, settings, SNAPSHOTS, stand_in=False)]
    spent = [ms for rank in ranks for ms in rank["cpu_ms"][WARM_UP:]]
    assert len(spent) == 2 * SNAPSHOTS and max(rank["pieces"] for rank in ranks) >= 0.9 * pieces
    assert statistics.median(spent) <= most_ms
