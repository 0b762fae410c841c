"""What others load, made of snapshots: whole or not there, and nothing of anybody else is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ftckpt.errors import StorageError
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist.commit import claim, manifest_of
from ftckpt.persist.exports import Exports
from ftckpt.persist.files import FileStorage
from ftckpt.persist.place import ExportPlace, Place, prepare
from ftckpt.persist.shards import StoredSnapshot
from ftckpt.smp.export import export
from tests.support.errors import raises
from tests.support.killing import killed_at
from tests.support.smp_nodes import Seen

TRACKER = "latest_checkpointed_iteration.txt"
LINEAGE, LATER = b"a" * 16, b"b" * 16


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "ftckpt").mkdir()
    return tmp_path


def exports(root: Path) -> Exports:
    return Exports(ExportPlace(str(root), "megatron-dist"), str(root / "ftckpt"))


def convert(path: Path, iteration: int) -> None:
    """What the command writes."""
    folder = path / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(str(iteration))
    (path / TRACKER).write_text(str(iteration))


def make(root: Path, iteration: int, lineage: bytes = LINEAGE) -> Path:
    snapshot, there = SnapshotId(lineage, iteration), exports(root)
    if not there.complete(snapshot):
        with there.making(snapshot) as made:
            convert(made.path, iteration)
            there.publish(made)
    return there.find()[snapshot]


def loadable(root: Path) -> int:
    """What Megatron would begin with."""
    iteration = int((root / TRACKER).read_text())
    assert (root / f"iter_{iteration:07d}" / "metadata.json").read_text() == str(iteration)
    return iteration


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_an_export_has_its_name_when_it_is_whole(root: Path) -> None:
    path = make(root, 5)
    assert path == root / "iter_0000005" and loadable(root) == 5
    assert exports(root).find() == {SnapshotId(LINEAGE, 5): path}
    make(root, 10)
    assert loadable(root) == 10
    assert names(root) == {"iter_0000005", "iter_0000010", TRACKER, "ftckpt"} and not names(root / "ftckpt")


def test_what_fails_leaves_nothing(root: Path) -> None:
    make(root, 5)
    with pytest.raises(RuntimeError), exports(root).making(SnapshotId(LINEAGE, 10)) as made:
        convert(made.path, 10)
        raise RuntimeError
    assert names(root) == {"iter_0000005", TRACKER, "ftckpt"} and not names(root / "ftckpt")


@pytest.mark.parametrize("replaces", [False, True], ids=["beside", "in the place of one that was left behind"])
def test_killed_at_any_step_an_older_one_can_be_loaded_and_the_next_one_tidies_up(
    replaces: bool, tmp_path: Path
) -> None:
    step, seen = 0, set()
    while True:
        root = tmp_path / str(step)
        (root / "ftckpt").mkdir(parents=True)
        make(root, 5)
        if replaces:
            make(root, 10)
        killed = killed_at(step, lambda at=root: make(at, 10, LATER))  # type: ignore[misc]
        found = exports(root).find()
        seen.add(SnapshotId(LATER, 10) in found)
        # Between the two renames there is but the one before them.
        assert loadable(root) in (5, 10) and SnapshotId(LINEAGE, 5) in found
        make(root, 10, LATER)
        assert loadable(root) == 10
        make(root, 15, LATER)
        assert loadable(root) == 15 and not names(root / "ftckpt")
        assert names(root) <= {"iter_0000005", "iter_0000010", "iter_0000015", TRACKER, "ftckpt"}
        if not killed:
            break
        step += 1
    assert seen == {False, True} and step > 10


def test_what_is_of_another_program_stays(root: Path) -> None:
    convert(root, 5)
    with raises(StorageError, "iter_0000005", "of another program"):
        make(root, 5)
    assert not (root / "iter_0000005" / "ftckpt.json").exists() and not names(root / "ftckpt")
    make(root, 10)
    exports(root).retain([])
    assert names(root) == {"iter_0000005", TRACKER, "ftckpt"}, "only what was made of a snapshot goes with it"


def claim_now(root: Path) -> None:
    """A run begins, behind all that was written before."""
    for path in root.iterdir():
        os.utime(path, (1, 1))
    claim(FileStorage(str(root / "ftckpt")), "a run", "job")


def test_a_job_that_went_back_names_what_it_writes(root: Path) -> None:
    """What was newer before it began is of a past that it has left."""
    make(root, 30)
    claim_now(root)
    make(root, 10, LATER)
    assert loadable(root) == 10
    make(root, 5, LATER)
    assert loadable(root) == 10, "of one run the newest"


def test_what_was_made_of_a_snapshot_goes_with_it(root: Path) -> None:
    for iteration in (5, 10, 15):
        make(root, iteration)
    five, ten, fifteen = (SnapshotId(LINEAGE, iteration) for iteration in (5, 10, 15))
    assert exports(root).retain([ten, fifteen]) == [5]
    assert names(root) == {"iter_0000010", "iter_0000015", TRACKER, "ftckpt"} and not names(root / "ftckpt")
    assert exports(root).retain([five, ten]) == [15] and loadable(root) == 10, "never names what is gone"
    assert exports(root).retain([SnapshotId(LATER, 10)]) == [10], "of another past"


def test_what_was_made_of_a_past_that_was_left_goes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has come to iteration 10 a second time, and what others load was not made of that."""
    storage, place = FileStorage(str(root / "ftckpt")), Place.of(str(root), "megatron-dist")
    for iteration in (5, 10, 15):
        make(root, iteration)
        there = SnapshotId(LATER if iteration == 10 else LINEAGE, iteration)
        storage.put(manifest_of(iteration), StoredSnapshot(there, "job", {}, {}).encode())
    storage.put(manifest_of(15), b"of a later version")
    (root / TRACKER).write_text("10")
    named, rename = list[int](), Path.rename

    def seen(path: Path, target: Path) -> None:
        named.append(loadable(root))
        rename(path, target)

    def never(secs: float) -> None:
        raise AssertionError

    monkeypatch.setattr(Path, "rename", seen)
    events = Seen()
    export(storage, place, SnapshotId(LINEAGE, 5), events, owner="", deadline=0.0, pause=never)
    assert [one["iteration"] for one in events.of("removed")] == [10] and named[-1] == loadable(root) == 15
    assert exports(root).find().keys() == {SnapshotId(LINEAGE, 5), SnapshotId(LINEAGE, 15)}


def test_snapshots_and_what_is_made_of_them_have_places_of_their_own(root: Path) -> None:
    assert Place.of("s3://bucket/a", "snapshot") == Place("s3://bucket/a")
    assert Place.of("/a", "universal") == Place("/a/ftckpt", ExportPlace("/a", "universal"))
    place = Place.of(str(root / "new"), "universal")
    with raises(StorageError, str(root / "new")):
        prepare(place)
    (root / "new").mkdir()
    prepare(place)
    prepare(place)
    assert names(root / "new") == {"ftckpt"}
    (root / "new" / "owner.json").write_text("{}")
    with raises(StorageError, "persist_format: snapshots lie there", "name another place"):
        prepare(place)
