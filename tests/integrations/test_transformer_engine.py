"""Megatron with Transformer Engine: real Megatron-core over the stand-in in ``tests/standin/te``."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from ftckpt.errors import UnsupportedError
from tests.standin import te
from tests.support import jobs
from tests.support.errors import a_rank_raises
from tests.support.pool import run_ranks
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc

DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}
CURRENT = {**DELAYED, "fp8_recipe": "tensorwise"}
REMAINDERS = {"use_precision_aware_optimizer": True}
WHOLE_MASTERS = {**REMAINDERS, "store_param_remainders": False}


@dataclass(frozen=True)
class Setup:
    """A job with Transformer Engine: its release, fields of TransformerConfig and OptimizerConfig, and ``rng``, the
    tracker of generators: of Megatron, or of TE, which has generators in it."""

    release: str = te.RELEASES[-1]
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    rng: str = "megatron"


def prepare(setup: Setup) -> Any:
    """``train_gpt`` with TE's layers."""
    te.install(setup.release)
    import train_gpt
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    make_model, make_optimizer = train_gpt.transformer_config, train_gpt.OptimizerConfig
    seed = train_gpt.model_parallel_cuda_manual_seed

    def configured(args: Any) -> Any:
        config = make_model(args)
        vars(config).update(setup.model)
        return config

    train_gpt.transformer_config = configured
    train_gpt.OptimizerConfig = functools.partial(make_optimizer, **setup.optimizer)
    train_gpt.model_parallel_cuda_manual_seed = functools.partial(seed, te_rng_tracker=setup.rng == "te")
    tracker = train_gpt.get_cuda_rng_tracker
    if setup.rng == "te":  # only the hashes of what was trained need it
        plain = lambda: {name: generator.get_state() for name, generator in tracker().get_states().items()}  # noqa: E731
        train_gpt.get_cuda_rng_tracker = lambda: SimpleNamespace(get_states=plain)
    train_gpt.block_spec = lambda *_: get_gpt_layer_with_transformer_engine_spec()
    return train_gpt


def train(rank: int, world_size: int, run: jobs.Run, setup: Setup) -> jobs.Outcome:
    prepare(setup)
    return jobs.train(rank, world_size, run)


def outcomes(world_size: int, setup: Setup, run: jobs.Run) -> list[jobs.Outcome]:
    return [result.value for result in run_ranks(train, world_size, run, setup, timeout_secs=200.0)]


SETUPS = {
    **{f"delayed-{release}": Setup(release, DELAYED) for release in te.RELEASES},
    **{f"current-{release}": Setup(release, CURRENT) for release in te.RELEASES},
    **{f"bf16-{release}": Setup(release) for release in te.RELEASES},
    "remainders": Setup(optimizer=REMAINDERS),
    "delayed-remainders": Setup(model=DELAYED, optimizer=REMAINDERS),
    "whole-masters": Setup(optimizer=WHOLE_MASTERS),
    "te-tracker": Setup(rng="te"),
}


@pytest.mark.parametrize(
    "name",
    by_default(
        SETUPS, ["delayed-2.18", "current-2.4", "bf16-2.2", "delayed-remainders", "whole-masters", "te-tracker"]
    ),
)
def test_a_restart_goes_on_bit_for_bit(name: str, settings: dict[str, Any]) -> None:
    setup = SETUPS[name]
    run = jobs.Run([], 6, settings)
    assert jobs.goes_on(functools.partial(outcomes, 1, setup), run, 3) == 3


def test_replicas_share_scales(settings: dict[str, Any]) -> None:
    setup, run = Setup(model=DELAYED), jobs.Run(["--pp", "2"], 4, settings)
    assert jobs.goes_on(functools.partial(outcomes, 4, setup), run, 2) == 2


def scales(rank: int, world_size: int, setup: Setup, run: jobs.Run) -> dict[str, Any]:
    """The scales of each module after ``run`` has restored and trained, by a name that no layout changes."""
    train(rank, world_size, run, setup)
    integration, fp8 = sys.modules["ftckpt.megatron"].integration, sys.modules["ftckpt.megatron.fp8"]
    unpacked = fp8._unpacked(integration.state._scaling.save())
    return {name: {key: [t.tolist() for t in pair] for key, pair in found.items()} for name, _, found in unpacked}


def all_scales(world_size: int, setup: Setup, run: jobs.Run) -> dict[str, Any]:
    found = [result.value for result in run_ranks(scales, world_size, setup, run, timeout_secs=200.0)]
    return {name: of_module for of_rank in found for name, of_module in of_rank.items()}


