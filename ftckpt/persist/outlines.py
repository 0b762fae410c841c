"""What another program's own saving would write, as its files without their elements: outlines.

Ranks let that program write at once all but what their snapshot has, which costs the bytes of no weight. The files
have their full size, with holes; a table for each rank says which elements belong where. Whoever has the snapshot on
storage fills them in. Below ``outlines/SNAPSHOT``, beside the snapshots:

| name | what |
|---|---|
| ``files/`` | what the program has written, as it wanted to have it in its own directory |
| ``table-RANK.json`` | of the files of a rank, by their paths below ``files``: the holes |
| ``replaced/`` | what has the place of the save, while that changes |
| ``outline.json`` | written last, by one rank: how many ranks there are, and what became of the save since |

An outline is there until what it is for is in its place.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ftckpt.errors import StorageError
from ftckpt.model.fragment import Fragment
from ftckpt.model.snapshot import SnapshotId

FILES = "files"
POINTER = "latest"
"""The file in which DeepSpeed names the newest checkpoint of a directory."""
_FOLDER = "outlines"
_MARK = "outline.json"


class Hole(NamedTuple):
    """Where the elements of ``fragment`` belong: from byte ``begin`` of a file on."""

    begin: int
    fragment: Fragment

    @property
    def end(self) -> int:
        return self.begin + self.fragment.nbytes


Table = Mapping[str, Sequence[Hole]]
"""Holes of files, ascending, by paths below ``files``."""


@dataclass(frozen=True)
class SaveMark:
    """What is known of a save: its ``tag``, the number of ``ranks`` that have left a table, and ``newest``: whether
    nothing has been saved since that the pointer must go on naming."""

    tag: str
    ranks: int
    newest: bool = True


class Outline:
    """The outline of what would be saved with ``snapshot``; ``snapshots`` is the directory in which these lie.

    Every method raises OSError where the file system fails.
    """

    def __init__(self, snapshots: str, snapshot: SnapshotId) -> None:
        self.snapshot = snapshot
        self.path = Path(snapshots, _FOLDER, str(snapshot))

    @property
    def files(self) -> Path:
        return self.path / FILES

    @property
    def replaced(self) -> Path:
        return self.path / "replaced"

    @property
    def mark(self) -> SaveMark | None:
        """None where there is none: it was never completed, taken back, or what it is for is in its place.

        Raises:
            StorageError: it is not one of ours.
        """
        return _read_mark(self.path)

    def write_table(self, rank: int, table: Table) -> None:
        """Leave ``rank``'s holes; to be called before ``complete`` is."""
        holes = {name: [[hole.begin, hole.fragment.to_json()] for hole in found] for name, found in table.items()}
        self.path.mkdir(parents=True, exist_ok=True)
        _put(self.path / f"table-{rank}.json", holes)

    def complete(self, mark: SaveMark) -> None:
        """All ranks have written theirs."""
        _put(self.path / _MARK, asdict(mark))

    def table(self) -> dict[str, list[Hole]]:
        """Of all ranks.

        Raises:
            StorageError: one is missing or is not what was written.
        """
        mark = self.mark
        if mark is None:
            raise StorageError(f"{self.path}: is not complete", lasting=True)
        holes: dict[str, list[Hole]] = {}
        for path in (self.path / f"table-{rank}.json" for rank in range(mark.ranks)):
            try:
                for name, found in json.loads(path.read_bytes()).items():
                    holes[name] = [Hole(int(begin), Fragment.from_json(value)) for begin, value in found]
            except (OSError, ValueError, TypeError, AttributeError) as error:
                raise StorageError(f"{path}: {error}", lasting=True) from None
        return holes

    def put_back(self) -> None:
        """What was taken out of its place, if nothing has come into that."""
        mark = self.mark
        if mark is not None and self.replaced.exists() and not (place := self.path.parents[2] / mark.tag).exists():
            self.replaced.rename(place)

    def remove(self) -> None:
        """A second call does nothing."""
        self.put_back()
        # The mark first: what goes is no outline from here on.
        (self.path / _MARK).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)
        for parent in self.path.parents[:1]:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()


def at(path: Path) -> Outline:
    """The outline that ``path`` is.

    Raises:
        StorageError: it is none.
    """
    try:
        snapshot = SnapshotId.parse(path.name)
    except ValueError:
        raise StorageError(f"{path}: is no outline of a save", lasting=True) from None
    return Outline(str(path.parent.parent), snapshot)


def supersede(snapshots: str, tag: str) -> None:
    """The program saves ``tag`` by itself, now: what is still to come takes neither its place nor the pointer.

    Raises:
        OSError: the file system fails.
        StorageError: a mark is not one of ours.
    """
    for outline in _all(snapshots):
        mark = outline.mark
        if mark is not None and mark.tag == tag:
            outline.remove()
        elif mark is not None and mark.newest:
            outline.complete(replace(mark, newest=False))


def remove_all(snapshots: str) -> None:
    """Those that earlier saves have left. Raises OSError."""
    for outline in _all(snapshots):
        outline.remove()


def _all(snapshots: str) -> Iterator[Outline]:
    for path in sorted(Path(snapshots, _FOLDER).glob("*")):
        try:
            yield at(path)
        except StorageError:
            continue  # of somebody else


def _read_mark(path: Path) -> SaveMark | None:
    try:
        value: Any = json.loads((path / _MARK).read_bytes())
        return SaveMark(str(value["tag"]), int(value["ranks"]), bool(value["newest"]))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        raise StorageError(f"{path / _MARK}: is not what was written", lasting=True) from None


def _put(path: Path, value: Any) -> None:
    """Whole or not there, and on the disk."""
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
