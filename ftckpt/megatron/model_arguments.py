"""The settings of a model that its tensors do not show, for ``ftckpt convert --to huggingface``."""

from __future__ import annotations

import json
from typing import Any

import torch.nn.functional as F

_OF_CONFIG = (
    "num_attention_heads", "layernorm_epsilon", "layernorm_zero_centered_gamma", "attention_output_gate",
    "apply_residual_connection_post_layernorm", "rotary_interleaved", "window_size", "no_rope_freq",
    "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
)  # fmt: skip
_OF_MODEL = ("max_position_embeddings", "position_embedding_type", "rotary_base", "rotary_percent")


def model_arguments(model: Any) -> str:
    """The settings of a Megatron model as JSON, by the names of its configuration or of Megatron-LM's arguments."""
    config = model.config
    activation = getattr(config, "activation_func", None)
    rotary = getattr(model, "rotary_pos_emb", None)
    arguments = {
        **{name: getattr(config, name, None) for name in _OF_CONFIG},
        **{name: getattr(model, name, None) for name in _OF_MODEL},
        "use_rope_scaling": getattr(model, "rotary_scaling", None),
        "rotary_seq_len_interpolation_factor": getattr(rotary, "seq_len_interpolation_factor", None),
        "swiglu": activation is F.silu and config.gated_linear_unit,
        "bias_gelu_fusion": activation is F.gelu and config.bias_activation_fusion,
        "squared_relu": activation not in (F.gelu, F.silu),  # or any other that is not supported
    }
    return json.dumps(arguments, default=str)
