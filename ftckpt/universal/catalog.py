"""The interface between readers and writers of checkpoints: catalogs of fragments, tensors, units.

Keys are ``ROLE/LOGICAL``: ``weight/``, ``master/``, one per optimizer state (``exp_avg/``, ``exp_avg_sq/``),
``step/``, ``buffer/``. State of one rank that has no meaning in another layout is in no catalog.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError
from ftckpt.model.fragment import DTYPE_BYTES, TORCH_NAMES, Box, Fragment, Shape
from ftckpt.universal.storage import Destination, fingerprint_of

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

WEIGHTS_ALONE = frozenset({"weight", "buffer"})
"""Roles of a checkpoint without an optimizer."""


def needs_optimizer(roles: Collection[str] | None) -> bool:
    """Whether some of ``roles`` (None: all) are optimizer state."""
    return roles is None or not WEIGHTS_ALONE.issuperset(roles)


@dataclass(frozen=True)
class Catalog:
    """The contents of a checkpoint.

    ``origin``: ``ftckpt`` (snapshots), ``universal``, ``deepspeed``, ``deepspeed-universal``, ``megatron-dist``,
    ``megatron-legacy`` or ``safetensors``. ``layout``: empty if unknown. ``fragments``: in the order of
    ``Reader.read``'s index. Two may hold the same elements: these must be bit-equal, or are averaged if the key is in
    ``average``. ``objects``: everything but tensors, encodable by ``ftckpt.model.objects``. ``padded``: keys whose
    first dimension depends on the layout; another layout may lack rows at its end.

    ``derived``: weights without fragments: ``weight/X`` of the given dtype (``BF16``) is ``master/X``, rounded to
    nearest even.
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
    """An open checkpoint. Any thread may call any method but ``close``, which comes last."""

    catalog: Catalog

    def read(self, index: int) -> Bytes:
        """The bytes of ``catalog.fragments[index]``: read-only, mapped if possible, valid until ``close``.

        Raises:
            ConvertError: they cannot be read or are corrupt; the text names file and tensor.
        """
        ...

    def read_part(self, index: int, begin: int, end: int) -> Bytes:
        """``read(index)[begin:end]``, possibly cheaper."""
        return self.read(index)[begin:end]

    def where(self, index: int) -> object:
        """The name of a fragment in errors: its file, if it has one."""
        return self.catalog.fragments[index].name

    def confirm(self) -> None:
        """Call after bytes from ``read`` were copied, before the copy counts: a live job may have overwritten them.

        Raises:
            ConvertError: it has.
        """
        return

    def fingerprint(self) -> str:
        """A text that changes when the checkpoint's files are replaced; empty if there is none."""
        return ""

    def close(self) -> None:
        """Release all files, and with them all bytes that ``read`` returned."""
        ...


class FragmentPlace(NamedTuple):
    """A fragment, the file that holds it, and the function that reads and verifies its bytes.

    ``padded``, ``average``: whether the catalog lists the key there.
    """

    fragment: Fragment
    file: Path
    read: Callable[[], Bytes]
    padded: bool = False
    average: bool = False


class FileReader(Reader):
    """A reader of the checkpoint at ``path``, which is in ``files``; ``described``: the catalog's other fields.

    Subclasses raise ConvertError if the checkpoint is incomplete, invalid or not supported; the text names the file.
    """

    def __init__(self, path: Path, stored: Iterable[FragmentPlace], files: Iterable[Path], **described: Any) -> None:
        self._path, self._stored, self._files = path, list(stored), list(files)
        self.catalog = Catalog(
            fragments=tuple(each.fragment for each in self._stored),
            padded=frozenset(each.fragment.key for each in self._stored if each.padded),
            average=frozenset(each.fragment.key for each in self._stored if each.average),
            **described,
        )

    def read(self, index: int) -> Bytes:
        if not self._stored:
            raise ConvertError(f"{self._path}: was closed")
        return self._stored[index].read()

    def where(self, index: int) -> Path:
        return self._stored[index].file

    def fingerprint(self) -> str:
        return fingerprint_of(self._files)

    def close(self) -> None:
        # Files stay mapped as long as something that reads them exists.
        self._stored = []


