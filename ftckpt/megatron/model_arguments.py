"""The settings of a model that its tensors do not show, for ``ftckpt convert --to huggingface``."""

from __future__ import annotations

import json
import re
from typing import Any

import torch.nn.functional as F

_OF_CONFIG = (
    "num_attention_heads", "num_query_groups", "kv_channels", "layernorm_epsilon", "moe_router_topk",
    "tensor_model_parallel_size", "moe_router_load_balancing_type",
)  # fmt: skip
_OF_MODEL = ("max_position_embeddings", "position_embedding_type", "rotary_base", "rotary_percent")
_HARMLESS = re.compile(
    f"{'|'.join(_OF_CONFIG)}|num_layers|(moe_ffn_|ffn_)?hidden_size|num_moe_experts|moe_layer_freq|add_(bias_linear|"
    "qkv_bias)|gated_linear_unit|activation_func|normalization|qk_layernorm|use_te_activation_func|attention_backend|"
    ".*(amax|bf16|deepep|dispatch|dropout|fp4|fp8|fp32|fused_|fusion|graph|grouped_gemm|hybridep|inference|"
    "init|kitchen|log_|logg|loss|offload|pipeline|qk_clip|quant|recompute|rng|transpose|routing_replay|saved|_layer_norm).*|"
    "cp_comm_type|test_mode|apply_query_key_layer_scaling|clone_scatter_output_in_embedding|transformer_impl|moe_("
    "input_jitter_eps|pad_expert_input_to_capacity|router_(bias_update_rate|dtype)|shared_expert_overlap|token_drop_policy)"
)
"""Fields of TransformerConfig that do not change what a trained model computes, or that are exported."""


def model_arguments(model: Any) -> str:
    """The settings of a Megatron model as JSON, by the names of its configuration or of Megatron-LM's arguments."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = model.config
    kind = config.activation_func, config.gated_linear_unit
    is_gelu, is_swiglu = kind == (F.gelu, False), kind == (F.silu, True)
    rotary = getattr(model, "rotary_pos_emb", None)
    own = {name: getattr(config, name) for name in TransformerConfig.__annotations__ if not _HARMLESS.fullmatch(name)}
    other = {name: value for name, value in own.items() if value != getattr(TransformerConfig, name, None)}
    arguments = {
        **{name: getattr(config, name, None) for name in _OF_CONFIG},
        **{name: getattr(model, name, None) for name in _OF_MODEL},
        "use_rope_scaling": getattr(model, "rotary_scaling", None),
        "rotary_seq_len_interpolation_factor": getattr(rotary, "seq_len_interpolation_factor", None),
        "swiglu": is_swiglu,
        "bias_gelu_fusion": is_gelu and (config.bias_activation_fusion or config.use_te_activation_func),
        "squared_relu": not (is_swiglu or is_gelu),  # or any other that is not supported
        **other,
        "not_default": list(other),
    }
    return json.dumps(arguments, default=str)
