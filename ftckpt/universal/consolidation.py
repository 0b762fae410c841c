"""Consolidates the fragments of a checkpoint into logical tensors, row by row as a writer requests them.

Weights that a checkpoint omits because they are casts of its masters are derived, bit-exact.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided

from ftckpt.array_types import Array, Bytes
from ftckpt.errors import ConvertError, LostError
from ftckpt.model.fragment import Fragment
from ftckpt.model.text import listed
from ftckpt.model.training_state import cast_master
from ftckpt.restore.plan import StridedCopy, overlap, plan
from ftckpt.restore.tensor_index import Index, ShardEntry
from ftckpt.universal.catalog import TORCH_DTYPES, Catalog, Get, Reader, Rows, Tensor, tensors_of

WEIGHT, MASTER = "weight/", "master/"
_FLOATS = {name: TORCH_DTYPES[name] for name in ("BF16", "F16", "F32", "F64")}
# Elements are moved and compared as integers: as floats NaN differs from itself, and 0.0 is -0.0.
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_MOST_NAMED = 5
_AVERAGED_BYTES = 1 << 20
"""Bytes of a tensor that are averaged at a time: sums take 64 bits an element, whatever its type."""


class Consolidator:
    """The logical tensors of a checkpoint. Any thread may call ``get``.

    Raises:
        ConvertError: fragments of one tensor differ in type or shape, or some of its elements are missing.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._fragments = fragments = reader.catalog.fragments
        self.tensors = tensors_of(fragments, reader.where)
        self._average = reader.catalog.average
        self._index = Index(ShardEntry(number, fragment, 0) for number, fragment in enumerate(fragments))
        nbytes: dict[str, int] = {}
        for fragment in fragments:
            nbytes[fragment.key] = nbytes.get(fragment.key, 0) + fragment.nbytes
        # More bytes than the tensor has: some elements occur twice and must be compared.
        self._doubled = frozenset(tensor.key for tensor in self.tensors if nbytes[tensor.key] > tensor.nbytes)
        self._check_complete()

    def get(self, tensor: Tensor, first: int, last: int) -> Bytes:
        """The bytes of rows ``first`` to ``last``: a read-only view of the source if contiguous there, else a copy.

        Raises:
            ConvertError: two fragments hold different bytes of the same elements, or the source cannot be read.
        """
        need = Rows(tensor, first, last).fragment
        if tensor.key in self._average:
            return self._averaged(tensor, first, last)
        if tensor.key in self._doubled:
            return self._compared(need)
        rows: Bytes | None = None
        for index, copies in self._touching(need):
            low, high = min(copy.source for copy in copies), max(copy.source_end for copy in copies)
            data = self._reader.read_part(index, low * need.item_bytes, high * need.item_bytes)
            if len(copies) == 1 and copies[0][2:] == ((need.numel,), (1,), (1,)):  # contiguous in one fragment
                return data
            rows = np.empty(need.nbytes, np.uint8) if rows is None else rows
            copy_strided(copies, data, rows, need.item_bytes, source_begin=low)
        return np.empty(0, np.uint8) if rows is None else rows

    def _check_complete(self) -> None:
        lacking = []
        for tensor in self.tensors:
            try:
                # Only to fail before the first file is written.
                plan(self._index, [Rows.whole(tensor).fragment], lambda source: 0)
            except LostError:
                lacking.append(tensor.key)
        if lacking:
            raise ConvertError(
                f"the source lacks elements of {listed(lacking, _MOST_NAMED)}: files of some ranks are missing; "
                "give all of them"
            )

    def _touching(self, need: Fragment) -> Iterator[tuple[int, Sequence[StridedCopy]]]:
        """The index of every fragment that holds elements of ``need``, and the copies of these."""
        for alike in self._index.usable(need, padded=False):
            for have in alike.touching(need):
                copies = overlap(have.fragment, need)
                if copies:
                    yield have.source, copies

    def _compared(self, need: Fragment) -> Bytes:
        """Rows of a tensor with duplicates, which must all be equal."""
        rows: Bytes = np.empty(need.nbytes, np.uint8)
        # Filled once, then compared with every fragment, those read included: no element is left uncompared.
        reads = plan(self._index, [need], lambda source: 0)
        for read in reads:
            copy_strided(read.copies, self._reader.read(read.offer.source), rows, need.item_bytes)
        for index, copies in self._touching(need):
            if not _same_copies(copies, self._reader.read(index), rows, need.item_bytes):
                others = [
                    str(self._reader.where(other)) for other in sorted({r.offer.source for r in reads} - {index})
                ]
                against = f" and {', '.join(others[:_MOST_NAMED])}" if others else ""
                where = self._reader.where(index)
                raise ConvertError(f"{need.key}: copies that must be equal differ: {where}{against}")
        return rows

    def _averaged(self, tensor: Tensor, first: int, last: int) -> Bytes:
        if tensor.dtype not in _FLOATS:
            raise ConvertError(f"{tensor.key}: elements of type {tensor.dtype} cannot be averaged")
        step = max(1, _AVERAGED_BYTES // max(1, tensor.row_bytes))
        rows: Bytes = np.empty((last - first) * tensor.row_bytes, np.uint8)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            mean = self._mean(Rows(tensor, begin, end).fragment)
            rows[(begin - first) * tensor.row_bytes : (end - first) * tensor.row_bytes] = mean
        return rows

    def _mean(self, need: Fragment) -> Bytes:
        # Counted by element: the boxes of the copies may differ.
        total, count = np.zeros(need.numel), np.zeros(need.numel)
        for index, copies in self._touching(need):
            items = _items(self._reader.read(index), need.item_bytes)
            for copy in copies:
                values = _to_float(_view(items, copy.source, copy.shape, copy.source_strides), need.dtype)
                for sums, each in ((total, values), (count, 1)):
                    view = _view(sums, copy.dest, copy.shape, copy.dest_strides)
                    np.add(view, each, out=view)
        result: Bytes = torch.from_numpy(total / count).to(_FLOATS[need.dtype]).view(torch.uint8).numpy()
        return result


def with_derived(catalog: Catalog, tensors: Sequence[Tensor]) -> list[Tensor]:
    """``tensors`` and the weights that the catalog derives from masters among them.

    Raises:
        ConvertError: the type of a derived weight is not a floating type.
    """
    stored = {tensor.key: tensor for tensor in tensors}
    every = list(tensors)
    for key, dtype in sorted(catalog.derived.items()):
        if dtype not in _FLOATS:
            raise ConvertError(f"{key}: cannot be cast from its master to {dtype}; known are {', '.join(_FLOATS)}")
        master = stored.get(master_of(key))
        if master is not None and key not in stored:
            every.append(Tensor(key, dtype, master.shape))
    return every


def deriving(catalog: Catalog, tensors: Sequence[Tensor], get: Get) -> Get:
    """``get`` extended to derived weights: it casts rows of their masters among ``tensors``."""
    stored = {tensor.key: tensor for tensor in tensors}

    def get_or_cast(tensor: Tensor, first: int, last: int) -> Bytes:
        if tensor.key in stored or tensor.key not in catalog.derived:
            return get(tensor, first, last)
        master = stored[master_of(tensor.key)]
        return cast(get(master, first, last), master.dtype, tensor.dtype)

    return get_or_cast


def refuse_remainders(tensors: Iterable[Tensor]) -> None:
    """Raises ConvertError if masters are stored as 16-bit remainders, which are incomplete without the weight."""
    for tensor in tensors:
        if tensor.role == "master_param" and tensor.dtype == "I16":
            raise ConvertError(
                f"{tensor.key}: not supported: the optimizer (--use-precision-aware-optimizer) stores 16 bits of the "
                "master, and the bf16 weight has the other 16; convert the weights alone with --roles weight,buffer"
            )


def derived_weights(keys: Collection[str], dtype: str) -> dict[str, str]:
    """The weights that are not among ``keys`` and whose masters are, sorted, with their type; none if that is ""."""
    weights = (WEIGHT + key.removeprefix(MASTER) for key in sorted(keys) if key.startswith(MASTER))
    return {weight: dtype for weight in weights if dtype and weight not in keys}


def require_weights(tensors: Iterable[Tensor]) -> None:
    """Raises ConvertError if a parameter has a master and no weight."""
    for weight in derived_weights({tensor.key for tensor in tensors}, "lacking"):
        raise ConvertError(
            f"the source has no weights of {weight.removeprefix(WEIGHT)}, and no type to cast masters to"
        )


def cast(data: Bytes, from_dtype: str, to_dtype: str) -> Bytes:
    """Casts elements between floating types, rounding as optimizers do when they update weights."""
    if from_dtype == to_dtype:
        return data
    # torch warns of tensors over read-only memory.
    source = torch.from_numpy(data if data.flags.writeable else data.copy()).view(_FLOATS[from_dtype])
    result: Bytes = cast_master(source, torch.empty(len(source), dtype=_FLOATS[to_dtype])).view(torch.uint8).numpy()
    return result


def master_of(key: str) -> str:
    """The key of a weight's master."""
    return MASTER + key.removeprefix(WEIGHT)


def copy_strided(
    copies: Iterable[StridedCopy], source: Bytes, dest: Bytes, item_bytes: int, *, source_begin: int = 0,
    dest_begin: int = 0,
) -> None:  # fmt: skip
    """Perform ``copies`` of elements of ``item_bytes`` between two flat buffers, which start at these elements."""
    from_items, to_items = _items(source, item_bytes), _items(dest, item_bytes)
    for copy in copies:
        from_view = _view(from_items, copy.source - source_begin, copy.shape, copy.source_strides)
        _view(to_items, copy.dest - dest_begin, copy.shape, copy.dest_strides)[...] = from_view


def _same_copies(copies: Iterable[StridedCopy], source: Bytes, dest: Bytes, item_bytes: int) -> bool:
    """Whether source and destination of ``copies`` are equal."""
    one, other = _items(source, item_bytes), _items(dest, item_bytes)
    return all(
        np.array_equal(
            _view(other, copy.dest, copy.shape, copy.dest_strides),
            _view(one, copy.source, copy.shape, copy.source_strides),
        )
        for copy in copies
    )


def _items(data: Bytes, item_bytes: int) -> Array:
    items: Array = data.view(_UNSIGNED[item_bytes])
    return items


def _view(items: Array, begin: int, shape: Sequence[int], strides: Sequence[int]) -> Array:
    view: Array = as_strided(items[begin:], shape, [stride * items.itemsize for stride in strides])
    return view


def _to_float(items: Array, dtype: str) -> npt.NDArray[np.float64]:
    copied = torch.from_numpy(np.array(items).reshape(-1).view(np.uint8)).view(_FLOATS[dtype])
    result: npt.NDArray[np.float64] = copied.to(torch.float64).numpy().reshape(items.shape)
    return result
