"""Exports in the place of DeepSpeed's saving: of those snapshots alone that ``save_checkpoint`` was called for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path

from ftckpt.errors import StorageError
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist.exports import MARK_NAME, Exports, Unpublished, explained
from ftckpt.persist.files import FileStorage, sync_directory
from ftckpt.persist.outlines import POINTER, Outline, SaveMark
from ftckpt.persist.place import ExportPlace


class OutlinedExports(Exports):
    """The exports at ``place``. Each has the name that the script gave it, and takes the place of what has it; what
    the script has saved by other means since keeps its place: see ``outlines.supersede``."""

    def __init__(self, place: ExportPlace, snapshots: str) -> None:
        super().__init__(place, snapshots)
        self._snapshots = snapshots

    def options(self, snapshot: SnapshotId) -> list[str]:
        return ["--outline", str(Outline(self._snapshots, snapshot).path)]

    def complete(self, snapshot: SnapshotId) -> bool:
        outline = Outline(self._snapshots, snapshot)
        outline.put_back()  # a kill came between two renames
        mark = outline.mark
        if mark is not None and _snapshot_of(self._root / mark.tag) == snapshot:
            self._settle(outline, mark)  # a kill came before that
            return True
        return mark is None

    def publish(self, made: Unpublished) -> Path:
        outline = Outline(self._snapshots, made.snapshot)
        with explained(made.path):
            mark = outline.mark
            if mark is None:
                raise StorageError(f"{outline.path}: the script has saved in its place since", lasting=True)
            path, final = made.path / mark.tag, self._root / mark.tag
            FileStorage(str(path)).put(MARK_NAME, json.dumps({"snapshot": str(made.snapshot)}).encode())
            self._open(path / MARK_NAME)
            if final.exists():
                shutil.rmtree(outline.replaced, ignore_errors=True)
                final.rename(outline.replaced)
            path.rename(final)
            # What DeepSpeed leaves beside: the scripts that make weights of it.
            for beside in (file for file in made.path.iterdir() if file.name != POINTER):
                beside.rename(self._root / beside.name)
            sync_directory(self._root)
        self._settle(outline, mark)
        return final

    def retain(self, snapshots: Collection[SnapshotId]) -> list[int]:
        return []

    def _settle(self, outline: Outline, mark: SaveMark) -> None:
        """It is in its place: name it as the newest, where that was wanted and is still so."""
        with explained(outline.path):
            if mark.newest and (outline.files / POINTER).is_file():
                self._storage.put(POINTER, mark.tag.encode())
                self._open(self._root / POINTER)
            outline.remove()


def _snapshot_of(path: Path) -> SnapshotId | None:
    try:
        return SnapshotId.parse(json.loads((path / MARK_NAME).read_bytes())["snapshot"])
    except (OSError, KeyError, TypeError, ValueError):
        return None
