"""The model of the schedules gives the order in which Megatron really runs its compute steps."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from ftckpt.schedule.pipeline import Orders, Step, pipeline_orders
from tests.support import jobs
from tests.support.pool import run_ranks

pytestmark = pytest.mark.multiproc

SEPARATE = {"overlap_p2p_comm": False, "batch_p2p_comm": False}
FLUSH = {"overlap_p2p_comm_warmup_flush": True}


def build(argv: list[str], micro_batches: int, changes: dict[str, Any]) -> Any:
    """The example job, one sample to a micro-batch, with ``changes`` to Megatron's configuration."""
    import train_gpt

    batches = ["--micro-batch", "1", "--global-batch", str(micro_batches)]
    job = train_gpt.build(train_gpt.parse_args([*jobs.TINY, *argv, *batches]))
    for name, value in changes.items():
        assert hasattr(job.config, name)
        setattr(job.config, name, value)
    return job


def real_order(
    rank: int, world_size: int, argv: list[str], micro_batches: int, changes: dict[str, Any]
) -> tuple[Step, ...]:
    """What this rank computes in one iteration; a backward is known by the output that it takes."""
    import train_gpt
    from megatron.core.pipeline_parallel import schedules

    job = build(argv, micro_batches, changes)
    order: list[Step] = []
    outputs: list[tuple[Any, Step]] = []
    forward_step, backward_step = schedules.forward_step, schedules.backward_step

    def forward(*args: Any, **kwargs: Any) -> Any:
        result = forward_step(*args, **kwargs)
        order.append(Step("forward", kwargs["current_microbatch"], kwargs.get("vp_stage") or 0))
        outputs.append((result[0], order[-1]))
        return result

    def backward(input_tensor: Any, output_tensor: Any, *args: Any) -> Any:
        (step,) = (step for output, step in outputs if output is output_tensor)
        order.append(Step("backward", step.micro, step.chunk))
        return backward_step(input_tensor, output_tensor, *args)

    schedules.forward_step, schedules.backward_step = forward, backward
    train_gpt.train_step(job)
    return tuple(order)


def assert_orders(argv: list[str], micro_batches: int, modelled: Orders | None, **changes: Any) -> None:
    assert modelled is not None
    results = run_ranks(real_order, len(modelled), argv, micro_batches, changes)
    for stage, (result, order) in enumerate(zip(results, modelled, strict=True)):
        assert result.value == order, f"stage {stage}"


@pytest.mark.parametrize(
    ("stages", "micro_batches"),
    [(1, 4), (2, 1), (4, 3), (4, 6)],
)
def test_one_forward_one_backward(stages: int, micro_batches: int) -> None:
    assert_orders(["--pp", str(stages), "--layers", "4"], micro_batches, pipeline_orders(stages, micro_batches))


@pytest.mark.parametrize(
    "stages, micro_batches, chunks, group, changes",
    [(2, 6, 3, 3, {}), (2, 5, 2, 3, FLUSH), (4, 8, 2, None, FLUSH), (4, 10, 2, 6, SEPARATE)],
)
def test_interleaved(
    stages: int, micro_batches: int, chunks: int, group: int | None, changes: dict[str, Any]
) -> None:
    argv = ["--pp", str(stages), "--vpp", str(chunks), "--layers", str(stages * chunks)]
    if group is not None:
        changes = {**changes, "microbatch_group_size_per_vp_stage": group}
    assert_orders(argv, micro_batches, pipeline_orders(stages, micro_batches, chunks, group), **changes)


def compare_tables(rank: int, world_size: int) -> int:
    """Megatron's own warm-up counts and table of forwards against the model, over many shapes; how many."""
    from megatron.core.pipeline_parallel import schedules

    compared = 0
    for stages, micros, chunks, group in itertools.product((2, 3, 4, 8), range(2, 20), (2, 4), (2, 3, 4, 5, 8, 9)):
        table = schedules.get_schedule_table(micros, chunks, group)
        for stage, order in enumerate(pipeline_orders(stages, micros, chunks, group) or ()):
            pipeline = SimpleNamespace(size=lambda: stages, rank=lambda stage=stage: stage)  # noqa: B023
            communicator = SimpleNamespace(pp_group=pipeline, virtual_pipeline_model_parallel_size=chunks)
            total, _, warmup, _ = schedules.get_pp_rank_microbatches(
                micros, chunks, group, False, False, communicator
            )
            forwards = [(step.micro, step.chunk) for step in order if step.kind == "forward"]
            assert forwards == table
            backwards = [(step.micro, chunks - 1 - step.chunk) for step in order if step.kind == "backward"]
            assert backwards == table
            first = min(warmup + 1, total)
            assert [step.kind for step in order[: first + 1]] == ["forward"] * first + ["backward"]
            compared += 1
    return compared


def test_warm_up_and_table_over_many_shapes() -> None:
    assert run_ranks(compare_tables, 1)[0].value > 300


def refusal(rank: int, world_size: int, argv: list[str], cases: list[tuple[int, int]]) -> list[str]:
    """What Megatron answers to each (micro-batches, group) before it computes anything."""
    import train_gpt
    from megatron.core.pipeline_parallel import schedules

    def unreached(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("a step ran")

    schedules.forward_step = unreached
    job = build(argv, 4, {})
    answers = []
    for micro_batches, group in cases:
        job.num_micro, job.config.microbatch_group_size_per_vp_stage = micro_batches, group
        try:
            train_gpt.train_step(job)
        except (ValueError, RuntimeError) as error:
            answers.append(type(error).__name__)
    return answers


def test_interleaved_refuses_what_megatron_refuses() -> None:
    cases = [(1, 2), (2, 3), (4, 1), (5, 2), (7, 3), (9, 4)]
    for micro_batches, group in cases:
        assert pipeline_orders(2, micro_batches, 2, group) is None
    results = run_ranks(refusal, 2, ["--pp", "2", "--vpp", "2", "--layers", "4"], cases)
    for result in results:
        assert result.value == ["ValueError"] * 3 + ["RuntimeError"] * 3
