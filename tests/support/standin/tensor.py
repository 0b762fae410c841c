"""Tensors asked for on "cuda" are made on the CPU.

The factories and methods themselves are replaced (rather than pushing a `TorchFunctionMode`): a mode
is bound to the thread that pushed it and slows every call down.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_FACTORIES = (
    "tensor", "as_tensor", "asarray", "empty", "zeros", "ones", "full", "rand", "randn", "randint",
    "randperm", "arange", "linspace", "logspace", "eye", "empty_strided", "tril_indices",
    "triu_indices", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
    "randint_like", "scalar_tensor",
)  # fmt: skip
_METHODS = ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")


def on_cpu(device: Any) -> Any:
    """The CPU in place of a CUDA device; anything else unchanged. A bare number is a CUDA device."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int):
        return torch.device("cpu")
    if isinstance(device, str) and device.partition(":")[0] == "cuda":
        return torch.device("cpu")
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


def _device_keyword_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = on_cpu(kwargs["device"])
        # Page-locking needs a driver.
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return call


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (on_cpu(args[0]), *args[1:])
        if kwargs.get("device") is not None:
            kwargs["device"] = on_cpu(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's optimizer asks for 'torch.cuda.FloatTensor' and the like by name."""

    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name: str = original(self)
            return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, *args, **kwargs)

    return type_


def _cuda(self: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return self


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    return self


def _record_stream(self: torch.Tensor, stream: Any) -> None:
    pass


def install_tensor() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _device_keyword_on_cpu(getattr(torch, name)))
    for name in _METHODS:
        setattr(torch.Tensor, name, _device_keyword_on_cpu(getattr(torch.Tensor, name)))
    replacements: dict[str, Callable[..., Any]] = {
        "to": _to(torch.Tensor.to),
        "type": _type(torch.Tensor.type),
        "cuda": _cuda,
        "pin_memory": _pin_memory,
        "record_stream": _record_stream,
    }
    for name, value in replacements.items():
        setattr(torch.Tensor, name, value)
