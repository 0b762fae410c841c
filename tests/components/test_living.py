"""Ranks of another pid namespace, as in a container next to the SMP's, are known by the locks that they hold."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ftckpt.memory.directory import LOCK_NAME, node_directory
from ftckpt.memory.heartbeat import Heartbeat
from ftckpt.memory.locks import JOB_LOCK_NAME
from ftckpt.smp.liveness import Liveness
from tests.support.mounting import RANK, rank_elsewhere
from tests.support.repository import ROOT

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
        [sys.executable, "-c", RANK, str(node_dir), str(node_dir / ARENA / LOCK_NAME)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        observer = Heartbeat.open(node_dir, None)
        assert [one.lives for one in living(node_dir).judge(observer.ranks())] == [True]
        process.send_signal(signal.SIGKILL)
    with rank_elsewhere(node_dir.parent, node_dir / ARENA / LOCK_NAME):
        assert [one.lives for one in living(node_dir).judge(observer.ranks())] == [False]
