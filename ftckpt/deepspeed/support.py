"""Unsupported features of DeepSpeed: each with the JSON field that requests it, and a remedy.

They follow from the configuration, which is the same on all ranks. Errors that only some ranks detect, such as a
parameter without a box, are raised when the state is described.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
from packaging.version import Version

from ftckpt.errors import UnsupportedError


def check(engine: Any) -> None:
    """Checks that an engine's state is fully supported.

    Raises:
        UnsupportedError: names the JSON field and the remedy, or the field whose value this release does not show.
    """
    for field, fix, applies in REFUSALS:
        try:
            is_set = bool(applies(engine))
        except AttributeError as error:
            raise UnsupportedError(
                f"DeepSpeed {deepspeed.__version__} does not show whether {field} is set ({error}), which ftckpt "
                "does not support: install a tested release"
            ) from error
        if is_set:
            raise UnsupportedError(f"DeepSpeed's {field} is not supported by ftckpt; {fix}")


def _on_nvme(offload: Any) -> bool:
    return offload is not None and offload.device == "nvme"


def _is_partial(engine: Any) -> bool:
    offload = engine.zero_offload_optimizer()
    return engine.zero_optimization_stage() == 3 and offload is not None and offload.ratio != 1.0


def _is_super(engine: Any) -> bool:
    offload = engine.zero_offload_optimizer()
    return offload is not None and bool(offload.super_offload)


def _has_autoep(engine: Any) -> bool:
    if Version(deepspeed.__version__) < Version("0.19.8"):
        return False
    return bool(getattr(engine._config.expert_parallel_config, "enabled", False))


_USE_CPU = "use device cpu: state on NVMe is not in memory"
REFUSALS: tuple[tuple[str, str, Callable[[Any], object]], ...] = (
    ("zero_optimization.offload_optimizer.device nvme", _USE_CPU, lambda one: _on_nvme(one.zero_offload_optimizer())),
    ("zero_optimization.offload_param.device nvme", _USE_CPU, lambda one: _on_nvme(one.zero_offload_param())),
    ("zero_optimization.offload_optimizer.super_offload", "remove it", _is_super),
    ("zero_optimization.offload_optimizer.ratio below 1",
     "set it to 1: the second optimizer of a partial offload is not supported", _is_partial),
    ("zero_optimization.zenflow", "remove it", lambda one: one.zenflow_config() is not None),
    ("zero_optimization.zero_hpz_partition_size", "set it to 1", lambda one: one.zero_hpz_partition_size() > 1),
    ("zero_optimization.zero_quantized_weights, _nontrainable_weights or _gradients", "set them to false",
     lambda one: one.zero_quantized_weights() or one.zero_quantized_nontrainable_weights()
     or one.zero_quantized_gradients()),
    ("fp16.fp16_master_weights_and_grads", "set it to false", lambda one: one.fp16_master_weights_and_gradients()),
    ("bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states", "set them to false",
     lambda one: one.bf16_master_weights_and_gradients() or one.bf16_optimizer_states()),
    ("tensor_parallel.autotp_size",
     "divide the model by layers that mark their parameters with tensor_model_parallel and partition_dim",
     lambda one: one.autotp_size() > 1),
    ("expert_parallel (AutoEP)", "use deepspeed.moe.layer.MoE", _has_autoep),
    ("sequence_parallel_size", "set it to 1 or leave it out", lambda one: one.sequence_parallel_size > 1),
    ("hybrid_engine", "remove it", lambda one: one._config.hybrid_engine.enabled),
    ("torch_autocast", "use bf16 or fp16", lambda one: one.torch_autocast_enabled()),
    ("data_efficiency", "remove it: the state of curriculum sampling and random layer token drop is not saved",
     lambda one: one.data_efficiency_enabled()),
    ("compile.deepcompile", "set it to false and do not call engine.compile()",
     lambda one: one.is_deepcompile_enabled() or one.is_compiled),
    ("optimizer.type Muon", "use AdamW",
     lambda one: any("use_muon" in group for group in getattr(one.basic_optimizer, "param_groups", ()))),
    ("LoRA of OptimizedLinear", "use layers of torch.nn", lambda one: one.optimized_linear_lora_enabled),
)  # fmt: skip
"""Each field that is an error if its function returns true for an engine, its remedy, and the function."""
