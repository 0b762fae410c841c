"""What readers and writers of DeepSpeed's files share: types, precision, and all that is no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ftckpt.errors import ConvertError
from ftckpt.universal.foreign import pickles

DTYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_TENSORS = {"module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "buffer_names"}
_OPTIMIZER = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "ds_version")
_SECTIONS = (("bf16", "BF16"), ("bfloat16", "BF16"), ("fp16", "F16"))


def dtype_name(tensor: torch.Tensor, where: Path | str) -> str:
    """The safetensors name of a tensor's type. Raises ConvertError that names ``where``."""
    if tensor.dtype not in DTYPES:
        raise ConvertError(f"{where}: a tensor has type {tensor.dtype}, which is not known")
    return DTYPES[tensor.dtype]


def precision(config: Any) -> str:
    """The type of the weights that a DeepSpeed configuration trains with."""
    for name, dtype in _SECTIONS:
        section = config.get(name) if isinstance(config, Mapping) else None
        if isinstance(section, Mapping) and section.get("enabled"):
            return dtype
    return "F32"


def objects_of(state: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Counters, schedulers, the configuration and users' state under ``state``, hyperparameters and the loss scale
    under ``optimizer``."""
    inner = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))
    groups = (
        optimizer.get("param_groups") or (inner.get("param_groups") if isinstance(inner, Mapping) else None) or []
    )
    found: dict[str, Any] = pickles.plain(
        {
            "state": {key: value for key, value in state.items() if key not in _TENSORS},
            "optimizer": {
                **{key: optimizer[key] for key in _OPTIMIZER if key in optimizer},
                "param_groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
            },
        }
    )
    return found
