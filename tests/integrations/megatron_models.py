"""Small Megatron models of many kinds in many layouts, for tests of their geometry: built, not trained."""

from __future__ import annotations

import contextlib
import copy
import importlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.support.elements import positions

LAYERS, HIDDEN, HEADS, FFN, SEQ, BATCH = 4, 32, 4, 48, 16, 2

_LAYOUT = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """``config`` are fields of (MLA)TransformerConfig; ``vocabulary`` None pads 257 tokens for the layout.

    ``grouped``: legacy grouped experts; ``mla``: multi-latent attention; ``rope``: rotary positions; ``sharded``:
    distributed optimizer.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    grouped: bool = False
    mla: bool = False
    rope: bool = False
    untied: bool = False
    vocabulary: int | None = 272
    sharded: bool = True


@dataclass(frozen=True)
class Built:
    chunks: list[Any]
    optimizer: Any
    config: Any


@contextlib.contextmanager
def parallel(layout: Mapping[str, int]) -> Iterator[None]:
    """Megatron's groups for a layout such as {"tp": 2, "pp": 2}."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    sizes = {_LAYOUT[axis]: size for axis, size in layout.items() if axis != "vpp" or size > 1}
    parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7 + 100 * parallel_state.get_pipeline_model_parallel_rank())
    try:
        yield
    finally:
        unset_num_microbatches_calculator()
        parallel_state.destroy_model_parallel()


def build(model: Model, layout: Mapping[str, int]) -> Built:
    """Chunks in DDP and their optimizer, on one rank; inside ``parallel``."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = _config(model, layout)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=model.sharded)
    chunks = []
    for index in range(layout.get("vpp", 1)):
        gpt = _gpt(model, layout, config, index if layout.get("vpp", 1) > 1 else None)
        chunks.append(DistributedDataParallel(config, ddp, gpt, disable_bucketing=index > 0))
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-3, min_lr=1e-4, weight_decay=0.01, params_dtype=config.params_dtype,
        use_distributed_optimizer=model.sharded,
    )  # fmt: skip
    return Built(chunks, get_megatron_optimizer(settings, chunks, use_gloo_process_groups=False), config)


def _config(model: Model, layout: Mapping[str, int]) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind: Any = MLATransformerConfig if model.mla else TransformerConfig
    more = dict(model.config)
    if "num_moe_experts" in more:
        more = {"moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 0.0, "add_bias_linear": False, **more}
        more["expert_model_parallel_size"] = layout.get("ep", 1)
        more["expert_tensor_parallel_size"] = layout.get("etp", layout.get("tp", 1))
        more["sequence_parallel"] = layout.get("tp", 1) > 1
    if model.grouped:
        stand_in_for_grouped_gemm()
    return kind(
        **{
            "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "ffn_hidden_size": FFN,
            "hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.float32,
            "pipeline_dtype": torch.float32, "batch_p2p_comm": False, "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False, "persist_layer_norm": False, "apply_rope_fusion": False,
            "overlap_p2p_comm": layout.get("vpp", 1) > 1,
            **{_LAYOUT[axis]: layout[axis] for axis in ("tp", "pp", "cp") if axis in layout},
            **({_LAYOUT["vpp"]: layout["vpp"]} if layout.get("vpp", 1) > 1 else {}),
            **more,
        }
    )  # fmt: skip


def _gpt(model: Model, layout: Mapping[str, int], config: Any, stage: int | None) -> Any:
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.moe.experts import GroupedMLP

    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=model.grouped,
        moe_use_legacy_grouped_gemm=model.grouped,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=model.mla,
    )
    if model.mla:
        latent: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
        latent.TELinear = type("TELinear", (), {})  # it asks whether layers are of this kind
    if model.mla or layout.get("cp", 1) > 1:
        spec.submodules.self_attention.submodules.core_attention = PlainAttention
    rope = model.rope or model.mla or bool(config.mtp_num_layers)
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=stage)
    multiple = 8 * layout.get("tp", 1)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=model.vocabulary or -(-257 // multiple) * multiple,
        max_sequence_length=SEQ,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=not model.untied,
        position_embedding_type="rope" if rope else "learned_absolute",
        mtp_block_spec=mtp,
        vp_stage=stage,
    )
    for module in gpt.modules():
        if isinstance(module, GroupedMLP):
            module.config = copy.copy(config)
            module.config.bf16 = True  # its forward pass asks for it and for nothing else of it
    return gpt.cuda(torch.cuda.current_device())


class PlainAttention(torch.nn.Module):
    """Causal attention with widths of its own for keys and values, as long as sequences are not divided: Megatron's
    needs Transformer Engine for either."""

    def __init__(self, config: Any, softmax_scale: float | None, **_more: Any) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, *_more: Any, **_options: Any) -> torch.Tensor:
        """From [sequence, batch, heads, width] of each to [sequence, batch, heads x width of values]."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self._scale)
        return found.permute(2, 0, 1, 3).flatten(2)


def stand_in_for_grouped_gemm() -> None:
    """Replaces the package, which cannot be installed without CUDA, by a loop over experts."""
    from types import SimpleNamespace

    grouped: Any = importlib.import_module("megatron.core.transformer.moe.grouped_gemm_util")

    def gmm(tokens: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, trans_b: bool) -> torch.Tensor:
        parts = torch.split(tokens, counts.tolist())
        return torch.cat([part @ (w.t() if trans_b else w) for part, w in zip(parts, weights, strict=True)])

    grouped.grouped_gemm = grouped.ops = SimpleNamespace(gmm=gmm)


def losses(built: Built) -> list[float]:
    """Losses of each token of four fixed batches, without a step; none on ranks before the last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import unwrap_model

    # As many batches whatever the number of replicas: all see the same ones.
    batches = [torch.from_numpy(np.random.default_rng(i).integers(0, 257, (BATCH, SEQ + 1))) for i in range(4)]
    found: list[float] = []

    def recorded(original: Any) -> Any:
        def compute(*args: Any) -> torch.Tensor:
            output = original(*args)
            found.extend(output.detach().float().flatten().tolist())
            return output

        return compute

    def forward_step(iterator: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
        batch = next(iterator)
        tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        positions = torch.arange(SEQ).expand_as(tokens)
        mask = torch.ones(SEQ, SEQ).triu(1).bool()[None, None]
        return chunk(tokens, positions, mask, labels=labels), lambda output: (output.float().mean(), {})

    for chunk in map(unwrap_model, built.chunks):
        chunk.compute_language_model_loss = recorded(type(chunk).compute_language_model_loss.__get__(chunk))
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in built.chunks],
        model=built.chunks,
        num_microbatches=len(batches),
        seq_length=SEQ,
        micro_batch_size=BATCH,
        forward_only=True,
    )
    return found


def known(key: str, positions: np.ndarray) -> np.ndarray:
    """The value in [-1, 1) that an element of a logical tensor shall have, float64; as integers cannot hit twice
    by chance. ``positions`` are flat, row-major; rows added to the first dimension leave those before as they are."""
    mixed = (positions.astype(np.uint64) + np.uint64(zlib.crc32(key.encode()))) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return (mixed >> np.uint64(40)).astype(np.float64) / 2**23 - 1.0


def fill(pieces: Any) -> None:
    """Give every element the value that it shall have."""
    for piece in pieces:
        values = known(piece.fragment.key, positions(piece.fragment))
        piece.tensor.copy_(torch.from_numpy(values).to(piece.tensor.dtype))
