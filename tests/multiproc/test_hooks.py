"""The fence stands before the first write of the optimizer, twice, and the schedule is followed step by step."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from tests.support import jobs
from tests.support.plain import Recorder
from tests.support.pool import run_ranks

pytestmark = pytest.mark.multiproc


def order_of_calls(rank: int, world_size: int, argv: list[str], finalize: bool, guard: str) -> list[str]:
    """What happens in one iteration, in order; of the two fences perhaps one alone."""
    import train_gpt
    from megatron.core.pipeline_parallel import schedules

    from ftckpt.megatron import door, hooks

    recorder = Recorder()
    hooks.install()
    job = train_gpt.build(train_gpt.parse_args([*jobs.TINY, *argv, "--iterations", "2"]))
    leaf = job.optimizer.chained_optimizers[0].optimizer
    inner = leaf.step
    leaf.step = lambda *a, **k: (recorder.log.append("write"), inner(*a, **k))[1]
    if finalize:
        original = job.config.finalize_model_grads_func
        job.config.finalize_model_grads_func = lambda *a, **k: (recorder.log.append("finalize"), original(*a, **k))[1]
    else:
        job.config.finalize_model_grads_func = None
    before = job.config.finalize_model_grads_func
    hooks.follow(recorder, job.optimizer, None)  # type: ignore[arg-type]
    if guard == "outer":
        door.hooks.undo.pop()()
    if guard == "inner":
        door.hooks.undo.pop(0)()
        leaf.step = inner
    train_gpt.train_step(job)
    assert job.config.finalize_model_grads_func is before
    assert job.config.timers is None
    door.remove()
    assert "step_with_ready_grads" not in vars(job.optimizer)
    assert not hasattr(schedules.forward_backward_no_pipelining, "__wrapped__")
    done = list(recorder.log)
    train_gpt.train_step(job)
    assert recorder.log.count("fence") == done.count("fence"), "removed hooks still fence"
    assert recorder.log.count("forward") == done.count("forward"), "removed hooks still listen"
    return done


SCHEDULES = [[], ["--pp", "2"], ["--pp", "2", "--vpp", "2", "--layers", "4"]]


@pytest.mark.parametrize("argv", SCHEDULES, ids=" ".join)
@pytest.mark.parametrize("finalize", [True, False], ids=["finalize", "no finalize"])
def test_the_tail_goes_from_the_last_backward_to_the_fence(argv: list[str], finalize: bool) -> None:
    for result in run_ranks(order_of_calls, 2, argv, finalize, "both"):
        log = result.value
        last = len(log) - log[::-1].index("backward") - 1
        rest = ["window", "tail", *["finalize"] * finalize, "fence", "write"]
        assert [word for word in log[last + 1 :] if word != "fence"] == [word for word in rest if word != "fence"]
        assert log.index("fence") > log.index("tail")
        assert log.index("fence") < log.index("write")


@pytest.mark.parametrize("guard", ["outer", "inner"])
def test_each_fence_holds_alone(guard: str) -> None:
    log = run_ranks(order_of_calls, 2, [], True, guard)[0].value
    assert log.count("fence") == 1
    assert log.index("finalize") < log.index("fence")
    if guard == "outer":
        assert log[-2:] == ["fence", "write"]


def followed(rank: int, world_size: int, argv: list[str]) -> tuple[list[str], Any]:
    """What is told of one iteration, and what the model said before."""
    import train_gpt

    from ftckpt.megatron import door, hooks

    recorder = Recorder()
    hooks.install()
    job = train_gpt.build(train_gpt.parse_args([*jobs.TINY, *argv, "--iterations", "2"]))
    hooks.follow(recorder, job.optimizer, None)  # type: ignore[arg-type]
    train_gpt.train_step(job)
    door.remove()
    return recorder.log, recorder.expected


@pytest.mark.parametrize("argv", SCHEDULES, ids=" ".join)
def test_the_model_names_the_places_that_training_comes_to(argv: list[str]) -> None:
    for result in run_ranks(followed, 2, argv):
        log, (kinds, lengths) = result.value
        told = [kind for kind in log if kind != "fence"]
        merged = [kind for index, kind in enumerate(told) if index == 0 or kind != told[index - 1]]
        assert tuple(merged) == tuple(kinds)
        assert len(lengths) == len(kinds)


def forward_only(rank: int, world_size: int) -> list[str]:
    import train_gpt
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from ftckpt.megatron import hooks

    recorder = Recorder()
    hooks.install()
    job = train_gpt.build(train_gpt.parse_args([*jobs.TINY, "--iterations", "2"]))
    hooks.follow(recorder, job.optimizer, None)  # type: ignore[arg-type]
    get_forward_backward_func()(
        forward_step_func=train_gpt.forward_step,
        data_iterator=[iter(job.data.next_batch(job.num_micro, 2, 0, 2))],
        model=job.model,
        num_microbatches=job.num_micro,
        seq_length=32,
        micro_batch_size=2,
        forward_only=True,
    )
    return recorder.log


def test_evaluation_does_not_fence_and_is_a_pause() -> None:
    assert run_ranks(forward_only, 2)[0].value == ["pause"]


def paused(rank: int, world_size: int) -> list[Any]:
    """What is told of a train loop's pauses, by functions of a module that looks them up as Megatron-LM's does."""
    import train_gpt

    from ftckpt.megatron import door, hooks

    recorder = Recorder()
    loop: Any = types.ModuleType("megatron.training.training")
    loop.evaluate = lambda: recorder.log.append("evaluate")
    loop.evaluate_and_print_results = lambda prefix: loop.evaluate()
    loop.save_checkpoint = lambda iteration, *, kind: (iteration, kind)
    loop.save_checkpoint_and_time = lambda iteration: loop.save_checkpoint(iteration, kind="torch")
    loop.maybe_finalize_async_save = lambda blocking=False: blocking
    before = dict(vars(loop))
    sys.modules[loop.__name__] = loop
    job = train_gpt.build(train_gpt.parse_args([*jobs.TINY, "--iterations", "2"]))
    hooks.follow(recorder, job.optimizer, None)  # type: ignore[arg-type]
    loop.evaluate_and_print_results("validation")
    result = loop.save_checkpoint_and_time(5)
    loop.maybe_finalize_async_save(blocking=False)
    loop.maybe_finalize_async_save(blocking=True)
    door.leave()
    assert dict(vars(loop)) == before
    return [result, *recorder.log]


def test_a_train_loop_tells_when_it_evaluates_and_saves() -> None:
    """This release's loop has no ``load_checkpoint``: it is no error."""
    (result, *log) = run_ranks(paused, 1)[0].value
    assert log == ["pause", "pause", "evaluate", "pause", "pause", "pause"] and result == (5, "torch")
