"""Experts in Transformer Engine's ``GroupedLinear``, a stand-in, under real Megatron-core: one parameter for each."""

from __future__ import annotations

import functools
import hashlib
import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.standin import te
from tests.support import jobs
from tests.support.pool import run_ranks

pytestmark = pytest.mark.multiproc

EXPERTS = ["--num-experts", "4", "--swiglu", "--dropout", "0"]


def prepare() -> None:
    """Build ``train_gpt`` with grouped experts; all else is Megatron's own, which trains without a GPU."""
    te.install(te.RELEASES[-1])
    import train_gpt
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    make_model, make_spec = train_gpt.transformer_config, train_gpt.block_spec

    def configured(args: Any) -> Any:
        config = make_model(args)
        config.moe_grouped_gemm = True
        return config

    def specified(*args: Any) -> Any:
        spec = make_spec(*args)
        for layer in spec.layer_specs:
            layer.submodules.mlp = get_moe_module_spec(use_te=True, num_experts=4, moe_grouped_gemm=True)
        return spec

    train_gpt.transformer_config, train_gpt.block_spec = configured, specified


def train(rank: int, world_size: int, run: jobs.Run) -> jobs.Outcome:
    prepare()
    return jobs.train(rank, world_size, run)


@pytest.mark.slow
def test_a_restart_goes_on_bit_for_bit(settings: dict[str, Any]) -> None:
    run = jobs.Run([*EXPERTS, "--ep", "2"], 6, settings)

    def outcomes(run: jobs.Run) -> list[jobs.Outcome]:
        return [found.value for found in run_ranks(train, 2, run, timeout_secs=200.0)]

    whole = outcomes(replace(run, settings=None))
    assert any("linear_fc1.weight1" in name for name in whole[0].hashes)
    outcomes(replace(run, until=3, end="keep"))
    assert jobs.assert_continues(whole, outcomes(run)) == 3
    assert not jobs.events(settings, "snapshot_error")


def experts(rank: int, world_size: int, run: jobs.Run) -> dict[Any, str]:
    """A digest of all state of each expert, by its name and place, after ``run`` has restored and trained."""
    train(rank, world_size, run)
    pieces = sys.modules["ftckpt.megatron"].integration.state.describe().stepped
    return {
        (piece.fragment.key, piece.fragment.box.offset): hashlib.sha256(piece.tensor.float().numpy()).hexdigest()
        for piece in pieces
        if ".experts." in piece.fragment.key and piece.fragment.numel == piece.fragment.box.numel
    }


def test_another_layout_takes_each_expert_to_its_place(settings: dict[str, Any]) -> None:
    run = jobs.Run(EXPERTS, 3, settings, end="keep")

    def found(ranks: int, run: jobs.Run) -> dict[Any, str]:
        digests = [result.value for result in run_ranks(experts, ranks, run, timeout_secs=200.0)]
        return functools.reduce(lambda all_, more: all_ | more, digests)

    saved = found(2, replace(run, argv=[*EXPERTS, "--ep", "2"]))
    # Of two layers and four experts three halves of matrices, each as weight, master and two moments.
    assert len(saved) == 2 * 4 * 3 * 4
    assert found(1, run) == saved  # no iteration is left to train
