"""Writes what DeepSpeed's ``save_checkpoint`` would have written: files that it has outlined, filled in.

Every file of the outline becomes one of the destination, with the elements of the source where the outline has holes.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from ftckpt.convert.catalog import Bytes, Catalog, Get, Rows, Tensor, Unit
from ftckpt.convert.consolidation import take, with_derived
from ftckpt.convert.foreign import archives, pickles
from ftckpt.convert.safetensors import STRIP_BYTES
from ftckpt.convert.storage import Destination, explained, map_file
from ftckpt.errors import ConvertError, StorageError
from ftckpt.model.fragment import Box, Fragment
from ftckpt.persist import outlines
from ftckpt.persist.outlines import Hole


class DeepSpeedOutlinedWriter:
    """What the outline in ``outline`` says, below ``path``: the directory of one tag, and what lies beside it.

    Raises:
        ConvertError: it is no outline, or one that was never completed.
    """

    def __init__(self, path: Path, outline: Path) -> None:
        self.destination = Destination(path)
        try:
            self._outline = outlines.at(outline.absolute())
            self._holes = self._outline.table()
        except StorageError as error:
            raise ConvertError(str(error)) from None
        self._tensors: Mapping[str, Tensor] = {}

    def plan(self, catalog: Catalog, tensors: Sequence[Tensor]) -> list[Unit]:
        if catalog.iteration != self._outline.snapshot.iteration:
            raise ConvertError(
                f"{self._outline.path}: is of iteration {self._outline.snapshot.iteration}, and the source of "
                f"{catalog.iteration}: name that snapshot with --iteration"
            )
        self._tensors = {tensor.key: tensor for tensor in with_derived(catalog, tensors)}
        files = self._outline.files
        with explained(files):
            paths = sorted(path for path in files.rglob("*") if path.is_file())
            sizes = {str(path.relative_to(files)): path.stat().st_size for path in paths}
        if lacking := sorted(self._holes.keys() - sizes.keys()):
            raise ConvertError(f"{files / lacking[0]}: is missing")
        return [
            Unit(name, tuple(self._rows(hole.fragment) for hole in self._holes.get(name, ())), size)
            for name, size in sizes.items()
        ]

    def memory(self, unit: Unit) -> int:
        """Bytes that ``write`` takes at most."""
        return 3 * max(STRIP_BYTES, unit.row_bytes)

    def write(self, unit: Unit, get: Get) -> None:
        source = self._outline.files / unit.name
        with self.destination.file(unit.name) as file:
            self._fill(source, self._holes.get(unit.name, ()), get, file)
            with explained(source):
                shutil.copymode(source, file.name)

    def finish(self, catalog: Catalog, units: Sequence[Unit]) -> None:
        for unit in units:
            if not (self.destination.partial / unit.name).is_file():
                raise ConvertError(f"{self.destination.partial / unit.name} is missing; start the same command again")
        self.destination.commit()

    def _fill(self, source: Path, holes: Sequence[Hole], get: Get, file: BinaryIO) -> None:
        outlined, at = map_file(source), 0
        for hole in holes:
            file.write(outlined[at : hole.begin].data)
            for part in self._elements(hole.fragment, get):
                file.write(part.data)
            at = hole.end
        file.write(outlined[at:].data)
        if bytes(outlined[: len(archives.ARCHIVE)]) == archives.ARCHIVE:
            file.flush()
            pickles.set_checksums(Path(file.name))

    def _rows(self, fragment: Fragment) -> Rows:
        """The rows of the tensor that ``fragment`` is in."""
        tensor = self._tensors.get(fragment.key)
        if tensor is None or (tensor.dtype, tensor.shape) != (fragment.dtype, fragment.global_shape):
            found = f"it as {tensor.dtype} {tensor.shape}" if tensor is not None else "none"
            raise ConvertError(
                f"{self._outline.path}: {fragment.key} is {fragment.dtype} {fragment.global_shape}; the source has "
                f"{found}"
            )
        first, last = _touched(fragment)
        return Rows(tensor, first, last)

    def _elements(self, fragment: Fragment, get: Get) -> Iterator[Bytes]:
        """Those of ``fragment``, a strip of rows at a time."""
        rows, box = self._rows(fragment), fragment.box
        step = max(1, STRIP_BYTES // max(1, rows.tensor.row_bytes))
        inner = math.prod(box.shape[1:])  # elements of the box in a row
        origin = box.offset[0] if box.offset else 0
        for first in range(rows.first, rows.last, step):
            last = min(first + step, rows.last)
            data = get(rows.tensor, first, last)
            shape = (last - first, *rows.tensor.shape[1:])
            within = Box((0, *box.offset[1:]), (last - first, *box.shape[1:]))
            taken = take(data, shape, within, 0, math.prod(shape)) if within.shape != shape else data
            # Counted inside the box: where these rows begin, and what of them is wanted.
            at = (first - origin) * inner
            low, high = max(fragment.start, at) - at, min(fragment.stop, at + (last - first) * inner) - at
            yield taken[low * fragment.item_bytes : high * fragment.item_bytes]


def _touched(fragment: Fragment) -> tuple[int, int]:
    """The rows of the whole tensor that have something of ``fragment``."""
    box = fragment.box
    if not box.shape:
        return 0, 1
    inner = max(1, math.prod(box.shape[1:]))
    return box.offset[0] + fragment.start // inner, box.offset[0] + -(-fragment.stop // inner)
