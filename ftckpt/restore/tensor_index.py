"""Index of the fragments in the selected slots.

Every rank of a large job must know the fragments of all slots, and needs few of them. A slot's entries are sent as a
table: the length of the first of two zlib streams (8 bytes, little endian) and the streams. The first has the tensors
as JSON, ``[[key, dtype, shape], …]``, the second a row of int64 (little endian) for each fragment, see ``row_of``.
Equal first streams of many slots are parsed once, and rows only if a key is needed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ftckpt.array_types import Integers
from ftckpt.errors import CorruptError
from ftckpt.model.fragment import DTYPE_BYTES, Box, Fragment, Shape


class ShardEntry(NamedTuple):
    """A fragment that can be read from ``source`` (an index of the caller); its first byte is at ``offset``."""

    source: int
    fragment: Fragment
    offset: int


class TensorId(NamedTuple):
    """The identity of a tensor: fragments with equal ones are parts of the same tensor."""

    key: str
    dtype: str
    shape: Shape


FIXED_COLUMNS = 3
"""Columns before those that depend on the number of dimensions."""

# The fastest of zlib: ranks wait for each other's compression.
# The least of zlib: tables are repetitive, and all ranks wait while each packs its own.
_LEVEL = 1
_LENGTH_BYTES = 8
MOST_BYTES = 1 << 30
"""Maximum size of a decompressed stream."""


def row_of(fragment: Fragment, offset: int) -> tuple[int, ...]:
    """An entry as numbers, without its source and tensor: byte offset, start, stop, box offset, box shape."""
    return offset, fragment.start, fragment.stop, *fragment.box.offset, *fragment.box.shape


FEW = 32
"""Maximum entries of a tensor that are tested one by one: for so few, arrays take longer."""


@dataclass
class TensorIndex:
    """Entries of one tensor, in the order in which they were added. All are added before the first lookup.

    ``once``: of equal fragments in several tables only the first is used.
    """

    tensor: TensorId
    once: bool = False
    _alone: list[ShardEntry] = field(default_factory=list)
    _tables: list[tuple[Integers, Integers]] = field(default_factory=list)

    def add(self, sources: Integers, rows: Integers) -> None:
        """Add ``rows`` of tables, shape (entries, columns), as ``row_of`` gives them, and the source of each."""
        self._tables.append((sources, rows))

    def add_one(self, offer: ShardEntry) -> None:
        """Add an entry that is in no table."""
        self._alone.append(offer)

    def touching(self, need: Fragment) -> list[ShardEntry]:
        """The entries that may overlap ``need``; all others do not."""
        sources, rows = self._table
        if len(sources) <= FEW:
            return [self._offer(source, row) for source, row in self._listed if _meet(row, need)]
        low, high = bounds(np.array([row_of(need, 0)], np.int64))
        near = np.flatnonzero(((self._bounds[0] < high) & (self._bounds[1] > low)).all(axis=1))
        return [self._offer(*one) for one in _pairs(sources[near], rows[near])]

    @cached_property
    def _listed(self) -> list[tuple[int, Sequence[int]]]:
        return list(_pairs(*self._table))

    @cached_property
    def _table(self) -> tuple[Integers, Integers]:
        tables = list(self._tables)
        if self.once and tables:
            sources, rows = map(np.concatenate, zip(*tables, strict=True))
            firsts = _first_of_each(rows[:, 1:])  # all but the byte offset: the fragment itself
            tables = [(sources[firsts], rows[firsts])]
        if self._alone:
            tables.append(_as_table(self._alone))
        return np.concatenate([sources for sources, _ in tables]), np.concatenate([rows for _, rows in tables])

    @cached_property
    def _bounds(self) -> tuple[Integers, Integers]:
        return bounds(self._table[1])

    def _offer(self, source: int, row: Sequence[int]) -> ShardEntry:
        key, dtype, shape = self.tensor
        offset, start, stop, *box = row
        place = Box(tuple(box[: len(shape)]), tuple(box[len(shape) :]))
        return ShardEntry(source, Fragment(key, dtype, shape, place, start, stop), offset)


def _pairs(sources: Integers, rows: Integers) -> Iterator[tuple[int, Sequence[int]]]:
    return zip(sources.tolist(), rows.tolist(), strict=True)


def _as_table(offers: Sequence[ShardEntry]) -> tuple[Integers, Integers]:
    rows = np.array([row_of(offer.fragment, offer.offset) for offer in offers], np.int64)
    return np.array([offer.source for offer in offers], np.int64), rows


def _first_of_each(rows: Integers) -> Integers:
    """The ascending indices of the first occurrence of each distinct row."""
    if (rows == rows[0]).all():
        return np.zeros(1, np.int64)
    order = np.lexsort(rows.T)  # stable
    is_new = np.ones(len(rows), bool)
    is_new[1:] = (rows[order[1:]] != rows[order[:-1]]).any(axis=1)
    return np.sort(order[is_new])


class Index:
    """Entries by key and dtype; built once, used by any number of plans. ``once``: see ``TensorIndex``."""

    def __init__(self, offers: Iterable[ShardEntry] = (), *, once: bool = False) -> None:
        self._once = once
        self._by_key: dict[tuple[str, str], dict[Shape, TensorIndex]] = {}
        for offer in offers:
            self.add(offer)

    def add(self, offer: ShardEntry) -> None:
        """Add an entry, before the first lookup."""
        fragment = offer.fragment
        self._of(TensorId(fragment.key, fragment.dtype, fragment.global_shape)).add_one(offer)

    def add_tables(self, tables: Iterable[tuple[int, bytes]], key_of: Callable[[str], str | None]) -> None:
        """Add the entries of all tables, each given with its source.

        ``key_of`` maps a table's key to the key in this index; None: its entries are left out.

        Raises:
            CorruptError: a table cannot be read; names its source.
        """
        # Ranks of one stage have the same tensors: equal compressed bytes are decompressed and parsed once.
        alike: dict[bytes, list[tuple[int, bytes]]] = {}
        for source, data in tables:
            end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
            alike.setdefault(data[_LENGTH_BYTES:end], []).append((source, data[end:]))
        for tensors, slots in alike.items():
            try:
                columns, count = _columns(tensors, key_of)
                # No key that this rank needs: the rows, most of a table, are not even decompressed.
                if not columns:
                    continue
                # Equal tensors: all rows have the same columns.
                rows = np.stack([_numbers(data, count) for _, data in slots])
            except (ValueError, TypeError, zlib.error) as error:
                raise CorruptError(f"the table of source {slots[0][0]} cannot be read: {error}") from None
            sources = np.array([source for source, _ in slots], np.int64)
            for column in columns:
                self._of(column.tensor).add(sources, rows[:, column.begin : column.end])

    def shapes(self, key: str, dtype: str) -> frozenset[Shape]:
        """The global shapes of the tensors with that ``key`` and ``dtype``."""
        return frozenset(self._by_key.get((key, dtype), ()))

    def usable(self, need: Fragment, padded: bool) -> list[TensorIndex]:
        """The entries of the need's global shape and, if ``padded``, of shapes that differ in dimension 0."""
        shape = need.global_shape
        return [
            offers
            for other, offers in self._by_key.get((need.key, need.dtype), {}).items()
            if other == shape or (padded and len(other) == len(shape) > 0 and other[1:] == shape[1:])
        ]

    def _of(self, tensor: TensorId) -> TensorIndex:
        shapes = self._by_key.setdefault((tensor.key, tensor.dtype), {})
        if tensor.shape not in shapes:
            shapes[tensor.shape] = TensorIndex(tensor, self._once)
        return shapes[tensor.shape]


