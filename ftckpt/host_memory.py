"""Host memory for bytes."""

from __future__ import annotations

import torch


def host_memory(nbytes: int) -> torch.Tensor:
    """1-D uint8, not cleared. On the host whatever ``torch.set_default_device`` says: a script may have called it."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def pinned_memory(nbytes: int) -> torch.Tensor:
    """The same, for copies from or to a device; where no more may be locked, slower memory that is right as well."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
    except RuntimeError:
        return host_memory(nbytes)
