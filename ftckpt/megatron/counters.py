"""The position of Megatron-LM's train loop, as an object of a snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_COUNTERS = (
    "iteration",
    "consumed_train_samples",
    "consumed_valid_samples",
    "skipped_train_samples",
    "num_floating_point_operations_so_far",
)


class Counters:
    """Megatron reads its position from its global arguments at start, and keeps two of the counters in local
    variables afterwards (``now``)."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self._log_sums: dict[str, Any] = {}
        self._restored_sums: dict[str, Any] | None = None
        self.now: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """The counters as they stand."""
        found = {name: getattr(self._args, name) for name in _COUNTERS if hasattr(self._args, name)}
        return {"counters": {**found, **self.now}, "log_sums": dict(self._log_sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the loop start there."""
        for name, value in state["counters"].items():
            setattr(self._args, name, value)
        self._restored_sums = state["log_sums"]

    def load_reshaped(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Of all stages of another layout: the position is everywhere the same, losses are known to the last one."""
        self.load_state_dict({"counters": states[0]["counters"], "log_sums": states[-1]["log_sums"]})

    def follow_log(self, losses: Mapping[str, Any], sums: dict[str, Any], is_first_iteration: bool) -> bool:
        """``sums`` will be added to until the next log line; returns whether this iteration begins a log."""
        self._log_sums = sums
        if self._restored_sums is None:
            return is_first_iteration
        sums.update({name: _like(losses, value) for name, value in self._restored_sums.items()})
        self._restored_sums = None
        return False


def _like(losses: Mapping[str, Any], saved: Any) -> Any:
    """A saved sum on the device of this iteration's losses."""
    if isinstance(saved, torch.Tensor):
        return next((saved.to(loss.device) for loss in losses.values()), saved)
    return saved
