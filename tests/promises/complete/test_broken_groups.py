"""Ranks that cannot reach each other while all of them live: stopped for long, or with connections that break."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ftckpt.session.reminders
from ftckpt.memory.heartbeat import Heartbeat, HeartbeatGauge
from ftckpt.persist.backend import open_storage
from tests.support import jobs, plain
from tests.support.pool import run_ranks
from tests.support.storages import committed
from tests.support.tiers import by_default

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

RANKS = 3
DEADLINE_SECS = 4.0
STILL_SECS = 1.5 * DEADLINE_SECS
AT = 4
"""The iteration of the trouble: one with a proof, where there are any."""
UNTIL = 40
REPEAT_SECS = 0.2


def descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


def disconnect(opened: set[int]) -> None:
    """Closes connections as a network does that drops them: both sides see them end."""
    for descriptor in opened:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
            end.getpeername()  # not of a listener: gloo ends a process that cannot accept
            end.shutdown(socket.SHUT_RDWR)


def stand_still(rank: int, here: Path) -> None:
    """Rank 1 is stopped until rank 0 continues it; the others wait for it as training does, in a collective."""
    if rank == 1:
        (here / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 0:

        def wake() -> None:
            time.sleep(STILL_SECS)
            os.kill(int((here / "pid").read_text()), signal.SIGCONT)

        threading.Thread(target=wake, daemon=True).start()


def train(rank: int, world_size: int, settings: dict[str, Any], trouble: str, end: str) -> Any:
    """Returns the newest committed iteration, and how many ranks log at the end that they take no snapshots."""
    here = Path(settings["events"]).parent
    logging.getLogger("ftckpt").addHandler(logging.FileHandler(here / f"log{rank}"))
    ftckpt.session.reminders._REPEAT_SECS = REPEAT_SECS
    before = descriptors()
    checkpointer, state = plain.make(rank, world_size, settings)
    opened = descriptors() - before
    assert checkpointer.restore() is None
    for iteration in range(1, UNTIL + 1):
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
    whole, pulses = checkpointer.committed, Heartbeat.open(checkpointer.node_dir, None).ranks()
    dist.barrier()
    if end == "die":
        plain.die()
    checkpointer.close()
    silent = sum(pulse.counts[HeartbeatGauge.NO_SNAPSHOTS] for pulse in pulses)
    return whole.iteration if whole is not None else None, silent


def deadlines(settings: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {**settings, "start_timeout_secs": DEADLINE_SECS, "vote_secs": DEADLINE_SECS / 2, **others}


@pytest.mark.parametrize("where", by_default(["stop", "stop in a proof"], ["stop"]))
def test_a_rank_that_stands_still_for_longer_than_all_deadlines_ends_nothing(
    where: str, settings: dict[str, Any]
) -> None:
    """In a proof the others wait for it in a collective."""
    # Other ranks wait for its round for a moment alone, and then in the proof.
    proofs = {"replica_check_interval": 1000, "vote_secs": 0.5}
    settings = deadlines(settings, **proofs if where == "stop in a proof" else {"replica_check_interval": 0})
    results = run_ranks(train, RANKS, settings, where, "close")
    # Those at the end may not be committed yet, or left out: iterations are shorter than what is done for a snapshot.
    whole, silent = zip(*(result.value for result in results), strict=True)
    assert len(set(whole)) == 1 and whole[0] > UNTIL - 10 and not any(silent)
    assert not jobs.events(settings, "turned_off")


def test_ranks_whose_connections_break_turn_off_and_train_on_and_say_so_again_and_again(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    settings = deadlines(settings, replica_check_interval=1000)
    results = run_ranks(train, RANKS, settings, "disconnect", "die", expect_failures=True)
    assert all(map(jobs.killed, results)), [result.error for result in results]
    assert sorted(event["rank"] for event in jobs.events(settings, "turned_off")) == list(range(RANKS))
    logs = [(tmp_path / f"log{rank}").read_text().splitlines() for rank in range(RANKS)]
    repeated = [[line for line in log if "no snapshots are taken: " in line] for log in logs]
    assert len(repeated[0]) > 1 and not any(repeated[1:]), "one rank speaks for all"
    start = {result.value[0] for result in run_ranks(plain.restored, RANKS, settings)}
    assert len(start) == 1 and start <= {AT - 2, AT - 1, AT}


def test_a_job_whose_connections_broke_ends_as_any_other(settings: dict[str, Any], tmp_path: Path) -> None:
    """Ranks are connected once more for storage, and once for the end."""
    (storage := tmp_path / "storage").mkdir()
    settings = deadlines(settings, replica_check_interval=0, persist=str(storage))
    results = run_ranks(train, RANKS, settings, "disconnect", "close")
    assert {result.value[1] for result in results} == {RANKS}
    (last,) = committed(open_storage(str(storage)))
    assert last in (AT - 2, AT - 1, AT)
    assert [event["error"] for event in jobs.events(settings, "closed")] == [None] * RANKS
    assert not list(Path(settings["arena"]).iterdir())
