"""A node whose tmpfs is full: snapshots in memory are restored and flushed; new ones wait for memory."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import ftckpt.session.reminders
from ftckpt.memory.arena import Arena
from ftckpt.memory.directory import SMP_STATE_NAME, end_smp, list_arenas
from ftckpt.memory.heartbeat import Heartbeat, HeartbeatGauge
from ftckpt.persist.backend import open_storage
from tests.support import jobs, plain
from tests.support.mounting import leave_free, tmpfs
from tests.support.pool import run_ranks
from tests.support.storages import committed
from tests.support.waiting import meet, until

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

RANKS = 3
KILLED_AT = 6
UNTIL = 40


@pytest.fixture
def full(settings: dict[str, Any], tmp_path: Path, arena_root: Path) -> Iterator[dict[str, Any]]:
    """The settings of a job that was killed at iteration 6, with its SMP; since then other files fill its tmpfs."""
    (tmp_path / "storage").mkdir()
    node = arena_root / "ftckpt-test" / "node"
    settings |= {
        "protect": "node", "chunk_size": "64KiB", "objects_size": "1MiB", "persist": str(tmp_path / "storage"),
        "persist_interval": 1 << 30, "flush_secs": 60.0,
    }  # fmt: skip
    with tmpfs(arena_root, "64m"):
        run_ranks(train_then_die, RANKS, settings, expect_failures=True)
        end_smp(node, 10.0)
        # The SMP that begins now has no room for what it keeps for its successor.
        (node / SMP_STATE_NAME).unlink()
        leave_free(arena_root, 0)
        yield settings
        end_smp(node, 10.0)


def guarded(checkpointer: Any) -> bool:
    """Whether an SMP knows what it has to do."""
    return bool(checkpointer.rank.protection.smp_guards)


def train_then_die(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    checkpointer, state = plain.restarted(rank, world_size, settings)
    until(lambda: guarded(checkpointer), secs=30)
    plain.train(checkpointer, state, range(1, KILLED_AT + 1))
    meet(Path(settings["events"]).parent / "trained", world_size)
    plain.die()


def train(rank: int, world_size: int, settings: dict[str, Any], room: bool = False) -> tuple[int | None, float, bool]:
    """The iteration and value that this rank started with, and whether it logged in iteration 20 that it takes no
    snapshots. With ``room`` memory is free after that."""
    here = Path(settings["events"]).parent
    logging.getLogger("ftckpt").addHandler(logging.FileHandler(here / f"log{rank}"))
    ftckpt.session.reminders._REPEAT_SECS = 0.05
    checkpointer, state = plain.make(rank, world_size, settings)
    start, silent = checkpointer.restore(), False
    value = float(state.row[0])
    for iteration in range((start or 0) + 1, UNTIL + 1):
        plain.iterate(checkpointer, state, iteration)
        time.sleep(0.02)
        if iteration == 20:
            until(lambda: settings["protect"] == "none" or guarded(checkpointer), secs=30)
            silent = bool(
                Heartbeat.open(checkpointer.node_dir, None).ranks()[rank].counts[HeartbeatGauge.NO_SNAPSHOTS]
            )
            meet(here / "looked", world_size)
            if room and rank == 0:
                leave_free(Path(settings["arena"]), 32 << 20)
    checkpointer.close()
    return start, value, silent


def began(results: list[Any]) -> tuple[int, bool]:
    """The iteration and whether ranks logged that they take no snapshots, alike on all of them."""
    ((start, value, silent),) = {result.value for result in results}
    assert start in (KILLED_AT - 1, KILLED_AT) and value == start
    return start, silent


def test_a_job_goes_on_from_memory_and_its_end_is_flushed(full: dict[str, Any]) -> None:
    _, silent = began(run_ranks(train, RANKS, full))
    assert not silent and jobs.events(full, "protection_waits") and not jobs.events(full, "turned_off")
    assert committed(open_storage(full["persist"])) == [UNTIL]


@pytest.mark.parametrize("room", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_where_slots_have_no_room_the_job_says_so_again_and_again(
    room: bool, full: dict[str, Any], arena_root: Path, tmp_path: Path
) -> None:
    """The restored snapshot stays in memory; snapshots continue as soon as memory is free."""
    newest = free_all_but_one(arena_root / "ftckpt-test" / "node")
    leave_free(arena_root, 0)
    start, silent = began(run_ranks(train, RANKS, full, room))
    assert start == newest and silent
    assert not jobs.events(full, "turned_off")
    for rank in range(RANKS):
        lines = (tmp_path / f"log{rank}").read_text().splitlines()
        assert sum("no snapshots are taken: " in line for line in lines) > 1
    assert committed(open_storage(full["persist"])) == [UNTIL if room else newest]


def train_with_small_files(rank: int, world_size: int, settings: dict[str, Any]) -> Any:
    """Runs ``train`` where no file may be as large as a slot."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    return train(rank, world_size, settings)


def test_a_limit_of_file_sizes_is_named_again_and_again(settings: dict[str, Any], tmp_path: Path) -> None:
    """The limit of a login node (``ulimit -f``): such a job trains, and takes no snapshot at all."""
    settings |= {"protect": "none", "objects_size": "1MiB"}
    results = run_ranks(train_with_small_files, 2, settings)
    assert all(result.value[2] for result in results)
    for rank in range(2):
        lines = (tmp_path / f"log{rank}").read_text().splitlines()
        told = [line for line in lines if "no snapshots are taken: " in line]
        assert len(told) > 1 and all("ulimit -f" in line and str(1 << 20) in line for line in told)


def free_all_but_one(node: Path) -> int:
    """The newest iteration that all arenas hold, when all other slots have given back their memory."""
    held = []
    for path in list_arenas(node):
        with closing(Arena.open(path)) as arena:
            held.append(set(arena.snapshots()))
    newest = max(set.intersection(*held))
    for path in list_arenas(node):
        with closing(Arena.open(path, writable=True)) as arena:
            for slot in range(arena.control.slots):
                if slot != arena.find(newest):
                    arena.free(slot)
    return newest.iteration
