"""DeepSpeed engines say where they are; the fence stands before the first write, twice; hooks can be removed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.frameworks.entry import Patches
from ftckpt.schedule.pipeline import pipeline_orders
from tests.support import ds_jobs
from tests.support.ds_jobs import BF16, Shape, fp16, zero
from tests.support.plain import Recorder
from tests.support.pool import run_ranks
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc
pytest.importorskip("deepspeed")

SHAPES = {
    "fp32": Shape(2),
    "bf16": Shape(2, config=BF16),
    "bf16-optimizer": ds_jobs.SHAPES["bf16-optimizer"],
    "zero1": Shape(2, config=BF16 | zero(1)),
    "zero2": Shape(2, config=BF16 | zero(2, overlap_comm=True)),
    "zero2-offload": ds_jobs.SHAPES["zero2-offload"],
    "zero3": Shape(2, config=BF16 | zero(3)),
    "pp2": Shape(2, ["--pp", "2", "--tie"], BF16 | zero(1)),
}
QUICK = ("bf16", "bf16-optimizer", "zero2", "zero3", "pp2")
GAS = 2
MICRO = ["forward", "backward", "window"]


ITERATIONS = [*ds_jobs.TINY, "--iterations", "9"]


def listen(engine: Any, recorder: Recorder) -> Any:
    """The hooks of a session, without one."""
    from ftckpt.deepspeed.hooks import EngineHooks
    from ftckpt.deepspeed.pipeline import follow_pipeline

    def begin() -> None:
        # Of each batch; here the first one counts.
        if not recorder.log:
            recorder.log.append("begin")

    hooks = EngineHooks(Patches(), engine, recorder, begin)  # type: ignore[arg-type]
    if engine.pipeline_parallelism:
        follow_pipeline(hooks, lambda given: given)
    else:
        hooks.follow_micro_batches()
    hooks.see_pauses()
    hooks.fence_optimizer()
    return hooks


def inner_optimizer(engine: Any) -> Any:
    inner = engine.optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    return inner


def merged(log: Sequence[str]) -> list[str]:
    """A place that is told twice in a row is one place."""
    return [word for index, word in enumerate(log) if index == 0 or word != log[index - 1]]


def note_writes(engine: Any, recorder: Recorder) -> None:
    """The body of the inner optimizer's step: what follows the pre-hooks of torch."""
    inner = inner_optimizer(engine)
    inner.register_step_pre_hook(lambda *args: recorder.log.append("write"))


def followed(rank: int, world_size: int, shape: Shape, without: str) -> tuple[list[str], Any]:
    """What is told in two iterations, of the two fences perhaps by one alone; and the model of the schedule."""
    import train_deepspeed

    job = ds_jobs.build(shape, ITERATIONS)
    recorder = Recorder()
    hooks = listen(job.engine, recorder)
    note_writes(job.engine, recorder)
    outer, inner = len(hooks.patches.undo) - 2, len(hooks.patches.undo) - 1
    if without:
        hooks.patches.undo.pop({"outer": outer, "inner": inner}[without])()
    for _ in range(2):
        train_deepspeed.train_step(job)
    return recorder.log, recorder.expected


def results(function: Any, ranks: int, *args: Any) -> list[Any]:
    return [result.value for result in run_ranks(function, ranks, *args, stand_in=False)]


@pytest.mark.parametrize("name", by_default(SHAPES, QUICK))
def test_places_fence_and_boundary_come_in_order(name: str) -> None:
    shape = SHAPES[name]
    for log, (kinds, lengths) in results(followed, shape.ranks, shape, ""):
        assert log[0] == "begin" and log.count("begin") == 1
        second = log.index("step 1") + 1
        assert log[-1] == "step 2" and log.index("step 2") == len(log) - 1
        for iteration in (log[1:second], log[second:]):
            told = merged([word for word in iteration if word not in ("fence", "write")])
            assert tuple(told[:-1]) == kinds
            assert len(lengths) == len(kinds)
            end = [word for word in iteration[iteration.index("tail") :] if word != "tail"]
            assert end[0] == "fence" and end[-2] == "write" and set(end[:-1]) == {"fence", "write"}
        if name != "pp2":
            assert kinds == (*MICRO * (GAS - 1), "forward", "backward", "tail")


