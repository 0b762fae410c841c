"""Index of the fragments in the selected slots, and the fragments that this rank needs of them.

Every rank of a large job must know the fragments of all slots, and needs few of them. A slot's entries are sent as a
table: the length of the first of two zlib streams (8 bytes, little endian) and the streams. The first has the tensors
as JSON, ``[[key, dtype, shape], …]``, the second a row of int64 (little endian) for each fragment, see ``row_of``.
Equal first streams of many slots are parsed once, and rows only if a key is needed.

On another layout the functions are the same, with other data. A rank that continues a shard (``own``) reads that
shard's private fragments. If no rank continues a shard, fragments private to shards are read from any of them, if all
agree, and ``local/`` ones stay as they were built.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import xxhash

from ftckpt.array_types import Buffer, Hashes, Integers
from ftckpt.errors import CorruptError, MismatchError
from ftckpt.memory.image import SlotImage
from ftckpt.model.fragment import DTYPE_BYTES, Box, Fragment, Shape
from ftckpt.model.manifest import PARITY_PREFIX
from ftckpt.model.replicas import disagreement, private_key
from ftckpt.model.text import listed
from ftckpt.model.training_state import Piece
from ftckpt.restore.locations import SlotAt


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


LOCAL = "local/"
"""Prefix of keys that belong to one rank and mean nothing to others."""

Placed = tuple[tuple[Fragment, int], ...]
"""Fragments, and the offset of each one's first byte in its slot."""


@dataclass(frozen=True)
class SlotContents:
    """A selected slot: its place, the rank that reads it for others, and the contents that all ranks must know.

    ``objects``: the offset of its encoded objects, and their bytes. ``capacity``: the weight of the shard's share in
    bytes, or the value measured since; None if neither is known. ``private``: the fragments private to the shard,
    under the keys of the model; ``table`` (see ``encode_table``) has all others.
    """

    at: SlotAt
    reader: int
    shard: str
    objects: tuple[int, int]
    capacity: int | None
    padded: tuple[str, ...]
    private: Placed
    table: bytes

    @classmethod
    def of(
        cls, at: SlotAt, reader: int, image: SlotImage, objects_used: int, capacity: int | None = None
    ) -> SlotContents:
        """The contents by the slot's image and the number of bytes of its objects."""
        manifest = image.manifest
        suffix = private_key("", manifest.shard)
        placed = list(zip(manifest.fragments, image.offsets, strict=True))
        private = tuple(
            (fragment.with_key(fragment.key.removesuffix(suffix)), offset)
            for fragment, offset in placed
            if fragment.key.endswith(suffix)
        )
        shared = [(fragment, offset) for fragment, offset in placed if not fragment.key.endswith(suffix)]
        table = encode_table([fragment for fragment, _ in shared], [offset for _, offset in shared])
        objects = (image.objects.begin, objects_used)
        return cls(at, reader, manifest.shard, objects, capacity, manifest.padded, private, table)

    @property
    def copies(self) -> Placed:
        """The fragments of ``private`` that other shards may read."""
        return tuple((fragment, offset) for fragment, offset in self.private if not fragment.key.startswith(LOCAL))

    @property
    def keys(self) -> set[str]:
        """The keys of all tensors that the slot has a part of, as in the model; parity excluded."""
        end = _LENGTH_BYTES + int.from_bytes(self.table[:_LENGTH_BYTES], "little")
        shared = {str(key) for key, *_ in json.loads(_unpacked(self.table[_LENGTH_BYTES:end]))}
        keys = shared | {fragment.key for fragment, _ in self.private}
        return {key for key in keys if not key.startswith(PARITY_PREFIX)}

    def hashes(self, read: Callable[[int, int], Buffer]) -> Hashes:
        """The xxh3-64 of the bytes of each of ``copies``; ``read`` gives a range of the slot's bytes."""
        spans = [(offset, offset + fragment.nbytes) for fragment, offset in self.copies]
        return np.array([xxhash.xxh3_64_intdigest(read(begin, end)) for begin, end in spans], np.uint64)


