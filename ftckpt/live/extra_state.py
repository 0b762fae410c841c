"""What modules keep beside parameters and buffers: pickled by their authors, so that ftckpt does not read it."""

from __future__ import annotations

from typing import Any

import torch

from ftckpt.errors import UnsupportedError


def refuse_extra_state(model: torch.nn.Module) -> None:
    """Transformer Engine keeps FP8 scales there, and something empty without FP8.

    Raises:
        UnsupportedError: a module keeps extra state, by name.
    """
    for name, module in model.named_modules():
        if type(module).get_extra_state is torch.nn.Module.get_extra_state:
            continue
        size = _size(module.get_extra_state())
        if size:
            raise UnsupportedError(
                f"module {name} keeps extra state{size} (FP8 scales?), which ftckpt cannot save yet"
            )


def _size(extra: Any) -> str:
    """In words; empty where there is nothing in it."""
    if extra is None:
        return ""
    if hasattr(extra, "getbuffer"):
        nbytes = extra.getbuffer().nbytes
    elif isinstance(extra, torch.Tensor):
        nbytes = extra.nbytes
    else:
        return f" of type {type(extra).__name__}"
    return f" of {nbytes} bytes" if nbytes else ""
