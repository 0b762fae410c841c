"""Hooks of DeepSpeed engines that the conformance suite does not show: pipelines, saves, skipped steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.frameworks.entry import Patches
from tests.support import ds_jobs
from tests.support.ds_jobs import BF16, Shape, fp16, zero
from tests.support.plain import Recorder, merged
from tests.support.pool import run_ranks
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc
pytest.importorskip("deepspeed")

SHAPES = {
    "zero1": Shape(2, config=BF16 | zero(1)),
    "zero3": Shape(2, config=BF16 | zero(3)),
    "pp2": Shape(2, ["--pp", "2", "--tie"], BF16 | zero(1)),
}
MICRO = ["forward", "backward", "window"]


ITERATIONS = [*ds_jobs.TINY, "--iterations", "9"]


def listen(engine: Any, recorder: Recorder) -> Any:
    """The hooks of a session, without one."""
    from ftckpt.deepspeed.hooks import EngineHooks
    from ftckpt.deepspeed.pipeline import follow_pipeline

    hooks = EngineHooks(Patches(), engine, recorder, lambda: None)  # type: ignore[arg-type]
    if engine.pipeline_parallelism:
        follow_pipeline(hooks, lambda given: given)
    else:
        hooks.follow_micro_batches()
    hooks.see_pauses()
    hooks.fence_optimizer()
    return hooks


def inner_optimizer(engine: Any) -> Any:
    from ftckpt.deepspeed import optimizers

    return optimizers.inner(engine.optimizer)


def followed(rank: int, world_size: int, shape: Shape) -> list[str]:
    """Reports of one iteration."""
    import train_deepspeed

    job = ds_jobs.build(shape, ITERATIONS)
    recorder = Recorder()
    listen(job.engine, recorder)
    train_deepspeed.train_step(job)
    return recorder.log


def results(function: Any, ranks: int, *args: Any) -> list[Any]:
    return [result.value for result in run_ranks(function, ranks, *args, stand_in=False)]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (4, 7)])
def test_a_stage_reports_each_step_and_the_windows_between(stages: int, micro_batches: int) -> None:
    shape = Shape(stages, ["--pp", str(stages), "--layers", "4"], {"gradient_accumulation_steps": micro_batches})
    for log in results(followed, stages, shape):
        told = merged([word for word in log[: log.index("step 1")] if word != "fence"])
        assert set(told[:-1:2]) == {"window"} and told[-1] == "tail"
        assert told.count("forward") == told.count("backward") == micro_batches


def saved(rank: int, world_size: int, shape: Shape, folder: str) -> list[str]:
    """Reports of a save by an engine, and of a forward without gradients, before it has trained."""
    job = ds_jobs.build(shape, ITERATIONS)
    recorder = Recorder()
    hooks = listen(job.engine, recorder)
    if not job.is_pipeline:
        with torch.no_grad():
            job.engine(*next(job.batches))
    job.engine.save_checkpoint(folder)
    assert not hooks.has_trained
    return recorder.log


@pytest.mark.parametrize("name", by_default(["zero1", "zero3", "pp2"], ["zero1", "pp2"]))
def test_saving_is_a_pause_and_no_training(name: str, tmp_path: Path) -> None:
    expected = ["pause"] * (1 if name == "pp2" else 2)
    assert results(saved, 2, SHAPES[name], str(tmp_path)) == [expected, expected]


def skipping(rank: int, world_size: int, shape: Shape) -> tuple[list[str], int]:
    import train_deepspeed

    job = ds_jobs.build(shape, ITERATIONS)
    recorder = Recorder()
    listen(job.engine, recorder)
    inner_optimizer(job.engine).register_step_pre_hook(lambda *_: recorder.log.append("write"))
    if rank == 0:
        next(job.engine.module.parameters()).register_hook(lambda grad: grad * float("inf"))
    for _ in range(3):
        train_deepspeed.train_step(job)
    return [word for word in recorder.log if word in ("fence", "write") or "step" in word], job.engine.skipped_steps


SKIPPING = {
    "fp16": Shape(2, config=fp16(16)),
    "zero1": Shape(2, config=fp16(16) | zero(1)),
    "zero3": Shape(2, config=fp16(16) | zero(3)),
    "pp2": Shape(2, ["--pp", "2"], fp16(16)),
}


@pytest.mark.parametrize("name", by_default(SKIPPING, ["fp16", "zero1", "pp2"]))
def test_a_skipped_step_is_a_boundary_and_writes_nothing(name: str) -> None:
    for log, skipped in results(skipping, 2, SKIPPING[name]):
        assert skipped == 3, log
        assert log == ["step 1", "step 2", "step 3"]


def accumulated(rank: int, world_size: int, how: str) -> list[str]:
    config = BF16 | zero(2) | {"gradient_accumulation_steps": 3}
    if how == "by hand":
        config |= {"managed_gradient_accumulation": False}
    job = ds_jobs.build(Shape(2, config=config), ITERATIONS)
    recorder = Recorder()
    listen(job.engine, recorder)
    for index in range(6):
        loss = job.engine(*next(job.batches))
        if how == "loss.backward":
            loss.backward()
        else:
            job.engine.backward(loss)
        if how != "by hand" or index % 3 == 2:
            job.engine.step()
    return recorder.log


@pytest.mark.parametrize("how", ["managed", "by hand", "loss.backward"])
def test_one_boundary_per_accumulation(how: str) -> None:
    for log in results(accumulated, 2, how):
        told = merged([word for word in log if word != "fence"])
        once = [*MICRO, *MICRO, "forward", "backward", *["window"] * (how == "by hand"), "tail"]
        assert told == [*once, "step 1", *once, "step 2"]
