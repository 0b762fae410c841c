"""Weights alone, in safetensors files under the model's own names, as many programs read and write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ftckpt.convert.catalog import WEIGHTS_ALONE, Bytes, Catalog, Get, Reader, Tensor, Unit, Writer, whole_fragment
from ftckpt.convert.consolidation import lacking_weight, with_derived
from ftckpt.convert.storage import Destination, explained, fingerprint_of, map_file
from ftckpt.convert.tensor_files import (
    MAX_FILE_BYTES,
    HeaderEntry,
    TensorFile,
    parse_header,
    strip_memory,
    units_of,
    write_unit,
)
from ftckpt.errors import ConvertError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def recognises(path: Path) -> bool:
    """Whether ``path`` is a directory of such files."""
    return (path / SINGLE).is_file() or (path / INDEX).is_file()


class WeightsReader(Reader):
    """The weights in the directory ``path``, each as ``weight/NAME``; buffers cannot be told from them.

    Raises:
        ConvertError: a file that the index names is missing or damaged, or does not hold what the index says.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        index = _index(path) if (path / INDEX).is_file() else None
        self._data: dict[str, Bytes] = {}
        self._places: list[tuple[str, HeaderEntry]] = []
        file_of: dict[str, str] = {}
        fragments = []
        for file in sorted(set(index.values())) if index is not None else [SINGLE]:
            self._data[file] = map_file(path / file)
            entries, _ = parse_header(self._data[file], str(path / file))
            for name, entry in entries.items():
                file_of[name] = file
                fragments.append(whole_fragment(f"weight/{name}", entry.dtype, entry.shape))
                self._places.append((file, entry))
        if index is not None and index != file_of:
            wrong = min(name for name in index.keys() | file_of.keys() if index.get(name) != file_of.get(name))
            raise ConvertError(f"{path / INDEX}: does not agree with the files about weight/{wrong}")
        self.catalog = Catalog("safetensors", 0, {}, tuple(fragments), {})

    def read(self, index: int) -> Bytes:
        file, entry = self._places[index]
        return self._data[file][entry.begin : entry.end]

    def fingerprint(self) -> str:
        return fingerprint_of(self._path / file for file in self._data)

    def close(self) -> None:
        self._data = {}


def _index(path: Path) -> dict[str, str]:
    where = path / INDEX
    try:
        with explained(where):
            names: Mapping[str, str] = json.loads(where.read_text())["weight_map"]
        return {str(name): str(Path(file).name) for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConvertError(f"{where}: is no index of safetensors files: {error}") from None


class WeightsWriter(Writer):
    """Weights and buffers alone, as a directory ``path`` of safetensors files.

    One file is named ``model.safetensors``, several have a ``model.safetensors.index.json`` beside them.
    """

    def __init__(self, path: Path, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self.destination = Destination(path)
        self._max_file_bytes = max_file_bytes

    def plan(self, catalog: Catalog, tensors: Sequence[Tensor]) -> list[Unit]:
        stored = with_derived(catalog, tensors)
        wanted = [tensor for tensor in stored if tensor.role in WEIGHTS_ALONE]
        lacking = lacking_weight(stored)
        if lacking or not wanted:
            what = lacking or "any tensor"
            raise ConvertError(f"the source has no weights of {what}, and does not say which type they are cast to")
        if len({tensor.name for tensor in wanted}) != len(wanted):
            raise ConvertError("a buffer has the name of a weight: both cannot be written under it")
        units = units_of("model", wanted, self._max_file_bytes)
        return [replace(units[0], name=SINGLE)] if len(units) == 1 else units

    def memory(self, unit: Unit) -> int:
        return strip_memory(unit)

    def write(self, unit: Unit, get: Get) -> None:
        names = {part.tensor.name: part.tensor for part in unit.parts}
        with self.destination.file(unit.name) as file:
            write_unit(TensorFile(file, names, {"format": "pt"}, checksums=False), unit, get)

    def finish(self, catalog: Catalog, units: Sequence[Unit]) -> None:
        if len(units) > 1:
            parts = [(unit.name, part) for unit in units for part in unit.parts]
            index = {
                "metadata": {"total_size": sum(part.nbytes for _, part in parts)},
                "weight_map": {part.tensor.name: name for name, part in parts},
            }
            with self.destination.file(INDEX) as file:
                file.write((json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
        for unit in units:  # those of an earlier attempt may have been damaged since
            parse_header(map_file(self.destination.partial / unit.name), unit.name)
        self.destination.commit()
