"""Records of what ftckpt has made for others to load: kept on its own side, beside the snapshots.

A record names an export exactly: its directory, each file with its size, and one checksum. Nothing that no record
names is ever written over, moved or removed, and neither is an export that is not as it was made: somebody has put
something into it, taken something out, or put something else in its place.
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
"""Of each file that the checksum covers: all of the small ones that describe an export."""


@dataclass(frozen=True)
class ExportRecord:
    """The export of ``snapshot``: the directory ``name`` with ``files`` by their paths in it, and their sizes.

    Without a name it has only been begun. ``is_going``: its removal has begun, so that files of it may be missing.
    """

    snapshot: SnapshotId
    name: str = ""
    files: Mapping[str, int] = field(default_factory=dict)
    checksum: str = ""
    is_going: bool = False

    @classmethod
    def of(cls, snapshot: SnapshotId, name: str, path: Path) -> ExportRecord:
        """Of what was made at ``path``, which is to have this ``name``. Raises OSError."""
        files = _files(path) or {}
        return cls(snapshot, name, files, _checksum(path, files))

    def lies_at(self, path: Path) -> bool:
        """Whether ``path`` has the files of this export, with their sizes, and nothing else. Raises OSError."""
        return bool(self.files) and not self.is_going and _files(path) == self.files

    def is_at(self, path: Path) -> bool:
        """Whether ``path`` is this export, as it was made. Raises OSError."""
        return self.lies_at(path) and _checksum(path, self.files) == self.checksum

    def remove_from(self, path: Path) -> None:
        """Remove the files of this export from ``path``, and the directories that are empty then. Raises OSError."""
        # The small files at the top go first: without them no program takes the rest for a checkpoint.
        for name in sorted(self.files, key=lambda name: (name.count("/"), self.files[name])):
            if not _leads_through_link(path, name):
                with suppress(FileNotFoundError):
                    if _size(path / name) == self.files[name]:
                        (path / name).unlink()
        folders = {str(parent) for name in self.files for parent in Path(name).parents}
        for folder in sorted(folders, key=len, reverse=True):
            if not _leads_through_link(path, folder):
                with suppress(OSError):  # somebody has put something there
                    (path / folder).rmdir()


class PointerRecord(NamedTuple):
    """What the run ``owner`` has written last into the file that names the newest export, and what stood there
    before: a kill may have come between."""

    owner: str = ""
    texts: tuple[str, ...] = ()


class ExportRecords:
    """The records on ``storage``, where the snapshots lie. Every method raises StorageError where storage fails."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def all(self) -> dict[SnapshotId, ExportRecord]:
        """By snapshot; what is none of ours is left out."""
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
        """Write a record in place of any of the same snapshot."""
        value = {name: item for name, item in vars(record).items() if name != "snapshot"}
        self._storage.put(f"{FOLDER}/{record.snapshot}", json.dumps(value).encode())

    def forget(self, snapshot: SnapshotId) -> None:
        """What there is of it is no more ftckpt's."""
        self._storage.remove([f"{FOLDER}/{snapshot}"])

    def remove(self, record: ExportRecord, root: Path) -> None:
        """Remove an export from ``root``, and then its record. Raises OSError."""
        self.keep(replace(record, is_going=True))
        record.remove_from(root / record.name)
        self.forget(record.snapshot)

    def pointer(self, name: str) -> PointerRecord:
        """What was written into the file ``name`` beside the exports."""
        if self._storage.size(f"{FOLDER}/{name}") is None:
            return PointerRecord()
        with suppress(KeyError, TypeError, ValueError):
            value = json.loads(self._storage.read(f"{FOLDER}/{name}"))
            return PointerRecord(str(value["owner"]), tuple(map(str, value["texts"])))
        return PointerRecord()

    def keep_pointer(self, name: str, record: PointerRecord) -> None:
        """To be called before the file is written."""
        self._storage.put(f"{FOLDER}/{name}", json.dumps(record._asdict()).encode())


def _files(path: Path) -> dict[str, int] | None:
    """The files below a directory, with their sizes; None where that is no directory, or has anything else in it than
    files and the directories that they lie in."""
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
    """Of a plain file; None of anything else."""
    status = path.lstat()
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _leads_through_link(root: Path, name: str) -> bool:
    parts = [root, *(root / parent for parent in Path(name).parents), root / name]
    return any(part.is_symlink() for part in parts)


def _checksum(path: Path, files: Mapping[str, int]) -> str:
    """Over the names and sizes of ``files``, and the beginning of each."""
    digest = xxhash.xxh3_64()
    for name, nbytes in sorted(files.items()):
        digest.update(f"{name}\0{nbytes}\0".encode())
        digest.update(_head(path / name))
    return digest.hexdigest()


def _head(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(_HEAD_BYTES)
