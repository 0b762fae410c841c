"""Geometry of one piece of one logical tensor: the word everything else is written in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

_DTYPES = {
    "BOOL": (1, "bool"), "U8": (1, "uint8"), "I8": (1, "int8"), "F8_E5M2": (1, "float8_e5m2"),
    "F8_E4M3": (1, "float8_e4m3fn"), "I16": (2, "int16"), "U16": (2, "uint16"), "F16": (2, "float16"),
    "BF16": (2, "bfloat16"), "I32": (4, "int32"), "U32": (4, "uint32"), "F32": (4, "float32"), "F64": (8, "float64"),
    "I64": (8, "int64"), "U64": (8, "uint64"),
}  # fmt: skip
"""All types of tensors that are known, by the names that safetensors gives them: bytes per element, torch's name."""

DTYPE_BYTES = {name: nbytes for name, (nbytes, _) in _DTYPES.items()}
"""Bytes per element."""
TORCH_NAMES = {name: torch_name for name, (_, torch_name) in _DTYPES.items()}
"""What torch calls the type: an SMP reads fragments and never loads torch."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A hyper-rectangle of a tensor: ``offset`` and ``shape``, both in elements, one entry per dimension.

    A scalar has no dimensions and one element.
    """

    offset: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, order=False)
class Fragment:
    """Elements ``start`` to ``stop`` (row-major, counted inside ``box``) of the logical tensor ``key``.

    ``key`` carries the role: ``master/decoder.final_layernorm.weight``. A fragment that an optimizer has
    not flattened has ``start == 0`` and ``stop == box.numel``.

    Raises:
        ValueError: the box leaves the tensor or the range leaves the box.
    """

    key: str
    dtype: str
    global_shape: Shape
    box: Box
    start: int
    stop: int
    _name: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"{self.key}: unknown dtype {self.dtype!r}")
        offsets, shape = self.box.offset, self.box.shape
        if not len(offsets) == len(shape) == len(self.global_shape):
            raise ValueError(f"{self.key}: box {self.box} does not have {len(self.global_shape)} dimensions")
        for offset, size, whole in zip(offsets, shape, self.global_shape, strict=True):
            if offset < 0 or size < 0 or offset + size > whole:
                raise ValueError(f"{self.key}: box {self.box} leaves shape {self.global_shape}")
        if not 0 <= self.start <= self.stop <= math.prod(shape):
            raise ValueError(f"{self.key}: range {self.start}:{self.stop} leaves box {self.box}")

    @classmethod
    def whole(cls, key: str, dtype: str, global_shape: Shape, box: Box) -> Fragment:
        """The fragment that holds all of ``box``."""
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

    @property
    def name(self) -> str:
        """Unique within a job: key, box and range, readable in any safetensors viewer."""
        if not self._name:  # a start asks for thousands of names, each several times
            offset = ",".join(map(str, self.box.offset))
            shape = ",".join(map(str, self.box.shape))
            object.__setattr__(self, "_name", f"{self.key}[{offset}+{shape}]({self.start}:{self.stop})")
        return self._name

    def part(self, start: int, stop: int) -> Fragment:
        """The elements ``start`` to ``stop`` counted from this fragment's own start."""
        if start == 0 and stop == self.numel:
            return self
        return replace(self, start=self.start + start, stop=self.start + stop)

    def with_key(self, key: str) -> Fragment:
        """The same geometry under another key."""
        return replace(self, key=key)

    def to_json(self) -> list[Any]:
        """A JSON value that ``from_json`` turns back into an equal fragment."""
        box = self.box
        return [
            self.key, self.dtype, list(self.global_shape), list(box.offset), list(box.shape), self.start, self.stop,
        ]  # fmt: skip

    @classmethod
    def from_json(cls, value: list[Any]) -> Fragment:
        """Inverse of ``to_json``; raises ValueError for anything else."""
        try:
            key, dtype, global_shape, offset, shape, start, stop = value
            # Numbers convert, a key must be one: ``str`` would make a name of anything.
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is not a text")
            box = Box(tuple(map(int, offset)), tuple(map(int, shape)))
            return cls(key, dtype, tuple(map(int, global_shape)), box, int(start), int(stop))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"not a fragment: {error}") from None
