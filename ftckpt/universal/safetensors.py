"""Safetensors files: packing, headers and streamed writing; and a reader and a writer of weights alone.

Weights alone have the model's own names, as other programs expect.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError
from ftckpt.model.fragment import DTYPE_BYTES, Shape
from ftckpt.universal.catalog import (
    WEIGHTS_ALONE,
    Catalog,
    FileReader,
    FragmentPlace,
    Get,
    Rows,
    Tensor,
    Unit,
    Writer,
    whole_fragment,
)
from ftckpt.universal.consolidation import require_weights, with_derived
from ftckpt.universal.storage import Destination, explained, map_file

SUFFIX = ".safetensors"
CHECKSUMS = "xxh3-64"
"""The key of a file's metadata that holds the checksums of its tensors."""
MAX_FILE_BYTES = 4 << 30
"""Default limit of a file; a larger tensor has a file of its own."""
STRIP_BYTES = 16 << 20
"""Maximum of a strip of rows that is requested at a time, unless one row is larger."""
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""

_STRIPS = 3
"""Copies of a strip in memory: the rows, a cast of them, and the reader's source of them."""
_ROLES = ("weight", "buffer", "master", "step")
# As in the safetensors library: spaces pad the header, so that data starts on a multiple of 8 bytes.
_ALIGN = 8


def by_role(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors sorted: weights, buffers, masters, steps, then optimizer state, each by name.

    Raises:
        ConvertError: a key occurs twice.
    """

    def order(tensor: Tensor) -> tuple[int, str]:
        return (_ROLES.index(tensor.role) if tensor.role in _ROLES else len(_ROLES)), tensor.key

    ordered = sorted(tensors, key=order)
    for one, other in pairwise(ordered):
        if one.key == other.key:
            raise ConvertError(f"{one.key}: the source has two tensors of this name")
    return ordered


def pack(tensors: Sequence[Tensor], max_bytes: int) -> list[list[Tensor]]:
    """Packs tensors, in the order given, into files of at most ``max_bytes``; a larger tensor has its own file.

    Inside a file larger element sizes come first, so that every tensor starts on a multiple of its element size.
    """
    files: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        # Only the last file is filled: successive keys stay together.
        if not files or tensor.nbytes > room:
            files.append([])
            room = max_bytes
        files[-1].append(tensor)
        room -= tensor.nbytes
    return [sorted(file, key=lambda tensor: (-DTYPE_BYTES[tensor.dtype], tensor.key)) for file in files]


def units_of(stem: str, tensors: Iterable[Tensor], max_file_bytes: int) -> list[Unit]:
    """Files ``STEM-00001-of-00007.safetensors`` and so on, see ``pack``."""
    packed = pack(by_role(tensors), max_file_bytes)
    return [
        Unit(
            f"{stem}-{number:05}-of-{len(packed):05}{SUFFIX}",
            tuple(map(Rows.whole, file)),
            sum(tensor.nbytes for tensor in file),
        )
        for number, file in enumerate(packed, 1)
    ]


def strips(rows: Rows, nbytes: int = STRIP_BYTES) -> Iterator[tuple[int, int]]:
    """First and last row (exclusive) of successive strips of ``rows``, of at most ``nbytes`` and at least one row."""
    if rows.nbytes == 0:
        return
    step = max(1, nbytes // rows.tensor.row_bytes)
    for first in range(rows.first, rows.last, step):
        yield first, min(first + step, rows.last)


def strip_memory(unit: Unit, strip_bytes: int = STRIP_BYTES) -> int:
    """Maximum memory of writing ``unit`` strip by strip, in bytes."""
    return min(_STRIPS * max(strip_bytes, unit.row_bytes), _STRIPS * unit.nbytes)


def header(names: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The header of a safetensors file with tensors ``names`` in this order.

    Raises:
        ConvertError: it exceeds the safetensors library's limit.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in names.items():
        begin, end = end, end + tensor.nbytes
        table[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    if len(text) > MAX_HEADER_BYTES:
        raise ConvertError(f"{len(names)} tensors need a header of {len(text)} bytes; lower --max-file")
    # The file format: length of the header (8 bytes, little endian), header, data without gaps.
    return len(text).to_bytes(8, "little") + text


class HeaderEntry(NamedTuple):
    """A tensor in a safetensors file; ``begin`` and ``end`` are offsets in the file."""

    dtype: str
    shape: Shape
    begin: int
    end: int


def parse_header(data: Bytes, where: str) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """The entries by name, and the metadata, of a safetensors file; ``data`` is all of it, ``where`` names it.

    Raises:
        ConvertError: not a safetensors file, truncated, or with gaps, overlaps or wrong sizes.
    """
    try:
        length = int.from_bytes(data[:8].tobytes(), "little")
        if len(data) < 8 or length > MAX_HEADER_BYTES or 8 + length > len(data):
            raise ValueError("truncated")
        table: dict[str, Any] = json.loads(data[8 : 8 + length].tobytes())
        metadata = dict(table.pop("__metadata__", {}))
        entries: dict[str, HeaderEntry] = {}
        base, at = 8 + length, 0
        # In file order: each tensor has to start at the end of the one before.
        for name, entry in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
            shape, (begin, end) = tuple(map(int, entry["shape"])), entry["data_offsets"]
            nbytes = Tensor(name, entry["dtype"], shape).nbytes
            if begin != at or end - begin != nbytes or min(shape, default=0) < 0:
                raise ValueError(f"{name} has bytes {begin} to {end}, should have {at} to {at + nbytes}")
            entries[name], at = HeaderEntry(entry["dtype"], shape, base + begin, base + end), end
        if base + at != len(data):
            raise ValueError(f"{len(data)} bytes, the header describes {base + at}")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConvertError(f"{where}: not a valid safetensors file: {str(error)[:200]}") from None
    return entries, metadata


def checksum(data: Bytes) -> str:
    """xxh3-64 as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data.data)


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def recognises(path: Path) -> bool:
    """Whether ``path`` is a directory of weights in safetensors files."""
    return (path / SINGLE).is_file() or (path / INDEX).is_file()


