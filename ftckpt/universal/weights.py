"""Reads weights that lie in safetensors files under the model's own names, as many programs write them."""

from __future__ import annotations

import json
from pathlib import Path

from ftckpt.errors import ConvertError
from ftckpt.state.fragment import Box, Fragment
from ftckpt.universal.atomic import explained
from ftckpt.universal.catalog import Bytes, Catalog, Source, fingerprint_of
from ftckpt.universal.layout_files import Entry, parse_header
from ftckpt.universal.reader import map_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def recognises(path: Path) -> bool:
    """Whether ``path`` is a directory of such files."""
    return (path / SINGLE).is_file() or (path / INDEX).is_file()


class WeightsSource(Source):
    """The weights in the directory ``path``, each as ``weight/NAME``; buffers cannot be told from them.

    Raises:
        ConvertError: a file that the index names is missing or damaged, or does not hold what the index says.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data: dict[str, Bytes] = {}
        self._entries: list[tuple[str, Entry]] = []
        fragments = []
        for file in _files(path):
            self._data[file] = map_file(path / file)
            entries, _ = parse_header(self._data[file], str(path / file))
            for name, entry in entries.items():
                dtype, shape = entry[:2]
                fragments.append(Fragment.whole(f"weight/{name}", dtype, shape, Box((0,) * len(shape), shape)))
                self._entries.append((file, entry))
        _check_index(path, {f.key: file for f, (file, _) in zip(fragments, self._entries, strict=True)})
        self._catalog = Catalog("safetensors", 0, {}, tuple(fragments), {})

    @property
    def catalog(self) -> Catalog:
        """See Source."""
        return self._catalog

    def read(self, index: int) -> Bytes:
        """See Source."""
        file, (_, _, begin, end) = self._entries[index]
        return self._data[file][begin:end]

    def fingerprint(self) -> str:
        """See Source."""
        return fingerprint_of(self._path / file for file in self._data)

    def close(self) -> None:
        """See Source."""
        self._data = {}


def _files(path: Path) -> list[str]:
    return sorted(set(_index(path).values())) if (path / INDEX).is_file() else [SINGLE]


def _index(path: Path) -> dict[str, str]:
    where = path / INDEX
    try:
        with explained(where):
            names = json.loads(where.read_text())["weight_map"]
        return {str(name): str(Path(file).name) for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConvertError(f"{where}: is no index of safetensors files: {error}") from None


def _check_index(path: Path, found: dict[str, str]) -> None:
    if not (path / INDEX).is_file():
        return
    said = {f"weight/{name}": file for name, file in _index(path).items()}
    wrong = sorted(key for key in said.keys() | found.keys() if said.get(key) != found.get(key))
    if wrong:
        raise ConvertError(f"{path / INDEX}: does not agree with the files about {wrong[0]}")
