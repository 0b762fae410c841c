"""The manifest of a universal checkpoint: what lies in which file. Byte maps and rules: ``FORMAT.md``. No I/O."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from ftckpt.errors import ConvertError
from ftckpt.state.fragment import DTYPE_BYTES, Shape

FORMAT = "ftckpt-universal"
VERSION = 1
"""Raised whenever a reader of the previous version would misread a checkpoint."""

MANIFEST_NAME = "manifest.json"
OBJECTS_NAME = "objects.ftobj"
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_HASH = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Stored:
    """One consolidated tensor: in which file it lies, and xxh3-64 of its bytes as 16 hex digits."""

    dtype: str
    shape: Shape
    file: str
    checksum: str

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class StoredFile:
    """A file beside the manifest, its exact size in bytes, and, of the objects, xxh3-64 of all of it."""

    nbytes: int
    checksum: str = ""


@dataclass(frozen=True)
class UniversalManifest:
    """All that a reader must know; fields as in ``ftckpt.universal.catalog.Catalog``.

    ``layout`` and ``origin`` tell where the checkpoint came from: nothing of it depends on them. ``files`` are
    all files but the manifest.
    """

    iteration: int
    origin: str
    layout: Mapping[str, int | str | bool]
    tensors: Mapping[str, Stored]
    files: Mapping[str, StoredFile]
    padded: frozenset[str] = frozenset()
    derived: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """JSON for people: two blanks of indentation, ending in a line feed. Equal manifests give equal bytes."""
        value: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "iteration": self.iteration,
            "origin": self.origin,
            "layout": dict(self.layout),
            "objects": OBJECTS_NAME,
            "padded": sorted(self.padded),
            "derived": dict(sorted(self.derived.items())),
            "files": {name: _file_json(file) for name, file in sorted(self.files.items())},
            "tensors": {key: _tensor_json(stored) for key, stored in sorted(self.tensors.items())},
        }
        value["checksum"] = _checksum(value)
        return (json.dumps(value, indent=2) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes, where: str) -> UniversalManifest:
        """Inverse of ``encode``; ``where`` names the file in errors.

        Raises:
            ConvertError: not such a manifest, damaged, of another version, or one that contradicts itself.
        """
        try:
            value: dict[str, Any] = json.loads(data)
            if not isinstance(value, dict) or value.get("format") != FORMAT:
                raise ConvertError(f"{where}: is no manifest of a universal checkpoint: its format is not {FORMAT!r}")
            if value["version"] != VERSION:
                raise ConvertError(f"{where}: format version {value['version']!r}, this ftckpt reads {VERSION}")
            checksum = value.pop("checksum")
            if checksum != _checksum(value):
                raise ConvertError(f"{where}: damaged or edited: its checksum does not match")
            manifest = cls(
                iteration=int(value["iteration"]),
                origin=str(value["origin"]),
                layout=dict(value["layout"]),
                tensors={str(key): _tensor(entry) for key, entry in value["tensors"].items()},
                files={str(name): _file(str(name), entry) for name, entry in value["files"].items()},
                padded=frozenset(map(str, value["padded"])),
                derived={str(key): str(dtype) for key, dtype in value["derived"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise ConvertError(f"{where}: is no manifest of a universal checkpoint: {str(error)[:200]}") from None
        manifest._check(where)
        return manifest

    def _check(self, where: str) -> None:
        for key, stored in self.tensors.items():
            if stored.file not in self.files:
                raise ConvertError(f"{where}: {key} lies in {stored.file}, which is not among the files")
        if not self.files.get(OBJECTS_NAME, StoredFile(0)).checksum:
            raise ConvertError(f"{where}: {OBJECTS_NAME}, with its checksum, is not among the files")


def _tensor_json(stored: Stored) -> dict[str, Any]:
    return {
        "dtype": stored.dtype, "shape": list(stored.shape), "file": stored.file, "checksum": stored.checksum,
    }  # fmt: skip


def _file_json(file: StoredFile) -> dict[str, Any]:
    return {"bytes": file.nbytes, **({"checksum": file.checksum} if file.checksum else {})}


def _tensor(entry: Mapping[str, Any]) -> Stored:
    shape = tuple(int(size) for size in entry["shape"])
    if entry["dtype"] not in DTYPE_BYTES or min(shape, default=0) < 0:
        raise ValueError(f"type {entry['dtype']!r} of shape {shape}")
    return Stored(entry["dtype"], shape, str(entry["file"]), _hash(entry["checksum"]))


def _file(name: str, entry: Mapping[str, Any]) -> StoredFile:
    """Names are taken for what lies beside the manifest: none leads elsewhere."""
    if not _FILE.fullmatch(name) or name == MANIFEST_NAME:
        raise ValueError(f"{name!r} is no name of a file of it")
    nbytes = int(entry["bytes"])
    if nbytes < 0:
        raise ValueError(f"{name}: {nbytes} bytes")
    return StoredFile(nbytes, _hash(entry["checksum"]) if "checksum" in entry else "")


def _hash(value: Any) -> str:
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        raise ValueError(f"{value!r} is no checksum of 16 hex digits")
    return value


def _checksum(value: Mapping[str, Any]) -> str:
    """xxh3-64 of the JSON without the checksum: sorted keys, no blanks, ASCII."""
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())
