"""Sums of losses that a train loop adds to until its next log line: where training stands, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class LogSums:
    """The loop keeps them in a dict of its own, which it hands on in each iteration."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._restored: dict[str, Any] | None = None

    def save(self) -> dict[str, Any]:
        """The sums as they stand."""
        return dict(self._sums)

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from what ``save`` gave, with the next iteration."""
        self._restored = saved

    def follow(self, losses: Mapping[str, Any], sums: dict[str, Any]) -> bool:
        """``losses`` are about to be added to ``sums``; returns whether these were restored just now."""
        # The loop's own dict, to which it adds until the log line: the next boundary reads it as it is then.
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
