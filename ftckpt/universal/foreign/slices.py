"""Parts of parameters in files of ranks, and the fragments of logical tensors that they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ftckpt.array_types import Bytes
from ftckpt.model.fragment import Box, Fragment, Shape
from ftckpt.restore.plan import StridedCopy, overlap
from ftckpt.universal.catalog import FragmentPlace, dtype_name
from ftckpt.universal.consolidation import copy_strided
from ftckpt.universal.foreign import archives
from ftckpt.universal.language.placing import Placement


@dataclass(frozen=True)
class ParameterSlice:
    """Elements in a file, from ``first`` on, of a rank's flattened part of a parameter.

    ``coords``: of the rank, sorted by axis. ``shape``: that of the part. ``is_number``: ``values`` are one number for
    the complete parameter, such as a step.
    """

    role: str
    name: str
    coords: tuple[tuple[str, int], ...]
    shape: Shape
    values: torch.Tensor
    file: Path
    first: int = 0
    is_number: bool = False

    @classmethod
    def whole(
        cls, role: str, name: str, coords: tuple[tuple[str, int], ...], tensor: torch.Tensor, file: Path
    ) -> ParameterSlice:
        """All elements of a part."""
        return cls(role, name, coords, tuple(tensor.shape), archives.flat(tensor, name), file)


def stored_in(part: ParameterSlice, placement: Placement, role: str) -> Iterator[FragmentPlace]:
    """The fragments of ``role`` in a part that belongs at ``placement``."""
    key, values = f"{role}/{placement.name}", part.values
    dtype = dtype_name(values, f"{part.file}: {part.name}")
    if part.is_number:
        fragment = Fragment.whole(key, dtype, *placement.of_number(part.shape))
        yield FragmentPlace(fragment, part.file, partial(archives.bytes_of, values, key))
        return
    all_of_it = Box((0,) * len(part.shape), part.shape)
    have = Fragment("", dtype, part.shape, all_of_it, part.first, part.first + values.numel())
    for box_map in placement.boxes:
        copies = overlap(have, Fragment.whole("", dtype, part.shape, box_map.local))
        if not copies and box_map.box.numel:
            continue
        # They are one range of the box: the part is flattened, and so is the box, in the same order.
        start, numel = min((copy.dest for copy in copies), default=0), sum(copy.numel for copy in copies)
        fragment = Fragment(key, dtype, placement.shape, box_map.box, start, start + numel)
        if len(copies) == 1 and copies[0].source_strides == (1,):
            read = partial(archives.bytes_of, values[copies[0].source : copies[0].source + numel], key)
        else:
            read = partial(_gathered, values, fragment, copies)
        yield FragmentPlace(fragment, part.file, read, placement.padded, placement.average)


def _gathered(values: torch.Tensor, fragment: Fragment, copies: Sequence[StridedCopy]) -> Bytes:
    rows: Bytes = np.empty(fragment.nbytes, np.uint8)
    data = archives.bytes_of(values, fragment.key)
    copy_strided(copies, data, rows, fragment.item_bytes, dest_begin=fragment.start)
    return rows
