"""The heartbeat page of a node, and who lives by it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ftckpt.memory.directory import LOCK_NAME, PULSE_NAME, node_directory
from ftckpt.memory.heartbeat import FlushState, Heartbeat
from ftckpt.memory.locks import JOB_LOCK_NAME
from ftckpt.model.snapshot import SnapshotId
from ftckpt.smp.liveness import Liveness
from tests.support.mounting import RANK as LIVING_RANK
from tests.support.mounting import rank_elsewhere
from tests.support.repository import ROOT
from tests.support.waiting import until

# --- the heartbeats of a node's ranks and SMP, which corruption cannot fake ---


REPOSITORY = Path(__file__).parents[2]

RANK = """
import sys, time
from pathlib import Path
from ftckpt.memory.heartbeat import FlushState, Heartbeat
pulse = Heartbeat.open(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
pulse.beat(int(sys.argv[4]), sys.argv[5])
print(pulse.problem, flush=True)
time.sleep(100)  # until it is killed
"""


def rank(directory: Path, *arguments: object) -> subprocess.Popen[str]:
    return started(RANK, directory, *arguments)


def started(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert process.stdout is not None and process.stdout.readline() == "None\n"
    return process


def words(directory: Path) -> np.memmap[tuple[int, int], np.dtype[np.uint64]]:
    return np.memmap(directory / PULSE_NAME, np.uint64, "r+", shape=(256, 32))


def test_an_observer_reads_what_ranks_of_other_processes_told(arena_root: Path) -> None:
    observer = Heartbeat.open(arena_root, None)
    assert observer.ranks() == []
    processes = [rank(arena_root, 3, 17, 41, "optimizer"), rank(arena_root, 0, 9, 0, "a phase longer than that")]
    try:
        first, second = observer.ranks()
        assert (first.place, first.rank, first.iteration, first.phase) == (0, 9, 0, "a phase longer t")
        assert (second.place, second.rank, second.iteration, second.phase) == (3, 17, 41, "optimizer")
        assert second.beats == 1 and second.lives and 0 <= time.monotonic_ns() - second.beat_ns < 60e9
        os.kill(processes[0].pid, signal.SIGKILL)  # not waited for: a zombie trains no more
        os.waitid(os.P_PID, processes[0].pid, os.WEXITED | os.WNOWAIT)
        assert [pulse.lives for pulse in observer.ranks()] == [True, False]
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=10)
    assert [pulse.lives for pulse in observer.ranks()] == [False, False]
    assert (arena_root / PULSE_NAME).stat().st_mode & 0o777 == 0o600


def test_each_beat_moves_and_a_rank_that_left_is_not_waited_for(arena_root: Path) -> None:
    mine, observer = Heartbeat.open(arena_root, 254, 5), Heartbeat.open(arena_root, None)
    (joined,) = observer.ranks()
    assert (joined.iteration, joined.phase, joined.beats) == (-1, "", 0)
    seen = []
    for iteration, phase in ((7, "forward"), (7, "forward"), (8, "")):
        mine.beat(iteration, phase)
        (told,) = observer.ranks()
        assert (told.iteration, told.phase) == (iteration, phase)
        seen.append((told.beats, told.beat_ns))
    assert seen == sorted(set(seen)) and seen[0] > (0, joined.beat_ns)
    mine.leave()
    mine.beat(9, "start")
    mine.leave()
    assert observer.ranks() == []


def test_a_process_that_got_the_pid_of_another_is_not_that_one(arena_root: Path) -> None:
    mine, observer = Heartbeat.open(arena_root, 0), Heartbeat.open(arena_root, None)
    mine.beat(1, "start")
    page = words(arena_root)
    page[0, 0] += np.uint64(1 << 22)  # the same pid, started a tick later
    assert observer.ranks()[0].lives is False
    page[0, 1] += np.uint64(1)
    assert observer.ranks()[0].lives is None, "in another pid namespace it cannot be told"


def test_how_far_all_ranks_came_is_known_when_they_have_left(arena_root: Path) -> None:
    ranks = [Heartbeat.open(arena_root, place) for place in range(2)]
    assert ranks[0].furthest() == -1
    for iteration, one in zip((7, 6), ranks, strict=True):
        one.beat(iteration, "start")
        one.leave()
    Heartbeat.open(arena_root, None).beat_smp()
    assert Heartbeat.open(arena_root, None).furthest() == 7
    again = Heartbeat.open(arena_root, 0)
    assert again.furthest() == 6


def test_the_smp_is_alive_while_it_beats(arena_root: Path) -> None:
    trainer, smp = Heartbeat.open(arena_root, 0), Heartbeat.open(arena_root, None)
    assert not trainer.smp_alive(60) and trainer.smp_beat()[0] == 0
    smp.beat_smp()
    assert trainer.smp_alive(60) and not trainer.smp_cannot(7)
    smp.beat_smp(7)
    assert trainer.smp_cannot(7)
    assert not trainer.smp_cannot(8), "it speaks of an older target"
    smp.beat_smp()
    assert not trainer.smp_cannot(7)
    until(lambda: not trainer.smp_alive(0.04), "its last sign of life is too old")
    smp.beat_smp()
    assert trainer.smp_alive(60)
    words(arena_root)[255, 0] += np.uint64(1 << 22)
    assert not trainer.smp_alive(60), "another process has its pid"
    smp.leave_smp()
    assert not trainer.smp_alive(60)
    assert [pulse.place for pulse in trainer.ranks()] == [0], "the SMP is no rank"


@pytest.mark.parametrize("seed", range(5))
def test_foreign_bytes_name_no_live_process_and_hurt_nobody(arena_root: Path, seed: int) -> None:
    (arena_root / PULSE_NAME).write_bytes(random.Random(seed).randbytes(70000))
    (arena_root / PULSE_NAME).chmod(0o644)
    mine = Heartbeat.open(arena_root, 3, 4)
    assert mine.problem is None and not mine.smp_alive(60)
    told = {pulse.place: pulse for pulse in mine.ranks()}
    assert not any(pulse.lives for place, pulse in told.items() if place != 3)
    assert all(pulse.phase.isprintable() for pulse in told.values())
    assert told[3].lives and (told[3].rank, told[3].iteration) == (4, -1)
    assert (arena_root / PULSE_NAME).stat().st_mode & 0o777 == 0o600
    assert (arena_root / PULSE_NAME).stat().st_size == 70000, "never cut: others may have it mapped"


def test_without_a_page_training_goes_on(arena_root: Path) -> None:
    (arena_root / "elsewhere").write_bytes(b"")
    (arena_root / PULSE_NAME).symlink_to(arena_root / "elsewhere")
    for directory, place in ((arena_root, 0), (arena_root / "nowhere", 0), (arena_root, 255), (arena_root, -1)):
        pulse = Heartbeat.open(directory, place)
        assert pulse.problem is not None and PULSE_NAME in pulse.problem
        pulse.beat(1, "start")
        pulse.leave()
        assert pulse.ranks() == [] and not pulse.smp_alive(60)
    assert (arena_root / "elsewhere").stat().st_size == 0


def test_a_rank_killed_in_its_copy_copies_no_longer(arena_root: Path) -> None:
    smp = Heartbeat.open(arena_root, None)
    process = started(RANK.replace("pulse.beat", "pulse.tell_copying(True)\npulse.beat"), arena_root, 3, 17, 41, "")
    process.kill()
    process.communicate(timeout=10)
    assert until(lambda: not smp.ranks_copy()) < 10


def test_how_far_a_flush_is_says_of_which_snapshot(arena_root: Path) -> None:
    smp, rank = Heartbeat.open(arena_root, None), Heartbeat.open(arena_root, 0)
    one, other = SnapshotId(b"a" * 16, 7), SnapshotId(b"b" * 16, 7)
    assert rank.flush_state(one) == FlushState.NONE
    smp.beat_smp(digest=5)
    smp.tell_flush(one, FlushState.DONE)
    assert rank.flush_state(one) == FlushState.DONE and rank.flush_state(other) == FlushState.NONE
    smp.tell_flush(other, FlushState.WORKING)
    assert (rank.flush_state(one), rank.flush_state(other)) == (FlushState.NONE, FlushState.WORKING)
    smp.tell_flush(None, FlushState.NONE)
    assert rank.flush_state(other) == FlushState.NONE


# --- ranks of another pid namespace, as in a container next to the SMP's, are known by the locks that they hold ---


ARENA = "dp0.00000000"


@pytest.fixture
def node_dir(arena_root: Path) -> Path:
    directory = node_directory(arena_root, "job", "n")
    (directory / ARENA).mkdir()
    return directory


def living(node_dir: Path) -> Liveness:
    found = Liveness(node_dir)
    found.know({"5": {"shard": "dp0", "arena": ARENA, "pid": 1}})
    return found


def test_one_that_writes_its_arena_lives_until_its_lock_is_gone(node_dir: Path) -> None:
    observer, judge = Heartbeat.open(node_dir, None), living(node_dir)
    with rank_elsewhere(node_dir, node_dir / ARENA / LOCK_NAME):
        (seen,) = observer.ranks()
        assert (seen.lives, seen.is_here) == (None, False)
        (judged,) = judge.judge([seen])
        assert judged.lives is True and (judged.rank, judged.iteration) == (5, 7)
        assert [one.lives for one in Liveness(node_dir).judge([seen])] == [None], (
            "nobody has said whose arena that is"
        )
    (judged,) = judge.judge(observer.ranks())
    assert judged.lives is False


def test_one_that_begins_may_live(node_dir: Path) -> None:
    observer, judge = Heartbeat.open(node_dir, None), living(node_dir)
    with rank_elsewhere(node_dir, node_dir / JOB_LOCK_NAME):
        assert [one.lives for one in judge.judge(observer.ranks())] == [None]
    assert [one.lives for one in judge.judge(observer.ranks())] == [False]


def test_ranks_of_this_namespace_are_judged_by_their_pids(node_dir: Path) -> None:
    """A lock may be another process's by now."""
    with subprocess.Popen(
        [sys.executable, "-c", LIVING_RANK, str(node_dir), str(node_dir / ARENA / LOCK_NAME)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        observer = Heartbeat.open(node_dir, None)
        assert [one.lives for one in living(node_dir).judge(observer.ranks())] == [True]
        process.send_signal(signal.SIGKILL)
    with rank_elsewhere(node_dir.parent, node_dir / ARENA / LOCK_NAME):
        assert [one.lives for one in living(node_dir).judge(observer.ranks())] == [False]
