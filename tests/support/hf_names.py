"""Tiny models under Hugging Face's names, and the same as the tensors of Megatron-core, with the latter's cuts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ftckpt.universal.catalog import FileReader, FragmentPlace, whole_fragment

Arrays = dict[str, np.ndarray]
LAYERS, HIDDEN, FFN, VOCABULARY, POSITIONS, EXPERTS, PAD = 2, 24, 20, 50, 16, 3, 14


@dataclass(frozen=True)
class Tiny:
    """A tiny model. ``config``: keys of its ``config.json`` beside those that all have."""

    heads: int = 4
    groups: int = 2
    head_dim: int = 6
    is_tied: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    def json(self, model_type: str) -> dict[str, Any]:
        """``config.json``."""
        if model_type == "gpt2":
            sizes = {
                "n_embd": HIDDEN,
                "n_layer": LAYERS,
                "n_head": self.heads,
                "n_inner": FFN,
                "n_positions": POSITIONS,
            }
            more = {"layer_norm_epsilon": 1e-4, "activation_function": "gelu_new"}
        else:
            sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": self.heads}
            sizes |= {"num_key_value_heads": self.groups, "head_dim": self.head_dim}
            sizes |= {"moe_intermediate_size" if model_type == "qwen3_moe" else "intermediate_size": FFN}
            more = {"rms_norm_eps": 1e-4, "rope_theta": 5000.0, "max_position_embeddings": POSITIONS}
        common = {"model_type": model_type, "vocab_size": VOCABULARY, "tie_word_embeddings": self.is_tied}
        return {**common, **sizes, **more, **self.config}


_QWEN_MOE = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": True}
FAMILIES = {
    "gpt2": Tiny(groups=4, is_tied=True),
    "llama": Tiny(),
    "mixtral": Tiny(groups=1, config={"num_local_experts": EXPERTS, "num_experts_per_tok": 2}),
    "qwen2": Tiny(is_tied=True),
    "qwen3": Tiny(head_dim=10, is_tied=True),
    "qwen3_moe": Tiny(groups=4, head_dim=10, config=_QWEN_MOE),
}
ARGUMENTS = {
    "num_attention_heads": 4, "norm_epsilon": 1e-4, "rotary_base": 5000, "max_position_embeddings": POSITIONS,
    "bias_gelu_fusion": True, "moe_router_topk": 2, "rotary_percent": 1.0, "apply_layernorm_1p": False,
}  # fmt: skip
"""What Megatron-LM saves of the command line of such a model."""


def hf_tensors(model_type: str) -> Arrays:
    """Random weights under Hugging Face's names."""
    random = np.random.default_rng(len(model_type))
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in _shapes(model_type)}


