"""Writes consolidated tensors as safetensors: universal checkpoints, and weights alone for everybody else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import xxhash

from ftckpt.errors import ConvertError, FtckptError
from ftckpt.state import objects
from ftckpt.universal.atomic import Destination
from ftckpt.universal.catalog import Bytes, Catalog, Get, Part, Tensor, Unit
from ftckpt.universal.derived import MASTER, WEIGHT, getting_derived, with_derived
from ftckpt.universal.format import (
    FORMAT,
    MANIFEST_NAME,
    OBJECTS_NAME,
    VERSION,
    Stored,
    StoredFile,
    UniversalManifest,
)
from ftckpt.universal.layout_files import by_role, file_names, header, pack, parse_header
from ftckpt.universal.reader import map_file

MAX_FILE_BYTES = 4 << 30
"""Default bound on a file; one tensor that is larger has a file of its own."""
STRIP_BYTES = 16 << 20
"""Rows are asked for in strips of at most this, or one by one where a row is larger."""
_CHECKSUMS = "xxh3-64"


class TensorFile:
    """A safetensors file that is written from its first tensor to its last.

    With ``checksums`` its metadata holds, under ``xxh3-64``, the JSON of a mapping from name to checksum: the header
    is written again by ``end``.
    """

    def __init__(
        self, file: BinaryIO, names: Mapping[str, Tensor], metadata: Mapping[str, str], checksums: bool
    ) -> None:
        self._file = file
        self._names = names
        self._metadata = metadata
        self._left = [(name, tensor.nbytes) for name, tensor in reversed(list(names.items()))]
        self._hash = xxhash.xxh3_64()
        self._hashes = dict.fromkeys(names, "0" * 16) if checksums else {}
        file.write(self._header())
        self._skip_empty()

    def put(self, data: Bytes) -> None:
        """The next bytes of the tensor whose turn it is; they never go beyond its end."""
        name, left = self._left[-1]
        if len(data) > left:
            raise ValueError(f"{len(data)} bytes for {name}, which lacks {left}")
        self._file.write(data.data)
        self._hash.update(data.data)
        self._left[-1] = (name, left - len(data))
        self._skip_empty()

    @property
    def complete(self) -> bool:
        """Whether every tensor is there."""
        return not self._left

    def end(self) -> None:
        """All tensors are there: complete the header. The caller closes the file."""
        if self._left:
            raise ValueError(f"{self._left[-1][0]} lacks {self._left[-1][1]} bytes")
        if self._hashes:
            self._file.seek(0)
            self._file.write(self._header())

    def _skip_empty(self) -> None:
        while self._left and self._left[-1][1] == 0:
            name, _ = self._left.pop()
            if self._hashes:
                self._hashes[name] = self._hash.hexdigest()
            self._hash.reset()

    def _header(self) -> bytes:
        more = {_CHECKSUMS: json.dumps(self._hashes, separators=(",", ":"))} if self._hashes else {}
        return header(self._names, {**self._metadata, **more})


def strips(part: Part, nbytes: int = STRIP_BYTES) -> Iterator[tuple[int, int]]:
    """First and last row of strips of at most ``nbytes`` that make up ``part``; one row at least each."""
    if part.nbytes == 0:
        return
    step = max(1, nbytes // part.tensor.row_bytes)
    for first in range(part.first, part.last, step):
        yield first, min(first + step, part.last)


class UniversalSink:
    """A universal checkpoint at ``path``, with every weight in it: those that the source derives are cast.

    ``weights=False`` leaves out the latter; the manifest says then what they derive from.
    """

    def __init__(self, path: Path, max_file_bytes: int = MAX_FILE_BYTES, weights: bool = True) -> None:
        self.destination = Destination(path)
        self._max_file_bytes = max_file_bytes
        self._weights = weights
        self._catalog: Catalog | None = None
        self._tensors: list[Tensor] = []

    def plan(self, catalog: Catalog, tensors: Sequence[Tensor]) -> list[Unit]:
        """See Sink."""
        self._catalog, self._tensors = catalog, list(tensors)
        wanted = with_derived(catalog, tensors) if self._weights else list(tensors)
        return _units("tensors", by_role(wanted), self._max_file_bytes)

    def write(self, unit: Unit, get: Get) -> None:
        """See Sink."""
        if self._catalog is None:
            raise ValueError("write before plan")
        get = getting_derived(self._catalog, self._tensors, get)
        with self.destination.file(unit.name) as file:
            made = self.begin_file(unit, file)
            _put_all(made, unit, get)

    @staticmethod
    def begin_file(unit: Unit, file: BinaryIO) -> TensorFile:
        """Begin the file of a unit; tensors follow in the order of its parts."""
        names = {part.tensor.key: part.tensor for part in unit.parts}
        return TensorFile(file, names, {"format": FORMAT, "version": str(VERSION)}, checksums=True)

    def finish(self, catalog: Catalog, units: Sequence[Unit]) -> None:
        """See Sink."""
        tensors: dict[str, Stored] = {}
        files: dict[str, StoredFile] = {}
        for unit in units:
            found, nbytes = _written(self.destination.partial / unit.name, unit)
            tensors.update(found)
            files[unit.name] = StoredFile(nbytes)
        try:
            encoded = objects.encode(dict(catalog.objects))
        except FtckptError as error:
            raise ConvertError(f"{OBJECTS_NAME}: {error}") from None
        with self.destination.file(OBJECTS_NAME) as file:
            file.write(encoded)
        files[OBJECTS_NAME] = StoredFile(len(encoded), xxhash.xxh3_64_hexdigest(encoded))
        derived = {key: dtype for key, dtype in catalog.derived.items() if key not in tensors}
        manifest = UniversalManifest(
            catalog.iteration, catalog.origin, catalog.layout, tensors, files, catalog.padded & set(tensors), derived
        )
        with self.destination.file(MANIFEST_NAME) as file:
            file.write(manifest.encode())
        self.destination.commit()


class SafetensorsSink:
    """Weights and buffers alone, under the model's own names, as a directory ``path`` of safetensors files.

    One file is named ``model.safetensors``, several have a ``model.safetensors.index.json`` beside them.
    """

    def __init__(self, path: Path, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self.destination = Destination(path)
        self._max_file_bytes = max_file_bytes
        self._catalog: Catalog | None = None
        self._tensors: list[Tensor] = []

    def plan(self, catalog: Catalog, tensors: Sequence[Tensor]) -> list[Unit]:
        """See Sink."""
        self._catalog, self._tensors = catalog, list(tensors)
        there = with_derived(catalog, tensors)
        wanted = [tensor for tensor in there if tensor.key.startswith((WEIGHT, "buffer/"))]
        weights = {tensor.key.removeprefix(WEIGHT) for tensor in wanted}
        masters = sorted(tensor.key.removeprefix(MASTER) for tensor in there if tensor.key.startswith(MASTER))
        lacking = [name for name in masters if name not in weights]
        if lacking or not wanted:
            what = lacking[0] if lacking else "any tensor"
            raise ConvertError(f"the source has no weights of {what}, and does not say which type they are cast to")
        if len({_plain(tensor) for tensor in wanted}) != len(wanted):
            raise ConvertError("a buffer has the name of a weight: both cannot be written under it")
        return _units("model", by_role(wanted), self._max_file_bytes)

    def write(self, unit: Unit, get: Get) -> None:
        """See Sink."""
        if self._catalog is None:
            raise ValueError("write before plan")
        get = getting_derived(self._catalog, self._tensors, get)
        names = {_plain(part.tensor): part.tensor for part in unit.parts}
        with self.destination.file(unit.name) as file:
            _put_all(TensorFile(file, names, {"format": "pt"}, checksums=False), unit, get)

    def finish(self, catalog: Catalog, units: Sequence[Unit]) -> None:
        """See Sink."""
        parts = [(unit.name, part) for unit in units for part in unit.parts]
        if len(units) > 1:
            total = sum(part.nbytes for _, part in parts)
            index = {
                "metadata": {"total_size": total},
                "weight_map": {_plain(part.tensor): name for name, part in parts},
            }
            with self.destination.file("model.safetensors.index.json") as file:
                file.write((json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
        for unit in units:
            data = map_file(self.destination.partial / unit.name)
            parse_header(data, unit.name)
        self.destination.commit()


def _units(stem: str, tensors: Sequence[Tensor], max_file_bytes: int) -> list[Unit]:
    packed = pack(tensors, max_file_bytes)
    names = file_names(stem, len(packed)) if len(packed) != 1 or stem != "model" else ["model.safetensors"]
    return [
        Unit(name, tuple(map(Part.whole, file)), sum(tensor.nbytes for tensor in file))
        for name, file in zip(names, packed, strict=True)
    ]


def _plain(tensor: Tensor) -> str:
    return tensor.key.partition("/")[2]


def _put_all(made: TensorFile, unit: Unit, get: Get) -> None:
    for part in unit.parts:
        for first, last in strips(part):
            made.put(get(part.tensor, first, last))
    made.end()


def _written(path: Path, unit: Unit) -> tuple[dict[str, Stored], int]:
    """What a finished file says of itself, compared with what it was to be."""
    data = map_file(path)
    entries, metadata = parse_header(data, str(path))
    hashes = json.loads(metadata.get(_CHECKSUMS, "{}"))
    right = {part.tensor.key: (part.tensor.dtype, part.tensor.shape) for part in unit.parts}
    if {key: entry[:2] for key, entry in entries.items()} != right or set(hashes) != set(right):
        raise ConvertError(f"{path}: does not hold what it was planned to hold; remove it and start again")
    return {key: Stored(dtype, shape, path.name, hashes[key]) for key, (dtype, shape) in right.items()}, len(data)
