"""Reads a universal checkpoint; ``FORMAT.md`` has the rules. Nothing of a partial or damaged one is given out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from ftckpt.errors import ConvertError, CorruptError
from ftckpt.state import objects
from ftckpt.state.fragment import Box, Fragment
from ftckpt.universal.atomic import PARTIAL, explained
from ftckpt.universal.catalog import Bytes, Catalog, Source
from ftckpt.universal.format import FORMAT, MANIFEST_NAME, OBJECTS_NAME, Stored, UniversalManifest
from ftckpt.universal.layout_files import Entry, checksum, parse_header

SUFFIX = ".safetensors"
_MOST_NAMED = 3
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def recognises(path: Path) -> bool:
    """Whether ``path`` is, or was to become, a universal checkpoint."""
    try:
        with open(path / MANIFEST_NAME, "rb") as file:
            return f'"{FORMAT}"'.encode() in file.read(256)
    except OSError:
        return False


class UniversalSource(Source):
    """The checkpoint in the directory ``path``; every tensor's checksum is compared when it is first read.

    Raises:
        ConvertError: not complete, another format version, a file that is missing or of another size, or a header
            that is not what the manifest says.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._manifest = _manifest(path)
        self._data = {name: self._open(name, file.nbytes) for name, file in self._manifest.files.items()}
        places = {name: self._entries(name) for name in self._data if name.endswith(SUFFIX)}
        self._keys = tuple(self._manifest.tensors)
        self._spans = [self._span(key, places) for key in self._keys]
        self._good: set[int] = set()
        self._guard = threading.Lock()
        self._catalog = Catalog(
            origin="universal",
            iteration=self._manifest.iteration,
            layout=self._manifest.layout,
            fragments=tuple(_fragment(key, stored) for key, stored in self._manifest.tensors.items()),
            objects=self._objects(),
            padded=self._manifest.padded,
            derived=self._manifest.derived,
        )

    @property
    def catalog(self) -> Catalog:
        """See Source: one fragment per tensor, all of it."""
        return self._catalog

    @property
    def manifest(self) -> UniversalManifest:
        """Where the checkpoint came from, and what lies in which file."""
        return self._manifest

    def read(self, index: int) -> Bytes:
        """See Source."""
        data = self._bytes(index)
        with self._guard:
            known = index in self._good
        if not known:
            problem = self._problem(index)
            if problem:
                raise ConvertError(problem)
            with self._guard:
                self._good.add(index)
        return data

    def verify(self, on_progress: Progress | None = None) -> list[str]:
        """Compare every byte of every tensor with its checksum; texts that name what is bad, none if all is good."""
        total = sum(stored.nbytes for stored in self._manifest.tensors.values())
        bad: list[str] = []
        done = 0
        for index, data in enumerate(map(self._bytes, range(len(self._keys)))):
            bad += filter(None, [self._problem(index)])
            done += len(data)
            if on_progress is not None:
                on_progress(done, total)
        return bad

    def fingerprint(self) -> str:
        """See Source: the manifest has the checksums of all tensors."""
        return checksum(map_file(self._path / MANIFEST_NAME))

    def close(self) -> None:
        """See Source."""
        self._data = {}

    def _bytes(self, index: int) -> Bytes:
        stored = self._manifest.tensors[self._keys[index]]
        if stored.file not in self._data:
            raise ConvertError(f"{self._path}: was closed")
        begin, end = self._spans[index]
        return self._data[stored.file][begin:end]

    def _problem(self, index: int) -> str:
        key = self._keys[index]
        stored = self._manifest.tensors[key]
        if checksum(self._bytes(index)) == stored.checksum:
            return ""
        return f"{self._path / stored.file}: {key} is damaged: its bytes do not match their checksum"

    def _open(self, name: str, nbytes: int) -> Bytes:
        data = map_file(self._path / name)
        if len(data) != nbytes:
            raise ConvertError(f"{self._path / name}: has {len(data)} bytes, {MANIFEST_NAME} says {nbytes}")
        return data

    def _entries(self, name: str) -> dict[str, Entry]:
        entries, _ = parse_header(self._data[name], str(self._path / name))
        unknown = sorted(key for key in entries if key not in self._manifest.tensors)
        if unknown:
            raise ConvertError(f"{self._path / name}: {unknown[0]} is not in {MANIFEST_NAME}")
        return entries

    def _span(self, key: str, places: Mapping[str, Mapping[str, Entry]]) -> tuple[int, int]:
        stored = self._manifest.tensors[key]
        entry = places.get(stored.file, {}).get(key)
        if entry is None:
            raise ConvertError(f"{self._path / stored.file}: {key}, which {MANIFEST_NAME} says is there, is not")
        dtype, shape, begin, end = entry
        if (dtype, shape) != (stored.dtype, stored.shape):
            found, right = f"{dtype} {list(shape)}", f"{stored.dtype} {list(stored.shape)}"
            raise ConvertError(f"{self._path / stored.file}: {key} is {found}, {MANIFEST_NAME} says {right}")
        return begin, end

    def _objects(self) -> Mapping[str, object]:
        data, where = self._data[OBJECTS_NAME], self._path / OBJECTS_NAME
        if checksum(data) != self._manifest.files[OBJECTS_NAME].checksum:
            raise ConvertError(f"{where}: damaged: its bytes do not match their checksum")
        try:
            value = objects.decode(data.data)
        except CorruptError as error:
            raise ConvertError(f"{where}: {error}") from None
        if not isinstance(value, dict):
            raise ConvertError(f"{where}: holds a {type(value).__name__}, not a mapping")
        return value


def map_file(path: Path) -> Bytes:
    """All bytes of a file, mapped read-only; they stay as long as the array, or a view of it, does.

    Raises:
        ConvertError: missing, not a plain file, or not permitted.
    """
    with explained(path):
        if path.stat().st_size == 0:
            return np.empty(0, np.uint8)
        data: Bytes = np.memmap(path, np.uint8, "r").view(np.ndarray)
        return data


def _manifest(path: Path) -> UniversalManifest:
    where = path / MANIFEST_NAME
    if path.name.endswith(PARTIAL):
        raise ConvertError(f"{path}: was never completed; finish what writes it, or remove it")
    if path.is_dir() and not where.exists():
        raise ConvertError(f"{where}: is missing: {path} is no universal checkpoint, or not all of one")
    with explained(where):
        return UniversalManifest.decode(where.read_bytes(), str(where))


def _fragment(key: str, stored: Stored) -> Fragment:
    return Fragment.whole(key, stored.dtype, stored.shape, Box((0,) * len(stored.shape), stored.shape))
