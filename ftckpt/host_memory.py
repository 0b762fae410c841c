"""Allocation of host memory as tensors."""

from __future__ import annotations

import torch


def host_memory(nbytes: int) -> torch.Tensor:
    """A 1-D uint8 tensor, not cleared, on the host even if the script has called ``torch.set_default_device``."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def pinned_memory(nbytes: int) -> torch.Tensor:
    """Pinned host memory for copies from or to a device; pageable memory if pinning fails."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
    except RuntimeError:
        return host_memory(nbytes)
