"""Fragments: pieces of logical tensors, the unit in which state is described."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

_DTYPES = """
1 BOOL bool  U8 uint8  I8 int8  F8_E5M2 float8_e5m2  F8_E4M3 float8_e4m3fn
2 I16 int16  U16 uint16  F16 float16  BF16 bfloat16
4 I32 int32  U32 uint32  F32 float32
8 F64 float64  I64 int64  U64 uint64
"""
"""All supported tensor types: bytes per element, then pairs of the names in safetensors and in torch."""

_ROWS = [line.split() for line in _DTYPES.strip().splitlines()]
DTYPE_BYTES = {name: int(row[0]) for row in _ROWS for name in row[1::2]}
"""Bytes per element."""
TORCH_NAMES = {name: torch_name for row in _ROWS for name, torch_name in zip(row[1::2], row[2::2], strict=True)}
"""Names of types in torch, as text: an SMP reads fragments without importing torch."""

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A hyper-rectangle of a tensor: ``offset`` and ``shape``, both in elements, one entry per dimension.

    A scalar has no dimensions and one element.
    """

    offset: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class _Place(NamedTuple):
    """Geometry as text: ``name``, box and range in the form of a fragment's name; ``json``, all of it."""

    name: str
    json: str


@lru_cache(maxsize=1 << 14)  # many tensors share a few shapes
def _place(global_shape: Shape, box: Box, start: int, stop: int) -> _Place:
    """The texts of a geometry. Raises ValueError if the box exceeds the shape or the range exceeds the box."""
    offsets, shape = box
    if not len(offsets) == len(shape) == len(global_shape):
        raise ValueError(f"box {box} does not have {len(global_shape)} dimensions")
    for offset, size, whole in zip(offsets, shape, global_shape, strict=True):
        if offset < 0 or size < 0 or offset + size > whole:
            raise ValueError(f"box {box} leaves shape {global_shape}")
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"range {start}:{stop} leaves box {box}")
    whole_text, offset_text, text = (",".join(map(str, sizes)) for sizes in (global_shape, offsets, shape))
    return _Place(
        f"[{offset_text}+{text}]({start}:{stop})", f"[{whole_text}],[{offset_text}],[{text}],{start},{stop}"
    )


class _Fields(NamedTuple):
    # A tuple, for speed: a start creates and compares thousands.
    key: str
    dtype: str
    global_shape: Shape
    box: Box
    start: int
    stop: int


class Fragment(_Fields):
    """Elements ``start`` to ``stop`` (row-major, counted inside ``box``) of the logical tensor ``key``.

    ``key`` carries the role: ``master/decoder.final_layernorm.weight``. A fragment that an optimizer has
    not flattened has ``start == 0`` and ``stop == box.numel``.

    Raises:
        ValueError: the box leaves the tensor or the range leaves the box.
    """

    def __new__(  # noqa: PLR0917 - the fields of the tuple
        cls, key: str, dtype: str, global_shape: Shape, box: Box, start: int, stop: int
    ) -> Fragment:
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"{key}: unknown dtype {dtype!r}")
        try:
            _place(global_shape, box, start, stop)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
        return tuple.__new__(cls, (key, dtype, global_shape, box, start, stop))

    @classmethod
    def whole(cls, key: str, dtype: str, global_shape: Shape, box: Box) -> Fragment:
        """The fragment of all elements of ``box``."""
        return cls(key, dtype, global_shape, box, 0, box.numel)

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * DTYPE_BYTES[self.dtype]

    @cached_property  # a start uses thousands of names several times
    def name(self) -> str:
        """Unique within a job: key, box and range, readable in any safetensors viewer."""
        return f"{self.key}{_place(*self[2:]).name}"

    def part(self, start: int, stop: int) -> Fragment:
        """The elements ``start`` to ``stop`` counted from this fragment's own start."""
        if start == 0 and stop == self.numel:
            return self
        key, dtype, global_shape, box, first, _ = self
        return Fragment(key, dtype, global_shape, box, first + start, first + stop)

    def with_key(self, key: str) -> Fragment:
        """The same geometry under another key."""
        return Fragment(key, *self[1:])

    def to_json(self) -> list[Any]:
        """A JSON value that ``from_json`` turns back into an equal fragment."""
        box = self.box
        shapes = (self.global_shape, box.offset, box.shape)
        return [self.key, self.dtype, *map(list, shapes), self.start, self.stop]

    def to_json_text(self) -> str:
        """``to_json`` without spaces."""
        return f'[{encode_basestring_ascii(self.key)},"{self.dtype}",{_place(*self[2:]).json}]'

    @classmethod
    def from_json(cls, value: list[Any]) -> Fragment:
        """Inverse of ``to_json``; raises ValueError for anything else."""
        try:
            key, dtype, global_shape, offset, shape, start, stop = value
            # Checked, not converted: ``str`` accepts any value.
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is not a text")
            box = Box(tuple(map(int, offset)), tuple(map(int, shape)))
            return cls(key, dtype, tuple(map(int, global_shape)), box, int(start), int(stop))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"not a fragment: {error}") from None

    @classmethod
    def each_from_json(cls, values: Iterable[list[Any]]) -> Iterator[Fragment]:
        """``from_json`` of each value; parses the geometry of adjacent values with equal geometry once."""
        made, place = None, list[Any]()
        for value in values:
            if made is not None and value[2:] == place and isinstance(value[0], str):
                made = cls(value[0], value[1], *made[2:])
            else:
                made, place = cls.from_json(value), value[2:]
            yield made
