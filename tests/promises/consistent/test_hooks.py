"""Hooks of Megatron that the conformance suite does not show: each schedule, and pauses of Megatron-LM's loop."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from tests.support import jobs
from tests.support.plain import Recorder, merged
from tests.support.pool import run_ranks

pytestmark = pytest.mark.multiproc


def order_of_calls(rank: int, world_size: int, argv: list[str], finalize: bool) -> list[str]:
    """The order of events in one iteration."""
    import train_gpt
    from megatron.core.pipeline_parallel import schedules

    from ftckpt.megatron import hooks, integration

    recorder = Recorder()
    hooks.install()
    job = train_gpt.build(train_gpt.parse_args([*jobs.TINY, *argv, "--iterations", "2"]))
    if finalize:
        original = job.config.finalize_model_grads_func
        job.config.finalize_model_grads_func = lambda *a, **k: (recorder.log.append("finalize"), original(*a, **k))[1]
    else:
        job.config.finalize_model_grads_func = None
    before = job.config.finalize_model_grads_func
    hooks.follow(recorder, job.optimizer, None)  # type: ignore[arg-type]
    train_gpt.train_step(job)
    assert job.config.finalize_model_grads_func is before
    assert job.config.timers is None
    integration.remove()
    assert "step_with_ready_grads" not in vars(job.optimizer)
    assert not hasattr(schedules.forward_backward_no_pipelining, "__wrapped__")
    return recorder.log


@pytest.mark.parametrize("argv", [[], ["--pp", "2"], ["--pp", "2", "--vpp", "2", "--layers", "4"]], ids=" ".join)
@pytest.mark.parametrize("finalize", [True, False], ids=["finalize", "no finalize"])
def test_the_tail_goes_from_the_last_backward_to_the_fence(argv: list[str], finalize: bool) -> None:
    for result in run_ranks(order_of_calls, 2, argv, finalize):
        log = result.value
        last = len(log) - log[::-1].index("backward") - 1
        rest = ["window", "tail", *["finalize"] * finalize, "fence"]
        assert merged(log[last + 1 :]) == rest
        told = merged([kind for kind in log if kind not in ("fence", "finalize")])
        assert set(told[:-1:2]) == {"window"} and told[-1] == "tail"
        assert told.count("forward") == told.count("backward") > 0


def paused(rank: int, world_size: int) -> list[Any]:
    """The reports of a train loop's pauses, by functions of a module that looks them up as Megatron-LM's does."""
    import train_gpt

    from ftckpt.megatron import hooks, integration

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
    integration.leave()
    assert dict(vars(loop)) == before
    return [result, *recorder.log]


def test_a_train_loop_tells_when_it_evaluates_and_saves() -> None:
    """This release's loop has no ``load_checkpoint``: it is no error."""
    (result, *log) = run_ranks(paused, 1)[0].value
    assert log == ["pause", "pause", "evaluate", "pause", "pause", "pause"] and result == (5, "torch")
