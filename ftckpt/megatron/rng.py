"""The generators that a Megatron rank draws from.

On the layout that a snapshot was taken in, each rank gets its generators back bit for bit. In another layout there
is no rank that they belong to: a new rank's dropout masks would be those of another part of the model. There each
generator is seeded with 64 bits that follow from its name, the state in which the job's own set-up left it, and the
iteration. What the job seeded alike (default generators of tensor-parallel ranks) stays alike, what it seeded
differently (tensor-parallel regions, experts, stages) stays different, and the same restart draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from ftckpt.live import rng


def save_rng() -> dict[str, Any]:
    """State of every generator that training draws from, Megatron's tracker among them."""
    return {**rng.save_generators(), "tracker": dict(get_cuda_rng_tracker().get_states())}


def load_rng(saved: Mapping[str, Any]) -> None:
    """Inverse of ``save_rng``."""
    rng.load_generators(saved)
    get_cuda_rng_tracker().set_states(dict(saved["tracker"]))


def derive_rng(built: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """What ``load_rng`` takes on a rank of another layout; ``built`` is what ``save_rng`` said before any batch."""
    generators = {name: state for name, state in built.items() if name != "tracker"}
    tracker = {
        name: rng.device_state(rng.derived_seed(f"tracker/{name}", state, iteration))
        for name, state in built["tracker"].items()
    }
    return {**rng.derive_generators(generators, iteration), "tracker": tracker}
