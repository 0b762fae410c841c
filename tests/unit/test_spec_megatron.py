"""The ready specifications know the tensors of Megatron-core's models, and say of each what Megatron says itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from test_spec import at, placed

from ftckpt.model.fragment import Box
from ftckpt.universal.language.placing import LocalTensor
from ftckpt.universal.language.spec import Spec
from tests.support.megatron_models import Model, build, fill, parallel
from tests.support.pool import run_ranks
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc

RMS = {"normalization": "RMSNorm"}
GATED = {**RMS, "gated_linear_unit": True, "add_bias_linear": False}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "gated_linear_unit": True, **RMS}
BIASED = {**EXPERTS, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid",
          "moe_router_load_balancing_type": "none"}  # fmt: skip
CASES: dict[str, tuple[str, Model]] = {
    "gpt": ("gpt", Model()),
    "gpt-untied": ("gpt", Model(untied=True)),
    "gpt-without-biases": ("gpt", Model({"add_bias_linear": False})),
    "gpt-qk-layernorm": ("gpt", Model({"qk_layernorm": True})),
    "gpt-rmsnorm": ("gpt", Model({**RMS, "add_bias_linear": False, "add_qkv_bias": True})),
    "llama": ("llama", Model({**GATED, "num_query_groups": 2}, untied=True)),
    "llama-tied": ("llama", Model({**GATED, "num_query_groups": 2})),
    "llama-qkv-bias": ("llama", Model({**GATED, "num_query_groups": 2, "add_qkv_bias": True}, untied=True)),
    "llama-qk-layernorm": ("llama", Model({**GATED, "num_query_groups": 2, "qk_layernorm": True}, untied=True)),
    "llama-biases": ("llama", Model({"gated_linear_unit": True}, untied=True)),
    "mixtral": ("mixtral", Model(EXPERTS, untied=True)),
    "mixtral-tied": ("mixtral", Model(EXPERTS)),
    "mixtral-expert-bias": ("mixtral", Model(BIASED, untied=True)),
    "mixtral-router-bias": ("mixtral", Model({**EXPERTS, "add_bias_linear": True}, untied=True)),
    "mixtral-qkv-bias": ("mixtral", Model({**EXPERTS, "add_qkv_bias": True, "qk_layernorm": True}, untied=True)),
    "mixtral-shared-expert-gate": (
        "mixtral",
        Model({**EXPERTS, "moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True}, untied=True),
    ),
    "mixtral-shared-expert": ("mixtral", Model({**EXPERTS, "moe_shared_expert_intermediate_size": 32}, untied=True)),
}
LAYOUTS = {"tp2": (2, {"tp": 2}), "pp2-vpp2": (2, {"pp": 2, "vpp": 2}), "tp2-pp2": (4, {"tp": 2, "pp": 2}),
           "tp2-ep2": (4, {"tp": 2, "ep": 2}), "tp2-etp1-ep2": (2, {"tp": 2, "ep": 2, "etp": 1})}  # fmt: skip


def stored_and_placed(rank: int, world_size: int, model: Model, layout: Mapping[str, int]) -> tuple[Any, Any]:
    """What a rank's checkpoint in the ``torch`` format would hold, and where Megatron itself says that it lies."""
    from megatron.core import parallel_state as mpu
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.utils import unwrap_model

    own: list[Any] = []
    theirs: list[Any] = []

    def leaves(value: Any) -> None:
        if isinstance(value, ShardedTensorFactory):
            leaves(value.build())
        elif isinstance(value, dict | list | tuple):
            for item in value.values() if isinstance(value, dict) else value:
                leaves(item)
        elif isinstance(value, ShardedTensor) and "_extra_state" not in value.key:
            data = value.data.detach().float().numpy().copy()
            theirs.append((value.key, tuple(value.global_shape), tuple(value.global_offset), data))

    with parallel(layout):
        coords = {
            "tp": mpu.get_tensor_model_parallel_rank(), "pp": mpu.get_pipeline_model_parallel_rank(),
            "ep": mpu.get_expert_model_parallel_rank(), "etp": mpu.get_expert_tensor_parallel_rank(),
        }  # fmt: skip
        built = build(model, layout)
        distinguish(built)
        for number, chunk in enumerate(built.chunks):
            for name, value in unwrap_model(chunk).state_dict_for_save_checkpoint().items():
                if value is not None and hasattr(value, "shape"):
                    own.append((name, {**coords, "vpp": number}, value.detach().float().numpy().copy()))
            leaves(unwrap_model(chunk).sharded_state_dict(metadata={"non_homogeneous_layers": True}))
    return own, theirs


def distinguish(built: Any) -> None:
    """Values that tell elements apart: biases and norms are alike everywhere when they are made."""
    from ftckpt.megatron.state import MegatronState

    described = MegatronState(built.chunks, built.optimizer, None, {}).describe()
    pieces = [*described.stepped, *described.volatile]
    fill(piece for piece in pieces if piece.fragment.key.startswith(("weight/", "buffer/")))


PAIRS = list(product(CASES, LAYOUTS))
QUICK = [
    (name, layout)
    for name, layout in PAIRS
    if name in ("gpt", "llama", "mixtral") or layout == ("tp2-ep2" if CASES[name][0] == "mixtral" else "tp2")
]


@pytest.mark.parametrize(("name", "layout"), by_default(PAIRS, QUICK))
def test_specifications_say_what_megatron_says(name: str, layout: str) -> None:
    spec, model = CASES[name]
    world_size, sizes = LAYOUTS[layout]
    if "ep" in sizes and "num_moe_experts" not in model.config:
        pytest.skip("no experts")
    if model.config.get("add_bias_linear") and sizes.get("tp", 1) != 1 and sizes.get("etp") != 1:
        pytest.skip("Megatron has no experts with biases that are cut")
    stored: list[tuple[LocalTensor, np.ndarray]] = []
    theirs: dict[str, np.ndarray] = {}
    # Without the distributed optimizer each rank has, and fills, all of its weights.
    for result in run_ranks(stored_and_placed, world_size, replace(model, sharded=False), sizes):
        own, said = result.value
        stored += [(LocalTensor(at_rank, values.shape, coords), values) for at_rank, coords, values in own]
        for key, shape, offset, values in said:
            tensor = theirs.setdefault(key, np.full(shape, np.nan, np.float32))
            lengths = (1,) * (len(shape) - values.ndim) + values.shape
            tensor[at(Box(offset, lengths))] = values.reshape(lengths)
    arguments = {"untie_embeddings_and_output_weights": model.untied, "num_attention_heads": 4, "hidden_size": 32}
    found = placed(Spec.load(spec), stored, **arguments)
    assert found.keys() == theirs.keys()
    for key, values in theirs.items():
        assert (found[key] == values).all(), key
