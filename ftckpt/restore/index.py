"""All that can be read, by key and type, so that what touches one need is found without looking at the rest.

Every rank of a large job must know what all slots offer, and needs little of it. A slot's offers travel as a table:
two zlib streams behind the length of the first (8 bytes, little endian). The tensors of its fragments as JSON,
``[[key, dtype, shape], …]``, and a row of int64 (little endian) of each, see ``row_of``. The tensors of many slots
are the same bytes: they are looked at once, and rows only where a key is wanted.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ftckpt.errors import CorruptError
from ftckpt.model.fragment import DTYPE_BYTES, Box, Fragment, Shape

Array = npt.NDArray[np.int64]


class Offer(NamedTuple):
    """A fragment that can be read from ``source`` (an index that the caller understands).

    ``offset`` is where the fragment's first byte lies in the source.
    """

    source: int
    fragment: Fragment
    offset: int


class TensorId(NamedTuple):
    """What fragments must have in common to be parts of the same tensor."""

    key: str
    dtype: str
    shape: Shape


FIXED_COLUMNS = 3
"""Columns before those that follow the dimensions."""

_LEVEL = 1
_LENGTH_BYTES = 8
MOST_BYTES = 1 << 30
"""Bound on either stream once it is unpacked."""


def row_of(fragment: Fragment, offset: int) -> tuple[int, ...]:
    """An offer as numbers, without its source and tensor: byte offset, start, stop, box offset, box shape."""
    return offset, fragment.start, fragment.stop, *fragment.box.offset, *fragment.box.shape


FEW = 32
"""Offers of a tensor that are looked at one by one: arrays take longer to make."""


@dataclass
class TensorOffers:
    """Offers of one tensor, in the order in which they were added. All are added before any is looked for."""

    tensor: TensorId
    _few: list[Offer] = field(default_factory=list)
    _sources: list[Array] = field(default_factory=list)
    _rows: list[Array] = field(default_factory=list)

    def add(self, sources: Array, rows: Array) -> None:
        """``rows``, shape (offers, columns), as ``row_of`` gives them, and the source of each."""
        self._sources.append(sources)
        self._rows.append(rows)

    def add_one(self, offer: Offer) -> None:
        """For few: they are made arrays of once they are many."""
        self._few.append(offer)
        if len(self._few) > FEW:
            self._flush()

    def touching(self, need: Fragment) -> list[Offer]:
        """Those that may hold an element of ``need``; no other offer does."""
        if not self._sources:
            return [offer for offer in self._few if _meet(offer.fragment, need)]
        low, high = bounds(np.array([row_of(need, 0)], np.int64))
        near = ((self._bounds[0] < high) & (self._bounds[1] > low)).all(axis=1)
        return [self._offer(row) for row in np.flatnonzero(near).tolist()]

    @cached_property
    def _table(self) -> tuple[Array, Array]:
        self._flush()
        return np.concatenate(self._sources), np.concatenate(self._rows)

    @cached_property
    def _bounds(self) -> tuple[Array, Array]:
        return bounds(self._table[1])

    def _flush(self) -> None:
        if self._few:
            rows = np.array([row_of(offer.fragment, offer.offset) for offer in self._few], np.int64)
            self.add(np.array([offer.source for offer in self._few], np.int64), rows)
            self._few.clear()

    def _offer(self, row: int) -> Offer:
        key, dtype, shape = self.tensor
        offset, start, stop, *box = self._table[1][row].tolist()
        place = Box(tuple(box[: len(shape)]), tuple(box[len(shape) :]))
        return Offer(int(self._table[0][row]), Fragment(key, dtype, shape, place, start, stop), offset)


class Index:
    """Offers by key and type; made once, used by any number of plans."""

    def __init__(self, offers: Iterable[Offer] = ()) -> None:
        self._by_key: dict[tuple[str, str], dict[Shape, TensorOffers]] = {}
        for offer in offers:
            self.add(offer)

    def add(self, offer: Offer) -> None:
        """Add one, before anything is looked for."""
        fragment = offer.fragment
        self._of(TensorId(fragment.key, fragment.dtype, fragment.global_shape)).add_one(offer)

    def add_tables(self, tables: Iterable[tuple[int, bytes]], key_of: Callable[[str], str | None]) -> None:
        """Add the offers of all tables, each given with its source.

        ``key_of`` says under which key those of a table's key stand, None: they are left out.

        Raises:
            CorruptError: not a table, naming the source.
        """
        alike: dict[bytes, list[tuple[int, bytes]]] = {}
        for source, data in tables:
            end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
            alike.setdefault(data[_LENGTH_BYTES:end], []).append((source, data[end:]))
        for tensors, slots in alike.items():
            try:
                columns = _columns(tensors)
                keyed = [(column, key) for column in columns if (key := key_of(column.tensor.key)) is not None]
                if not keyed:
                    continue
                rows = np.stack([_numbers(data, columns[-1].end) for _, data in slots])
            except (ValueError, TypeError, zlib.error) as error:
                raise CorruptError(f"the table of source {slots[0][0]} cannot be read: {error}") from None
            sources = np.array([source for source, _ in slots], np.int64)
            for column, key in keyed:
                self._of(TensorId(key, *column.tensor[1:])).add(sources, rows[:, column.begin : column.end])

    def shapes(self, key: str, dtype: str) -> frozenset[Shape]:
        """Global shapes in which ``key`` is there with that type; empty where it is not."""
        return frozenset(self._by_key.get((key, dtype), ()))

    def usable(self, need: Fragment, padded: bool) -> list[TensorOffers]:
        """Offers of the need's own global shape and, where it is ``padded``, of those that differ in dimension 0."""
        shape = need.global_shape
        return [
            offers
            for other, offers in self._by_key.get((need.key, need.dtype), {}).items()
            if other == shape or (padded and len(other) == len(shape) > 0 and other[1:] == shape[1:])
        ]

    def _of(self, tensor: TensorId) -> TensorOffers:
        shapes = self._by_key.setdefault((tensor.key, tensor.dtype), {})
        if tensor.shape not in shapes:
            shapes[tensor.shape] = TensorOffers(tensor)
        return shapes[tensor.shape]


