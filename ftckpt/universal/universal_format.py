"""The manifest, reader and writer of the universal format, which ``FORMAT.md`` specifies."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError, CorruptError, FtckptError
from ftckpt.model import codec, objects
from ftckpt.model.fragment import DTYPE_BYTES, Shape
from ftckpt.model.text import with_article
from ftckpt.universal.catalog import Catalog, FileReader, FragmentPlace, Tensor, Unit, whole_fragment
from ftckpt.universal.consolidation import with_derived
from ftckpt.universal.safetensors import (
    CHECKSUMS,
    SUFFIX,
    HeaderEntry,
    SafetensorsWriter,
    checksum,
    parse_header,
    units_of,
)
from ftckpt.universal.storage import PARTIAL, CheckedOnce, explained, map_file

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


class UniversalReader(FileReader):
    """Reads the checkpoint in the directory ``path``; each tensor is verified when it is first read.

    The catalog has one fragment per tensor, all of it.
    """

    def __init__(self, path: Path) -> None:
        self.manifest = manifest = _read_manifest(path)
        data = {name: _open(path / name, file.nbytes) for name, file in manifest.files.items()}
        headers = {name: _header(path / name, data[name], manifest) for name in data if name.endswith(SUFFIX)}
        checked = CheckedOnce[str]()
        stored = []
        for key, entry in manifest.tensors.items():
            begin, end = _place(path / entry.file, key, entry, headers.get(entry.file, {}))
            read = partial(_verified, checked, f"{path / entry.file}: {key}", entry, data[entry.file][begin:end])
            fragment = whole_fragment(key, entry.dtype, entry.shape)
            stored.append(FragmentPlace(fragment, path / entry.file, read, key in manifest.padded))
        objects = _objects(data[OBJECTS_NAME], path / OBJECTS_NAME, manifest.files[OBJECTS_NAME].checksum)
        super().__init__(
            path,
            stored,
            [path / MANIFEST_NAME],
            origin="universal",
            iteration=manifest.iteration,
            layout=manifest.layout,
            objects=objects,
            derived=manifest.derived,
        )

    def fingerprint(self) -> str:
        """The checksum of the manifest, which has those of all tensors."""
        return checksum(map_file(self._path / MANIFEST_NAME))


def _verified(checked: CheckedOnce[str], where: str, entry: TensorEntry, data: Bytes) -> Bytes:
    def compare() -> None:
        if checksum(data) != entry.checksum:
            raise ConvertError(f"{where} is corrupt: its bytes do not match their checksum")

    checked.check(where, compare)
    return data


def _open(path: Path, nbytes: int) -> Bytes:
    data = map_file(path)
    if len(data) != nbytes:
        raise ConvertError(f"{path}: has {len(data)} bytes, {MANIFEST_NAME} lists {nbytes}")
    return data


def _header(path: Path, data: Bytes, manifest: UniversalManifest) -> dict[str, HeaderEntry]:
    entries, _ = parse_header(data, str(path))
    unknown = sorted(entries.keys() - manifest.tensors.keys())
    if unknown:
        raise ConvertError(f"{path}: {unknown[0]} is not in {MANIFEST_NAME}")
    return entries


def _place(path: Path, key: str, listed: TensorEntry, entries: Mapping[str, HeaderEntry]) -> tuple[int, int]:
    """The range of a tensor's bytes in its file."""
    entry = entries.get(key)
    if entry is None:
        raise ConvertError(f"{path}: {key}, which {MANIFEST_NAME} lists, is missing")
    if (entry.dtype, entry.shape) != (listed.dtype, listed.shape):
        there, right = (f"{each.dtype} {list(each.shape)}" for each in (entry, listed))
        raise ConvertError(f"{path}: {key} is {there}, {MANIFEST_NAME} lists {right}")
    return entry.begin, entry.end


def _objects(data: Bytes, where: Path, right: str) -> Mapping[str, object]:
    if checksum(data) != right:
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


class UniversalWriter(SafetensorsWriter):
    """Writes a universal checkpoint. Derived weights of the source are cast and stored."""

    metadata: Mapping[str, str] = {"format": FORMAT, "version": str(VERSION)}
    checksums = True

    def plan(self, catalog: Catalog, tensors: Sequence[Tensor]) -> list[Unit]:
        return units_of("tensors", with_derived(catalog, tensors), self._max_file_bytes)

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
