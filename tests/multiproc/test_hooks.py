"""The fence is where the schedules finalize gradients, and around the optimizer: each holds alone."""

from __future__ import annotations

from typing import Any

import jobs
import pytest

from ftckpt.testing.pool import run_ranks

pytestmark = pytest.mark.multiproc


class Recorder:
    """Stands where a checkpointer does and writes down when it is asked to fence."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def fence(self) -> None:
        self.log.append("fence")


def order_of_calls(rank: int, world_size: int, argv: list[str], finalize: bool, hooks_only: str) -> list[str]:
    """What happens in one iteration, in order, with one of the two fences taken away."""
    import train_gpt
    from megatron.core.pipeline_parallel import schedules

    from ftckpt.megatron import hooks

    recorder = Recorder()
    if hooks_only != "optimizer":
        hooks.install()
    job = train_gpt.build(train_gpt.parse_args([*jobs.TINY, *argv, "--iterations", "2"]))
    step = job.optimizer.step_with_ready_grads
    job.optimizer.step_with_ready_grads = lambda: (recorder.log.append("step"), step())[1]
    if finalize:
        original = job.config.finalize_model_grads_func
        job.config.finalize_model_grads_func = lambda *a, **k: (recorder.log.append("finalize"), original(*a, **k))[1]
    else:
        job.config.finalize_model_grads_func = None
    before = job.config.finalize_model_grads_func
    hooks.activate(recorder, job.optimizer, None)  # type: ignore[arg-type]
    if hooks_only == "schedule":
        del job.optimizer.step
        hooks._guarded = None
    train_gpt.train_step(job)
    assert job.config.finalize_model_grads_func is before
    hooks.remove()
    assert "step" not in vars(job.optimizer)
    assert not hasattr(schedules.forward_backward_no_pipelining, "__wrapped__")
    done = list(recorder.log)
    train_gpt.train_step(job)
    assert recorder.log.count("fence") == done.count("fence"), "removed hooks still fence"
    return done


@pytest.mark.parametrize("argv", [[], ["--pp", "2"], ["--pp", "2", "--vpp", "2", "--layers", "4"]], ids=" ".join)
@pytest.mark.parametrize("finalize", [True, False], ids=["finalize", "no finalize"])
def test_fences_come_before_finalize_and_before_the_step(argv: list[str], finalize: bool) -> None:
    expected = ["fence", "finalize", "fence", "step"] if finalize else ["fence", "fence", "step"]
    for result in run_ranks(order_of_calls, 2, argv, finalize, "both"):
        assert result.value == expected


def test_the_optimizer_guard_holds_alone() -> None:
    assert run_ranks(order_of_calls, 2, [], True, "optimizer")[0].value == ["finalize", "fence", "step"]


def test_the_schedule_fence_holds_alone() -> None:
    assert run_ranks(order_of_calls, 2, [], True, "schedule")[0].value == ["fence", "finalize", "step"]


def forward_only(rank: int, world_size: int) -> list[str]:
    import train_gpt
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from ftckpt.megatron import hooks

    recorder = Recorder()
    hooks.install()
    job = train_gpt.build(train_gpt.parse_args([*jobs.TINY, "--iterations", "2"]))
    hooks.activate(recorder, job.optimizer, None)  # type: ignore[arg-type]
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


def test_evaluation_does_not_fence() -> None:
    assert run_ranks(forward_only, 2)[0].value == []


def unknown_version(rank: int, world_size: int) -> str:
    import megatron.core

    from ftckpt.errors import UnsupportedError
    from ftckpt.megatron import hooks

    megatron.core.__version__ = "9.9.9"
    try:
        hooks.install()
    except UnsupportedError as error:
        return str(error)
    return "installed"


def test_an_unknown_version_is_refused_by_name() -> None:
    text: Any = run_ranks(unknown_version, 1)[0].value
    assert "9.9.9 is not known" in text and "0.16.1" in text