def _shapes(model_type: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    tiny = FAMILIES[model_type]
    queries, keys = tiny.heads * tiny.head_dim, tiny.groups * tiny.head_dim
    if not tiny.is_tied:
        yield "lm_head.weight", (VOCABULARY, HIDDEN)
    if model_type == "gpt2":
        yield from (("transformer.wte.weight", (VOCABULARY, HIDDEN)), ("transformer.wpe.weight", (POSITIONS, HIDDEN)))
        for layer in range(LAYERS):
            block = f"transformer.h.{layer}"
            for name, rows, columns in (
                ("attn.c_attn", HIDDEN, 3 * HIDDEN), ("attn.c_proj", HIDDEN, HIDDEN), ("mlp.c_fc", HIDDEN, FFN),
                ("mlp.c_proj", FFN, HIDDEN),
            ):  # fmt: skip
                yield from ((f"{block}.{name}.weight", (rows, columns)), (f"{block}.{name}.bias", (columns,)))
        norms = [f"transformer.h.{layer}.ln_{n}" for layer in range(LAYERS) for n in (1, 2)]
        yield from (
            (f"{norm}.{kind}", (HIDDEN,)) for norm in (*norms, "transformer.ln_f") for kind in ("weight", "bias")
        )
        return
    yield from (("model.embed_tokens.weight", (VOCABULARY, HIDDEN)), ("model.norm.weight", (HIDDEN,)))
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{block}.{norm}.weight", (HIDDEN,)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{block}.self_attn.{name}_proj.weight", (rows, HIDDEN)
            if model_type == "qwen2":
                yield f"{block}.self_attn.{name}_proj.bias", (rows,)
        yield f"{block}.self_attn.o_proj.weight", (HIDDEN, queries)
        if model_type.startswith("qwen3"):
            yield from ((f"{block}.self_attn.{name}_norm.weight", (tiny.head_dim,)) for name in "qk")
        yield from _mlp(model_type, block)


def _mlp(model_type: str, block: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    gate, up, down, inside = _experts(model_type)
    if not inside:
        for name, shape in ((gate, (FFN, HIDDEN)), (up, (FFN, HIDDEN)), (down, (HIDDEN, FFN))):
            yield f"{block}.mlp.{name}.weight", shape
        return
    yield f"{block}.{inside}.gate.weight", (EXPERTS, HIDDEN)
    for expert in range(EXPERTS):
        for name, shape in ((gate, (FFN, HIDDEN)), (up, (FFN, HIDDEN)), (down, (HIDDEN, FFN))):
            yield f"{block}.{inside}.experts.{expert}.{name}.weight", shape


def _experts(model_type: str) -> tuple[str, str, str, str]:
    """The names of an MLP's three weights, and of the module of experts, if any."""
    if model_type == "mixtral":
        return "w1", "w3", "w2", "block_sparse_moe"
    return "gate_proj", "up_proj", "down_proj", "mlp" if model_type == "qwen3_moe" else ""


def megatron_tensors(model_type: str, hf: Mapping[str, np.ndarray], *, joined: bool, grouped: bool) -> Arrays:
    """The tensors of Megatron-core with the weights ``hf``, and rows that its layout added to the vocabulary.

    ``joined``: normalization is inside linear layers, as in Transformer Engine. ``grouped``: legacy grouped experts.
    """
    found: Arrays = {}
    prefix, layer_of = ("transformer", "transformer.h") if model_type == "gpt2" else ("model", "model.layers")
    kinds = [kind for kind in ("weight", "bias") if model_type == "gpt2" or kind == "weight"]
    embedding = hf[f"{prefix}.{'wte' if model_type == 'gpt2' else 'embed_tokens'}.weight"]
    found["embedding.word_embeddings.weight"] = _padded(embedding)
    if "lm_head.weight" in hf:
        found["output_layer.weight"] = _padded(hf["lm_head.weight"])
    if model_type == "gpt2":
        found["embedding.position_embeddings.weight"] = hf["transformer.wpe.weight"]
    for kind in kinds:
        found[f"decoder.final_layernorm.{kind}"] = hf[f"{prefix}.{'ln_f' if model_type == 'gpt2' else 'norm'}.{kind}"]
    for layer in range(LAYERS):
        inside = f"decoder.layers.{layer}"
        parts = {name.removeprefix(f"{layer_of}.{layer}."): array for name, array in hf.items()
                 if name.startswith(f"{layer_of}.{layer}.")}  # fmt: skip
        dense = _gpt2_layer(parts) if model_type == "gpt2" else _llama_layer(model_type, parts, grouped)
        is_moe = "mlp.router.weight" in dense
        norms = [("input_layernorm.", "self_attention.linear_qkv.layer_norm_")]
        norms += [] if is_moe else [("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")]
        for alone, with_linear in norms if joined else ():
            dense = {name.replace(alone, with_linear): array for name, array in dense.items()}
        found |= {f"{inside}.{name}": array for name, array in dense.items()}
    return {f"weight/{name}": np.ascontiguousarray(array) for name, array in found.items()}


def _padded(rows: np.ndarray) -> np.ndarray:
    return np.concatenate([rows, np.full((PAD, rows.shape[1]), 9, np.float32)])


def interleaved(heads: int, groups: int, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Query, key and value as Megatron stores them: the queries of a group, then its key, then its value."""
    head_dim = parts[0].shape[0] // heads
    cut = [part.reshape(groups, -1, head_dim, *part.shape[1:]) for part in parts]
    return np.concatenate(cut, axis=1).reshape(-1, *parts[0].shape[1:])


_GPT2_NAMES = {
    "self_attention.linear_proj": "attn.c_proj", "mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj",
    "input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2",
}  # fmt: skip


def _gpt2_layer(parts: Mapping[str, np.ndarray]) -> Arrays:
    heads, found = FAMILIES["gpt2"].heads, {}
    for kind in ("weight", "bias"):
        found[f"self_attention.linear_qkv.{kind}"] = interleaved(
            heads, heads, np.split(parts[f"attn.c_attn.{kind}"].T, 3)
        )
        for name, of in _GPT2_NAMES.items():
            found[f"{name}.{kind}"] = parts[f"{of}.{kind}"].T
    return found


def _llama_layer(model_type: str, parts: Mapping[str, np.ndarray], grouped: bool) -> Arrays:
    tiny = FAMILIES[model_type]
    found = {
        "input_layernorm.weight": parts["input_layernorm.weight"],
        "pre_mlp_layernorm.weight": parts["post_attention_layernorm.weight"],
        "self_attention.linear_proj.weight": parts["self_attn.o_proj.weight"],
    }
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in parts:
            projections = [parts[f"self_attn.{part}_proj.{kind}"] for part in "qkv"]
            found[f"self_attention.linear_qkv.{kind}"] = interleaved(tiny.heads, tiny.groups, projections)
    for part in "qk":
        if f"self_attn.{part}_norm.weight" in parts:
            found[f"self_attention.{part}_layernorm.weight"] = parts[f"self_attn.{part}_norm.weight"]
    gate, up, down, inside = _experts(model_type)
    if not inside:
        found["mlp.linear_fc1.weight"] = np.concatenate([parts[f"mlp.{name}.weight"] for name in (gate, up)])
        found["mlp.linear_fc2.weight"] = parts[f"mlp.{down}.weight"]
        return found
    found["mlp.router.weight"] = parts[f"{inside}.gate.weight"]
    gates, ups, downs = (
        np.stack([parts[f"{inside}.experts.{n}.{name}.weight"] for n in range(EXPERTS)]) for name in (gate, up, down)
    )
    if grouped:
        found["mlp.experts.experts.weight1"] = np.stack([gates, ups], axis=1).transpose(0, 3, 1, 2)
        found["mlp.experts.experts.weight2"] = downs.transpose(0, 2, 1)
    else:
        found["mlp.experts.experts.linear_fc1.weight"] = np.concatenate([gates, ups], axis=1)
        found["mlp.experts.experts.linear_fc2.weight"] = downs
    return found


def source(tensors: Mapping[str, np.ndarray], objects: Mapping[str, Any], **more: Any) -> FileReader:
    """A checkpoint of these tensors in fp32 and ``objects``; ``more``: other fields of its catalog."""

    def read(array: np.ndarray) -> Any:
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    stored = [
        FragmentPlace(whole_fragment(key, "F32", array.shape), Path(key), partial(read, array))
        for key, array in tensors.items()
    ]
    return FileReader(Path("memory"), stored, [], origin="ftckpt", iteration=7, layout={}, objects=objects, **more)
