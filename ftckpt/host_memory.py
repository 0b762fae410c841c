"""Host memory for bytes."""

from __future__ import annotations

import torch


def host_memory(nbytes: int) -> torch.Tensor:
    """1-D uint8, not cleared. On the host whatever ``torch.set_default_device`` says: a script may have called it."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
