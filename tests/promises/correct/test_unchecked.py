"""Snapshots without checksums: an SMP computes them when its trainers have ended, and a restart uses them anyway."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ftckpt.memory.arena import Arena
from ftckpt.memory.control_block import SlotState
from ftckpt.memory.directory import SMP_LOCK_NAME, end_smp
from ftckpt.memory.locks import holder_of
from tests.support import plain, smps, waiting
from tests.support.event_logs import logged, read_events
from tests.support.flips import flip
from tests.support.pool import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

RANKS, LAST = 2, 4


@pytest.fixture
def node_dir(settings: dict[str, Any]) -> Iterator[Path]:
    """The directory of a job without protection; its SMP does not outlive the test."""
    path = Path(str(settings["arena"])) / "ftckpt-test" / "node"
    yield path
    if path.exists():
        assert end_smp(path, 20)


def train_then_die(rank: int, world_size: int, settings: dict[str, Any], with_smp: bool) -> None:
    smps.start_smps()
    checkpointer, state = plain.restarted(rank, world_size, settings)
    waiting.until(lambda: checkpointer.rank.protection.smp_guards, "the SMP serves", 30.0)
    plain.train(checkpointer, state, range(1, LAST + 1))
    checkpointer.fence()
    waiting.until(lambda: checkpointer.capture is not None and not checkpointer.capture.busy)
    time.sleep(1.0)  # several looks of the SMP, which could have checked any snapshot by now
    arena = checkpointer.arena
    assert arena is not None
    assert [arena.state(slot) for slot in arena.snapshots().values()] == [SlotState.SEALED] * 2
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    if rank:
        signal.pause()
    # The SMP after the ranks that would start another one.
    for pid in pids[1:]:
        os.kill(pid, signal.SIGKILL)
    if with_smp:
        os.kill(holder_of(checkpointer.node_dir / SMP_LOCK_NAME) or 0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def restored(rank: int, world_size: int, settings: dict[str, Any]) -> tuple[int, str]:
    lines = logged()
    checkpointer, state = plain.restarted(rank, world_size, settings)
    assert {*state.row.tolist()} == {float(state.iteration)}
    checkpointer.close(remove=False)
    return state.iteration, "\n".join(lines)


def arenas(node_dir: Path) -> Iterator[Arena]:
    for path in sorted(node_dir.glob("dp*")):
        with closing(Arena.open(path)) as arena:
            yield arena


def states(node_dir: Path, iteration: int) -> set[SlotState]:
    found = {
        arena.state(slot)
        for arena in arenas(node_dir)
        for snapshot, slot in arena.snapshots().items()
        if snapshot.iteration == iteration
    }
    return found


def test_an_smp_checks_what_a_restart_takes_when_its_trainers_were_killed(
    settings: dict[str, Any], node_dir: Path
) -> None:
    run_ranks(train_then_die, RANKS, settings, False, expect_failures=True)
    waiting.until(lambda: states(node_dir, LAST) == {SlotState.CHECKED}, "the newest is checked", 30.0)
    at, said = run_ranks(restored, RANKS, settings)[0].value
    for event in read_events(Path(settings["events"]), "verified"):
        assert event["states"] == {"checked": RANKS} and event["gap_secs"] > 1.0
    assert at == LAST and "without checksums for" in said and "before this start" not in said
    # From its checksum on a chunk that goes bad is told from one that never had any.
    for arena in arenas(node_dir):
        slot = next(slot for snapshot, slot in arena.snapshots().items() if snapshot.iteration == LAST)
        flip(arena.path / f"slot{slot}.safetensors", arena.image.chunks[0].begin + 5)
    at, _ = run_ranks(restored, RANKS, settings)[0].value
    assert at == LAST - 1, "what has gone bad is not loaded"


def test_a_restart_takes_what_has_no_checksums_where_smp_and_trainers_were_killed(
    settings: dict[str, Any], node_dir: Path
) -> None:
    begun = time.monotonic()
    run_ranks(train_then_die, RANKS, settings, True, expect_failures=True)
    waiting.until(lambda: holder_of(node_dir / SMP_LOCK_NAME) is None, "the killed SMP has ended")
    assert states(node_dir, LAST) == {SlotState.SEALED}
    time.sleep(1.0)
    at, said = run_ranks(restored, RANKS, settings)[0].value
    for event in read_events(Path(settings["events"]), "verified"):
        assert event["states"] == {"sealed": RANKS} and 2.0 < event["gap_secs"] < time.monotonic() - begun
    assert at == LAST and f"{RANKS} of {RANKS} shards had none before this start" in said