def _meet(row: Sequence[int], other: Fragment) -> bool:
    """Whether the boxes of an entry and a fragment overlap, and, if they are equal, the flat ranges."""
    box, dims = tuple(row[FIXED_COLUMNS:]), len(other.global_shape)
    if box == other.box.offset + other.box.shape:
        return row[1] < other.stop and other.start < row[2]
    return all(
        at < to + size and to < at + length
        for at, length, to, size in zip(box[:dims], box[dims:], other.box.offset, other.box.shape, strict=True)
    )


def bounds(rows: Integers) -> tuple[Integers, Integers]:
    """The bounding box of each row's elements: first and one past the last index, shape (rows, dims) each.

    A row without elements has an empty box.
    """
    dims = (rows.shape[1] - FIXED_COLUMNS) // 2
    offset, shape = rows[:, FIXED_COLUMNS : FIXED_COLUMNS + dims], rows[:, FIXED_COLUMNS + dims :]
    low, high = offset.copy(), offset + shape
    # Flat positions of the first and the last element; start and stop follow the byte offset in a row.
    first, last = rows[:, 1], rows[:, 2] - 1
    alone = first <= last  # rows whose elements share the index along each dimension so far
    high[~alone] = low[~alone]
    for axis in range(dims):
        # At least 1: an empty box would divide by zero.
        inner = np.maximum(np.prod(shape[:, axis + 1 :], axis=1), 1)
        begin, end = first // inner, last // inner
        low[alone, axis] = (offset[:, axis] + begin)[alone]
        high[alone, axis] = (offset[:, axis] + end + 1)[alone]
        first, last = first - begin * inner, last - begin * inner
        alone = alone & (begin == end)
    return low, high