@pytest.mark.parametrize("without", ["outer", "inner"])
@pytest.mark.parametrize("name", by_default(SHAPES, ["bf16-optimizer", "zero1"]))
def test_each_fence_holds_alone(name: str, without: str) -> None:
    shape = SHAPES[name]
    for log, _ in results(followed, shape.ranks, shape, without):
        writes = log.count("write")
        assert log.count("fence") == writes
        assert merged(log[log.index("fence") :])[:2] == ["fence", "write"]
        assert all(log[index - 1] == "fence" for index, word in enumerate(log) if word == "write")


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (4, 7)])
def test_the_model_names_the_places_that_a_stage_comes_to(stages: int, micro_batches: int) -> None:
    shape = Shape(stages, ["--pp", str(stages), "--layers", "4"], {"gradient_accumulation_steps": micro_batches})
    for stage, (log, (kinds, lengths)) in enumerate(results(followed, stages, shape, "")):
        told = merged([word for word in log[1 : log.index("step 1")] if word not in ("fence", "write")])
        assert tuple(told) == kinds
        assert kinds.count("forward") == kinds.count("backward") == micro_batches
        assert len(lengths) == len(kinds) and sum(lengths) == pytest.approx(1)
        assert lengths[0] > 0 if stage else lengths[-1] == 0, "a stage waits before its first forward, or at the end"


def test_deepspeeds_schedule_is_the_models() -> None:
    from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule

    names = {ForwardPass: "forward", BackwardPass: "backward"}
    for stages, micro_batches in itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 8)):
        for stage, modelled in enumerate(pipeline_orders(stages, micro_batches) or ()):
            steps = TrainSchedule(micro_batches=micro_batches, stages=stages, stage_id=stage)
            order = [names[type(command)] for commands in steps for command in commands if type(command) in names]
            assert order == [step.kind for step in modelled], (stages, micro_batches, stage)


def evaluated(rank: int, world_size: int, shape: Shape, folder: str) -> list[str]:
    job = ds_jobs.build(shape, ITERATIONS)
    recorder = Recorder()
    hooks = listen(job.engine, recorder)
    if job.is_pipeline:
        job.engine.eval_batch(job.batches)
    else:
        tokens, labels = next(job.batches)
        job.engine.eval()
        job.engine(tokens, labels)
        job.engine.train()
        with torch.no_grad():
            job.engine(tokens, labels)
    job.engine.save_checkpoint(folder)
    assert not hooks.has_trained
    return recorder.log


@pytest.mark.parametrize("name", by_default(["zero1", "zero3", "pp2"], ["zero1", "pp2"]))
def test_evaluation_and_saving_are_pauses_and_no_training(name: str, tmp_path: Path) -> None:
    expected = ["pause"] * (2 if name == "pp2" else 3)
    assert results(evaluated, 2, SHAPES[name], str(tmp_path)) == [expected, expected]


def skipping(rank: int, world_size: int, shape: Shape) -> tuple[list[str], int]:
    import train_deepspeed

    job = ds_jobs.build(shape, ITERATIONS)
    recorder = Recorder()
    listen(job.engine, recorder)
    note_writes(job.engine, recorder)
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
        told = merged([word for word in log[1:] if word != "fence"])
        once = [*MICRO, *MICRO, "forward", "backward", *["window"] * (how == "by hand"), "tail"]
        assert told == [*once, "step 1", *once, "step 2"]


def state_of(engine: Any) -> Mapping[str, Any]:
    """Everything a hook could hang on."""
    inner = inner_optimizer(engine)
    return {
        "fields": [sorted(vars(owner)) for owner in (engine, engine.optimizer, inner)],
        "pre-hooks": len(inner._optimizer_step_pre_hooks),
        "instructions": getattr(engine, "_INSTRUCTION_MAP", None),
        "loader": type(engine.training_dataloader),
    }


def removed(rank: int, world_size: int, shape: Shape, arena: str) -> list[str]:
    """A job with ftckpt, of which ftckpt is removed."""
    import deepspeed
    import train_deepspeed

    import ftckpt.deepspeed
    from tests.support.standin import deepspeed as standin

    standin.install()
    original = deepspeed.initialize.__wrapped__
    plain = ds_jobs.build(shape, ITERATIONS)
    before = state_of(plain.engine)
    ftckpt.deepspeed.remove()
    from ftckpt.deepspeed import initialize

    initialize.install()
    section = {"enabled": True, "node": "node", "job": "removed", "arena": arena}
    job = ds_jobs.build(shape, ITERATIONS, ftckpt=section)
    checkpointer: Any = ftckpt.deepspeed.active()
    train_deepspeed.train_step(job)
    assert state_of(job.engine) != before
    ftckpt.deepspeed.remove()
    assert deepspeed.initialize is original
    assert ftckpt.deepspeed.active() is None
    calls: list[str] = []
    for name in ("phase", "fence", "step", "expect"):
        setattr(checkpointer, name, lambda *args, name=name: calls.append(name))
    train_deepspeed.train_step(plain)
    before = state_of(plain.engine)
    train_deepspeed.train_step(job)
    assert state_of(job.engine) == before
    return calls


@pytest.mark.parametrize("name", by_default(["zero1", "zero3", "pp2"], ["zero3", "pp2"]))
def test_remove_undoes_everything(name: str, arena_root: Path) -> None:
    assert results(removed, 2, SHAPES[name], str(arena_root)) == [[], []]
