"""ftckpt: in-memory, bit-exact fault tolerance for hybrid-parallel training.

Names are imported on first use, so that parts without tensors do not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftckpt.config import Config
    from ftckpt.session.checkpointer import Checkpointer

__all__ = ["Checkpointer", "Config"]
__version__ = "0.1.0"

_HOMES = {"Checkpointer": "ftckpt.session.checkpointer", "Config": "ftckpt.config"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ftckpt' has no attribute {name!r}")
    from importlib import import_module

    if name == "Config":
        import_module("ftckpt.frameworks.launcher")  # an invalid configuration ends the script as one line
    return getattr(import_module(_HOMES[name]), name)
