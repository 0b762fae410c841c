"""Megatron's Muon, with the package that computes its updates: killed and resumed bit for bit, or refused by name."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import UnsupportedError
from tests.support import jobs
from tests.support.errors import a_rank_raises
from tests.support.faults import Fault
from tests.support.trainers import install

pytestmark = [pytest.mark.multiproc, pytest.mark.faults, pytest.mark.slow]

UNTIL, AT = 7, 5


@pytest.fixture(scope="module")
def packages() -> str:
    pytest.importorskip("megatron.core.optimizer.muon")
    return str(install("muon", ["emerging-optimizers==0.3.0", "absl-py==2.3.1"]))


def step_by_muon(packages: str, is_layer_wise: bool, job: Any, rank: int) -> None:
    """Gives a built job Muon in place of Adam."""
    sys.path.append(packages)
    import train_gpt
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    args = job.args
    config = OptimizerConfig(
        optimizer="muon", lr=args.lr, weight_decay=0.01, bf16=args.precision == "bf16", clip_grad=1.0
    )
    job.optimizer = get_megatron_muon_optimizer(
        config, job.model, use_gloo_process_groups=False, layer_wise_distributed_optimizer=is_layer_wise
    )
    job.scheduler = train_gpt.build_scheduler(args, job.optimizer)
    job.config.grad_scale_func = job.optimizer.scale_loss


@pytest.mark.parametrize("argv", ["--tp 2", "--pp 2 --precision fp32", "--ep 2 --num-experts 4"])
def test_muon_killed_goes_on_bit_for_bit(argv: str, packages: str, settings: dict[str, Any], tmp_path: Path) -> None:
    words = [*argv.split(), "--no-distributed-optimizer"]
    run = jobs.Run(words, UNTIL, settings, prepare=partial(step_by_muon, packages, False))
    fault = Fault("all", AT, "boundary", tmp_path / "fired", "kill", secs=20)
    whole = jobs.outcomes(2, jobs.Run(words, UNTIL, prepare=run.prepare))
    assert all(
        map(jobs.killed, jobs.broken(2, jobs.Run(words, UNTIL, settings, faults=[fault], prepare=run.prepare)))
    )
    assert jobs.assert_continues(whole, jobs.outcomes(2, run)) == AT - 1
    assert not jobs.events(settings, "snapshot_error")


def test_layer_wise_muon_is_refused_by_name(packages: str, settings: dict[str, Any]) -> None:
    prepare = partial(step_by_muon, packages, True)
    with a_rank_raises(UnsupportedError, "LayerWiseDistributedOptimizer"):
        jobs.outcomes(2, jobs.Run(["--no-distributed-optimizer"], UNTIL, settings, prepare=prepare))
