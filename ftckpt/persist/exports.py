"""Snapshots in a format that others load, as directories: whole or not there, and what names the newest moved last.

An export is made in a directory of its own beside the snapshots, and gets its name by one rename. A file in it says
of which snapshot it is: what has none is of another program.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ftckpt.errors import StorageError
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist.commit import OWNER_NAME, folder_of
from ftckpt.persist.files import FileStorage, sync_directory
from ftckpt.persist.place import ExportPlace

MARK_NAME = "ftckpt.json"
"""In each export: its snapshot."""
WORK_NAME = "converting"
_NUMBER = re.compile(r"(\d+)\D*$")


class _Form(NamedTuple):
    """How a format lies: the file that names the newest, whether what is converted has it, and a directory beside
    it that is the checkpoint, or is the checkpoint itself; and how the file names an iteration."""

    pointer: str
    is_inside: bool
    text: str


_FORMS = {
    "universal": _Form("latest", False, "iter_{:07d}\n"),
    "megatron-dist": _Form("latest_checkpointed_iteration.txt", True, "{}"),
    "deepspeed-universal": _Form("latest_universal", True, "global_step{}"),
}


class Unpublished(NamedTuple):
    """An export that is being made: ``ftckpt convert`` writes it to ``path``."""

    snapshot: SnapshotId
    path: Path


class Exports:
    """The exports at ``place``, made of the snapshots in the directory ``snapshots`` of the same file system.

    Every method raises StorageError where the file system fails.
    """

    def __init__(self, place: ExportPlace, snapshots: str) -> None:
        self._form = _FORMS[place.form]
        self._root, self._work = Path(place.root), Path(snapshots) / WORK_NAME
        self._storage = FileStorage(place.root)

    @property
    def umask(self) -> int:
        """For what is written: it is as open to others as the directory that it comes to, whatever an SMP writes."""
        with explained(self._root):
            return 0o777 & ~self._root.stat().st_mode

    def find(self) -> dict[SnapshotId, Path]:
        """All that are there."""
        found = {}
        with explained(self._root):
            for mark in self._root.glob(f"*/{MARK_NAME}"):
                with suppress(KeyError, TypeError, ValueError):  # of another program, then
                    found[SnapshotId.parse(json.loads(mark.read_bytes())["snapshot"])] = mark.parent
        return found

    def complete(self, snapshot: SnapshotId) -> bool:
        """Whether there is nothing to be made: of ``snapshot`` there is an export, which is named now where a kill
        came before that."""
        if snapshot not in self.find():
            return False
        self._name(snapshot.iteration)
        return True

    @contextmanager
    def making(self, snapshot: SnapshotId) -> Iterator[Unpublished]:
        """An export of ``snapshot`` to be made. What of it is not published goes at the end, and what others have
        left that were killed, at once."""
        own = self._work / f"{folder_of(snapshot.iteration)}-{snapshot.lineage.hex()}"
        with explained(self._root):
            shutil.rmtree(self._work, ignore_errors=True)
            for left in self._root.glob(f".{self._form.pointer}-*"):
                left.unlink()
            own.mkdir(parents=True)
        try:
            yield Unpublished(snapshot, own / "made")
        finally:
            shutil.rmtree(own, ignore_errors=True)
            self._leave_work()

    def publish(self, made: Unpublished) -> Path:
        """Give it its name, then name it as the newest, unless in this run there is a newer one already.

        Raises:
            StorageError: what has its name is of another program.
        """
        iteration, path = made.snapshot.iteration, made.path
        with explained(path):
            if self._form.is_inside:
                (path,) = [entry for entry in path.iterdir() if entry.is_dir()]
            FileStorage(str(path)).put(MARK_NAME, json.dumps({"snapshot": str(made.snapshot)}).encode())
            self._open(path / MARK_NAME)
            final = self._root / (path.name if self._form.is_inside else folder_of(iteration))
            if os.path.lexists(final):
                self._displace(final, made)
            path.rename(final)
            sync_directory(self._root)
        self._name(iteration)
        return final

    def retain(self, snapshots: Collection[SnapshotId]) -> list[int]:
        """Remove those of other snapshots, which are gone, or of a past that the job has left; returns their
        iterations."""
        gone = {snapshot: path for snapshot, path in self.find().items() if snapshot not in snapshots}
        self._point_away_from([snapshot.iteration for snapshot in gone])
        with explained(self._root):
            for path in gone.values():
                aside = self._work / f"removed-{path.name}"
                aside.parent.mkdir(exist_ok=True)
                path.rename(aside)  # from here on it is none
                shutil.rmtree(aside)
        self._leave_work()
        return sorted(snapshot.iteration for snapshot in gone)

    def _displace(self, final: Path, made: Unpublished) -> None:
        """Make room where a history that the job has left had the same iteration."""
        if not (final / MARK_NAME).is_file():
            raise StorageError(f"{final}: is of another program, and stays as it is", lasting=True)
        self._point_away_from([made.snapshot.iteration])
        final.rename(made.path.with_name("replaced"))

    def _name(self, iteration: int) -> None:
        # One that an earlier run has named may be of a past that the job has left.
        if self._named() < iteration or not self._is_of_this_run(self._root / self._form.pointer):
            self._point_to(iteration)

    def _point_to(self, iteration: int) -> None:
        self._storage.put(self._form.pointer, self._form.text.format(iteration).encode())
        self._open(self._root / self._form.pointer)

    def _open(self, file: Path) -> None:
        # Behind the rename: until then nobody else looks for it.
        file.chmod(0o666 & ~self.umask)

    def _point_away_from(self, iterations: Collection[int]) -> None:
        """What is to go is not the one that a job would load, as far as there is another."""
        others = [snapshot.iteration for snapshot in self.find() if snapshot.iteration not in iterations]
        if others and self._named() in iterations:
            self._point_to(max(others))

    def _is_of_this_run(self, path: Path) -> bool:
        """Whether ``path`` was written since the run that writes here has claimed the place."""
        claim = self._work.with_name(OWNER_NAME)
        if not path.exists() or not claim.exists():
            return path.exists()
        return path.stat().st_mtime_ns >= claim.stat().st_mtime_ns

    def _leave_work(self) -> None:
        with suppress(OSError):  # another one is being made
            self._work.rmdir()

    def _named(self) -> int:
        """The iteration of the newest; -1 where none is named."""
        if self._storage.size(self._form.pointer) is None:
            return -1
        found = _NUMBER.search(self._storage.read(self._form.pointer).decode(errors="replace"))
        return int(found[1]) if found is not None else -1


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Errors of the system as StorageErrors."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror} ({error.filename})") from None