def _meet(one: Fragment, other: Fragment) -> bool:
    """Whether the boxes share an element, and, where they are the same, the ranges."""
    if one.box == other.box:
        return one.start < other.stop and other.start < one.stop
    return all(
        at < to + size and to < at + length
        for at, length, to, size in zip(one.box.offset, one.box.shape, other.box.offset, other.box.shape, strict=True)
    )


def bounds(rows: Array) -> tuple[Array, Array]:
    """First and one past the last index of each row's elements along each dimension; shape (rows, dims) each.

    The least box around them; one without elements where there are none.
    """
    dims = (rows.shape[1] - FIXED_COLUMNS) // 2
    offset, shape = rows[:, FIXED_COLUMNS : FIXED_COLUMNS + dims], rows[:, FIXED_COLUMNS + dims :]
    low, high = offset.copy(), offset + shape
    first, last = rows[:, 1], rows[:, 2] - 1
    alone = first <= last  # all elements share the index along each dimension so far
    high[~alone] = low[~alone]
    for axis in range(dims):
        inner = np.maximum(np.prod(shape[:, axis + 1 :], axis=1), 1)
        begin, end = first // inner, last // inner
        low[alone, axis] = (offset[:, axis] + begin)[alone]
        high[alone, axis] = (offset[:, axis] + end + 1)[alone]
        first, last = first - begin * inner, last - begin * inner
        alone = alone & (begin == end)
    return low, high


def encode_table(fragments: Sequence[Fragment], offsets: Sequence[int]) -> bytes:
    """A table of ``fragments``, whose first bytes lie at ``offsets``."""
    names = json.dumps([[f.key, f.dtype, f.global_shape] for f in fragments], separators=(",", ":"))
    numbers = [number for pair in zip(fragments, offsets, strict=True) for number in row_of(*pair)]
    tensors = zlib.compress(names.encode(), _LEVEL)
    rows = zlib.compress(np.array(numbers, "<i8").tobytes(), _LEVEL)
    return len(tensors).to_bytes(_LENGTH_BYTES, "little") + tensors + rows


class _Column(NamedTuple):
    """Where the numbers of a fragment lie in each row of the tables that have the same tensors."""

    tensor: TensorId
    begin: int
    end: int


def _columns(tensors: bytes) -> list[_Column]:
    columns: list[_Column] = []
    position = 0
    for key, dtype, shape in json.loads(_unpacked(tensors)):
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {dtype!r}")
        end = position + FIXED_COLUMNS + 2 * len(shape)
        columns.append(_Column(TensorId(str(key), dtype, tuple(map(int, shape))), position, end))
        position = end
    return columns


def _numbers(data: bytes, count: int) -> Array:
    numbers = np.frombuffer(_unpacked(data), "<i8").astype(np.int64)
    if len(numbers) != count:
        raise ValueError(f"{len(numbers)} numbers where {count} belong")
    return numbers


def _unpacked(data: bytes) -> bytes:
    stream = zlib.decompressobj()
    text = stream.decompress(data, MOST_BYTES)
    if not stream.eof:
        raise ValueError("a stream is cut off or too long")
    return text
