"""What a slot holds as a short message: every rank of a large job hears of all slots, and needs little of them.

A table is two zlib streams behind the length of the first (8 bytes, little endian): the kinds of its fragments as
JSON, ``[[key, dtype, shape], …]``, and a row of int64 (little endian) of each, see ``index.row_of``. The kinds of
many slots are the same bytes: they are looked at once, and rows only where a key is wanted.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ftckpt.errors import CorruptError
from ftckpt.restore.index import FIXED_COLUMNS, Array, Index, Kind, row_of
from ftckpt.state.fragment import DTYPE_BYTES, Fragment

_LEVEL = 1
_LENGTH_BYTES = 8
MOST_BYTES = 1 << 30
"""Bound on either stream once it is unpacked."""


def encode(fragments: Sequence[Fragment], offsets: Sequence[int]) -> bytes:
    """A table of ``fragments``, whose first bytes lie at ``offsets``."""
    names = json.dumps([[f.key, f.dtype, f.global_shape] for f in fragments], separators=(",", ":"))
    rows = [number for pair in zip(fragments, offsets, strict=True) for number in row_of(*pair)]
    kinds = zlib.compress(names.encode(), _LEVEL)
    return (
        len(kinds).to_bytes(_LENGTH_BYTES, "little") + kinds + zlib.compress(np.array(rows, "<i8").tobytes(), _LEVEL)
    )


def index_of(tables: Iterable[tuple[int, bytes]], wanted: Callable[[str], bool] = lambda key: True) -> Index:
    """An index of the haves of all tables, given with the source of each, whose keys are ``wanted``.

    Raises:
        CorruptError: not a table, naming the source.
    """
    alike: dict[bytes, list[tuple[int, bytes]]] = {}
    for source, data in tables:
        end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        alike.setdefault(data[_LENGTH_BYTES:end], []).append((source, data[end:]))
    index = Index()
    for kinds, held in alike.items():
        try:
            columns = _columns(kinds)
            used = [column for column in columns if wanted(column.kind.key)]
            if not used:
                continue
            rows = np.stack([_numbers(data, columns[-1].end) for _, data in held])
        except (ValueError, TypeError, zlib.error) as error:
            raise CorruptError(f"what source {held[0][0]} says that it holds cannot be read: {error}") from None
        sources = np.array([source for source, _ in held], np.int64)
        for column in used:
            index.alike(column.kind).add(sources, rows[:, column.begin : column.end])
    return index


class _Column(NamedTuple):
    """Where the numbers of a fragment lie in each row of those that have the same kinds."""

    kind: Kind
    begin: int
    end: int


def _columns(kinds: bytes) -> list[_Column]:
    found: list[_Column] = []
    position = 0
    for key, dtype, shape in json.loads(_unpacked(kinds)):
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {dtype!r}")
        end = position + FIXED_COLUMNS + 2 * len(shape)
        found.append(_Column(Kind(str(key), dtype, tuple(map(int, shape))), position, end))
        position = end
    return found


def _numbers(data: bytes, count: int) -> Array:
    numbers = np.frombuffer(_unpacked(data), "<i8").astype(np.int64)
    if len(numbers) != count:
        raise ValueError(f"{len(numbers)} numbers where {count} belong")
    return numbers


def _unpacked(data: bytes) -> bytes:
    stream = zlib.decompressobj()
    found = stream.decompress(data, MOST_BYTES)
    if not stream.eof:
        raise ValueError("a stream is cut off or too long")
    return found
