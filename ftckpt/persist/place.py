"""Where snapshots lie on storage, and where what others load is made of them.

Without a format of others they lie where the user says. With one that place is theirs: what they load lies there as
they write it, and the snapshots, which a restart under ftckpt reads, in a folder in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ftckpt.persist.commit import LATEST_NAME, OWNER_NAME
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


def snapshots_at(where: str) -> str:
    """Where snapshots lie at a place that the user has named: there, or in their folder beside what others load."""
    folder = Path(where, FOLDER)
    # Of a job, or of ``ftckpt save``, which claims nothing.
    are_there = any((folder / name).is_file() for name in (OWNER_NAME, LATEST_NAME))
    return str(folder) if "://" not in where and are_there else where
