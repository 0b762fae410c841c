"""The model of the schedules has the order of Megatron's tables, and refuses what Megatron refuses."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from ftckpt.schedule.pipeline import pipeline_orders
from tests.support import jobs
from tests.support.pool import run_ranks

pytestmark = pytest.mark.multiproc


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
    job, _ = jobs.built(*argv, "--micro-batch", "1", "--global-batch", "4")
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
