"""Fragments of all ranks put together again: what is missing, what is claimed twice and differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ftckpt.capture.assignment import as_bytes
from ftckpt.model.fragment import Fragment

Elements = tuple[Fragment, bytes]
"""A fragment and its bytes."""
Wholes = dict[str, tuple[str, tuple[int, ...], npt.NDArray[np.uint8]]]
"""By key the type, the shape and the bytes of a tensor, a row for each element."""


def held(pieces: Iterable[Any]) -> list[Elements]:
    """What a rank has of these pieces now."""
    return [(piece.fragment, as_bytes(piece.tensor).cpu().numpy().tobytes()) for piece in pieces]


def positions(fragment: Fragment) -> npt.NDArray[np.int64]:
    """Of each element of a fragment its flat place in the logical tensor."""
    whole = np.arange(int(np.prod(fragment.global_shape, dtype=int))).reshape(fragment.global_shape)
    places = zip(fragment.box.offset, fragment.box.shape, strict=True)
    box: Any = tuple(slice(offset, offset + size) for offset, size in places)
    return whole[box].reshape(-1)[fragment.start : fragment.stop]


def put_together(ranks: Iterable[Sequence[Elements]]) -> list[str]:
    """What is wrong with the fragments of all ranks, in words; empty: they make up every tensor.

    No element is missing, no rank holds one twice, ranks that hold the same one hold the same bytes.
    """
    return _joined(ranks)[1]


def wholes(found: Iterable[Elements]) -> Wholes:
    """The tensors that fragments make up, whoever holds them.

    Raises:
        AssertionError: an element is missing, or two fragments have other bytes of it.
    """
    tensors, problems = _joined([one] for one in found)
    assert not problems, problems[:3]
    return {key: (*tensor.kind, tensor.bytes) for key, tensor in tensors.items()}


def read_all(reader: Any) -> Wholes:
    """The tensors of a checkpoint."""
    return wholes([(f, reader.read(index).tobytes()) for index, f in enumerate(reader.catalog.fragments)])


def differing(mine: Wholes, theirs: Wholes) -> list[str]:
    """Keys of both whose tensors differ. Rows of a vocabulary that only one has are padding."""

    def same(key: str) -> bool:
        one, other = mine[key], theirs[key]
        rows = min(len(one[2]), len(other[2]))
        is_padded = "word_embeddings" in key or "output_layer" in key
        return (is_padded or one[:2] == other[:2]) and np.array_equal(one[2][:rows], other[2][:rows])

    return [key for key in sorted(mine.keys() & theirs.keys()) if not same(key)]


def _joined(ranks: Iterable[Sequence[Elements]]) -> tuple[Mapping[str, _Tensor], list[str]]:
    tensors: dict[str, _Tensor] = {}
    problems: list[str] = []
    for rank, elements in enumerate(ranks):
        for fragment, data in elements:
            tensor = tensors.setdefault(fragment.key, _Tensor(fragment))
            problems += [f"{fragment.name} {what}" for what in tensor.add(rank, fragment, data)]
    for key, tensor in tensors.items():
        missing = int((tensor.holders < 0).sum())
        if missing:
            problems.append(f"{key}: {missing} of {tensor.holders.size} elements are in no fragment")
    return tensors, problems


class _Tensor:
    """One logical tensor, as far as it was seen; ``holders`` has the last rank that has each element, or -1."""

    def __init__(self, fragment: Fragment) -> None:
        numel = int(np.prod(fragment.global_shape, dtype=int))
        self.kind = (fragment.dtype, fragment.global_shape)
        self.bytes = np.zeros((numel, fragment.item_bytes), np.uint8)
        self.holders = np.full(numel, -1)

    def add(self, rank: int, fragment: Fragment, data: bytes) -> Iterable[str]:
        if (fragment.dtype, fragment.global_shape) != self.kind:
            return [f"is {fragment.dtype} of {fragment.global_shape}, elsewhere {self.kind}"]
        at = positions(fragment)
        values = np.frombuffer(data, np.uint8).reshape(-1, fragment.item_bytes)
        if len(values) != len(at):
            return [f"has {len(values)} elements in memory"]
        problems = ["holds an element twice"] if (self.holders[at] == rank).any() else []
        known = self.holders[at] >= 0
        if (self.bytes[at[known]] != values[known]).any():
            problems.append("holds other bytes than an earlier rank")
        self.bytes[at], self.holders[at] = values, rank
        return problems
