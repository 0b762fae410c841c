"""Fragments of all ranks put together again: what is missing, what is claimed twice and differs; and their digest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ftckpt.capture.assignment import as_bytes
from ftckpt.model.fragment import Fragment
from ftckpt.model.training_state import Description

Elements = tuple[Fragment, bytes]
"""A fragment and its bytes."""
Wholes = dict[str, tuple[str, tuple[int, ...], npt.NDArray[np.uint8]]]
"""The type, the shape and the bytes of each tensor by key, a row for each element."""


def held(pieces: Iterable[Any]) -> list[Elements]:
    """The contents of a rank's pieces now."""
    return [(piece.fragment, as_bytes(piece.tensor).cpu().numpy().tobytes()) for piece in pieces]


def positions(fragment: Fragment) -> npt.NDArray[np.int64]:
    """The flat place of each element of a fragment in the logical tensor."""
    whole = np.arange(int(np.prod(fragment.global_shape, dtype=int))).reshape(fragment.global_shape)
    places = zip(fragment.box.offset, fragment.box.shape, strict=True)
    box: Any = tuple(slice(offset, offset + size) for offset, size in places)
    return whole[box].reshape(-1)[fragment.start : fragment.stop]


def put_together(ranks: Iterable[Sequence[Elements]]) -> list[str]:
    """Problems of the fragments of all ranks, in words; empty: they make up every tensor.

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


Digest = dict[str, tuple[int, str]]
"""The number of elements by key, and a hash of each element's place in the logical tensor and its bits."""


class Digester:
    """Hashes what all ranks hold together: a number for each logical tensor, the same in every layout.

    Every element counts once, the lowest rank's where several have it. Left out: what belongs to a rank (``local/``),
    and of the tensors that the layout pads all rows from ``rows`` on. Collective, as is each call.

    Args:
        described: this rank's state; its tensors are read at each call.
        gather: every rank's bytes, in rank order.
        rank: this one.
        rows: size of the vocabulary without padding; None: padding counts.
    """

    def __init__(
        self, described: Description, gather: Callable[[bytes], list[bytes]], rank: int, rows: int | None = None
    ) -> None:
        self._gather = gather
        pieces = [p for p in (*described.stepped, *described.volatile) if not p.fragment.key.startswith("local/")]
        gathered = gather(json.dumps([piece.fragment.to_json() for piece in pieces]).encode())
        held = [[Fragment.from_json(value) for value in json.loads(data)] for data in gathered]
        taken: dict[Any, npt.NDArray[np.bool_]] = {}
        for fragment in (fragment for fragments in held[:rank] for fragment in fragments):
            _untaken(taken, fragment)
        self._parts = []
        for piece in pieces:
            own, at = _untaken(taken, piece.fragment), positions(piece.fragment).astype(np.uint64)
            if rows is not None and piece.fragment.key in described.padded:
                own &= at < rows * int(np.prod(piece.fragment.global_shape[1:], dtype=int))
            self._parts.append((piece, own, at[own]))

    def __call__(self) -> Digest:
        """The hashes now; the same on all ranks."""
        counts, sums = Counter[str](), Counter[str]()
        for piece, own, at in self._parts:
            key, words = piece.fragment.key, as_bytes(piece.tensor).cpu().numpy()
            values = words.view(f"u{piece.fragment.item_bytes}")[own].astype(np.uint64)
            name = np.full(1, xxhash.xxh3_64_intdigest(key.encode()), np.uint64)
            counts[key] += len(at)
            sums[key] += int(_finalized(_finalized(at ^ name) + values).sum(dtype=np.uint64))
        total, numbers = Counter[str](), Counter[str]()
        for data in self._gather(json.dumps([counts, sums]).encode()):
            for found, of_rank in zip((numbers, total), json.loads(data), strict=True):
                found.update(of_rank)
        return {key: (numbers[key], f"{total[key] % 2**64:016x}") for key in sorted(numbers)}


def _untaken(taken: dict[Any, npt.NDArray[np.bool_]], fragment: Fragment) -> npt.NDArray[np.bool_]:
    """Elements of a fragment that nobody has taken; then they are. Boxes that are not the same do not overlap."""
    of_box = taken.setdefault((fragment.key, fragment.box), np.zeros(fragment.box.numel, np.bool_))
    own = ~of_box[fragment.start : fragment.stop]
    of_box[fragment.start : fragment.stop] = True
    return own


def _finalized(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A pseudorandom integer for each: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    words = (words + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