def encode_contents(slots: Sequence[SlotContents]) -> bytes:
    """A message of slots: the length of a JSON text (8 bytes, little endian), the text, all tables.

    Tables are not in the text: they are most of the message, and compressed.
    """
    heads = [
        [s.shard, s.objects, s.capacity, s.padded, [[f.to_json(), offset] for f, offset in s.private], len(s.table)]
        for s in slots
    ]
    text = json.dumps(heads, separators=(",", ":")).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *(slot.table for slot in slots)])


def decode_contents(data: bytes, sources: Mapping[str, SlotAt], readers: Mapping[str, int]) -> list[SlotContents]:
    """Inverse of ``encode_contents``; all ranks already know the places and readers of the slots."""
    position = 8 + int.from_bytes(data[:8], "little")
    slots = []
    for shard, (begin, used), capacity, padded, private, length in json.loads(data[8:position]):
        placed = tuple((Fragment.from_json(fragment), int(offset)) for fragment, offset in private)
        table, position = data[position : position + length], position + length
        at, objects = sources[shard], (begin, used)
        slots.append(SlotContents(at, readers[shard], shard, objects, capacity, tuple(padded), placed, table))
    return slots


def index_for(pieces: Iterable[Piece], slots: Sequence[SlotContents], own: str | None) -> Index:
    """The index of the fragments that ``pieces`` need; an entry's source is the index of one of ``slots``.

    Private fragments of the shard ``own`` have its private keys. Without ``own``, those of all shards have the
    model's keys, and of equal ones only the first is used, so that all ranks read the same.

    Raises:
        CorruptError: a table cannot be read.
    """
    keys = {piece.fragment.key for piece in pieces}
    keys |= {other for key in keys if (other := _same_bits(key)) is not None}
    index = Index(once=own is None)
    index.add_tables(
        ((place, slot.table) for place, slot in enumerate(slots)), lambda key: key if key in keys else None
    )
    for place, slot in enumerate(slots):
        if own not in (None, slot.shard):
            continue
        # A rank that continues the shard reads all its private fragments, ``local/`` too; others only ``copies``.
        for fragment, offset in slot.copies if own is None else slot.private:
            if fragment.key in keys:
                key = fragment.key if own is None else private_key(fragment.key, own)
                index.add(ShardEntry(place, fragment.with_key(key), offset))
    return index


def whole_in(
    pieces: Iterable[Piece], own: SlotContents, image: SlotImage
) -> tuple[list[tuple[Piece, Fragment, int]], list[Piece]]:
    """The ``pieces`` that the slot ``own`` has as complete fragments, and the others. ``image`` is that of ``own``.

    The first come with their fragments, as in ``needs_of``, and offsets in the slot. No source is cheaper, so they
    need no plan. On the same layout they are all pieces, except those assigned to other replicas.
    """
    private = dict(own.private)
    shared = {
        fragment.name: (fragment, offset)
        for fragment, offset in zip(image.manifest.fragments, image.offsets, strict=True)
    }
    whole: list[tuple[Piece, Fragment, int]] = []
    others: list[Piece] = []
    for piece in pieces:
        fragment = piece.fragment
        # By name, which is cached; it does not include dtype and shape, so fragments are compared below.
        there, offset = shared.get(fragment.name, (None, 0))
        if (at := private.get(fragment)) is not None:
            whole.append((piece, fragment.with_key(private_key(fragment.key, own.shard)), at))
        elif there == fragment:
            whole.append((piece, fragment, offset))
        else:
            others.append(piece)
    return whole, others


