"""What every reader of checkpoints gives and every writer takes: catalogs of fragments, tensors, units.

Keys are ``ROLE/LOGICAL``: ``weight/``, ``master/``, one per optimizer state (``exp_avg/``, ``exp_avg_sq/``),
``step/``, ``buffer/``. What belongs to one rank and means nothing in another layout is in no catalog.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError
from ftckpt.model.fragment import DTYPE_BYTES, TORCH_NAMES, Box, Fragment, Shape
from ftckpt.universal.storage import Destination

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

WEIGHTS_ALONE = frozenset({"weight", "buffer"})
"""Roles of a checkpoint without an optimizer."""


@dataclass(frozen=True)
class Catalog:
    """What a checkpoint holds.

    ``origin`` is ``ftckpt`` (arenas), ``universal``, ``deepspeed``, ``deepspeed-universal``, ``megatron-dist`` or
    ``megatron-legacy``. ``layout`` is empty where it is not known. ``fragments`` stand in the order of
    ``Reader.read``'s index; two may hold the same elements, which must then be equal bit for bit, or are to be
    averaged where the key is in ``average``. ``objects`` is all that is no tensor, encodable by
    ``ftckpt.model.objects``. Of keys in ``padded`` the first dimension depends on the layout: rows at its end may be
    missing in another one.

    ``derived`` names weights that are not stored: ``weight/X`` of the dtype given (``BF16``) is ``master/X``, cast
    with rounding to nearest even. They have no fragments.
    """

    origin: str
    iteration: int
    layout: Mapping[str, int | str | bool]
    fragments: tuple[Fragment, ...]
    objects: Mapping[str, Any]
    padded: frozenset[str] = frozenset()
    average: frozenset[str] = frozenset()
    derived: Mapping[str, str] = field(default_factory=dict)


class Reader(Protocol):
    """An open checkpoint; several threads may read at once."""

    catalog: Catalog

    def read(self, index: int) -> Bytes:
        """The bytes of ``catalog.fragments[index]``, mapped where possible, read-only, valid until ``close``.

        Raises:
            ConvertError: they cannot be read, or are not what was written; the text names file and tensor.
        """
        ...

    def read_part(self, index: int, begin: int, end: int) -> Bytes:
        """Bytes ``begin`` to ``end`` (exclusive) of what ``read`` gives, where the rest may cost something."""
        return self.read(index)[begin:end]

    def where(self, index: int) -> object:
        """What an error names a fragment by: the file it lies in, where there is one."""
        return self.catalog.fragments[index].name

    def confirm(self) -> None:
        """Call after bytes that ``read`` gave were copied, before they count: a live job may have written over them.

        Raises:
            ConvertError: it has.
        """
        return

    def fingerprint(self) -> str:
        """Which bytes these are, beside what the catalog says: another text where files were replaced since.

        Of a checkpoint that has none it is empty.
        """
        return ""

    def close(self) -> None:
        """Give up all files; nothing that ``read`` gave may be used from here on."""
        ...


@dataclass(frozen=True, order=True)
class Tensor:
    """A consolidated logical tensor; one without dimensions has one row."""

    key: str
    dtype: str
    shape: Shape

    @classmethod
    def of(cls, fragment: Fragment) -> Tensor:
        """The tensor that a fragment is a part of."""
        return cls(fragment.key, fragment.dtype, fragment.global_shape)

    @property
    def role(self) -> str:
        return self.key.partition("/")[0]

    @property
    def name(self) -> str:
        return self.key.partition("/")[2]

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Rows:
    """Rows ``first`` to ``last`` (exclusive) of a tensor."""

    tensor: Tensor
    first: int
    last: int

    @classmethod
    def whole(cls, tensor: Tensor) -> Rows:
        return cls(tensor, 0, tensor.rows)

    @property
    def nbytes(self) -> int:
        return (self.last - self.first) * self.tensor.row_bytes

    @property
    def fragment(self) -> Fragment:
        """The same elements, as something to be read."""
        key, dtype, shape = self.tensor.key, self.tensor.dtype, self.tensor.shape
        if not shape:
            return Fragment.whole(key, dtype, (), Box((), ()))
        inner = shape[1:]
        box = Box((self.first, *(0,) * len(inner)), (self.last - self.first, *inner))
        return Fragment.whole(key, dtype, shape, box)


@dataclass(frozen=True)
class Unit:
    """One output file, by its path below the destination, what goes into it, and its size in bytes, estimated."""

    name: str
    parts: tuple[Rows, ...]
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Of the largest row: the least that a writer can ask for at a time."""
        return max((part.tensor.row_bytes for part in self.parts), default=0)


Get = Callable[[Tensor, int, int], Bytes]
"""``get(tensor, first, last)``: the bytes of these rows. Whoever wants little memory asks for few rows at a time."""


class Writer(Protocol):
    """Where consolidated tensors go: into ``destination``, which ``finish`` gives its name, and nothing before.

    Whoever drives the writer begins the destination, and releases it after an error.
    """

    destination: Destination

    def plan(self, catalog: Catalog, tensors: Sequence[Tensor]) -> list[Unit]:
        """All files to write, the same for the same arguments.

        Raises:
            ConvertError: something that this format must have is missing, or something cannot be written in it.
        """
        ...

    def memory(self, unit: Unit) -> int:
        """Bytes that ``write`` takes at most."""
        ...

    def write(self, unit: Unit, get: Get) -> None:
        """Write one file: temporary name, fsync, rename. Several threads may write different units at once.

        Raises:
            ConvertError: no room, or no permission; nothing of this name is left.
        """
        ...

    def finish(self, catalog: Catalog, units: Sequence[Unit]) -> None:
        """Manifests and markers, once every unit is written; then the destination has its name."""
        ...


def dtype_name(tensor: torch.Tensor, where: object) -> str:
    """The safetensors name of a tensor's type. Raises ConvertError that names ``where``."""
    if tensor.dtype not in DTYPE_NAMES:
        raise ConvertError(f"{where}: a tensor has type {tensor.dtype}, which is not known")
    return DTYPE_NAMES[tensor.dtype]


def whole_fragment(key: str, dtype: str, shape: Shape) -> Fragment:
    """All elements of a tensor that lies in one piece."""
    return Rows.whole(Tensor(key, dtype, shape)).fragment


def tensors_of(fragments: Iterable[Fragment], where: Callable[[int], object]) -> tuple[Tensor, ...]:
    """The tensors that fragments are parts of, in the order in which they first appear.

    Raises:
        ConvertError: two fragments of one tensor differ in type or shape; ``where`` names a fragment by its index.
    """
    first: dict[str, tuple[Tensor, int]] = {}
    for index, fragment in enumerate(fragments):
        tensor = Tensor.of(fragment)
        known, known_index = first.setdefault(fragment.key, (tensor, index))
        if known != tensor:
            one, other = (f"{each.dtype} {list(each.shape)}" for each in (known, tensor))
            raise ConvertError(
                f"{fragment.key}: ranks that hold parts of it disagree what it is: {one} and {other} "
                f"({where(known_index)}, {where(index)})"
            )
    return tuple(tensor for tensor, _ in first.values())
