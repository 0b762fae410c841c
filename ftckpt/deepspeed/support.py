"""Unsupported features of DeepSpeed: each with the JSON field that requests it, and a remedy.

They follow from the configuration, which is the same on all ranks. Errors that only some ranks detect, such as a
parameter without a box, are raised when the state is described.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import deepspeed
from packaging.version import Version

from ftckpt.errors import UnsupportedError


class UnsupportedField(NamedTuple):
    """A field of DeepSpeed's JSON that is an error if it ``applies`` to an engine, and its remedy.

    Releases before ``since`` may not have the field; later ones must show whether it is set.
    """

    field: str
    applies: Callable[[Any], bool]
    fix: str
    since: str = "0"


def check(engine: Any) -> None:
    """Checks that an engine's state is fully supported.

    Raises:
        UnsupportedError: names the JSON field and the remedy.
    """
    for refusal in REFUSALS:
        if _applies(refusal, engine):
            raise UnsupportedError(f"DeepSpeed's {refusal.field} is not supported by ftckpt; {refusal.fix}")


def _applies(refusal: UnsupportedField, engine: Any) -> bool:
    try:
        return bool(refusal.applies(engine))
    except AttributeError as error:
        if Version(deepspeed.__version__) < Version(refusal.since):
            return False
        raise UnsupportedError(
            f"DeepSpeed {deepspeed.__version__} does not show whether {refusal.field} is set ({error}), which ftckpt "
            "does not support: install a tested release"
        ) from error


def _offload(part: str, value: str) -> Callable[[Any], Any]:
    def read(engine: Any) -> Any:
        config = getattr(engine._config.zero_config, part)
        return getattr(config, value) if config is not None else None

    return read


def _is_nvme(part: str) -> Callable[[Any], bool]:
    device = _offload(part, "device")
    return lambda engine: device(engine) == "nvme"


def _has_hpz(engine: Any) -> bool:
    return int(engine.zero_hpz_partition_size()) > 1


def _quantizes(engine: Any) -> bool:
    zero = engine._config.zero_config
    return bool(
        zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights or zero.zero_quantized_gradients
    )


def _bf16_masters(engine: Any) -> bool:
    return bool(engine.bf16_master_weights_and_gradients() or engine.bf16_optimizer_states())


REFUSALS = (
    UnsupportedField(
        "zero_optimization.offload_optimizer.device nvme",
        _is_nvme("offload_optimizer"),
        "use device cpu: state on NVMe is not in memory",
    ),
    UnsupportedField(
        "zero_optimization.offload_param.device nvme",
        _is_nvme("offload_param"),
        "use device cpu: state on NVMe is not in memory",
    ),
    UnsupportedField(
        "zero_optimization.offload_optimizer.super_offload",
        lambda engine: bool(_offload("offload_optimizer", "super_offload")(engine)),
        "remove it",
        "0.18.9",
    ),
    UnsupportedField(
        "zero_optimization.offload_optimizer.ratio below 1",
        lambda engine: (
            engine.zero_optimization_stage() == 3 and (_offload("offload_optimizer", "ratio")(engine) or 1.0) != 1.0
        ),
        "set it to 1: the second optimizer of a partial offload is not supported",
    ),
    UnsupportedField(
        "zero_optimization.zenflow", lambda engine: engine.zenflow_config() is not None, "remove it", "0.17.6"
    ),
    UnsupportedField("zero_optimization.zero_hpz_partition_size", _has_hpz, "set it to 1"),
    UnsupportedField(
        "zero_optimization.zero_quantized_weights, _nontrainable_weights or _gradients",
        _quantizes,
        "set them to false",
    ),
    UnsupportedField(
        "fp16.fp16_master_weights_and_grads",
        lambda engine: bool(engine.fp16_master_weights_and_gradients()),
        "set it to false",
    ),
    UnsupportedField(
        "bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states",
        _bf16_masters,
        "set them to false",
        "0.18.9",
    ),
    UnsupportedField(
        "tensor_parallel.autotp_size",
        lambda engine: int(engine.autotp_size()) > 1,
        "divide the model by layers that mark their parameters with tensor_model_parallel and partition_dim",
        "0.16.9",
    ),
    UnsupportedField(
        "expert_parallel (AutoEP)",
        lambda engine: bool(getattr(engine._config.expert_parallel_config, "enabled", False)),
        "use deepspeed.moe.layer.MoE",
        "0.19.8",
    ),
    UnsupportedField(
        "sequence_parallel_size", lambda engine: int(engine.sequence_parallel_size) > 1, "set it to 1 or leave it out"
    ),
    UnsupportedField("hybrid_engine", lambda engine: bool(engine._config.hybrid_engine.enabled), "remove it"),
    UnsupportedField(
        "torch_autocast", lambda engine: bool(engine.torch_autocast_enabled()), "use bf16 or fp16", "0.17.6"
    ),
    UnsupportedField(
        "data_efficiency",
        lambda engine: bool(engine.data_efficiency_enabled()),
        "remove it: the state of curriculum sampling and random layer token drop is not saved",
    ),
    UnsupportedField(
        "compile.deepcompile",
        lambda engine: bool(engine.is_deepcompile_enabled()) or bool(engine.is_compiled),
        "set it to false and do not call engine.compile()",
        "0.16.9",
    ),
    UnsupportedField(
        "optimizer.type Muon",
        lambda engine: any("use_muon" in group for group in getattr(engine.basic_optimizer, "param_groups", ())),
        "use AdamW",
    ),
    UnsupportedField(
        "LoRA of OptimizedLinear", lambda engine: bool(engine.optimized_linear_lora_enabled), "use layers of torch.nn"
    ),
)
