"""A node whose tmpfs is full: what is in memory is restored and flushed, and what does not fit waits and is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftckpt.persist.commit import committed
from ftckpt.persist.storage import open_storage
from ftckpt.store.directory import end_smp
from tests.support import jobs, plain
from tests.support.mounting import leave_free, tmpfs
from tests.support.pool import run_ranks
from tests.support.waiting import meet, until

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

RANKS = 3


@pytest.fixture
def full(settings: dict[str, Any], tmp_path: Path, arena_root: Path) -> Iterator[dict[str, Any]]:
    """A job on a small tmpfs, with storage."""
    (tmp_path / "storage").mkdir()
    with tmpfs(arena_root, "64m"):
        yield {
            **settings, "protect": "node", "chunk_mib": 0.0625, "objects_mib": 1, "persist": str(tmp_path / "storage"),
            "persist_interval": 1 << 30, "persist_timeout_secs": 30.0,
        }  # fmt: skip
        end_smp(arena_root / "ftckpt-test" / "node", 10.0)


def train(rank: int, world_size: int, settings: dict[str, Any], until_iteration: int, ends: bool) -> Any:
    """Returns the iteration from which it began, and a value of what was restored."""
    checkpointer, state = plain.make(rank, world_size, settings)
    start = checkpointer.restore() or 0
    value = float(state.row[0])
    if not ends:
        assert checkpointer.has_smp(30.0)
    for iteration in range(start + 1, until_iteration + 1):
        plain.iterate(checkpointer, state, iteration)
    if not ends:
        until(lambda: checkpointer.whole is not None)
        meet(Path(settings["events"]).parent / f"trained{until_iteration}", world_size)
        plain.die()
    checkpointer.close()
    return start, value


def test_a_restart_on_a_full_tmpfs(full: dict[str, Any], arena_root: Path) -> None:
    run_ranks(train, RANKS, full, 6, False, expect_failures=True)
    end_smp(arena_root / "ftckpt-test" / "node", 10.0)
    leave_free(arena_root, 0)
    results = run_ranks(train, RANKS, full, 12, True)
    print([r.value for r in results])
    print([e for e in jobs.events(full, "smp_error")])
    assert committed(open_storage(full["persist"])) == [12]