def encode_table(fragments: Sequence[Fragment], offsets: Sequence[int]) -> bytes:
    """A table of ``fragments``, whose first bytes are at ``offsets``."""
    names = json.dumps([[f.key, f.dtype, f.global_shape] for f in fragments], separators=(",", ":"))
    numbers = [number for pair in zip(fragments, offsets, strict=True) for number in row_of(*pair)]
    tensors = zlib.compress(names.encode(), _LEVEL)
    rows = zlib.compress(np.array(numbers, "<i8").tobytes(), _LEVEL)
    return len(tensors).to_bytes(_LENGTH_BYTES, "little") + tensors + rows


def keys_of_table(table: bytes) -> set[str]:
    """The keys of the tensors in a table."""
    end = _LENGTH_BYTES + int.from_bytes(table[:_LENGTH_BYTES], "little")
    return {str(key) for key, *_ in json.loads(_unpacked(table[_LENGTH_BYTES:end]))}


class _Column(NamedTuple):
    """The columns of one fragment, in each row of the tables that have the same tensors."""

    tensor: TensorId
    begin: int
    end: int


def _columns(tensors: bytes, key_of: Callable[[str], str | None]) -> tuple[list[_Column], int]:
    """The columns of tensors for which ``key_of`` gives a key, under that key, and the number of all columns."""
    columns: list[_Column] = []
    position = 0
    for key, dtype, shape in json.loads(_unpacked(tensors)):
        # Its item size is not known.
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {dtype!r}")
        end = position + FIXED_COLUMNS + 2 * len(shape)
        if (wanted := key_of(str(key))) is not None:
            columns.append(_Column(TensorId(wanted, dtype, tuple(map(int, shape))), position, end))
        position = end
    return columns, position


def _numbers(data: bytes, count: int) -> Integers:
    numbers = np.frombuffer(_unpacked(data), "<i8").astype(np.int64)
    if len(numbers) != count:
        raise ValueError(f"{len(numbers)} numbers instead of {count}")
    return numbers


def _unpacked(data: bytes) -> bytes:
    stream = zlib.decompressobj()
    # Bounded: a damaged stream may decompress to any length.
    text = stream.decompress(data, MOST_BYTES)
    if not stream.eof:
        raise ValueError("a stream is truncated or too long")
    return text
