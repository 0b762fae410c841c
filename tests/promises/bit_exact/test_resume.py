"""A job that loses all its processes resumes from memory to the same bits as an unbroken one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import jobs
from tests.support.pool import run_ranks
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc

FULL = ["--tp", "2", "--pp", "2"]
LAYOUTS = {
    "tp2-pp2-dp2-distributed": (8, FULL),
    "tp2-pp2-dp2-replicated-overlap": (8, [*FULL, "--no-distributed-optimizer", "--overlap-grad-reduce"]),
    "dp2-fp32": (2, ["--precision", "fp32", "--no-distributed-optimizer"]),
    "dp2-fp16-scaled": (2, ["--precision", "fp16", "--loss-scale", "262144", "--loss-scale-window", "2"]),
    "pp2-vpp2-dp2-overlap-both": (
        4,
        ["--pp", "2", "--vpp", "2", "--layers", "4", "--overlap-grad-reduce", "--overlap-param-gather"],
    ),
    "tp2-ep2-router-bias": (4, ["--tp", "2", "--ep", "2", "--num-experts", "4", "--router-bias"]),
    "ep2-experts-replicated": (2, ["--ep", "2", "--num-experts", "4", "--no-distributed-optimizer"]),
    "tp2-swiglu-gqa-untied": (2, ["--tp", "2", "--swiglu", "--kv-groups", "2", "--untie"]),
    "tp2-dp2-fp32-sequence": (4, ["--tp", "2", "--precision", "fp32", "--swiglu", "--untie", "--sequence-parallel"]),
}


@pytest.mark.parametrize(
    "name", by_default(LAYOUTS, ["tp2-pp2-dp2-distributed", "dp2-fp16-scaled", "pp2-vpp2-dp2-overlap-both"])
)
def test_resume_is_bit_exact(name: str, settings: dict[str, Any], arena_root: Path) -> None:
    world_size, argv = LAYOUTS[name]
    reference = jobs.outcomes(world_size, jobs.Run(argv, until=6))
    assert any("exp_avg_sq" in name for name in reference[0].hashes)
    first = jobs.broken(world_size, jobs.Run(argv, until=4, settings=settings, end="die"))
    assert all(map(jobs.killed, first)), [r.error for r in first]
    resumed = jobs.outcomes(world_size, jobs.Run(argv, until=6, settings=settings))
    assert jobs.assert_continues(reference, resumed) in (3, 4)
    assert not jobs.events(settings, "snapshot_error")
    assert not list(arena_root.iterdir()), "an ended job left something behind"


FP16 = ["--precision", "fp16", "--loss-scale", "65536", "--loss-scale-window", "2"]


@pytest.mark.parametrize(
    "first, then, told",
    [
        (FP16, [], "the loss scaler of the snapshot is not used: this job has none"),
        ([], FP16, "the loss scaler starts at 65536: the snapshot has none of its kind"),
    ],
    ids=["fp16 to bf16", "bf16 to fp16"],
)
def test_another_precision_takes_all_but_the_loss_scaler(
    first: list[str], then: list[str], told: str, settings: dict[str, Any]
) -> None:
    """Weights are recomputed from their masters; as in Megatron's checkpoints the scaler is not restored: a log
    line."""
    before = jobs.outcomes(2, jobs.Run([*first, "--tp", "2"], 4, settings, end="keep"))
    resumed = run_ranks(jobs.train_and_tell, 2, jobs.Run([*then, "--tp", "2"], 5, settings))
    (outcome, said), (other, nothing) = (result.value for result in resumed)
    assert outcome.start == other.start == 4
    assert told in said and "loss scaler" not in nothing
    # Masters and moments went on: a job from the beginning has twice the loss's distance.
    assert abs(outcome.history[0][1] - before[0].history[-1][1]) < 0.2
    assert not jobs.events(settings, "snapshot_error")


def drift(job: Any, rank: int) -> None:
    """Give each rank its own dropout masks."""
    torch.manual_seed(rank)


def test_replicas_that_differ_are_each_captured(settings: dict[str, Any]) -> None:
    """Different dropout masks on ranks of one tensor-parallel group make its layer norms drift apart."""
    argv = ["--tp", "2"]
    reference = jobs.outcomes(2, jobs.Run(argv, until=8, prepare=drift))
    jobs.broken(2, jobs.Run(argv, until=6, settings=settings, prepare=drift, end="die"))
    resumed = jobs.outcomes(2, jobs.Run(argv, until=8, settings=settings, prepare=drift))
    jobs.assert_continues(reference, resumed)
    assert jobs.events(settings, "replicas_differ")
