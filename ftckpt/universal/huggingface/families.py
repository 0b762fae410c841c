"""Families of models: the names of Megatron-core and of Hugging Face, and the keys of ``config.json``.

A table has a name of Megatron, a cut and the names of the parts; those that begin with a dot are of a layer. ``qkv``:
groups of heads, ``halves``: gate, then up, ``pairs``: a row of the gate and one of up in turns; ``T``: transposed.
``{expert}`` numbers Megatron's first dimension. Transformer Engine has normalization inside linear layers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

_LLAMA = """
embedding.word_embeddings.weight              -       model.embed_tokens.weight
output_layer.weight                           -       lm_head.weight
decoder.final_layernorm.weight                -       model.norm.weight
.input_layernorm.weight                       -       .input_layernorm.weight
.self_attention.linear_qkv.layer_norm_weight  -       .input_layernorm.weight
.self_attention.linear_qkv.weight             qkv     .self_attn.{q,k,v}_proj.weight
.self_attention.linear_proj.weight            -       .self_attn.o_proj.weight
.pre_mlp_layernorm.weight                     -       .post_attention_layernorm.weight
.mlp.linear_fc1.layer_norm_weight             -       .post_attention_layernorm.weight
"""
_DENSE = """
.mlp.linear_fc1.weight                        halves  .mlp.{gate,up}_proj.weight
.mlp.linear_fc2.weight                        -       .mlp.down_proj.weight
"""
_QKV_BIAS = """
.self_attention.linear_qkv.bias               qkv     .self_attn.{q,k,v}_proj.bias
"""
_HEAD_NORMS = """
.self_attention.q_layernorm.weight            -       .self_attn.q_norm.weight
.self_attention.k_layernorm.weight            -       .self_attn.k_norm.weight
"""
_MIXTRAL = """
.mlp.router.weight                            -       .block_sparse_moe.gate.weight
.mlp.experts.experts.linear_fc1.weight        halves  .block_sparse_moe.experts.{expert}.{w1,w3}.weight
.mlp.experts.experts.linear_fc2.weight        -       .block_sparse_moe.experts.{expert}.w2.weight
.mlp.experts.experts.weight1                  pairsT  .block_sparse_moe.experts.{expert}.{w1,w3}.weight
.mlp.experts.experts.weight2                  T       .block_sparse_moe.experts.{expert}.w2.weight
"""
_QWEN_MOE = (
    _MIXTRAL.replace("block_sparse_moe", "mlp").replace("{w1,w3}", "{gate,up}_proj").replace("w2", "down_proj")
)
_GPT2 = """
embedding.word_embeddings.weight              -       transformer.wte.weight
embedding.position_embeddings.weight          -       transformer.wpe.weight
output_layer.weight                           -       lm_head.weight
decoder.final_layernorm.weight                -       transformer.ln_f.weight
decoder.final_layernorm.bias                  -       transformer.ln_f.bias
.input_layernorm.weight                       -       .ln_1.weight
.input_layernorm.bias                         -       .ln_1.bias
.self_attention.linear_qkv.layer_norm_weight  -       .ln_1.weight
.self_attention.linear_qkv.layer_norm_bias    -       .ln_1.bias
.self_attention.linear_qkv.weight             qkvT    .attn.c_attn.weight
.self_attention.linear_qkv.bias               qkv     .attn.c_attn.bias
.self_attention.linear_proj.weight            T       .attn.c_proj.weight
.self_attention.linear_proj.bias              -       .attn.c_proj.bias
.pre_mlp_layernorm.weight                     -       .ln_2.weight
.pre_mlp_layernorm.bias                       -       .ln_2.bias
.mlp.linear_fc1.layer_norm_weight             -       .ln_2.weight
.mlp.linear_fc1.layer_norm_bias               -       .ln_2.bias
.mlp.linear_fc1.weight                        T       .mlp.c_fc.weight
.mlp.linear_fc1.bias                          -       .mlp.c_fc.bias
.mlp.linear_fc2.weight                        T       .mlp.c_proj.weight
.mlp.linear_fc2.bias                          -       .mlp.c_proj.bias
"""
_GPT2_KEYS = {
    "vocab_size": "vocabulary", "n_positions": "positions", "n_embd": "hidden", "n_layer": "layers",
    "n_head": "heads", "n_inner": "ffn", "tie_word_embeddings": "is_tied", "layer_norm_epsilon": "norm_epsilon",
    "activation_function": "activation",
}  # fmt: skip
_COMMON_KEYS = {
    "vocab_size": "vocabulary", "hidden_size": "hidden", "num_hidden_layers": "layers", "head_dim": "head_dim",
    "num_attention_heads": "heads", "num_key_value_heads": "groups", "tie_word_embeddings": "is_tied",
    "rms_norm_eps": "norm_epsilon", "rope_theta": "rotary_base", "max_position_embeddings": "max_positions",
}  # fmt: skip
_LLAMA_KEYS = {**_COMMON_KEYS, "intermediate_size": "ffn"}
_MIXTRAL_KEYS = {**_LLAMA_KEYS, "num_local_experts": "experts", "num_experts_per_tok": "topk"}
_QWEN_MOE_KEYS = {
    **_COMMON_KEYS, "moe_intermediate_size": "ffn", "num_experts": "experts", "num_experts_per_tok": "topk"
}  # fmt: skip
_SILU = {"hidden_act": "silu"}
_UNBIASED = {**_SILU, "attention_bias": False}


class NameRule(NamedTuple):
    """The Hugging Face names of the parts of a tensor; several parts with one name are joined."""

    parts: tuple[str, ...]
    cut: str
    is_transposed: bool
    has_experts: bool


@dataclass(frozen=True)
class Family:
    """``table``: see above. ``config``: the facts in ``config.json``, by key; ``constants``: its other keys.
    ``arguments``: what these arguments of Megatron have to be."""

    architecture: str
    table: str
    config: Mapping[str, str]
    constants: Mapping[str, Any]
    layer: str = "model.layers.{layer}"
    arguments: tuple[tuple[str, Any], ...] = (("swiglu", True), ("position_embedding_type", "rope"))

    def rules(self) -> dict[str, NameRule]:
        """The rules by patterns of Megatron's names."""
        found = {}
        for source, cut, names in re.findall(r"(\S+) +(\S+) +(\S+)", self.table):
            template = self.layer + names if names.startswith(".") else names
            choice = re.search(r"\{(\w+(?:,\w+)+)\}", template)
            parts = [template.replace(choice[0], part) for part in choice[1].split(",")] if choice else [template]
            name = "decoder.layers.{layer}" + source if source.startswith(".") else source
            found[name] = NameRule(tuple(parts), cut.strip("-T"), cut.endswith("T"), "{expert}" in template)
        return found


FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel", _GPT2, _GPT2_KEYS, {}, "transformer.h.{layer}",
        (("swiglu", False), ("position_embedding_type", "learned_absolute")),
    ),
    "llama": Family("LlamaForCausalLM", _LLAMA + _DENSE, _LLAMA_KEYS, {**_UNBIASED, "mlp_bias": False}),
    "mistral": Family("MistralForCausalLM", _LLAMA + _DENSE, _LLAMA_KEYS, {**_SILU, "sliding_window": None}),
    "mixtral": Family("MixtralForCausalLM", _LLAMA + _MIXTRAL, _MIXTRAL_KEYS, _SILU),
    "qwen2": Family("Qwen2ForCausalLM", _LLAMA + _QKV_BIAS + _DENSE, _LLAMA_KEYS, _SILU),
    "qwen3": Family("Qwen3ForCausalLM", _LLAMA + _HEAD_NORMS + _DENSE, _LLAMA_KEYS, _UNBIASED),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", _LLAMA + _HEAD_NORMS + _QWEN_MOE, _QWEN_MOE_KEYS, {**_UNBIASED, "norm_topk_prob": True}
    ),
}  # fmt: skip
"""Families by ``model_type``."""


def family_of(names: Collection[str]) -> str:
    """The ``model_type`` of a model with these names of Megatron."""
    parts = {part for name in names for part in name.split(".")}
    if "position_embeddings" in parts:
        return "gpt2"
    if "q_layernorm" in parts:
        return "qwen3_moe" if "experts" in parts else "qwen3"
    if "experts" in parts:
        return "mixtral"
    return "qwen2" if any(name.endswith(".linear_qkv.bias") for name in names) else "llama"
