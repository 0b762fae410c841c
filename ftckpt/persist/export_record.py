"""Records of the exports that ftckpt has written, stored with the snapshots.

A record identifies an export exactly: its directory, each file with its size, and one checksum. Files that no record
names are never overwritten, moved or removed, and neither is an export that has changed since it was written.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist.storage import Storage

FOLDER = "made"
_HEAD_BYTES = 4096
"""The checksum covers so many first bytes of each file, so all of the small files that describe an export."""


@dataclass(frozen=True)
class ExportRecord:
    """The export of ``snapshot``: the directory ``name`` with ``files`` by their paths in it, and their sizes.

    Without a name the export is being written. ``is_going``: it is being removed, and files may be missing.
    """

    snapshot: SnapshotId
    name: str = ""
    files: Mapping[str, int] = field(default_factory=dict)
    checksum: str = ""
    is_going: bool = False

    @classmethod
    def of(cls, snapshot: SnapshotId, name: str, path: Path) -> ExportRecord:
        """The record of an export written to ``path``, to be renamed to ``name``. Raises OSError."""
        files = _files(path) or {}
        return cls(snapshot, name, files, _checksum(path, files))

    def lies_at(self, path: Path) -> bool:
        """Whether ``path`` has the files of this export, with their sizes, and nothing else. Raises OSError."""
        return bool(self.files) and not self.is_going and _files(path) == self.files

    def is_at(self, path: Path) -> bool:
        """Whether ``path`` is this export, unchanged. Raises OSError."""
        return self.lies_at(path) and _checksum(path, self.files) == self.checksum

    def remove_from(self, path: Path) -> None:
        """Removes the files of this export from ``path``, and directories that are empty then. Raises OSError."""
        # Small files at the top first: without them no program takes the rest for a checkpoint.
        for name in sorted(self.files, key=lambda name: (name.count("/"), self.files[name])):
            if not _leads_through_link(path, name):
                with suppress(FileNotFoundError):
                    if _size(path / name) == self.files[name]:
                        (path / name).unlink()
        folders = {str(parent) for name in self.files for parent in Path(name).parents}
        for folder in sorted(folders, key=len, reverse=True):
            if not _leads_through_link(path, folder):
                with suppress(OSError):  # it has other files
                    (path / folder).rmdir()


class PointerRecord(NamedTuple):
    """The texts that the file naming the newest export may have: the one that the run ``owner`` writes, and the
    previous one, in case of a kill in between."""

    owner: str = ""
    texts: tuple[str, ...] = ()


class ExportRecords:
    """The records on ``storage``, that of the snapshots. Every method raises StorageError if storage fails."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def all(self) -> dict[SnapshotId, ExportRecord]:
        """All records by snapshot; other objects are skipped."""
        found = {}
        for entry in self._storage.list(FOLDER):
            with suppress(KeyError, TypeError, ValueError, AttributeError):
                snapshot = SnapshotId.parse(entry.name.removeprefix(f"{FOLDER}/"))
                value: dict[str, Any] = json.loads(self._storage.read(entry.name))
                files = {str(name): int(nbytes) for name, nbytes in value["files"].items()}
                name, checksum, is_going = str(value["name"]), str(value["checksum"]), bool(value["is_going"])
                found[snapshot] = ExportRecord(snapshot, name, files, checksum, is_going)
        return found

    def keep(self, record: ExportRecord) -> None:
        """Writes a record, replacing any of the same snapshot."""
        value = {name: item for name, item in vars(record).items() if name != "snapshot"}
        self._storage.put(f"{FOLDER}/{record.snapshot}", json.dumps(value).encode())

    def forget(self, snapshot: SnapshotId) -> None:
        """Removes a record: files of the export are no longer ftckpt's."""
        self._storage.remove([f"{FOLDER}/{snapshot}"])

    def remove(self, record: ExportRecord, root: Path) -> None:
        """Removes an export from ``root``, and then its record. Raises OSError."""
        self.keep(replace(record, is_going=True))
        record.remove_from(root / record.name)
        self.forget(record.snapshot)

    def pointer(self, name: str) -> PointerRecord:
        """The record of the file ``name`` next to the exports."""
        if self._storage.size(f"{FOLDER}/{name}") is None:
            return PointerRecord()
        with suppress(KeyError, TypeError, ValueError):
            value = json.loads(self._storage.read(f"{FOLDER}/{name}"))
            return PointerRecord(str(value["owner"]), tuple(map(str, value["texts"])))
        return PointerRecord()

    def keep_pointer(self, name: str, record: PointerRecord) -> None:
        """Writes the record of the file ``name``. To be called before the file is written."""
        self._storage.put(f"{FOLDER}/{name}", json.dumps({"owner": record.owner, "texts": record.texts}).encode())


def _files(path: Path) -> dict[str, int] | None:
    """The files below a directory with their sizes; None if ``path`` is not a directory, or contains anything but
    files and non-empty directories."""
    if path.is_symlink() or not path.is_dir():
        return None
    found: dict[str, int] = {}
    for directory, below, names in os.walk(path, onerror=_fail):
        for name in names:
            nbytes = _size(Path(directory, name))
            if nbytes is None:
                return None
            found[str(Path(directory, name).relative_to(path))] = nbytes
        if (not below and not names) or any(Path(directory, name).is_symlink() for name in below):
            return None
    return found


def _fail(error: OSError) -> None:
    raise error


def _size(path: Path) -> int | None:
    """The size of a regular file; None for anything else."""
    status = path.lstat()
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _leads_through_link(root: Path, name: str) -> bool:
    parts = [root, *(root / parent for parent in Path(name).parents), root / name]
    return any(part.is_symlink() for part in parts)


def _checksum(path: Path, files: Mapping[str, int]) -> str:
    """A checksum over names, sizes and first bytes of ``files``."""
    digest = xxhash.xxh3_64()
    for name, nbytes in sorted(files.items()):
        digest.update(f"{name}\0{nbytes}\0".encode())
        digest.update(_head(path / name))
    return digest.hexdigest()


def _head(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(_HEAD_BYTES)