class WeightsReader(FileReader):
    """Reads the tensors in the directory ``path``, each as ``weight/NAME``: the files do not mark buffers."""

    def __init__(self, path: Path) -> None:
        index = _index(path) if (path / INDEX).is_file() else None
        files = [path / file for file in sorted(set(index.values()))] if index is not None else [path / SINGLE]
        stored, file_of = [], {}
        for file in files:
            data = map_file(file)
            entries, _ = parse_header(data, str(file))
            for name, (dtype, shape, begin, end) in entries.items():
                file_of[name] = file.name
                fragment = whole_fragment(f"weight/{name}", dtype, shape)
                stored.append(FragmentPlace(fragment, file, partial(np.asarray, data[begin:end])))
        if index is not None and index != file_of:
            wrong = min(name for name in index.keys() | file_of.keys() if index.get(name) != file_of.get(name))
            raise ConvertError(f"{path / INDEX}: contradicts the files about weight/{wrong}")
        super().__init__(path, stored, files, origin="safetensors", iteration=0, layout={}, objects={})


def _index(path: Path) -> dict[str, str]:
    where = path / INDEX
    try:
        with explained(where):
            names: Mapping[str, str] = json.loads(where.read_text())["weight_map"]
        # The bare name: an index must not lead outside its directory.
        return {str(name): str(Path(file).name) for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConvertError(f"{where}: not a valid index of safetensors files: {error}") from None


class SafetensorsWriter(Writer):
    """Writes complete tensors into a directory ``path`` of safetensors files of at most ``max_file_bytes``.

    ``metadata``: of each file. ``checksums``: tensors have their keys there, and the metadata has ``xxh3-64``: JSON
    that maps each key to its checksum. Otherwise tensors have the model's names.
    """

    metadata: Mapping[str, str]
    checksums: bool

    def __init__(self, path: Path, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self.destination = Destination(path)
        self._max_file_bytes = max_file_bytes

    def memory(self, unit: Unit) -> int:
        return strip_memory(unit)

    def write(self, unit: Unit, get: Get) -> None:
        tensors = {part.tensor.key if self.checksums else part.tensor.name: part.tensor for part in unit.parts}
        # Placeholders of the final length: the header is overwritten in place.
        hashes = dict.fromkeys(tensors, "0" * 16)
        with self.destination.file(unit.name) as file:
            file.write(self._header(tensors, hashes))
            for name, tensor in tensors.items():
                digest = xxhash.xxh3_64()
                for first, last in strips(Rows.whole(tensor)):
                    data = get(tensor, first, last).data
                    file.write(data)
                    digest.update(data)
                hashes[name] = digest.hexdigest()
            file.seek(0)
            file.write(self._header(tensors, hashes))

    def _header(self, tensors: Mapping[str, Tensor], hashes: Mapping[str, str]) -> bytes:
        more = {CHECKSUMS: json.dumps(hashes, separators=(",", ":"))} if self.checksums else {}
        return header(tensors, {**self.metadata, **more})


class WeightsWriter(SafetensorsWriter):
    """Writes weights and buffers alone.

    A single file is named ``model.safetensors``; several come with a ``model.safetensors.index.json``.
    """

    metadata: Mapping[str, str] = {"format": "pt"}
    checksums = False

    def plan(self, catalog: Catalog, tensors: Sequence[Tensor]) -> list[Unit]:
        stored = with_derived(catalog, tensors)
        wanted = [tensor for tensor in stored if tensor.role in WEIGHTS_ALONE]
        require_weights(stored)
        if not wanted:
            raise ConvertError("the source has no weights, and no masters to cast")
        if len({tensor.name for tensor in wanted}) != len(wanted):
            raise ConvertError("a buffer has the name of a weight: the format cannot hold both")
        units = units_of("model", wanted, self._max_file_bytes)
        # transformers requires this name if there is no index.
        return [replace(units[0], name=SINGLE)] if len(units) == 1 else units

    def finish(self, catalog: Catalog, units: Sequence[Unit]) -> None:
        if len(units) > 1:
            parts = [(unit.name, part) for unit in units for part in unit.parts]
            index = {
                "metadata": {"total_size": sum(part.nbytes for _, part in parts)},
                "weight_map": {part.tensor.name: name for name, part in parts},
            }
            with self.destination.file(INDEX) as file:
                file.write((json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
        for unit in units:  # a file of an earlier attempt may be corrupt
            parse_header(map_file(self.destination.partial / unit.name), unit.name)
        self.destination.commit()
