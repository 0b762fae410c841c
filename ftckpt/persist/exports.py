"""Exports: checkpoints in the formats of other programs, published atomically.

An export is written to a work directory next to the snapshots and published by one rename; then the file that names
the newest is updated. In the users' directory only exports with a record (``export_record``) are ftckpt's: all other
files stay, and are an error only if they have the name of an export.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ftckpt.errors import StorageError
from ftckpt.events import log
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist.commit import OWNER_NAME, folder_of
from ftckpt.persist.export_record import ExportRecord, ExportRecords, PointerRecord
from ftckpt.persist.files import FileStorage, sync_directory
from ftckpt.persist.objects import require_obstore
from ftckpt.persist.paths import Place

WORK_NAME = "converting"
_NUMBER = re.compile(r"(\d+)\D*$")
_OTHERS = "zero_to_fp32.py"
"""A file that DeepSpeed writes next to its checkpoints."""


class _Form(NamedTuple):
    """The directory layout of a format. ``pointer``: the file that names the newest. ``is_inside``: the converter's
    output contains the checkpoint as a subdirectory, otherwise it is the checkpoint. ``text``: the pointer's content.
    """

    pointer: str
    is_inside: bool
    text: str


_FORMS = {
    "universal": _Form("latest", False, "iter_{:07d}\n"),
    "megatron-dist": _Form("latest_checkpointed_iteration.txt", True, "{}"),
    "deepspeed-universal": _Form("latest_universal", True, "global_step{}"),
    "safetensors": _Form("latest", False, "iter_{:07d}\n"),
    "huggingface": _Form("latest", False, "iter_{:07d}\n"),
}


class PendingExport(NamedTuple):
    """An export in progress: ``ftckpt convert`` writes it to ``path``."""

    snapshot: SnapshotId
    path: Path


class Exports:
    """The exports at ``place`` of the snapshots there, by the run ``owner``.

    Every method raises StorageError if the file system fails.
    """

    def __init__(self, place: Place, owner: str = "") -> None:
        assert place.exports is not None
        self._form = _FORMS[place.exports.form]
        self._root, self._work = Path(place.exports.root), Path(place.snapshots) / WORK_NAME
        self._records = ExportRecords(FileStorage(place.snapshots))
        self._owner = owner

    @property
    def umask(self) -> int:
        """The umask for exports: they get the permissions of their directory, unlike other files of an SMP."""
        with explained(self._root):
            return 0o777 & ~self._root.stat().st_mode

    @property
    def snapshots(self) -> Collection[SnapshotId]:
        """The snapshots with a record, whether or not their export exists."""
        return self._records.all().keys()

    def find(self) -> dict[SnapshotId, Path]:
        """The exports whose files all exist, by snapshot."""
        with explained(self._root):
            made = {snapshot: (one, self._root / one.name) for snapshot, one in self._records.all().items()}
            return {snapshot: path for snapshot, (one, path) in made.items() if one.lies_at(path)}

    def complete(self, snapshot: SnapshotId) -> bool:
        """Whether ``snapshot`` has an export; if so, names it as the newest in case a kill prevented that."""
        if snapshot not in self.find():
            return False
        self._name(snapshot.iteration)
        return True

    @contextmanager
    def making(self, snapshot: SnapshotId) -> Iterator[PendingExport]:
        """A work directory for an export of ``snapshot``. It is removed at the end, and those of killed exports at
        the start."""
        own = self._work_of(snapshot)
        with explained(self._work):
            for left in self.snapshots:
                _remove_tree(self._work_of(left))
            self._records.keep(ExportRecord(snapshot))  # first: after a kill it identifies the work directory
            own.mkdir(parents=True)
        try:
            yield PendingExport(snapshot, own / "made")
        finally:
            with suppress(StorageError, OSError):  # the next export removes it
                _remove_tree(own)
                self._leave_work()
                if not self._records.all()[snapshot].name:
                    self._records.forget(snapshot)

    def publish(self, made: PendingExport) -> Path:
        """Renames the export to its final name, then names it as the newest, unless this run has a newer one.

        Raises:
            StorageError: a file or directory of that name, or the file naming the newest, is not ftckpt's.
        """
        snapshot, path = made.snapshot, made.path
        self._require_own_pointer()
        with explained(path):
            if self._form.is_inside:
                (path,) = [entry for entry in path.iterdir() if entry.is_dir()]
            name = path.name if self._form.is_inside else folder_of(snapshot.iteration)
            record = ExportRecord.of(snapshot, name, path)
            self._make_room(record)
            self._records.keep(record)
            path.rename(self._root / name)
            sync_directory(self._root)
        self._name(snapshot.iteration)
        return self._root / name

    def retain(self, snapshots: Collection[SnapshotId]) -> list[int]:
        """Removes exports of all but ``snapshots``; returns their iterations. A changed export stays, and its record
        is dropped, so that it is no longer ftckpt's."""
        gone, removed = [one for one in self._records.all().values() if one.snapshot not in snapshots], list[int]()
        self._point_away_from([one.snapshot for one in gone])
        with explained(self._root):
            for one in gone:
                path = self._root / one.name
                if one.is_going or one.is_at(path):
                    self._records.remove(one, self._root)
                    removed.append(one.snapshot.iteration)
                else:
                    self._records.forget(one.snapshot)
                    if one.name and os.path.lexists(path):
                        log.warning("ftckpt: %s stays: it has changed since the export; remove it yourself", path)
        return sorted(removed)

    def foreign_pointer(self) -> Path | None:
        """A file that shows that another program saves checkpoints there, if any."""
        for name in sorted({form.pointer for form in _FORMS.values()}):
            if self._is_foreign(name):
                return self._root / name
        others = self._root / _OTHERS
        return others if os.path.lexists(others) else None

    def _is_foreign(self, pointer: str) -> bool:
        """Whether a file ``pointer`` exists that ftckpt has not written."""
        is_there = os.path.lexists(self._root / pointer)
        return is_there and self._text(pointer) not in self._records.pointer(pointer).texts

    def _make_room(self, new: ExportRecord) -> None:
        """Removes an export of another branch that has the name of ``new``. Raises StorageError for other files."""
        final = self._root / new.name
        if not os.path.lexists(final):
            return
        old = next((one for one in self._records.all().values() if one.name == new.name), None)
        if old is not None and (old.is_going or old.is_at(final)):
            self._point_away_from([old.snapshot])
            self._records.remove(old, self._root)
        if os.path.lexists(final):
            text = "was not made by ftckpt, or has changed since: move it away"
            raise StorageError(f"{final} {text}", lasting=True)

    def _name(self, iteration: int) -> None:
        # The export that an earlier run has named may be of an abandoned branch.
        if self._named() < iteration or self._records.pointer(self._form.pointer).owner != self._owner:
            self._point_to(iteration)

    def _point_to(self, iteration: int) -> None:
        self._require_own_pointer()
        name, now = self._form.pointer, self._text(self._form.pointer)
        text = self._form.text.format(iteration)
        texts = tuple(dict.fromkeys([text, *([now] if now is not None else [])]))
        self._records.keep_pointer(name, PointerRecord(self._owner, texts))
        # Written next to the snapshots: a kill leaves nothing in the users' directory.
        fresh = self._work / name
        with explained(fresh):
            self._work.mkdir(exist_ok=True)
            with open(fresh, "wb") as file:
                file.write(text.encode())
                os.fchmod(file.fileno(), 0o666 & ~self.umask)
                file.flush()
                os.fsync(file.fileno())
            fresh.rename(self._root / name)
            sync_directory(self._root)
        self._leave_work()

    def _point_away_from(self, snapshots: Collection[SnapshotId]) -> None:
        """If the pointer names one of ``snapshots``, makes it name the newest other export, if any."""
        others = [snapshot.iteration for snapshot in self.find() if snapshot not in snapshots]
        if others and self._named() in [snapshot.iteration for snapshot in snapshots]:
            self._point_to(max(others))

    def _require_own_pointer(self) -> None:
        if self._is_foreign(self._form.pointer):
            raise StorageError(_taken(self._root / self._form.pointer), lasting=True)

    def _named(self) -> int:
        """The iteration that the pointer names; -1 if ftckpt has not written it."""
        text = self._text(self._form.pointer)
        if text is None or text not in self._records.pointer(self._form.pointer).texts:
            return -1
        found = _NUMBER.search(text)
        return int(found[1]) if found is not None else -1

    def _text(self, name: str) -> str | None:
        """The content of a regular file next to the exports; None if there is none."""
        path = self._root / name
        with explained(path):
            if path.is_symlink() or not path.is_file():
                return None
            return path.read_bytes().decode(errors="replace")

    def _work_of(self, snapshot: SnapshotId) -> Path:
        return self._work / f"{folder_of(snapshot.iteration)}-{snapshot.lineage.hex()}"

    def _leave_work(self) -> None:
        with suppress(OSError):  # another export is in progress
            self._work.rmdir()


