"""The generators that training draws from: Python's, NumPy's, torch's and the device's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from ftckpt.state import objects


def save_generators() -> dict[str, Any]:
    """State of every generator; ``device`` is None on a machine without one."""
    return {
        "python": _python_state(random),
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


def derive_generators(built: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """What ``save_generators`` would say had each generator been seeded with ``derived_seed``; sets nothing."""
    seeds = {name: derived_seed(name, state, iteration) for name, state in built.items()}
    words = [seeds["numpy"] & 0xFFFFFFFF, seeds["numpy"] >> 32]
    return {
        "python": _python_state(random.Random(seeds["python"])),
        "numpy": np.random.RandomState(np.array(words, np.uint32)).get_state(),
        "torch": torch.Generator().manual_seed(seeds["torch"]).get_state(),
        "device": device_state(seeds["device"]) if built["device"] is not None else None,
    }


def derived_seed(name: str, built: Any, iteration: int) -> int:
    """64 bits that follow from a generator's name, the state that it was built with, and the iteration to go on from.

    Generators that were seeded alike get the same, others get others, and each iteration gives other ones.
    """
    return xxhash.xxh3_64_intdigest(objects.encode({"name": name, "built": built, "iteration": iteration}))


def device_state(seed: int) -> torch.Tensor:
    """The state of the device's generator after ``seed``, with the generator left as it is."""
    before = torch.cuda.get_rng_state()
    try:
        torch.cuda.manual_seed(seed)
        return torch.cuda.get_rng_state()
    finally:
        torch.cuda.set_rng_state(before)


def _python_state(generator: Any) -> dict[str, Any]:
    version, words, gauss = generator.getstate()
    return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}
