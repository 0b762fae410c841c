"""Running sums of losses for a train loop's next log line, which are part of the training state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class LogSums:
    """Saves and restores the sums in the train loop's dict, which the loop passes in each iteration."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._restored: dict[str, Any] | None = None

    def save(self) -> dict[str, Any]:
        """The current sums."""
        return dict(self._sums)

    def load(self, saved: dict[str, Any]) -> None:
        """Restores saved sums, with the next iteration."""
        self._restored = saved

    def follow(self, losses: Mapping[str, Any], sums: dict[str, Any]) -> bool:
        """Must be called before ``losses`` are added to ``sums``; returns whether it has restored these."""
        # A reference to the loop's dict: the next boundary reads its values of that time.
        self._sums = sums
        if self._restored is None:
            return False
        sums.update({name: _like(losses, value) for name, value in self._restored.items()})
        self._restored = None
        return True


def _like(losses: Mapping[str, Any], saved: Any) -> Any:
    """A saved sum on the device of this iteration's losses."""
    if isinstance(saved, torch.Tensor):
        return next((saved.to(loss.device) for loss in losses.values()), saved)
    return saved
