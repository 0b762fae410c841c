"""Consolidated tensors out of the fragments of a source: rows are filled when a writer asks for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided

from ftckpt.errors import ConvertError, LostError
from ftckpt.restore.plan import Have, Index, overlap, plan
from ftckpt.state.fragment import DTYPE_BYTES, Box, Fragment
from ftckpt.universal.catalog import Bytes, Catalog, Source, Tensor

Array = npt.NDArray[Any]
Block = tuple[int, int, Sequence[int], Sequence[int], Sequence[int]]
"""Source begin, destination begin, shape, source strides, destination strides, in elements."""

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_MOST_NAMED = 5
_AVERAGED_BYTES = 1 << 20


class Filler:
    """The tensors of a source, and their rows.

    Raises:
        ConvertError: fragments of one tensor differ in type or shape, or do not make up all of it.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        catalog = source.catalog
        self.tensors = consolidated(catalog)
        self._average = catalog.average
        self._index = Index(Have(number, fragment, 0) for number, fragment in enumerate(catalog.fragments))
        held: dict[str, int] = {}
        holders: dict[str, list[tuple[int, int, int]]] = {}
        for number, fragment in enumerate(catalog.fragments):
            held[fragment.key] = held.get(fragment.key, 0) + fragment.nbytes
            holders.setdefault(fragment.key, []).append((number, *_row_range(fragment)))
        self._holders = {key: np.array(found).T for key, found in holders.items()}
        self._copied = frozenset(tensor.key for tensor in self.tensors if held[tensor.key] > tensor.nbytes)
        self._check_complete()

    def get(self, tensor: Tensor, first: int, last: int) -> Bytes:
        """The bytes of rows ``first`` to ``last``: a view of the source, not to be written to, where they lie in one
        piece, else fresh memory.

        Raises:
            ConvertError: two fragments differ where they hold the same elements, or the source cannot be read.
        """
        need = _rows(tensor, first, last)
        if tensor.key in self._average:
            return self._averaged(tensor, first, last)
        if tensor.key in self._copied:
            return self._filled_once(need)
        filled: Bytes | None = None
        for index, blocks in self._touching(need):
            held = self._source.read(index)
            if len(blocks) == 1 and blocks[0][2:] == ((need.numel,), (1,), (1,)):
                begin = blocks[0][0] * need.item_bytes
                return held[begin : begin + need.nbytes]
            filled = np.empty(need.nbytes, np.uint8) if filled is None else filled
            copy_blocks(blocks, held, filled, need.item_bytes)
        return np.empty(0, np.uint8) if filled is None else filled

    def _filled_once(self, need: Fragment) -> Bytes:
        """Of a tensor of which there are copies, that are compared."""
        filled: Bytes = np.empty(need.nbytes, np.uint8)
        reads = plan(self._index, [need], lambda source: 0)
        for read in reads:
            copy_blocks(read.blocks, self._source.read(read.have.source), filled, need.item_bytes)
        self._compare(need, filled, frozenset(read.have.source for read in reads))
        return filled

    def _check_complete(self) -> None:
        lacking = []
        for tensor in self.tensors:
            try:
                plan(self._index, [_rows(tensor, 0, tensor.rows)], lambda source: 0)
            except LostError:
                lacking.append(tensor.key)
        if lacking:
            more = f" and {len(lacking) - _MOST_NAMED} more" if len(lacking) > _MOST_NAMED else ""
            named = ", ".join(lacking[:_MOST_NAMED])
            raise ConvertError(
                f"the source does not hold all elements of {named}{more}: files of some ranks are missing"
            )

    def _touching(self, need: Fragment) -> Iterator[tuple[int, Sequence[Block]]]:
        """Every fragment that holds elements of ``need``, which are rows, by its index, and which they are."""
        numbers, first, last = self._holders[need.key]
        begin = need.box.offset[0] if need.box.offset else 0
        end = begin + (need.box.shape[0] if need.box.shape else 1)
        for index in numbers[(first < end) & (last > begin)].tolist():
            blocks = overlap(self._source.catalog.fragments[index], need)
            if blocks:
                yield index, blocks

    def _compare(self, need: Fragment, filled: Bytes, used: frozenset[int]) -> None:
        """All that the source has of ``need`` has to be what is filled."""
        for index, blocks in self._touching(need):
            if not same_blocks(blocks, self._source.read(index), filled, need.item_bytes):
                others = [self._where(other) for other in sorted(used - {index})]
                against = f" and {', '.join(others[:_MOST_NAMED])}" if others else ""
                raise ConvertError(f"{need.key}: copies that must be equal differ: {self._where(index)}{against}")

    def _averaged(self, tensor: Tensor, first: int, last: int) -> Bytes:
        """Some rows at a time: sums have 64 bits an element."""
        if tensor.dtype not in _FLOATS:
            raise ConvertError(f"{tensor.key}: elements of type {tensor.dtype} cannot be averaged")
        step = max(1, _AVERAGED_BYTES // max(1, tensor.row_bytes))
        filled: Bytes = np.empty((last - first) * tensor.row_bytes, np.uint8)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            part = self._averaged_rows(_rows(tensor, begin, end))
            filled[(begin - first) * tensor.row_bytes : (end - first) * tensor.row_bytes] = part
        return filled

    def _averaged_rows(self, need: Fragment) -> Bytes:
        total, count = np.zeros(need.numel), np.zeros(need.numel)
        for index, blocks in self._touching(need):
            held = _items(self._source.read(index), need.item_bytes)
            for begin, at, shape, source_strides, dest_strides in blocks:
                more = _to_float(_view(held, begin, shape, source_strides), need.dtype)
                for sums, each in ((total, more), (count, 1)):
                    view = _view(sums, at, shape, dest_strides)
                    np.add(view, each, out=view)
        result: Bytes = torch.from_numpy(total / count).to(_FLOATS[need.dtype]).view(torch.uint8).numpy()
        return result

    def _where(self, index: int) -> str:
        where = getattr(self._source, "where", None)
        return str(where(index)) if where is not None else self._source.catalog.fragments[index].name


def consolidated(catalog: Catalog) -> tuple[Tensor, ...]:
    """The tensors that a catalog's fragments are of, in the order in which they first appear.

    Raises:
        ConvertError: fragments of one tensor differ in type or shape.
    """
    found: dict[str, Tensor] = {}
    for fragment in catalog.fragments:
        tensor = Tensor(fragment.key, fragment.dtype, fragment.global_shape)
        other = found.setdefault(fragment.key, tensor)
        if other != tensor:
            told = f"{other.dtype} {list(other.shape)} and {tensor.dtype} {list(tensor.shape)}"
            raise ConvertError(f"{fragment.key}: ranks that hold parts of it disagree what it is: {told}")
    return tuple(found.values())


def copy_blocks(blocks: Iterable[Block], source: Bytes, dest: Bytes, item_bytes: int) -> None:
    """Copy strided blocks, in elements of ``item_bytes``, between two flat memories."""
    one, other = _items(source, item_bytes), _items(dest, item_bytes)
    for begin, at, shape, source_strides, dest_strides in blocks:
        _view(other, at, shape, dest_strides)[...] = _view(one, begin, shape, source_strides)


def same_blocks(blocks: Iterable[Block], source: Bytes, dest: Bytes, item_bytes: int) -> bool:
    """Whether a copy of these blocks would change nothing."""
    one, other = _items(source, item_bytes), _items(dest, item_bytes)
    return all(
        np.array_equal(_view(other, at, shape, dest_strides), _view(one, begin, shape, source_strides))
        for begin, at, shape, source_strides, dest_strides in blocks
    )


def take(data: Bytes, shape: Sequence[int], box: Box, start: int, stop: int) -> Bytes:
    """The elements of ``box`` among those ``start`` to ``stop`` of a tensor of ``shape``, flattened: ``data`` are the
    bytes of these. A view of ``data`` where they lie in one piece."""
    if start >= stop:
        return data[:0]
    item_bytes = len(data) // (stop - start)
    dtype = next(dtype for dtype, nbytes in DTYPE_BYTES.items() if nbytes == item_bytes)
    held = Fragment("", dtype, tuple(shape), Box((0,) * len(shape), tuple(shape)), start, stop)
    blocks = overlap(held, Fragment.whole("", dtype, tuple(shape), box))
    numel = sum(block.numel for block in blocks)
    if len(blocks) == 1 and blocks[0].source_strides == (1,):
        return data[blocks[0].source * item_bytes : (blocks[0].source + numel) * item_bytes]
    first = min((block.dest for block in blocks), default=0)  # in the order of the box they are one range
    taken: Bytes = np.empty(numel * item_bytes, np.uint8)
    copy_blocks([block._replace(dest=block.dest - first) for block in blocks], data, taken, item_bytes)
    return taken


def _rows(tensor: Tensor, first: int, last: int) -> Fragment:
    if not tensor.shape:
        return Fragment.whole(tensor.key, tensor.dtype, (), Box((), ()))
    rest = tensor.shape[1:]
    box = Box((first, *(0,) * len(rest)), (last - first, *rest))
    return Fragment.whole(tensor.key, tensor.dtype, tensor.shape, box)


def _row_range(fragment: Fragment) -> tuple[int, int]:
    """First and one past the last row that a fragment holds elements of."""
    if not fragment.box.shape:
        return 0, 1
    inner = max(1, math.prod(fragment.box.shape[1:]))
    offset = fragment.box.offset[0]
    return offset + fragment.start // inner, offset - (-fragment.stop // inner)


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
