"""Where snapshots lie on storage, and where what others load is made of them.

Without a format of others they lie where the user says. With one that place is theirs: what they load lies there as
they write it, and the snapshots, which a restart under ftckpt reads, in a folder in it.
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
    """The directory ``root`` in which snapshots lie in ``form``, a format of ``ftckpt convert``."""

    root: str
    form: str


class Place(NamedTuple):
    """Where ``snapshots`` lie, and the ``exports`` that are made of them, if any are."""

    snapshots: str = ""
    exports: ExportPlace | None = None

    @classmethod
    def of(cls, persist: str, form: str) -> Place:
        """What the settings ``persist`` and ``persist_format`` say."""
        if not persist or form == SNAPSHOT:
            return cls(persist)
        return cls(f"{persist}/{FOLDER}", ExportPlace(persist, form))


class SnapshotLocation(NamedTuple):
    """Where snapshots lie at a place that a user has named, and the ``iteration`` of the one that it is itself."""

    where: str
    iteration: int | None = None


def locate(where: str) -> SnapshotLocation:
    """Snapshots at ``where``: there, in their folder beside what others load, or one that is named by its folder."""
    if "://" in where:
        return SnapshotLocation(where)
    path = Path(where)
    # Of a job, or of ``ftckpt save``, which claims nothing.
    if any((path / FOLDER / name).is_file() for name in (OWNER_NAME, LATEST_NAME)):
        return SnapshotLocation(str(path / FOLDER))
    iteration = iteration_of(path.absolute().name)
    if iteration is not None and is_manifest(path / MANIFEST_NAME):
        return SnapshotLocation(str(path.absolute().parent), iteration)
    return SnapshotLocation(where)


def is_manifest(path: Path) -> bool:
    """Whether a file is the manifest of a snapshot on storage."""
    try:
        with open(path, "rb") as file:
            return f'"{FORMAT}"'.encode() in file.read(256)
    except OSError:
        return False
