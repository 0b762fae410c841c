"""The snapshot of a restart, where memory and storage have different ones."""

from __future__ import annotations

from pathlib import Path

from ftckpt.memory.inventory import Inventory
from ftckpt.parity.modes import Modes
from ftckpt.restore.forecast import forecast
from tests.support.choosing import inventory_of
from tests.support.errors import lacks
from tests.support.protected import Job, build


def found(arena_root: Path) -> Inventory:
    job = Job(arena_root, ("a", "b"), Modes())
    build(job, (4, 5), ())
    return inventory_of(job.node_dir("a"), job.node_dir("b"))


def test_storage_counts_where_it_is_newer(arena_root: Path) -> None:
    inventory = found(arena_root)
    assert (forecast(inventory, [3], lambda query: ()).source, forecast(inventory, [5], lambda query: ()).source) == (
        "memory", "memory",
    )  # fmt: skip
    newer = forecast(inventory, [6, 3], lambda query: ())
    assert (newer.iteration, newer.source, newer.rebuilt) == (6, "storage", {})


def test_storage_stands_in_for_what_memory_has_lost(arena_root: Path) -> None:
    one = Inventory(found(arena_root).arenas[:1])
    alone = forecast(one, [], lambda query: ())
    assert alone.iteration == -1 and not lacks(alone.problem, "dp1")
    stored = forecast(one, [3], lambda query: ())
    assert (stored.iteration, stored.source) == (3, "storage") and stored.passed_over == (alone.problem,)
