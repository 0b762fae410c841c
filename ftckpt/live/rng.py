"""The generators that training draws from: Python's, NumPy's, torch's and the device's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def save_generators() -> dict[str, Any]:
    """State of every generator; ``device`` is None on a machine without one."""
    version, words, gauss = random.getstate()
    return {
        "python": {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def load_generators(saved: Mapping[str, Any]) -> None:
    """Inverse of ``save_generators``."""
    python = saved["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    if saved["device"] is not None:
        torch.cuda.set_rng_state(saved["device"])
