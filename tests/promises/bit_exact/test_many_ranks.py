"""Jobs of many ranks under a low limit of open files: they start, snapshot, protect and come back."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ftckpt.errors import LaunchError
from tests.support import jobs, plain
from tests.support.pool import run_ranks
from tests.support.waiting import meet

pytestmark = pytest.mark.multiproc

SMALL = {
    "protect": "node", "objects_size": "1MiB", "chunk_size": "64KiB", "start_timeout_secs": 200.0,
    "overhead_budget": 0.0,
    "protect_timeout_secs": 200.0,
}  # fmt: skip
NODES = {16: 4, 128: 8}
"""Number of nodes by the number of ranks."""


def join(rank: int, world_size: int, store: Path) -> None:
    """The job's own group, which on a device is none of gloo's, takes no connections either."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world_size), rank=rank, world_size=world_size)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def nodes(world_size: int) -> list[str]:
    return [f"node{rank * NODES[world_size] // world_size}" for rank in range(world_size)]


def protected_then_killed(rank: int, world_size: int, settings: dict[str, Any], limit: int) -> None:
    """Train until a snapshot is protected, leave what it took, and die."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit // 2, limit))
    join(rank, world_size, Path(settings["events"]).parent / "first")
    before, begin = descriptors(), time.monotonic()
    checkpointer, state = plain.make(rank, world_size, settings, nodes(world_size))
    made, iteration = descriptors() - before, 0
    assert checkpointer.restore() is None
    while checkpointer.protected is None or iteration < 3:
        iteration += 1
        plain.iterate(checkpointer, state, iteration)
        assert time.monotonic() - begin < SMALL["start_timeout_secs"]  # type: ignore[operator]
    seen = made, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    Path(settings["events"], f"seen{rank}").write_text(json.dumps(seen))
    meet(Path(settings["events"]).parent / "trained", world_size, 100.0)
    plain.die()


def restored_under(rank: int, world_size: int, settings: dict[str, Any], limit: int) -> Any:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit // 2, limit))
    join(rank, world_size, Path(settings["events"]).parent / "second")
    checkpointer, state = plain.make(rank, world_size, settings, nodes(world_size))
    made = descriptors()
    start = checkpointer.restore()
    opened = descriptors() - made
    plain.iterate(checkpointer, state, (start or 0) + 1)
    checkpointer.close()
    return start, state.row.unique().tolist(), opened


@pytest.mark.timeout(1500)
@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "limit"), [(16, 128), (128, 256)])
def test_many_ranks_under_a_low_limit_of_open_files(world_size: int, limit: int, settings: dict[str, Any]) -> None:
    """Gloo's full mesh of two groups takes twice as many descriptors in each rank as there are ranks, and 6 more."""
    settings |= SMALL
    options: dict[str, Any] = {"timeout_secs": 600.0, "init_process_group": False}
    run_ranks(protected_then_killed, world_size, settings, limit, expect_failures=True, grace_secs=20.0, **options)
    every = [json.loads(path.read_text()) for path in Path(settings["events"]).glob("seen*")]
    assert len(every) == world_size
    assert max(made for made, _ in every) < 30, "connections that nobody uses"
    assert limit // 2 < min(soft for _, soft in every) <= limit, "the soft limit is raised to what is needed"
    protected = max(event["iteration"] for event in jobs.events(settings, "protected"))
    results = [result.value for result in run_ranks(restored_under, world_size, settings, limit, **options)]
    start, opened = results[0][0], max(opened for *_, opened in results)
    assert start >= protected and [found for *found, _ in results] == [[start, [start + 1.0]]] * world_size
    # A partner on each other node and a ring's two; arenas stay open until training begins.
    assert opened < 30, "each rank needs what all ranks hold, but not a connection to each of them"


def refused(rank: int, world_size: int, settings: dict[str, Any]) -> str:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (90, 90))
    with pytest.raises(LaunchError) as error:
        plain.make(rank, world_size, settings)
    return str(error.value)


def test_a_limit_that_is_too_low_is_refused_by_name_on_all_ranks(settings: dict[str, Any]) -> None:
    texts = [result.value for result in run_ranks(refused, 16, {**settings, **SMALL})]
    assert len(set(texts)) == 1, "all ranks say the same, at once"
    assert texts[0].startswith("rank 1: ulimit -n: this process needs 1") and "hard limit is 90; raise" in texts[0]
