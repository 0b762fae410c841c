"""The description of Megatron ranks' state is the same in every layout: keys, shapes, and the place of each element.

Each model is built in many layouts and filled by a function of key and place. That a place means the same in all of
them is shown by the losses, which must be those of one rank alone, token by token.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from ftckpt.model.fragment import Fragment
from ftckpt.restore.plan import plan
from ftckpt.restore.tensor_index import ShardEntry
from tests.integrations import megatron_models as models
from tests.integrations.megatron_models import Model
from tests.support.elements import positions
from tests.support.pool import RankFailure, run_ranks
from tests.support.tiers import by_default

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(900)]

_MOE = {"num_moe_experts": 4, "moe_router_topk": 2}
_BIASED = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none",
}
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "v_head_dim": 12, "qk_pos_emb_head_dim": 4,
    "qk_layernorm": True, "rope_type": "rope",
}  # fmt: skip
MODELS = {
    "gpt": Model(),
    "gqa-swiglu-untied": Model({"num_query_groups": 2, "gated_linear_unit": True, "qk_layernorm": True}, untied=True),
    "experts": Model({**_MOE, **_BIASED, "moe_shared_expert_intermediate_size": 24}),
    "gated-experts": Model({**_MOE, "gated_linear_unit": True, "moe_layer_freq": [0, 1, 1, 0]}),
    "grouped": Model(_MOE, grouped=True),
    "gated-grouped": Model({**_MOE, "gated_linear_unit": True}, grouped=True),
    "mla": Model(_LATENT, mla=True),
    "mtp": Model({"mtp_num_layers": 1}, untied=True),
}
_DENSE = ("gpt", "gqa-swiglu-untied", "mla", "mtp")
_EXPERTS = ("experts", "gated-experts", "grouped", "gated-grouped")
LAYOUTS: list[tuple[int, dict[str, int], tuple[str, ...], tuple[str, ...]]] = [
    (2, {"tp": 2}, ("gqa-swiglu-untied", "mla", "grouped", "gated-grouped"), (*_DENSE, *_EXPERTS)),
    (2, {"pp": 2}, ("mtp",), (*_DENSE, *_EXPERTS)),
    (2, {"pp": 2, "vpp": 2}, ("gated-experts",), (*_DENSE, *_EXPERTS)),
    (2, {}, ("gpt",), ("gpt", "gated-experts")),  # dp2
    (2, {"ep": 2}, ("experts",), _EXPERTS),
    (2, {"tp": 2, "etp": 1}, ("gated-experts",), _EXPERTS),
    (4, {"tp": 4}, ("gqa-swiglu-untied",), (*_DENSE, *_EXPERTS)),  # of 2 groups of keys and values
    (4, {"tp": 2, "pp": 2, "vpp": 2}, ("mla",), ("gqa-swiglu-untied", "mla")),
    (4, {"tp": 2, "ep": 2}, ("gated-grouped",), _EXPERTS),
    (4, {"tp": 2, "ep": 4, "etp": 1}, ("grouped",), _EXPERTS),
    (4, {"tp": 2, "pp": 2, "etp": 1, "ep": 2}, ("experts",), _EXPERTS),
    (4, {"cp": 2, "pp": 2}, (), ("gpt",)),  # has no losses
]
"""Ranks, layout, models by default, and all models."""


@dataclass(frozen=True)
class RankDescription:
    """The description by one rank: fragments, padded keys, and losses of tokens (none before the last stage)."""

    fragments: list[Fragment]
    padded: frozenset[str]
    losses: list[float]


Case = tuple[str, Model, Mapping[str, int]]


def describe_all(rank: int, world_size: int, cases: list[Case]) -> list[RankDescription]:
    """One after the other in the same processes."""
    return [_describe(model, layout) for _, model, layout in cases]


def _describe(model: Model, layout: Mapping[str, int]) -> RankDescription:
    from ftckpt.megatron.state import MegatronState

    with models.parallel(layout):
        built = models.build(model, layout)
        state = MegatronState(built.chunks, built.optimizer, None, {})  # type: ignore[arg-type]
        described = state.describe()
        pieces = [*described.stepped, *described.volatile]
        models.fill(piece for piece in pieces if not piece.fragment.key.startswith("local/"))
        state.finish_load()
        losses = models.losses(built) if layout.get("cp", 1) == 1 else []
        return RankDescription([piece.fragment for piece in pieces], described.padded, losses)


def described(world_size: int, cases: list[Case]) -> dict[str, list[RankDescription]]:
    """The description by each rank, by case."""
    results = run_ranks(describe_all, world_size, cases, timeout_secs=60.0 + 10.0 * len(cases))
    return {name: [result.value[index] for result in results] for index, (name, _, _) in enumerate(cases)}


@pytest.fixture(scope="module")
def alone() -> dict[str, list[RankDescription]]:
    """Each model on one rank."""
    return described(1, [(name, MODELS[name], {}) for name in MODELS])


@pytest.fixture(scope="module", params=by_default(["some models", "all models"], ["some models"]))
def divided(request: pytest.FixtureRequest) -> dict[str, list[RankDescription]]:
    """Models in each of their layouts, by a name such as ``gpt tp2``."""
    found: dict[str, list[RankDescription]] = {}
    for world_size in (2, 4):
        cases = [
            (f"{name} {_text(layout)}", MODELS[name], layout)
            for ranks, layout, some, every in LAYOUTS
            if ranks == world_size
            for name in (some if request.param == "some models" else every)
        ]
        found.update(described(world_size, cases))
    return found


def _text(layout: Mapping[str, int]) -> str:
    return "".join(f"{axis}{size}" for axis, size in layout.items()) or "dp2"


def shapes(ranks: list[RankDescription]) -> dict[str, tuple[int, ...]]:
    """The shape of every logical tensor; fails where two ranks disagree."""
    found: dict[str, tuple[int, ...]] = {}
    for fragment in (fragment for rank in ranks for fragment in rank.fragments):
        if not fragment.key.startswith("local/"):
            assert found.setdefault(fragment.key, fragment.global_shape) == fragment.global_shape, fragment.key
    return found


def test_keys_and_shapes_are_those_of_one_rank(alone: Any, divided: Any) -> None:
    for case, ranks in divided.items():
        assert shapes(ranks) == shapes(alone[case.split()[0]]), case


def test_losses_of_tokens_are_those_of_one_rank(alone: Any, divided: Any) -> None:
    for case, ranks in divided.items():
        wanted = alone[case.split()[0]][0].losses
        found = [rank.losses for rank in ranks if rank.losses]
        assert found or "cp2" in case, case
        for losses in found:
            np.testing.assert_allclose(losses, wanted, rtol=2e-5, err_msg=case)


def test_a_plan_between_any_two_layouts_fills_every_element(alone: Any, divided: Any) -> None:
    for name in MODELS:
        layouts = {"one": alone[name], **{c: r for c, r in divided.items() if c.split()[0] == name}}
        for source, target in itertools.permutations(layouts, 2):
            if "one" in (source, target) or source.endswith("tp2"):
                assert_filled(layouts[source], layouts[target], f"{source} to {target}")


def assert_filled(
    sources: list[RankDescription], targets: list[RankDescription], what: str, rows: Mapping[str, int] | None = None
) -> None:
    """Carry out the plan of every target rank and compare each element with what it shall be.

    ``rows``: of padded keys, how many rows have values in both layouts.
    """
    haves = [
        ShardEntry(rank, fragment, 0)
        for rank, source in enumerate(sources)
        for fragment in source.fragments
        if not fragment.key.startswith("local/")
    ]
    held: dict[Fragment, np.ndarray] = {}
    for target in targets:
        needs = [fragment for fragment in target.fragments if not fragment.key.startswith("local/")]
        found = [torch.full((need.numel,), float("nan"), dtype=torch.float64) for need in needs]
        for read in plan(haves, needs, lambda _: 0, target.padded):
            values = held.setdefault(read.offer.fragment, _values(read.offer.fragment))
            for block in read.copies:
                to = found[read.need].as_strided(block.shape, block.dest_strides, block.dest)
                assert torch.isnan(to).all(), f"{what}: elements of {needs[read.need].name} are read twice"
                to.copy_(torch.from_numpy(values).as_strided(block.shape, block.source_strides, block.source))
        for need, tensor in zip(needs, found, strict=True):
            wanted = _values(need)
            if rows and need.key in rows:
                beyond = positions(need) >= rows[need.key] * need.global_shape[-1]
                assert torch.isnan(tensor).numpy()[beyond].all(), f"{what}: {need.name}"
                wanted[beyond] = float("nan")
            np.testing.assert_array_equal(tensor.numpy(), wanted, f"{what}: {need.name}")


def _values(fragment: Fragment) -> np.ndarray:
    return models.known(fragment.key, positions(fragment))


@pytest.mark.parametrize("untied", by_default([False, True], [True]))
def test_vocabularies_are_padded_and_nothing_else_is(untied: bool) -> None:
    model = replace(MODELS["gpt"], vocabulary=None, untied=untied)
    one, four = described(1, [("one", model, {})])["one"], described(4, [("four", model, {"tp": 4})])["four"]
    names = {"embedding.word_embeddings.weight", *(["output_layer.weight"] if untied else [])}
    padded = {f"{role}/{name}" for role in ("weight", "exp_avg", "exp_avg_sq") for name in names}
    assert one[0].padded == padded
    assert {key for key, shape in shapes(four).items() if shape != shapes(one)[key]} == padded
    assert {shapes(one)[key][0] for key in padded} == {264}
    assert {shapes(four)[key][0] for key in padded} == {288}
    rows = dict.fromkeys(padded, 264)
    assert_filled(one, four, "one to four", rows)
    assert_filled(four, one, "four to one", rows)


def test_buffers_of_the_model_are_told_from_those_of_a_rank(divided: Any) -> None:
    for case, ranks in divided.items():
        volatile = {f.key for rank in ranks for f in rank.fragments if f.key.startswith(("buffer/", "local/"))}
        if case.startswith("experts "):
            layers = range(models.LAYERS)
            assert {f"buffer/decoder.layers.{n}.mlp.router.expert_bias" for n in layers} <= volatile
            assert all("tokens_per_expert" in key for key in volatile if key.startswith("local/"))
        else:
            assert not {key for key in volatile if key.startswith("buffer/")}, case


def test_each_tensor_has_one_step_and_each_sequential_expert_its_own(alone: Any) -> None:
    for name in MODELS:
        for key, shape in shapes(alone[name]).items():
            if key.startswith("step/"):
                assert shape == ((4,) if ".experts.linear_fc" in key else (1,)), key
        keys = [f.name for f in alone[name][0].fragments]
        assert len(keys) == len(set(keys))


@pytest.mark.parametrize("name", ["grouped", "gated-grouped"])
def test_grouped_experts_are_divided_in_the_order_of_ranks(name: str, divided: Any) -> None:
    """Hidden units that change places between both weights would give the same losses."""
    for rank, description in enumerate(divided[f"{name} tp2"]):
        parts = [f for f in description.fragments if f.key.startswith("weight/") and ".experts.weight" in f.key]
        offsets = {f.box.offset[-1 if f.key.endswith("weight1") else 1] for f in parts}
        assert parts and offsets == {rank * models.FFN // 2}


def test_a_model_that_megatron_cannot_describe_is_refused() -> None:
    """Megatron 0.16.1 asserts that the last stage has no output layer where embeddings are tied."""
    tied = replace(MODELS["mtp"], untied=False)
    with pytest.raises(RankFailure, match=r"UnsupportedError: .*use --untie-embeddings-and-output-weights"):
        described(2, [("tied", tied, {"pp": 2})])
