"""Exports of snapshots: complete or absent, and files of others are never touched."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ftckpt.errors import StorageError
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist.commit import CheckpointName
from ftckpt.persist.exports import Exports, prepare
from ftckpt.persist.files import FileStorage
from ftckpt.persist.paths import ExportPlace, Place
from ftckpt.persist.shards import StoredSnapshot
from ftckpt.persist_setting import PERSIST_FORMATS
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


def exports(root: Path, owner: str = "", form: str = "megatron-dist") -> Exports:
    return Exports(Place.of(str(root), form), owner)


def convert(path: Path, iteration: int) -> None:
    """The output of the command."""
    folder = path / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(str(iteration))
    (path / TRACKER).write_text(str(iteration))


def make(root: Path, iteration: int, lineage: bytes = LINEAGE, owner: str = "") -> Path:
    snapshot, there = SnapshotId(lineage, iteration), exports(root, owner)
    if not there.complete(snapshot):
        with there.making(snapshot) as made:
            convert(made.path, iteration)
            there.publish(made)
    return there.find()[snapshot]


def loadable(root: Path) -> int:
    """The iteration that Megatron would load."""
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
    assert names(root) == {"iter_0000005", "iter_0000010", TRACKER, "ftckpt"} and names(root / "ftckpt") == {"made"}


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
        assert loadable(root) == 15 and names(root / "ftckpt") == {"made"}
        assert names(root) <= {"iter_0000005", "iter_0000010", "iter_0000015", TRACKER, "ftckpt"}
        if not killed:
            break
        step += 1
    assert seen == {False, True} and step > 10


def test_what_has_the_name_of_an_export_stays(root: Path) -> None:
    make(root, 5)
    convert(root.parent / "other", 10)
    (root.parent / "other" / "iter_0000010").rename(root / "iter_0000010")
    with raises(StorageError, "iter_0000010"):
        make(root, 10)
    assert names(root / "ftckpt") == {"made"} and loadable(root) == 5
    exports(root).retain([])
    assert names(root) == {"iter_0000010", TRACKER, "ftckpt"}, "only what was made of a snapshot goes with it"


def test_a_job_that_went_back_names_what_it_writes(root: Path) -> None:
    """Exports newer than its start belong to an abandoned lineage."""
    make(root, 30, owner="before")
    make(root, 10, LATER, "now")
    assert loadable(root) == 10
    make(root, 5, LATER, "now")
    assert loadable(root) == 10, "of one run the newest"


def test_what_was_made_of_a_snapshot_goes_with_it(root: Path) -> None:
    for iteration in (5, 10, 15):
        make(root, iteration)
    five, ten, fifteen = (SnapshotId(LINEAGE, iteration) for iteration in (5, 10, 15))
    assert exports(root).retain([ten, fifteen]) == [5]
    assert names(root) == {"iter_0000010", "iter_0000015", TRACKER, "ftckpt"} and names(root / "ftckpt") == {"made"}
    assert exports(root).retain([five, ten]) == [15] and loadable(root) == 10, "never names what is gone"
    assert exports(root).retain([SnapshotId(LATER, 10)]) == [10], "of another past"


def test_what_was_made_of_a_past_that_was_left_goes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has reached iteration 10 a second time, and the export is of the first."""
    storage, place = FileStorage(str(root / "ftckpt")), Place.of(str(root), "megatron-dist")
    for iteration in (5, 10, 15):
        make(root, iteration)
        there = SnapshotId(LATER if iteration == 10 else LINEAGE, iteration)
        storage.put(CheckpointName(iteration).manifest, StoredSnapshot(there, "job", {}, {}).encode())
    storage.put(CheckpointName(15).manifest, b"of a later version")
    make(root, 10, owner="another")  # by a run that had come to it
    named, unlink = list[int](), Path.unlink

    def seen(path: Path, **options: bool) -> None:
        if path.parent.parent == root:
            named.append(loadable(root))
        unlink(path, **options)

    def never(secs: float) -> None:
        raise AssertionError

    monkeypatch.setattr(Path, "unlink", seen)
    events = Seen()
    export(storage, place, SnapshotId(LINEAGE, 5), events, owner="another", deadline=0.0, pause=never)
    assert [one["iteration"] for one in events.of("removed")] == [10] and named == [15] and loadable(root) == 15
    assert exports(root).find().keys() == {SnapshotId(LINEAGE, 5), SnapshotId(LINEAGE, 15)}


def test_snapshots_and_what_is_made_of_them_have_places_of_their_own(root: Path) -> None:
    assert Place.of("s3://bucket/a", "snapshot") == Place("s3://bucket/a")
    assert not prepare(Place()) and not prepare(Place("memory:///a"))
    assert Place.of("/a", "universal") == Place("/a/ftckpt", ExportPlace("/a", "universal"))
    place = Place.of(str(root / "new"), "universal")
    assert prepare(place) and not prepare(place)
    assert names(root / "new") == {"ftckpt"}
    (root / "new" / "owner.json").write_text("{}")
    with raises(StorageError, "persist_format"):
        prepare(place)


