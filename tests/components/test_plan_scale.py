"""Planning stays fast and small in a job of 16,384 ranks: who copies which bytes, and where to read after a change of
the layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import plan_scale, reshape_plan
from benchmarks.reshape_plan import Layout
from ftckpt.model.replicas import CUT_BYTES

SLACK = 8
"""Times the limits of the benchmarks, for busy machines."""


def due(job: plan_scale.SyntheticJob) -> float:
    """The first rank's share by arithmetic: bytes of each fragment over the number of ranks that have it.

    Norms under the distributed optimizer are too small to divide: each rank copies all of them.
    """
    tp, _, dp = job.shape
    total = 0.0
    for fragment in job.fragments(0, 0):
        matrix = fragment.global_shape[1] > 1
        holders = {"non-distributed": dp, "distributed": 1, "expert pairs": 2 if matrix else dp}[job.optimizer]
        holders *= 1 if matrix or job.optimizer == "distributed" else tp
        holders *= 2 if "embedding" in fragment.key else 1
        total += fragment.nbytes / holders
    return total


@pytest.mark.parametrize("optimizer", plan_scale.OPTIMIZERS)
def test_shares_are_what_arithmetic_says(optimizer: str) -> None:
    job = plan_scale.SyntheticJob(64, optimizer)
    sets, parts = plan_scale.compute(plan_scale.Exchange(job))
    assert abs(sum(part.fragment.nbytes for part in parts) - due(job)) <= CUT_BYTES * len(sets.runs)


@pytest.mark.parametrize("optimizer", plan_scale.OPTIMIZERS)
@pytest.mark.parametrize("ranks", [64, pytest.param(16_384, marks=pytest.mark.slow)])
def test_a_large_job_is_planned_in_time_and_in_little_memory(optimizer: str, ranks: int) -> None:
    case = plan_scale.run_case(plan_scale.SyntheticJob(ranks, optimizer), repeats=1)
    assert case["secs_median"] < SLACK * plan_scale.LIMIT_SECS
    assert case["kept_bytes"] < case["peak_bytes"] < plan_scale.LIMIT_BYTES
    assert case["groups"] > (150 if ranks == 16_384 else 20)


@pytest.mark.slow
def test_reads_of_the_largest_job_are_planned_in_time_and_in_little_memory() -> None:
    old, new = Layout(8, 16, 128, "flat"), Layout(4, 8, 256, "whole")
    case = reshape_plan.run_case(old, new, reshape_plan.messages_of(old), repeats=1, ranks=[5000])
    assert case["secs_max"] < SLACK * reshape_plan.LIMIT_SECS and case["peak_bytes"] < reshape_plan.LIMIT_BYTES
    assert case["reads"] >= 4 * case["needs"] > 1000


def test_the_commands_write_their_results(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    assert plan_scale.main(["--json", str(output), "--ranks", "8", "--repeats", "1"]) == 0
    assert [case["optimizer"] for case in json.loads(output.read_text())["cases"]] == [*plan_scale.OPTIMIZERS]
    assert reshape_plan.main(["--json", str(output), "--ranks", "64", "--repeats", "1"]) == 0
    assert len(json.loads(output.read_text())["cases"]) == len(reshape_plan.CHANGES)