def prepare(place: Place) -> bool:
    """Checks the job's storage before it trains, and creates the directory if its parent exists; whether it was
    created. Any number of processes may call it concurrently.

    Raises:
        StorageError: the place is missing, not writable, or another program's; or a package is not installed.
    """
    where = place.exports.root if place.exports is not None else place.snapshots
    if not where:
        return False
    if "://" in where:
        require_obstore(where)
        return False
    is_new = _make(Path(where))
    root = FileStorage(where)
    if place.exports is None:
        return is_new
    if root.size(OWNER_NAME) is not None:
        text = (
            f"{root.where}: --ftckpt-persist-format: has snapshots from a run without it; move them to "
            f"{place.snapshots}, or name another place"
        )
        raise StorageError(text, lasting=True)
    with explained(Path(place.snapshots)):
        Path(place.snapshots).mkdir(exist_ok=True)
    if (foreign := Exports(place).foreign_pointer()) is not None:
        raise StorageError(_taken(foreign), lasting=True)
    return is_new


def _make(path: Path) -> bool:
    if path.exists():
        return False
    try:
        path.mkdir()
    except FileExistsError:  # created by another rank; a dangling link is reported by FileStorage
        return False
    except FileNotFoundError:
        text = (
            f"{path}: does not exist, and neither does {path.parent}: a wrong path, or storage is not mounted; "
            "mount it, or create the directory with mkdir -p on storage that all nodes share"
        )
        raise StorageError(text, lasting=True) from None
    except OSError as error:
        text = f"{path}: does not exist and cannot be created: {error.strerror}; name another directory"
        raise StorageError(text, lasting=True) from None
    return True


def _taken(pointer: Path) -> str:
    return (
        f"{pointer} was not written by ftckpt: another program saves there; --ftckpt-persist-format needs a "
        f"directory of its own: name another with --ftckpt-persist, such as {pointer.with_name('exports')}"
    )


def _remove_tree(path: Path) -> None:
    """Removes a directory, unless ``path`` is a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Converts OSErrors to StorageErrors."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror} ({error.filename})") from None
