"""Which snapshots are in the past of a head, and the lineage in a node's file: as it was written, or none at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import ArenaError
from ftckpt.memory import lineage_file
from ftckpt.memory.directory import LINEAGE_NAME
from ftckpt.memory.lineage_file import read_lineage, write_lineage
from ftckpt.model import codec
from ftckpt.model.lineage import (
    FIRST,
    NO_CHECKPOINT,
    NO_REQUEST,
    UNKNOWN,
    Branch,
    Lineage,
    LoadedCheckpoint,
    Selection,
    is_past,
    lineage_after,
    newest,
    rollback_reason,
)
from ftckpt.model.snapshot import SnapshotId


def test_rolling_back_makes_a_branch_and_abandons_only_what_is_newer() -> None:
    back = FIRST.branch(40)
    assert back.branches == (Branch(1), Branch(2, 40))
    assert [is_past(FIRST, iteration, back) for iteration in (0, 40, 41, 90)] == [True, True, False, False]
    assert is_past(back, 90, back) and is_past(FIRST, 90, FIRST)


BRANCHING = st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 30)), max_size=6)


@given(BRANCHING, st.integers(0, 40))
def test_is_past_agrees_with_a_replay_of_every_branch(branching: list[tuple[int, int]], at: int) -> None:
    """Against a model: of each lineage the generation that took each iteration, by replaying every branch."""
    histories, taken = [FIRST], [[1] * 41]
    for number, iteration in branching:
        parent = number % len(histories)
        generation = 1 + max(one.generation for one in histories)
        histories.append(histories[parent].branch(iteration, after=generation - 1))
        taken.append([*taken[parent][: iteration + 1], *[generation] * (40 - iteration)])
    for one, ours in zip(histories, taken, strict=True):
        for head, theirs in zip(histories, taken, strict=True):
            assert is_past(one, at, head) == (ours[: at + 1] == theirs[: at + 1])


@pytest.mark.parametrize(
    ("loaded", "head", "counts"),
    [
        (NO_CHECKPOINT, FIRST, False),
        (LoadedCheckpoint(20), FIRST, False),  # the newer of the two counts
        (LoadedCheckpoint(20), Lineage(FIRST.branches, found=20), False),
        (LoadedCheckpoint(20), Lineage(FIRST.branches, found=50), True),
        (LoadedCheckpoint(20, lasting=False), Lineage(FIRST.branches, found=50), False),
        (LoadedCheckpoint(0), Lineage(FIRST.branches, found=50), False),  # storage that is not mounted
        (LoadedCheckpoint(20, named=True), FIRST, True),
        (LoadedCheckpoint(20, named=True), Lineage(FIRST.branches, ("load of iteration 20",)), False),
        (LoadedCheckpoint(30, named=True), Lineage(FIRST.branches, ("load of iteration 20",)), True),
        (LoadedCheckpoint(0, in_training=True), FIRST, True),
    ],
)
def test_what_a_script_loads_counts_over_newer_snapshots_only_on_purpose(
    loaded: LoadedCheckpoint, head: Lineage, counts: bool
) -> None:
    assert bool(rollback_reason(loaded, head)) == counts


def test_a_restart_continues_its_lineage_and_remembers_what_was_asked_and_found() -> None:
    after = lineage_after(FIRST, LoadedCheckpoint(50), 60, 60, ("rollback-before 61",))
    assert (after, after.requests, after.found) == (FIRST, ("rollback-before 61",), 50)
    assert lineage_after(after, LoadedCheckpoint(30), 60, -1, ()).found == 50
    assert not lineage_after(after, NO_CHECKPOINT, 60, -1, ()).requests


def test_a_start_that_may_load_yet_remembers_what_it_has_loaded_before() -> None:
    """DeepSpeed restores first, and loads a tag after that: the same tag at each restart rolls back once."""
    before = Lineage(FIRST.branches, ("rollback-before 41", "load of iteration 20"))
    assert LoadedCheckpoint(may_follow=True).requests(NO_REQUEST, before) == ("load of iteration 20",)
    assert LoadedCheckpoint().requests(NO_REQUEST, before) == ()
    assert LoadedCheckpoint(30, named=True, may_follow=True).requests(NO_REQUEST, before) == ("load of iteration 30",)


def test_what_storage_has_and_a_restart_skips_is_abandoned() -> None:
    after = lineage_after(FIRST, NO_CHECKPOINT, 40, 60, ())
    assert after.branches == (Branch(1), Branch(2, 40)) and not is_past(FIRST, 60, after)


def test_a_start_from_a_checkpoint_of_the_script_has_no_past() -> None:
    head = FIRST.branch(40)
    after = lineage_after(head, LoadedCheckpoint(70), None, -1, ())
    assert after.branches == (Branch(3),) and after.found == 70
    assert lineage_after(head, LoadedCheckpoint(70, lasting=False), None, -1, ()).found == -1


def test_doubtful_snapshots_are_those_of_one_branch_after_the_trusted_one_up_to_the_alarm() -> None:
    head = FIRST.doubt(20, 30)
    selection = Selection(head)

    def taken(lineage: Lineage, *iterations: int) -> list[int]:
        return [one for one in iterations if selection.takes(lineage, SnapshotId(bytes(16), one))]

    assert taken(FIRST, 20, 21, 30, 31) == [20, 31]
    assert taken(UNKNOWN, 21) == [21] and Selection(head, assumed=FIRST).takes(UNKNOWN, SnapshotId(bytes(16), 20))
    assert not Selection(head, assumed=FIRST).takes(UNKNOWN, SnapshotId(bytes(16), 21))
    one = SnapshotId(bytes(16), 25)
    assert Selection(head, one).takes(FIRST, one), "by name"


def test_what_follows_a_restart_from_before_the_doubt_is_in_no_doubt() -> None:
    after = lineage_after(FIRST.doubt(20, 30), NO_CHECKPOINT, 20, -1, ())
    selection = Selection(after)
    assert after.branches == (Branch(1), Branch(2, 20)) and after.doubtful
    assert selection.takes(after, SnapshotId(bytes(16), 25)) and selection.takes(after, SnapshotId(bytes(16), 20))
    assert not Selection(FIRST.doubt(20, 30).branch(40)).takes(FIRST, SnapshotId(bytes(16), 25))
    assert lineage_after(FIRST.doubt(20, 30), NO_CHECKPOINT, 31, -1, ()) == FIRST, "it goes on behind the doubt"


def test_what_one_node_doubts_all_doubt_and_json_keeps_it() -> None:
    one, other = FIRST.doubt(20, 30), FIRST.doubt(15, 30)
    assert newest([FIRST, one, other]).doubtful == one.doubtful + other.doubtful
    assert codec.decode(codec.encode(one), Lineage).doubtful == one.doubtful


def test_a_lineage_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_lineage(tmp_path) == UNKNOWN
    for lineage in (FIRST, FIRST.branch(40)):
        write_lineage(tmp_path, lineage)
        assert read_lineage(tmp_path) == lineage
    assert [path.name for path in tmp_path.iterdir()] == [LINEAGE_NAME]


@pytest.mark.parametrize("at", [0, 5, 40, 60])
def test_a_damaged_file_is_no_lineage(at: int, tmp_path: Path) -> None:
    write_lineage(tmp_path, FIRST.branch(40))
    data = bytearray((tmp_path / LINEAGE_NAME).read_bytes())
    data[at] ^= 1
    (tmp_path / LINEAGE_NAME).write_bytes(data)
    assert read_lineage(tmp_path) == UNKNOWN
    (tmp_path / LINEAGE_NAME).write_bytes(data[: at + 1])
    assert read_lineage(tmp_path) == UNKNOWN


def test_a_lineage_that_is_there_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full tmpfs takes no page, and a job that resumes needs none."""

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    write_lineage(tmp_path, FIRST)
    monkeypatch.setattr(lineage_file, "replace_file", full)
    write_lineage(tmp_path, FIRST)
    with pytest.raises(ArenaError):
        write_lineage(tmp_path, FIRST.branch(3))
    assert read_lineage(tmp_path) == FIRST