@dataclass(frozen=True, order=True)
class Tensor:
    """A consolidated logical tensor; a scalar has one row."""

    key: str
    dtype: str
    shape: Shape

    @classmethod
    def of(cls, fragment: Fragment) -> Tensor:
        """The tensor that a fragment belongs to."""
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
        """The fragment of these rows."""
        key, dtype, shape = self.tensor.key, self.tensor.dtype, self.tensor.shape
        if not shape:
            return Fragment.whole(key, dtype, (), Box((), ()))
        inner = shape[1:]
        box = Box((self.first, *(0,) * len(inner)), (self.last - self.first, *inner))
        return Fragment.whole(key, dtype, shape, box)


@dataclass(frozen=True)
class Unit:
    """An output file: its path below the destination, its content, and its estimated size in bytes."""

    name: str
    parts: tuple[Rows, ...]
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of the largest row, the minimum of a request."""
        return max((part.tensor.row_bytes for part in self.parts), default=0)


Get = Callable[[Tensor, int, int], Bytes]
"""``get(tensor, first, last)``: the bytes of these rows. Fewer rows per call take less memory."""


class Writer(Protocol):
    """Writes consolidated tensors into ``destination``, which gets its final name in ``finish``.

    The caller calls ``rename``, ``plan``, ``destination.begin``, ``write`` for each unit, ``finish``, and
    ``destination.release`` in any case.
    """

    destination: Destination

    def rename(self, catalog: Catalog, tensors: Sequence[Tensor], get: Get) -> tuple[Sequence[Tensor], Get]:
        """The tensors to write under the names of the destination, and the function that reads them.

        Raises:
            ConvertError: see ``plan``.
        """
        return tensors, get

    def plan(self, catalog: Catalog, tensors: Sequence[Tensor]) -> list[Unit]:
        """All files to write; deterministic.

        Raises:
            ConvertError: the source lacks something that the format requires, or holds something it cannot represent.
        """
        ...

    def memory(self, unit: Unit) -> int:
        """Maximum memory of ``write`` in bytes."""
        ...

    def write(self, unit: Unit, get: Get) -> None:
        """Write one file: temporary name, fsync, rename. Any thread may call it, each with another unit.

        Raises:
            ConvertError: no space or no permission; the file does not exist then.
        """
        ...

    def finish(self, catalog: Catalog, units: Sequence[Unit]) -> None:
        """Write manifests and markers, after every unit, and commit the destination."""
        ...


def dtype_name(tensor: torch.Tensor, where: object) -> str:
    """The safetensors name of a tensor's type. Raises ConvertError that names ``where``."""
    if tensor.dtype not in DTYPE_NAMES:
        raise ConvertError(f"{where}: a tensor has the unsupported type {tensor.dtype}")
    return DTYPE_NAMES[tensor.dtype]


def whole_fragment(key: str, dtype: str, shape: Shape) -> Fragment:
    """The fragment of all elements of a tensor."""
    return Rows.whole(Tensor(key, dtype, shape)).fragment


def tensors_of(fragments: Iterable[Fragment], where: Callable[[int], object]) -> tuple[Tensor, ...]:
    """The tensors that fragments belong to, in order of first appearance; ``where`` names a fragment by its index.

    Raises:
        ConvertError: two fragments of one tensor differ in type or shape.
    """
    first: dict[str, tuple[Tensor, int]] = {}
    for index, fragment in enumerate(fragments):
        tensor = Tensor.of(fragment)
        known, known_index = first.setdefault(fragment.key, (tensor, index))
        if known != tensor:
            one, other = (f"{each.dtype} {list(each.shape)}" for each in (known, tensor))
            raise ConvertError(
                f"{fragment.key}: parts of ranks disagree on type or shape: {one} and {other} "
                f"({where(known_index)}, {where(index)})"
            )
    return tuple(tensor for tensor, _ in first.values())
