"""The paths of snapshots and exports on storage.

Without an export format, snapshots are at the place that the user names. With one, exports are there, as the format
requires, and snapshots, which restarts read, in a folder in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ftckpt.persist.commit import LATEST_NAME, MANIFEST_NAME, OWNER_NAME, iteration_of
from ftckpt.persist.shards import FORMAT
from ftckpt.persist_setting import PERSIST_FORMATS

SNAPSHOT = PERSIST_FORMATS[0]
FOLDER = "ftckpt"


class ExportPlace(NamedTuple):
    """The directory ``root`` of exports in ``form``, a format of ``ftckpt convert``."""

    root: str
    form: str


class Place(NamedTuple):
    """The path or URL of ``snapshots``, and the place of their ``exports``, if any."""

    snapshots: str = ""
    exports: ExportPlace | None = None

    @classmethod
    def of(cls, persist: str, form: str) -> Place:
        """The place named by the settings ``persist`` and ``persist_format``."""
        if not persist or form == SNAPSHOT:
            return cls(persist)
        return cls(f"{persist}/{FOLDER}", ExportPlace(persist, form))


class SnapshotLocation(NamedTuple):
    """The storage of snapshots at a place that a user names; ``iteration``, if the place is a single checkpoint."""

    where: str
    iteration: int | None = None


def locate(where: str) -> SnapshotLocation:
    """Finds the snapshots of ``where``: in it, in its folder next to exports, or as the folder of a checkpoint."""
    if "://" in where:
        return SnapshotLocation(where)
    path = Path(where)
    # LATEST_NAME: ``ftckpt save`` writes no OWNER_NAME.
    if any((path / FOLDER / name).is_file() for name in (OWNER_NAME, LATEST_NAME)):
        return SnapshotLocation(str(path / FOLDER))
    iteration = iteration_of(path.absolute().name)
    if iteration is not None and is_manifest(path / MANIFEST_NAME):
        return SnapshotLocation(str(path.absolute().parent), iteration)
    return SnapshotLocation(where)


def is_manifest(path: Path) -> bool:
    """Whether a file is the manifest of a checkpoint."""
    try:
        with open(path, "rb") as file:
            return f'"{FORMAT}"'.encode() in file.read(256)
    except OSError:
        return False
