"""Ranks that lose each other while all of them live: stopped for long, or with connections that break."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ftckpt.persist.commit import committed
from ftckpt.persist.storage import open_storage
from tests.support import jobs, plain
from tests.support.pool import run_ranks
from tests.support.tiers import by_default
from tests.support.waiting import meet

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

RANKS = 3
DEADLINE_SECS = 4.0
STILL_SECS = 1.5 * DEADLINE_SECS
AT = 4
"""The iteration of the trouble: one with a proof, where there are any."""
UNTIL = 40


def descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


def disconnect(opened: set[int]) -> None:
    """As a network does that drops connections: both sides see them end."""
    for descriptor in opened:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
            end.getpeername()  # not of a listener: gloo ends a process that cannot accept
            end.shutdown(socket.SHUT_RDWR)


def stand_still(rank: int, here: Path) -> None:
    """Rank 1 is stopped until rank 0 has it go on; the others wait for it as training does, in a collective."""
    if rank == 1:
        (here / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 0:

        def wake() -> None:
            time.sleep(STILL_SECS)
            os.kill(int((here / "pid").read_text()), signal.SIGCONT)

        threading.Thread(target=wake, daemon=True).start()


def train(rank: int, world_size: int, settings: dict[str, Any], trouble: str, end: str) -> int | None:
    import torch.distributed as dist

    here = Path(settings["events"]).parent
    before = descriptors()
    checkpointer, state = plain.make(rank, world_size, settings)
    opened = descriptors() - before
    assert checkpointer.restore() is None
    until = AT + 1 if end == "close soon" else UNTIL
    for iteration in range(1, until + 1):
        checkpointer.fence()
        if iteration == AT and trouble == "stop":
            stand_still(rank, here)
        if iteration == AT and trouble == "disconnect" and rank == 1:
            disconnect(opened)
        dist.barrier()  # as gradients do
        if iteration == AT and trouble == "stop in a proof":
            stand_still(rank, here)
        state.advance(iteration, float(iteration))
        checkpointer.step(iteration)
        time.sleep(0.02)
    whole = checkpointer.whole
    if end == "die":
        meet(here / "trained", world_size)
        plain.die()
    checkpointer.close()
    return whole.iteration if whole is not None else None


def deadlines(settings: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {**settings, "start_timeout_secs": DEADLINE_SECS, "vote_secs": DEADLINE_SECS / 2, **others}


def test_a_rank_that_stands_still_for_longer_than_all_deadlines_ends_nothing(settings: dict[str, Any]) -> None:
    settings = deadlines(settings, replica_check_interval=0)
    results = run_ranks(train, RANKS, settings, "stop", "close")
    assert [result.value for result in results] == [UNTIL - 1] * RANKS
    assert not jobs.events(settings, "ranks_lost") and not jobs.events(settings, "turned_off")


@pytest.mark.parametrize("trouble", by_default(["disconnect", "stop in a proof"], ["disconnect"]))
def test_ranks_that_lose_each_other_find_together_and_a_restart_has_what_came_then(
    trouble: str, settings: dict[str, Any]
) -> None:
    """In a proof ranks wait for each other: they give that up."""
    settings = deadlines(settings, replica_check_interval=1000)
    results = run_ranks(train, RANKS, settings, trouble, "die", expect_failures=True)
    assert all(map(jobs.killed, results)), [result.error for result in results]
    for event in ("ranks_lost", "ranks_reunited"):
        assert {found["rank"] for found in jobs.events(settings, event)} == set(range(RANKS)), event
    assert len({found["iteration"] for found in jobs.events(settings, "ranks_reunited")}) == 1
    assert not jobs.events(settings, "turned_off")
    start = {result.value[0] for result in run_ranks(plain.restored, RANKS, settings)}
    assert start <= {UNTIL - 1, UNTIL}


def test_a_job_that_ends_while_ranks_are_lost_leaves_nothing_but_its_last_iteration(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """They meet once more, for storage and for the end."""
    (storage := tmp_path / "storage").mkdir()
    settings = deadlines(settings, replica_check_interval=0, persist=str(storage))
    run_ranks(train, RANKS, settings, "disconnect", "close soon")
    assert committed(open_storage(str(storage))) == [AT + 1]
    assert jobs.events(settings, "ranks_lost") and not any(
        event["error"] for event in jobs.events(settings, "closed")
    )
    assert not list(Path(settings["arena"]).iterdir())
