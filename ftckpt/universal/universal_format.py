"""The manifest, reader and writer of the universal format, which ``FORMAT.md`` specifies."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError, CorruptError, FtckptError
from ftckpt.model import codec, objects
from ftckpt.model.fragment import DTYPE_BYTES, Shape
from ftckpt.model.text import with_article
from ftckpt.universal.catalog import Catalog, Get, Reader, Tensor, Unit, Writer, whole_fragment
from ftckpt.universal.consolidation import with_derived
from ftckpt.universal.safetensors import (
    CHECKSUMS,
    MAX_FILE_BYTES,
    SUFFIX,
    HeaderEntry,
    TensorFile,
    checksum,
    parse_header,
    strip_memory,
    units_of,
    write_unit,
)
from ftckpt.universal.storage import PARTIAL, CheckedOnce, Destination, explained, map_file

FORMAT = "ftckpt-universal"
VERSION = 1
"""Incremented when a reader of the previous version would misread a checkpoint."""

MANIFEST_NAME = "manifest.json"
OBJECTS_NAME = "objects.ftobj"
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_HASH = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class TensorEntry:
    """A consolidated tensor: its type, shape and file, and xxh3-64 of its bytes as 16 hex digits.

    Raises:
        ValueError: unknown type, negative dimension, or malformed checksum.
    """

    dtype: str
    shape: Shape
    file: str
    checksum: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES or min(self.shape, default=0) < 0:
            raise ValueError(f"type {self.dtype!r} of shape {self.shape}")
        if not _HASH.fullmatch(self.checksum):
            raise ValueError(f"{self.checksum!r} is not a checksum of 16 hex digits")


@dataclass(frozen=True)
class FileEntry:
    """The size in bytes of a file listed in the manifest and, for the objects, xxh3-64 of the file."""

    nbytes: int
    checksum: str = ""

    @classmethod
    def from_json(cls, name: str, entry: Mapping[str, Any]) -> FileEntry:
        """Inverse of ``to_json``. Raises KeyError, TypeError or ValueError for anything else."""
        # Only plain names: no path may lead outside the checkpoint.
        if not _FILE.fullmatch(name) or name == MANIFEST_NAME:
            raise ValueError(f"{name!r} is no name of a file of a checkpoint")
        nbytes = int(entry["bytes"])
        if nbytes < 0:
            raise ValueError(f"{name}: {nbytes} bytes")
        checksum = entry.get("checksum", "")
        if checksum and not _HASH.fullmatch(checksum):
            raise ValueError(f"{name}: {checksum!r} is not a checksum of 16 hex digits")
        return cls(nbytes, checksum)

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.nbytes, **({"checksum": self.checksum} if self.checksum else {})}


@dataclass(frozen=True)
class UniversalManifest:
    """The content of ``manifest.json``; fields as in ``ftckpt.universal.catalog.Catalog``.

    ``layout`` and ``origin`` describe the source and are informative. ``files`` are all files but the manifest.
    """

    iteration: int
    origin: str
    layout: Mapping[str, int | str | bool]
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]
    padded: frozenset[str] = frozenset()
    derived: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The manifest as indented JSON that ends in a line feed. Equal manifests give equal bytes."""
        value: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "iteration": self.iteration,
            "origin": self.origin,
            "layout": dict(self.layout),
            "objects": OBJECTS_NAME,
            "padded": sorted(self.padded),
            "derived": dict(sorted(self.derived.items())),
            "files": {name: file.to_json() for name, file in sorted(self.files.items())},
            "tensors": {key: codec.to_json(entry) for key, entry in sorted(self.tensors.items())},
        }
        # Of the values, not of the text: reformatting is harmless.
        value["checksum"] = _checksum(value)
        return (json.dumps(value, indent=2) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes, where: str) -> UniversalManifest:
        """Inverse of ``encode``; ``where`` names the file in errors.

        Raises:
            ConvertError: not a manifest of a universal checkpoint, corrupt, of another version, or inconsistent.
        """
        try:
            value: dict[str, Any] = json.loads(data)
            if not isinstance(value, dict) or value.get("format") != FORMAT:
                raise ConvertError(f"{where}: is no manifest of a universal checkpoint: its format is not {FORMAT!r}")
            if value["version"] != VERSION:
                raise ConvertError(f"{where}: format version {value['version']!r}, this ftckpt reads {VERSION}")
            checksum = value.pop("checksum")
            if checksum != _checksum(value):
                raise ConvertError(f"{where}: corrupt or edited: its checksum does not match")
            manifest = cls(
                iteration=int(value["iteration"]),
                origin=str(value["origin"]),
                layout=dict(value["layout"]),
                tensors=codec.from_json(value["tensors"], dict[str, TensorEntry]),
                files={str(name): FileEntry.from_json(str(name), entry) for name, entry in value["files"].items()},
                padded=codec.from_json(value["padded"], frozenset[str]),
                derived=codec.from_json(value["derived"], dict[str, str]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ConvertError(f"{where}: is no manifest of a universal checkpoint: {str(error)[:200]}") from None
        for key, tensor in manifest.tensors.items():
            if tensor.file not in manifest.files:
                raise ConvertError(f"{where}: {key} is in {tensor.file}, which is not among the files")
        if not manifest.files.get(OBJECTS_NAME, FileEntry(0)).checksum:
            raise ConvertError(f"{where}: {OBJECTS_NAME}, with its checksum, is not among the files")

        return manifest


def _checksum(value: Mapping[str, Any]) -> str:
    """The checksum of the manifest's JSON without ``checksum``: sorted keys, no whitespace, ASCII."""
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def recognises(path: Path) -> bool:
    """Whether ``path`` is a universal checkpoint, complete or partial."""
    try:
        with open(path / MANIFEST_NAME, "rb") as file:
            return f'"{FORMAT}"'.encode() in file.read(256)  # the first key; a manifest may have many megabytes
    except OSError:
        return False


class UniversalReader(Reader):
    """Reads the checkpoint in the directory ``path``; each tensor is verified when it is first read.

    The catalog has one fragment per tensor, all of it.

    Raises:
        ConvertError: incomplete, of another format version, or a file is missing, has another size, or contradicts
            the manifest.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.manifest = manifest = _read_manifest(path)
        self._data = {name: self._open(name, file.nbytes) for name, file in manifest.files.items()}
        headers = {name: self._header(name) for name in self._data if name.endswith(SUFFIX)}
        self._keys = tuple(manifest.tensors)
        self._places = [self._place(key, headers) for key in self._keys]
        self._checked = CheckedOnce[int]()
        self.catalog = Catalog(
            origin="universal",
            iteration=manifest.iteration,
            layout=manifest.layout,
            fragments=tuple(whole_fragment(key, entry.dtype, entry.shape) for key, entry in manifest.tensors.items()),
            objects=self._objects(),
            padded=manifest.padded,
            derived=manifest.derived,
        )

    def read(self, index: int) -> Bytes:
        key, place = self._keys[index], self._places[index]
        entry = self.manifest.tensors[key]
        if entry.file not in self._data:
            raise ConvertError(f"{self._path}: was closed")
        data = self._data[entry.file][place.begin : place.end]
        self._checked.check(index, lambda: self._compare(index, data))
        return data

    def _compare(self, index: int, data: Bytes) -> None:
        key = self._keys[index]
        entry = self.manifest.tensors[key]
        if checksum(data) != entry.checksum:
            where = f"{self._path / entry.file}: {key}"
            raise ConvertError(f"{where} is corrupt: its bytes do not match their checksum")

    def fingerprint(self) -> str:
        """The checksum of the manifest, which has those of all tensors."""
        return checksum(map_file(self._path / MANIFEST_NAME))

    def close(self) -> None:
        self._data = {}

    def _open(self, name: str, nbytes: int) -> Bytes:
        data = map_file(self._path / name)
        if len(data) != nbytes:
            raise ConvertError(f"{self._path / name}: has {len(data)} bytes, {MANIFEST_NAME} lists {nbytes}")
        return data

    def _header(self, name: str) -> dict[str, HeaderEntry]:
        entries, _ = parse_header(self._data[name], str(self._path / name))
        unknown = sorted(entries.keys() - self.manifest.tensors.keys())
        if unknown:
            raise ConvertError(f"{self._path / name}: {unknown[0]} is not in {MANIFEST_NAME}")
        return entries

    def _place(self, key: str, headers: Mapping[str, Mapping[str, HeaderEntry]]) -> HeaderEntry:
        listed = self.manifest.tensors[key]
        entry = headers.get(listed.file, {}).get(key)
        if entry is None:
            raise ConvertError(f"{self._path / listed.file}: {key}, which {MANIFEST_NAME} lists, is missing")
        if (entry.dtype, entry.shape) != (listed.dtype, listed.shape):
            there, right = (f"{each.dtype} {list(each.shape)}" for each in (entry, listed))
            raise ConvertError(f"{self._path / listed.file}: {key} is {there}, {MANIFEST_NAME} lists {right}")
        return entry

    def _objects(self) -> Mapping[str, object]:
        data, where = self._data[OBJECTS_NAME], self._path / OBJECTS_NAME
        if checksum(data) != self.manifest.files[OBJECTS_NAME].checksum:
            raise ConvertError(f"{where}: corrupt: its bytes do not match their checksum")
        try:
            value = objects.decode(data.data)
        except CorruptError as error:
            raise ConvertError(f"{where}: {error}") from None
        if not isinstance(value, dict):
            raise ConvertError(f"{where}: holds {with_article(type(value).__name__)}, not a mapping")
        return value


def _read_manifest(path: Path) -> UniversalManifest:
    where = path / MANIFEST_NAME
    if path.name.endswith(PARTIAL):
        raise ConvertError(f"{path}: was never completed; repeat the command that writes it, or remove it")
    if path.is_dir() and not where.exists():
        raise ConvertError(f"{where}: is missing: {path} is not a universal checkpoint, or incomplete")
    with explained(where):
        return UniversalManifest.decode(where.read_bytes(), str(where))


class UniversalWriter(Writer):
    """Writes a universal checkpoint at ``path``. Derived weights of the source are cast and stored.

    ``weights=False``: they are not stored but listed as derived in the manifest.
    """

    def __init__(self, path: Path, max_file_bytes: int = MAX_FILE_BYTES, weights: bool = True) -> None:
        self.destination = Destination(path)
        self._max_file_bytes = max_file_bytes
        self._weights = weights

    def plan(self, catalog: Catalog, tensors: Sequence[Tensor]) -> list[Unit]:
        wanted = with_derived(catalog, tensors) if self._weights else tensors
        return units_of("tensors", wanted, self._max_file_bytes)

    def memory(self, unit: Unit) -> int:
        return strip_memory(unit)

    def write(self, unit: Unit, get: Get) -> None:
        with self.destination.file(unit.name) as file:
            write_unit(self.begin_file(unit, file), unit, get)

    @staticmethod
    def begin_file(unit: Unit, file: BinaryIO) -> TensorFile:
        """Start the file of a unit; its tensors follow in the order of its parts."""
        names = {part.tensor.key: part.tensor for part in unit.parts}
        return TensorFile(file, names, {"format": FORMAT, "version": str(VERSION)}, checksums=True)

    def finish(self, catalog: Catalog, units: Sequence[Unit]) -> None:
        tensors: dict[str, TensorEntry] = {}
        files: dict[str, FileEntry] = {}
        for unit in units:
            entries, files[unit.name] = _entries_of(self.destination.partial / unit.name, unit)
            tensors.update(entries)
        try:
            encoded = objects.encode(dict(catalog.objects))
        except FtckptError as error:
            raise ConvertError(f"{OBJECTS_NAME}: {error}") from None
        with self.destination.file(OBJECTS_NAME) as file:
            file.write(encoded)
        files[OBJECTS_NAME] = FileEntry(len(encoded), xxhash.xxh3_64_hexdigest(encoded))
        # A stored cast is an ordinary tensor.
        derived = {key: dtype for key, dtype in catalog.derived.items() if key not in tensors}
        manifest = UniversalManifest(
            catalog.iteration, catalog.origin, catalog.layout, tensors, files, catalog.padded & set(tensors), derived
        )
        # Last of all files: a directory without it is no checkpoint.
        with self.destination.file(MANIFEST_NAME) as file:
            file.write(manifest.encode())
        self.destination.commit()


def _entries_of(path: Path, unit: Unit) -> tuple[dict[str, TensorEntry], FileEntry]:
    """The manifest's entries for a finished file; the file may be of an earlier attempt, so its header is checked."""
    data = map_file(path)
    entries, metadata = parse_header(data, str(path))
    # From the file's metadata: the tensors are not read again.
    hashes = json.loads(metadata.get(CHECKSUMS, "{}"))
    right = {part.tensor.key: (part.tensor.dtype, part.tensor.shape) for part in unit.parts}
    if {key: entry[:2] for key, entry in entries.items()} != right or set(hashes) != set(right):
        raise ConvertError(f"{path}: does not hold the planned tensors; remove it and start again")
    tensors = {key: TensorEntry(dtype, shape, path.name, hashes[key]) for key, (dtype, shape) in right.items()}
    return tensors, FileEntry(len(data))