def job(root: Path) -> list[SnapshotId]:
    """Three exports of the universal format."""
    for iteration in (5, 10, 15):
        publish(root, SnapshotId(LINEAGE, iteration))
    return [SnapshotId(LINEAGE, iteration) for iteration in (5, 10, 15)]


def publish(root: Path, snapshot: SnapshotId) -> None:
    there = exports(root, form="universal")
    with there.making(snapshot) as made:
        (made.path / "part").mkdir(parents=True)
        (made.path / "manifest.json").write_text(str(snapshot))
        (made.path / "part" / "weights").write_bytes(b"w" * snapshot.iteration)
        there.publish(made)


def renamed(root: Path) -> None:
    (root / "iter_0000005").rename(root / "best")


def copied(root: Path) -> None:
    for number in range(6):
        shutil.copytree(root / "iter_0000005", root / f"keep{number}")


def of_another_run(root: Path) -> None:
    shutil.copytree(root / "iter_0000015", root / "iter_0009000")


def linked(root: Path) -> None:
    for name, to in (("best", "iter_0000005"), ("dangling", "nowhere"), ("iter_0000007", "iter_0000005")):
        (root / name).symlink_to(to)


def moved_and_linked(root: Path) -> None:
    (root / "iter_0000005").rename(root / "best")
    (root / "iter_0000005").symlink_to("best")


def noted(root: Path) -> None:
    (root / "iter_0000005" / "eval.json").write_text("{}")
    (root / "iter_0000005" / "empty").mkdir()


def linked_into(root: Path) -> None:
    (root / "iter_0000005" / "part" / "tokenizer").symlink_to(root.parent)


def written_anew(root: Path) -> None:
    (root / "iter_0000005" / "manifest.json").write_text(str(SnapshotId(LATER, 5)))


def hidden(root: Path) -> None:
    (root / ".latest-notes.txt").write_text("mine")
    (root / ".latest-notes").mkdir()
    (root / "ftckpt" / "converting" / "mine").mkdir(parents=True)
    (root / "ftckpt" / "made" / "notes").write_text("mine")


@pytest.mark.parametrize(
    "change", [renamed, copied, of_another_run, linked, moved_and_linked, noted, linked_into, written_anew, hidden]
)
def test_what_a_user_does_beside_exports_stays_and_stops_none(change: Callable[[Path], None], root: Path) -> None:
    first, *others = job(root)
    change(root)
    before = {path: path.lstat().st_mode for path in root.rglob("*") if path.name != "latest"}
    goes = {path for path in before if path.is_relative_to(root / "iter_0000005")}
    if change in (renamed, moved_and_linked, noted, linked_into, written_anew):
        goes = set()
    goes.add(root / "ftckpt" / "made" / str(first))
    publish(root, newest := SnapshotId(LINEAGE, 20))
    exports(root, form="universal").retain([*others, newest])
    lost = {path for path in before if path not in {*root.rglob("*")}}
    assert lost == goes
    assert exports(root, form="universal").find().keys() == {*others, newest}
    assert (root / "latest").read_text() == "iter_0000020\n"


@pytest.mark.parametrize("step", ["of its files", "whole"])
def test_what_comes_into_an_export_that_is_going_stays(
    step: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the check, and before its directory is deleted."""
    _, *others = job(root)
    unlink, folder = Path.unlink, root / "iter_0000005" / ("part" if step == "of its files" else "")

    def late(path: Path, **options: bool) -> None:
        (folder / "mine").touch()
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", late)
    exports(root, form="universal").retain(others)
    assert [path for path in (root / "iter_0000005").rglob("*") if path.is_file()] == [folder / "mine"]


@pytest.mark.parametrize(
    ("name", "text"),
    [("latest", "global_step900"), (TRACKER, "9000"), ("latest_universal", "global_step3"), ("zero_to_fp32.py", "#")],
)
@pytest.mark.parametrize("form", PERSIST_FORMATS[1:])
def test_a_directory_in_which_another_program_saves_is_refused_at_the_start(
    name: str, text: str, form: str, root: Path
) -> None:
    place = Place.of(str(root), form)
    (root / name).write_text(text)
    with raises(StorageError, str(root / name), "persist_format", "persist="):
        prepare(place)
    assert (root / name).read_text() == text


def test_a_pointer_that_another_program_has_written_since_stays(root: Path) -> None:
    make(root, 5)
    prepare(Place.of(str(root), "megatron-dist"))
    (root / TRACKER).write_text("7")
    with raises(StorageError, TRACKER):
        make(root, 10)
    assert (root / TRACKER).read_text() == "7" and names(root) == {"iter_0000005", TRACKER, "ftckpt"}
    exports(root).retain([])
    assert (root / TRACKER).read_text() == "7" and names(root) == {TRACKER, "ftckpt"}
    with raises(StorageError, TRACKER):
        prepare(Place.of(str(root), "megatron-dist"))
    (root / TRACKER).unlink()
    (root / TRACKER).symlink_to("mine")
    with raises(StorageError, TRACKER):
        make(root, 10)
    assert (root / TRACKER).is_symlink()