def needs_of(
    pieces: Iterable[Piece], index: Index, own: SlotContents | None, padded: frozenset[str]
) -> list[tuple[Piece, Fragment]]:
    """The fragment to read for each piece; ``own`` is the slot of the shard that this rank continues.

    A derived piece is read only if the snapshot has it, that is, if it differed from its derivation.

    Raises:
        MismatchError: the snapshot lacks a tensor of the model.
    """
    private = {fragment for fragment, _ in own.private} if own is not None else set()
    needs: list[tuple[Piece, Fragment]] = []
    for piece in pieces:
        fragment = piece.fragment
        if own is not None and fragment in private:  # private fragments are never cut
            needs.append((piece, fragment.with_key(private_key(fragment.key, own.shard))))
        elif own is None and fragment.key.startswith(LOCAL):
            continue
        elif (there := _found(piece, index, padded)) is not None:
            needs.append((piece, there))
    return needs


def unwanted(keys: Iterable[str], pieces: Iterable[Piece]) -> set[str]:
    """The ``keys`` of a snapshot from which no piece can be read."""
    wanted = {piece.fragment.key for piece in pieces}
    return {key for key in keys if key not in wanted and _same_bits(key) not in wanted}


def require_none(left: Iterable[str]) -> None:
    """Raises MismatchError if there are keys of a snapshot (``left``) that no rank reads."""
    keys = sorted(left)
    if not keys:
        return
    more = f" and {len(keys) - 1} more tensors" if len(keys) > 1 else ""
    raise MismatchError(
        f"the snapshot is of another model or optimizer: this job has no tensor for its {keys[0]}{more} (roles "
        f"{listed(sorted({key.partition('/')[0] for key in keys}))}); start with the model and the optimizer it was "
        "taken from, or give this job another name and another --ftckpt-persist ('ftckpt clean JOB' removes "
        "snapshots from memory)"
    )


def check_copies(slots: Sequence[SlotContents], hashes: Mapping[str, Hashes], needs: Iterable[Fragment]) -> None:
    """Check that private copies of a tensor, any of which may be read, have the same bits in all shards.

    ``hashes`` has ``SlotContents.hashes`` of each shard. Only keys of ``needs`` are checked.

    Raises:
        MismatchError: two shards differ; the text names the tensor and both.
    """
    keys = {need.key for need in needs}
    differing = disagreement(
        (fragment, slot.shard, content)
        for slot in slots
        for (fragment, _), content in zip(slot.copies, hashes[slot.shard].tolist(), strict=True)
        if fragment.key in keys
    )
    if differing is not None:
        fragment, one, other = differing
        raise MismatchError(
            f"{fragment.name} does not have the same bits in {one} and {other}, so it cannot be restored on another "
            "layout: start with the layout it was taken in, or load a checkpoint from storage"
        )


def _same_bits(key: str) -> str | None:
    """The key of the master of a weight, or the reverse; None for others. With one dtype both have the same bits, and
    some layouts save only one of them."""
    role, _, name = key.partition("/")
    other = {"weight": "master", "master": "weight"}.get(role)
    return f"{other}/{name}" if other is not None else None


def _found(piece: Piece, index: Index, padded: frozenset[str]) -> Fragment | None:
    """The fragment from which ``piece`` can be read; None if it is derived."""
    fragment, other = piece.fragment, _same_bits(piece.fragment.key)
    if _has(index, fragment, padded):
        return fragment
    if piece.derived_from is not None:
        return None
    if other is not None and _has(index, fragment.with_key(other), padded):
        return fragment.with_key(other)
    shapes = index.shapes(fragment.key, fragment.dtype)
    there = f" (it has {', '.join(str(list(shape)) for shape in sorted(shapes))})" if shapes else ""
    raise MismatchError(
        f"the snapshot is of another model: it has no {fragment.key} of type {fragment.dtype} and shape "
        f"{list(fragment.global_shape)}{there}; start the model it was taken from, or give this one another job name "
        "and another --ftckpt-persist ('ftckpt clean JOB' removes snapshots from memory)"
    )


def _has(index: Index, fragment: Fragment, padded: frozenset[str]) -> bool:
    shapes, shape = index.shapes(fragment.key, fragment.dtype), fragment.global_shape
    if shape in shapes:
        return True
    return fragment.key in padded and any(other[1:] == shape[1:] and len(other) == len(shape) for other in shapes)