def test_another_layout_takes_the_scales_of_all_stages(settings: dict[str, Any]) -> None:
    setup, run = Setup(model=DELAYED), jobs.Run(["--pp", "2", "--layers", "4"], 3, settings, end="keep")
    saved = all_scales(2, setup, run)
    # No iteration is left to train.
    assert all_scales(1, setup, replace(run, argv=["--layers", "4"])) == saved
    assert len(saved) == 4 * 5 and "decoder.layers.3.mlp.linear_fc2" in saved
    largest = [max(map(max, pair[1])) for module in saved.values() for pair in module.values()]
    assert sum(amax > 0 for amax in largest) >= len(largest) / 2


@pytest.mark.parametrize(
    "first, then", [(DELAYED, {}), ({}, DELAYED), (DELAYED, CURRENT)], ids=["off", "on", "other"]
)
def test_fp8_may_be_switched_between_attempts(
    first: dict[str, Any], then: dict[str, Any], settings: dict[str, Any]
) -> None:
    run = jobs.Run([], 3, settings, end="keep")
    outcomes(1, Setup(model=first), run)
    resumed = functools.partial(train, setup=Setup(model=then))
    outcome, said = run_ranks(jobs.train_and_tell, 1, replace(run, until=4), resumed)[0].value
    assert outcome.start == 3
    # Four multiplications in a layer and attention, in two layers.
    assert ("FP8 scales of 10 modules of the snapshot do not fit here" in said) == (first == DELAYED)
    assert ("FP8 scales for this model: starting with initial ones" in said) == (then == DELAYED)


def test_a_longer_history_takes_a_shorter_one(settings: dict[str, Any]) -> None:
    run = jobs.Run([], 3, settings, end="keep")
    short = all_scales(1, Setup(model=DELAYED), run)
    longer = all_scales(1, Setup(model={**DELAYED, "fp8_amax_history_len": 6}), run)
    for name, directions in short.items():
        for direction, (scale, history) in directions.items():
            assert longer[name][direction] == [scale, [*history, *([[0.0] * len(scale)] * 2)]]


@pytest.mark.parametrize(
    "more, fuses, remedy",
    [
        ({"fp8_param": True}, False, "--fp8-param-gather"),
        ({}, True, "--use-transformer-engine-op-fuser"),
        ({"use_transformer_engine_op_fuser": True}, False, "--use-transformer-engine-op-fuser"),
    ],
    ids=["parameters", "op fuser", "op fuser of 0.19"],
)
def test_fp8_whose_state_is_not_known_is_refused_by_its_setting(
    more: dict[str, Any], fuses: bool, remedy: str
) -> None:
    with a_rank_raises(UnsupportedError, remedy):
        run_ranks(described, 1, Setup(model=DELAYED), more, fuses)


def described(rank: int, world_size: int, setup: Setup, more: dict[str, Any], fuses: bool) -> None:
    train_gpt = prepare(setup)
    if fuses:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        train_gpt.block_spec = lambda *_: get_gpt_layer_with_transformer_engine_spec(use_te_op_fuser=True)
    job = train_gpt.build(train_gpt.parse_args([*jobs.TINY]))
    vars(job.config).update(more)  # not before: what it builds then has no stand-in
    from ftckpt.megatron.state import MegatronState

    MegatronState(job.model, job.optimizer, job.scheduler, {})


def test_scales_that_no_setting_speaks_of_are_refused_when_they_come(settings: dict[str, Any]) -> None:
    """A script that casts by itself: its scales could not be restored."""
    run = jobs.Run([], 5, settings, end="keep")
    run_ranks(cast_by_hand, 1, Setup(), run, timeout_secs=200.0)
    errors = jobs.events(settings, "snapshot_error")
    assert len(errors) == 3 and "decoder.layers.0.self_attention.core_attention has FP8 scales" in errors[0]["error"]
    assert not jobs.events(settings, "snapshot") and jobs.events(settings, "turned_off")


def cast_by_hand(rank: int, world_size: int, setup: Setup, run: jobs.Run) -> jobs.Outcome:
    train_gpt = prepare(setup)
    step = train_gpt.forward_step

    def cast(*args: Any) -> Any:
        from transformer_engine.pytorch import fp8_autocast

        with fp8_autocast():
            return step(*args)

    train_gpt.forward_step = cast
    return jobs.train(rank, world_size, run)
