"""FusedAdam of Transformer Engine and of Apex: state ahead of its first step.

Both count their steps in the groups of parameters, in groups that have parameters alone. Their kernels write by
address, so that torch counts no writes (``_version``).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ftckpt.errors import UnsupportedError

NAME = "FusedAdam of Transformer Engine and Apex"

_PACKAGES = ("transformer_engine.", "apex.optimizers.")
_DTYPES = ("exp_avg_dtype", "exp_avg_sq_dtype", "master_weight_dtype")


def is_fused_adam(inner: Any) -> bool:
    """Whether it is one of the two. DeepSpeed has another of that name."""
    kind = type(inner)
    return kind.__qualname__ == "FusedAdam" and kind.__module__.startswith(_PACKAGES)


def check(inner: Any) -> None:
    """Refuse a form of it that keeps more than its state and its groups say.

    Raises:
        UnsupportedError: the setting.
    """
    own_masters = getattr(inner, "master_weights", False) and not hasattr(inner, "initialize_state")
    # A flag of the last overflow decides whether the next step is counted, and masters lie beside the state.
    for name, is_on in (("capturable", getattr(inner, "capturable", False)), ("master_weights", own_masters)):
        if is_on:
            raise UnsupportedError(f"FusedAdam with {name} keeps state that ftckpt does not know; leave it off")
    for name in _DTYPES:
        if (dtype := getattr(inner, name, torch.float32)) != torch.float32:
            raise UnsupportedError(f"FusedAdam with {name} {dtype}: its scales are not known yet; use fp32")


def initialize(inner: Any, parameter: torch.Tensor) -> None:
    """Make the state of one parameter as the optimizer's own first step does."""
    if not hasattr(inner, "initialize_state"):  # Apex, and Transformer Engine before 1.13
        inner.state[parameter].update({name: _zeros(parameter) for name in ("exp_avg", "exp_avg_sq")})
        return
    arguments = []
    if "store_param_remainders" in inspect.signature(inner.initialize_state).parameters:  # since 2.1
        arguments.append(inner.store_param_remainders and parameter.dtype == torch.bfloat16)
    inner.initialize_state(parameter, *arguments)


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter.detach(), dtype=torch.float32)
