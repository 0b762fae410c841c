"""A fork of a training process: it has no hooks, and nothing of its parent's memory or record changes."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import ftckpt
import ftckpt.torch
from ftckpt.capture import copier
from ftckpt.group import Group
from ftckpt.memory import end_notes
from ftckpt.memory.heartbeat import Heartbeat
from ftckpt.memory.launch_record import launcher_run
from tests.support.constants import configured
from tests.support.pool import run_ranks
from tests.support.processes import in_child
from tests.support.waiting import until

pytestmark = pytest.mark.multiproc

ROUNDS = 8


def trains(rank: int, world_size: int, arena: str, records: str) -> list[bool]:
    """Train, and fork a child that does all that a trainer does; whether the parent finds all as it was."""
    tempfile.tempdir = records

    copy_chunk, may_copy = copier.copy_chunk, threading.Event()
    may_copy.set()

    def copy_later(*arguments: Any) -> None:
        may_copy.wait(60)
        copy_chunk(*arguments)

    copier.copy_chunk = copy_later
    config = ftckpt.Config(
        enabled=True, job="j", node="n", arena=arena, protect="none", schedule="stream", slots=3,
        **configured({"fence_secs": 1.0}),
    )  # fmt: skip
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = ftckpt.torch.attach(model, optimizer, config=config)
    assert checkpointer is not None
    checkpointer.restore()

    def train(iteration: int) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        checkpointer.step(iteration)

    def slots() -> list[Any]:
        assert checkpointer.arena is not None
        return [checkpointer.arena.control.record(slot) for slot in range(3)]

    def child() -> bool:
        train(4)
        checkpointer.pause()
        error = ValueError("a probe that failed")
        sys.excepthook(ValueError, error, None)
        launcher_run(os.environ).resume()
        checkpointer.close()
        return True

    train(1)
    train(2)
    until(lambda: checkpointer.capture is None or not checkpointer.capture.flying)
    may_copy.clear()
    train(3)  # its copies are under way
    launcher_run(os.environ).end(0, "done", job="j")
    pulse = Heartbeat.open(checkpointer.node_dir, None)
    before, beats = slots(), pulse.ranks()[0].beats
    same = [in_child(child), slots() == before, pulse.ranks()[0].beats == beats]
    same += [end_notes.read(checkpointer.node_dir) == [], launcher_run(os.environ).read().code == 0]
    may_copy.set()
    train(4)
    until(lambda: checkpointer.committed is not None)
    return same


def test_nothing_of_the_parent_changes(arena_root: Path, tmp_path: Path) -> None:
    (result,) = run_ranks(trains, 1, str(arena_root), str(tmp_path), stand_in=False, env={"FTCKPT_RUN": "a"})
    assert result.value == [True] * 5


def closes_its_group(rank: int, world_size: int, folder: str) -> int:
    """Close groups that a child of one rank has copies of; returns how many."""
    for _ in range(ROUNDS):
        group = Group(30.0)
        group.gather(b"begun")
        if rank == 0 and os.fork() == 0:
            signal.alarm(60)
            until(lambda: not Path(folder).exists())
            os._exit(0)
        group.gather(b"done")
        group.close()
        del group
    return ROUNDS


def test_a_job_ends_while_children_live(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:  # children end when it is gone
        results = run_ranks(closes_its_group, 3, folder)
    assert [result.value for result in results] == [ROUNDS] * 3
