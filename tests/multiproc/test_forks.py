"""A fork of a training process: its hooks are gone, and nothing of its parent's memory or record changes."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ftckpt
import ftckpt.torch
from ftckpt import forks
from ftckpt.capture import copier
from ftckpt.group import Group
from ftckpt.memory import end_notes
from ftckpt.memory.heartbeat import Heartbeat
from ftckpt.memory.launch_record import launcher_run
from ftckpt.torch.hooks import follow
from ftckpt.torch.state import PlainState
from tests.support import ds_jobs, jobs
from tests.support.constants import configured
from tests.support.plain import Recorder
from tests.support.pool import run_ranks
from tests.support.waiting import until

pytestmark = pytest.mark.multiproc

ROUNDS = 16


class Trainer(Recorder):
    """What a process trains with."""

    is_off = False

    def off(self) -> None:
        self.is_off = True


def in_child(action: Callable[[], bool]) -> bool:
    """Whether ``action`` returns True in a fork of this process."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # it ends, whatever it waits for
        code = 2
        try:
            code = 0 if action() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def steps_of(trainer: Trainer, step: Callable[[], object]) -> tuple[list[str], bool]:
    """What ``step`` tells here, and whether in a child it tells nothing."""
    forks.trains(trainer.off)

    def tells_nothing() -> bool:
        before = list(trainer.log)
        step()
        return trainer.log == before and trainer.is_off and forks.is_child

    step()
    is_silent = in_child(tells_nothing)
    told = list(trainer.log)
    step()
    assert trainer.log == told * 2 and not trainer.is_off and not forks.is_child, "the parent trains on"
    return told, is_silent


def plain_hooks(rank: int, world_size: int) -> Any:
    trainer, model = Trainer(), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    follow(ftckpt.torch.patches, trainer, model, optimizer, PlainState(model, optimizer, None, {}))  # type: ignore[arg-type]

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    return steps_of(trainer, step)


def megatron_hooks(rank: int, world_size: int) -> Any:
    import train_gpt

    from ftckpt.megatron import hooks
    from ftckpt.megatron.optimizers import leaf_optimizers

    trainer = Trainer()
    job = train_gpt.build(train_gpt.parse_args([*jobs.TINY, "--iterations", "9"]))
    hooks.follow(trainer, job.optimizer, None)  # type: ignore[arg-type]
    (inner,) = [leaf.optimizer for leaf in leaf_optimizers(job.optimizer) if leaf.optimizer is not None]

    def step() -> None:
        """As far as hooks go: threads of the stand-in for a device are none of a child's."""
        for hook in list(inner._optimizer_step_pre_hooks.values()):
            hook(inner, (), {})
        if "step_with_ready_grads" in vars(job.optimizer):
            trainer.log.append("wrapped")

    return steps_of(trainer, step)


def deepspeed_hooks(rank: int, world_size: int) -> Any:
    from ftckpt.deepspeed import active_engine
    from ftckpt.deepspeed.hooks import EngineHooks

    engine = ds_jobs.build(ds_jobs.Shape(1), [*ds_jobs.TINY, "--iterations", "9"]).engine
    trainer = Trainer()
    hooks = EngineHooks(active_engine.door.hooks, engine, trainer, lambda: None)  # type: ignore[arg-type]
    hooks.follow_micro_batches()
    hooks.fence_optimizer()
    inner = engine.optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    return steps_of(trainer, inner.step)


HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
FRAMEWORKS = [plain_hooks, megatron_hooks, *([deepspeed_hooks] if HAS_DEEPSPEED else [])]


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.__name__)
def test_a_child_that_steps_its_copy_is_not_followed(framework: Callable[..., Any]) -> None:
    (result,) = run_ranks(framework, 1, stand_in=framework is megatron_hooks)
    told, is_silent = result.value
    assert "fence" in told and is_silent


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
    """Close groups, of which a child of one rank has copies; returns how many."""
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
