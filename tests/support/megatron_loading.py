"""What Megatron-core 0.16.1 needs to load its own checkpoints with optimizers of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def steps_aside() -> Iterator[None]:
    """Megatron-core 0.16.1 copies each entry of an optimizer's state but ``step``, which torch's own Adam, unlike
    fused ones, has there too: it is away while Megatron copies."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def without_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = state.pop("step")
        original(self, model_param, tensors)
        state["step"] = step

    DistributedOptimizer._set_main_param_and_optimizer_states = without_step
    try:
        yield
    finally:
        DistributedOptimizer._set_main_param_and_optimizer_states = original
