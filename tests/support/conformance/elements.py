"""Fragments of all ranks put together again: what is missing, what is claimed twice and differs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ftckpt.model.fragment import Fragment

Elements = tuple[Fragment, npt.NDArray[np.uint8]]
"""A fragment and its bytes."""


def put_together(ranks: Iterable[Sequence[Elements]]) -> list[str]:
    """What is wrong with the fragments of all ranks, in words; empty: they make up every tensor.

    No element is missing, no rank holds one twice, ranks that hold the same one hold the same bytes.
    """
    tensors: dict[str, _Tensor] = {}
    problems: list[str] = []
    for rank, elements in enumerate(ranks):
        for tensor in tensors.values():
            tensor.mine[:] = False
        for fragment, data in elements:
            tensor = tensors.setdefault(fragment.key, _Tensor(fragment))
            problems += [f"rank {rank}: {fragment.name} {what}" for what in tensor.add(fragment, data)]
    for key, tensor in tensors.items():
        missing = int((~tensor.seen).sum())
        if missing:
            problems.append(f"{key}: {missing} of {tensor.seen.size} elements are in no fragment")
    return problems


class _Tensor:
    """One logical tensor, as far as it was seen."""

    def __init__(self, fragment: Fragment) -> None:
        numel = int(np.prod(fragment.global_shape, dtype=int))
        self.kind = (fragment.global_shape, fragment.dtype)
        self.positions = np.arange(numel).reshape(fragment.global_shape)
        self.bytes = np.zeros((numel, fragment.item_bytes), np.uint8)
        self.seen, self.mine = np.zeros(numel, bool), np.zeros(numel, bool)

    def add(self, fragment: Fragment, data: npt.NDArray[np.uint8]) -> Iterable[str]:
        if (fragment.global_shape, fragment.dtype) != self.kind:
            return [f"is {fragment.dtype} of {fragment.global_shape}, elsewhere {self.kind}"]
        places = zip(fragment.box.offset, fragment.box.shape, strict=True)
        box: Any = tuple(slice(offset, offset + size) for offset, size in places)
        at = self.positions[box].reshape(-1)[fragment.start : fragment.stop]
        values = data.reshape(-1, fragment.item_bytes)
        if len(values) != len(at):
            return [f"has {len(values)} elements in memory"]
        problems = ["holds an element twice"] if self.mine[at].any() else []
        known = self.seen[at]
        if (self.bytes[at[known]] != values[known]).any():
            problems.append("holds other bytes than an earlier rank")
        self.bytes[at], self.seen[at], self.mine[at] = values, True, True
        return problems
