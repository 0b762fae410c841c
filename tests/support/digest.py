"""A number for each logical tensor of a job that is the same in every layout that holds the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from ftckpt.model.fragment import Fragment
from ftckpt.model.training_state import Description, Piece

Array = npt.NDArray[Any]
Digest = dict[str, tuple[int, str]]
"""By key, the number of elements and a hash of each element's place in the logical tensor and its bits."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Digester:
    """Hashes what all ranks hold together: every element of a logical tensor once, whoever holds it.

    Of what several ranks hold the lowest rank's copy counts. Left out: what belongs to a rank (``local/``), and of
    the tensors that the layout pads all rows from ``rows`` on.

    Collective, as is each call.

    Args:
        described: this rank's state; its tensors are read at each call.
        gather: every rank's bytes, in rank order.
        rank: this one.
        rows: size of the vocabulary without padding; None: padding counts.

    Raises:
        ValueError: two ranks say different things of the shape or the type of one tensor.
    """

    def __init__(
        self, described: Description, gather: Callable[[bytes], list[bytes]], rank: int, rows: int | None = None
    ) -> None:
        self._gather = gather
        pieces = [p for p in (*described.stepped, *described.volatile) if not p.fragment.key.startswith("local/")]
        told = gather(json.dumps([piece.fragment.to_json() for piece in pieces]).encode())
        held = [[Fragment.from_json(value) for value in json.loads(data)] for data in told]
        _check_same(held)
        self._parts = [
            (pieces[index], begin, end, rows if pieces[index].fragment.key in described.padded else None)
            for index, begin, end in own_ranges(held, rank)
        ]

    def __call__(self) -> Digest:
        """The hashes now; the same on all ranks."""
        mine: dict[str, tuple[int, int]] = {}
        for piece, begin, end, rows in self._parts:
            count, total = mine.get(piece.fragment.key, (0, 0))
            places, values = _elements(piece, begin, end, rows)
            more = int(_mixed(piece.fragment.key, places, values).sum(dtype=np.uint64))
            mine[piece.fragment.key] = (count + len(places), (total + more) % 2**64)
        sums: dict[str, tuple[int, int]] = {}
        for data in self._gather(json.dumps(mine).encode()):
            for key, (count, total) in json.loads(data).items():
                before = sums.get(key, (0, 0))
                sums[key] = (before[0] + count, (before[1] + total) % 2**64)
        return {key: (count, f"{total:016x}") for key, (count, total) in sorted(sums.items())}


def own_ranges(held: Sequence[Sequence[Fragment]], rank: int) -> list[tuple[int, int, int]]:
    """What ``rank`` counts: index of its fragment, and a range inside that one's box.

    Ranges of one box of one tensor may overlap in any way; boxes do not, where they are not the same.
    """
    taken: dict[Any, list[tuple[int, int]]] = {}
    own: list[tuple[int, int, int]] = []
    for holder, fragments in enumerate(held[: rank + 1]):
        for index, fragment in enumerate(fragments):
            ranges = taken.setdefault((fragment.key, fragment.box), [])
            free = _outside(ranges, fragment.start, fragment.stop)
            ranges += free
            if holder == rank:
                own += [(index, begin, end) for begin, end in free]
    return own


def _outside(ranges: Sequence[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    free = []
    for first, last in sorted(ranges):
        if last <= begin or first >= end:
            continue
        if first > begin:
            free.append((begin, first))
        begin = max(begin, last)
    return [*free, (begin, end)] if begin < end else free


def _check_same(held: Sequence[Sequence[Fragment]]) -> None:
    known: dict[str, Fragment] = {}
    for fragment in (fragment for fragments in held for fragment in fragments):
        other = known.setdefault(fragment.key, fragment)
        if (other.dtype, other.global_shape) != (fragment.dtype, fragment.global_shape):
            raise ValueError(f"{fragment.key} has two types or shapes: {other.name} and {fragment.name}")


def _elements(piece: Piece, begin: int, end: int, rows: int | None) -> tuple[Array, Array]:
    """Place in the logical tensor and bits of the elements ``begin`` to ``end`` of a fragment's box; uint64 each."""
    fragment = piece.fragment
    words = piece.tensor.detach()[begin - fragment.start : end - fragment.start].view(_WORDS[fragment.item_bytes])
    values = words.cpu().numpy()
    values = values.view(f"u{fragment.item_bytes}").astype(np.uint64)
    inside = np.unravel_index(np.arange(begin, end), fragment.box.shape or (1,))
    offset = fragment.box.offset or (0,)
    coordinates = tuple(axis + first for axis, first in zip(inside, offset, strict=True))
    places = np.ravel_multi_index(coordinates, fragment.global_shape or (1,)).astype(np.uint64)
    if rows is not None:
        keep = coordinates[0] < rows
        places, values = places[keep], values[keep]
    return places, values


def _mixed(key: str, places: Array, values: Array) -> Array:
    """A random-looking uint64 per element: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014), twice."""
    name = np.full(1, xxhash.xxh3_64_intdigest(key.encode()), np.uint64)
    return _finalized(_finalized(places ^ name) + values)


def _finalized(words: Array) -> Array:
    words = (words + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = words ^ (words >> np.uint64(31))
    return mixed
