"""What DeepSpeed has outlined comes to its place: whole or not there, and nothing that was saved since is undone."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ftckpt.errors import StorageError
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist import outlines
from ftckpt.persist.outlined import OutlinedExports
from ftckpt.persist.outlines import Hole, Outline, SaveMark
from ftckpt.persist.place import Place
from tests.support.errors import raises
from tests.support.killing import killed_at
from tests.support.tiers import by_default

LINEAGE = b"a" * 16
SCRIPT = "zero_to_fp32.py"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "ftckpt").mkdir()
    return tmp_path


def exports(root: Path) -> OutlinedExports:
    place = Place.of(f"deepspeed:{root}", "snapshot")
    assert place.exports is not None
    return OutlinedExports(place.exports, place.snapshots)


def write(path: Path, tag: str, text: str, *, newest: bool = True) -> None:
    """What DeepSpeed leaves in a directory."""
    (path / tag).mkdir(parents=True, exist_ok=True)
    (path / tag / "mp_rank_00_model_states.pt").write_text(text)
    (path / SCRIPT).write_text("")
    if newest:
        (path / "latest").write_text(tag)


def outlined(root: Path, iteration: int, tag: str = "", *, newest: bool = True) -> Outline:
    """A call of ``save_checkpoint``."""
    tag = tag or f"global_step{iteration}"
    outlines.remove_all(str(root / "ftckpt"))
    outline = Outline(str(root / "ftckpt"), SnapshotId(LINEAGE, iteration))
    write(outline.files, tag, "with holes", newest=newest)
    outline.write_table(0, {})
    outline.complete(SaveMark(tag, 1))
    return outline


def export(root: Path, iteration: int) -> None:
    """What an SMP does with a snapshot."""
    snapshot, there = SnapshotId(LINEAGE, iteration), exports(root)
    if there.complete(snapshot):
        return
    with there.making(snapshot) as made:
        mark = Outline(str(root / "ftckpt"), snapshot).mark
        assert mark is not None
        write(
            made.path,
            mark.tag,
            str(iteration),
            newest=(Outline(str(root / "ftckpt"), snapshot).files / "latest").exists(),
        )
        there.publish(made)


def loadable(root: Path) -> str:
    """What DeepSpeed would begin with."""
    return (root / (root / "latest").read_text() / "mp_rank_00_model_states.pt").read_text()


def test_a_save_comes_to_its_place(root: Path) -> None:
    outlined(root, 5)
    export(root, 5)
    assert loadable(root) == "5" and (root / SCRIPT).exists()
    assert not list((root / "ftckpt").iterdir())
    export(root, 6)  # nobody has asked for that
    outlined(root, 7, "best", newest=False)
    export(root, 7)
    assert loadable(root) == "5" and (root / "best" / "ftckpt.json").exists()
    outlined(root, 8, "best")
    export(root, 8)
    assert loadable(root) == "8"


def test_what_the_script_saves_meanwhile_counts(root: Path) -> None:
    outlined(root, 5)
    outlines.supersede(str(root / "ftckpt"), "global_step6")
    write(root, "global_step6", "6")
    export(root, 5)
    assert loadable(root) == "6" and (root / "global_step5").exists()
    outlined(root, 7, "best")
    snapshot = SnapshotId(LINEAGE, 7)
    with raises(StorageError, "saved in its place since"), exports(root).making(snapshot) as made:
        write(made.path, "best", "7")
        outlines.supersede(str(root / "ftckpt"), "best")
        write(root, "best", "8")
        exports(root).publish(made)
    assert loadable(root) == "8" and exports(root).complete(snapshot)


@pytest.mark.parametrize(
    ("tag", "restarts"),
    by_default([("best", False), ("best", True), ("", False), ("", True)], [("best", False), ("", True)]),
)
def test_killed_at_any_step_nothing_is_lost_and_the_next_one_ends_it(
    tag: str, restarts: bool, tmp_path: Path
) -> None:
    seen = set()
    for step in itertools.count():
        root = tmp_path / str(step)
        (root / "ftckpt").mkdir(parents=True)
        outlined(root, 5, tag)
        export(root, 5)
        outlined(root, 10, tag)
        killed = killed_at(step, lambda at=root: export(at, 10))  # type: ignore[misc]
        is_there = (root / (root / "latest").read_text()).exists()
        seen.add(loadable(root) if is_there else "between two renames")
        if not restarts:
            export(root, 10)
            assert loadable(root) == "10" and (root / "latest").stat().st_mode & 0o444 == 0o444
        outlined(root, 15)
        assert loadable(root) in ("5", "10")
        export(root, 15)
        assert loadable(root) == "15" and not list((root / "ftckpt").iterdir())
        if not killed:
            break
    assert seen == {"5", "10"} | ({"between two renames"} if tag else set())


def test_tables_are_of_all_ranks(root: Path) -> None:
    outline = Outline(str(root / "ftckpt"), SnapshotId(LINEAGE, 5))
    assert outline.mark is None
    box = Box((0, 4), (2, 4))
    holes = [Hole(64, Fragment("master/a", "F32", (2, 8), box, 1, 7))]
    outline.write_table(0, {"a/b.pt": holes})
    with raises(StorageError, "is not complete"):
        outline.table()
    outline.complete(SaveMark("a", 2))
    with raises(StorageError, "table-1.json"):
        outline.table()
    outline.write_table(1, {})
    assert outlines.at(outline.path).table() == {"a/b.pt": holes} and holes[0].end == 64 + 24
    (outline.path / "outline.json").write_text("{}")
    with raises(StorageError, "outline.json: is not what was written"):
        outline.table()
    with raises(StorageError, "is no outline"):
        outlines.at(root)
