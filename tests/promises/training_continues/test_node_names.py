"""Machines and containers under one node name: refused before anything is made, unless they share their memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import ConfigError
from tests.support import jobs, plain
from tests.support.mounting import may_mount, move_into_a_container
from tests.support.pool import run_ranks
from tests.support.waiting import meet

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]


def in_containers(
    rank: int, world_size: int, settings: dict[str, Any], shares_memory: bool
) -> tuple[int | None, str, list[str]]:
    """The result of a start: the iteration, an error, and the files in this container's memory."""
    arena = Path(settings["arena"])
    if rank > 0:
        move_into_a_container(arena, shares_memory)
    checkpointer, state = plain.make(rank, world_size, settings)
    try:
        start = checkpointer.restore()
    except ConfigError as error:
        # What each rank withdraws the last one of its machine has.
        meet(Path(settings["events"]).parent / "refused", world_size)
        return None, str(error), sorted(os.listdir(arena))
    plain.train(checkpointer, state, range(1, 4))
    checkpointer.close(remove=False)
    return start, "", []


@pytest.fixture(autouse=True)
def mounting() -> None:
    if not may_mount():
        pytest.skip("mounts of its own take root")


def test_two_machines_with_one_name_are_refused_and_leave_nothing(settings: dict[str, Any]) -> None:
    results = run_ranks(in_containers, 3, settings, False)
    for _, error, left in (result.value for result in results):
        for word in ("two machines", "'node'", "rank 0", "rank 1", "--ftckpt-node", "FTCKPT_NODE"):
            assert word in error
        assert left == []


def test_containers_of_one_machine_that_share_its_memory_are_one_node(settings: dict[str, Any]) -> None:
    for expected in (None, 3):
        assert {result.value[:2] for result in run_ranks(in_containers, 2, settings, True)} == {(expected, "")}
    assert not jobs.events(settings, "fallback")
