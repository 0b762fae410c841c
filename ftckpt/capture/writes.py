"""Whether tensors were written, as torch counts it for autograd."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from operator import attrgetter
from typing import TypeAlias

import torch

from ftckpt.model.training_state import Piece

Counts: TypeAlias = "array[int]"
"""Of the tensors of a ``WriteCounts``, in their order."""

_count = attrgetter("_version")


class WriteCounts:
    """The tensors that have the counts of some pieces: one of them may count for many."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._keys: list[str] = []
        self._tensors: list[torch.Tensor] = []
        seen: set[int] = set()
        for piece in pieces:
            tensor = piece.tensor if piece.counted is None else piece.counted
            if id(tensor) not in seen:
                seen.add(id(tensor))
                self._keys.append(piece.fragment.key)
                self._tensors.append(tensor)

    def read(self) -> Counts:
        """As they stand now."""
        # No list is kept: of as many numbers each would be an object somewhere in memory, which no cache has. Made of
        # one: from an iterator an array takes numbers twice as long.
        return array("q", [*map(_count, self._tensors)])

    def written(self, before: Counts) -> str:
        """The key of a piece that was written since ``read`` gave ``before``; empty where none was."""
        now = self.read()
        if now == before:
            return ""
        return next(key for key, was, count in zip(self._keys, before, now, strict=True) if was != count)

    def forget(self) -> None:
        """Let go of the tensors."""
        self._keys, self._tensors = [], []
