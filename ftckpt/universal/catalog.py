"""What every reader of checkpoints gives and every writer takes: catalogs of fragments, tensors, units.

Keys are ``ROLE/LOGICAL``: ``weight/``, ``master/``, one per optimizer state (``exp_avg/``, ``exp_avg_sq/``),
``step/``, ``buffer/``. What belongs to one rank and means nothing in another layout is in no catalog.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from ftckpt.state.fragment import DTYPE_BYTES, Fragment, Shape
from ftckpt.universal.atomic import Destination, explained

Bytes = npt.NDArray[np.uint8]
"""One dimension, row-major elements in little-endian order: numpy has no bfloat16, and nothing here computes."""


@dataclass(frozen=True)
class Catalog:
    """What a checkpoint holds.

    ``origin`` is ``ftckpt`` (arenas), ``universal``, ``deepspeed``, ``deepspeed-universal``, ``megatron-dist`` or
    ``megatron-legacy``. ``layout`` is empty where it is not known. ``fragments`` stand in the order of
    ``Source.read``'s index; two may hold the same elements, which must then be equal bit for bit, or are to be
    averaged where the key is in ``average``. ``objects`` is all that is no tensor, encodable by
    ``ftckpt.state.objects``. Of keys in ``padded`` the first dimension depends on the layout: rows at its end may be
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


class Source(Protocol):
    """An open checkpoint; several threads may read at once. Sources that nobody writes to inherit ``confirm``."""

    @property
    def catalog(self) -> Catalog:
        """What it holds."""
        ...

    def read(self, index: int) -> Bytes:
        """The bytes of ``catalog.fragments[index]``, mapped where possible, read-only, valid until ``close``.

        Raises:
            ConvertError: they cannot be read, or are not what was written; the text names file and tensor.
        """
        ...

    def confirm(self) -> None:
        """Call after bytes that ``read`` gave were copied, before they count: a live job may have written over them.

        Raises:
            ConvertError: it has.
        """
        return

    def fingerprint(self) -> str:
        """Which bytes these are, beside what the catalog says: another text where files were replaced since.

        Of a source that has none it is empty.
        """
        return ""

    def close(self) -> None:
        """Unmap all."""
        ...


def fingerprint_of(files: Iterable[Path]) -> str:
    """Of the names, sizes and times of change of ``files``. Raises ConvertError where one is not there."""
    digest = xxhash.xxh3_128()
    for file in sorted(files):
        with explained(file):
            status = file.stat()
        digest.update(repr((file.name, status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()


@dataclass(frozen=True, order=True)
class Tensor:
    """One consolidated logical tensor."""

    key: str
    dtype: str
    shape: Shape

    @property
    def rows(self) -> int:
        """Entries of the first dimension; 1 of a tensor without dimensions."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Part:
    """Rows ``first`` to ``last`` (exclusive) of a tensor."""

    tensor: Tensor
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """Bytes of these rows."""
        return (self.last - self.first) * self.tensor.row_bytes

    @classmethod
    def whole(cls, tensor: Tensor) -> Part:
        """All rows."""
        return cls(tensor, 0, tensor.rows)


@dataclass(frozen=True)
class Unit:
    """One output file, by its path below the destination, what goes into it, and its size in bytes, estimated."""

    name: str
    parts: tuple[Part, ...]
    nbytes: int


Get = Callable[[Tensor, int, int], Bytes]
"""``get(tensor, first, last)``: the bytes of these rows. Whoever wants little memory asks for few rows at a time."""


class Sink(Protocol):
    """Where consolidated tensors go: into ``destination``, which ``finish`` gives its name, and nothing before."""

    @property
    def destination(self) -> Destination:
        """What all files are written with. Who drives the sink begins it, and releases it after an error."""
        ...

    def plan(self, catalog: Catalog, tensors: Sequence[Tensor]) -> list[Unit]:
        """All files to write, the same for the same arguments.

        Raises:
            ConvertError: something that this format must have is missing, or something cannot be written in it.
        """
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
