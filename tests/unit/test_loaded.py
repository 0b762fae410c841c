"""Which snapshots never happened, by the origins of all that lie anywhere: a script or an operator has gone back."""

from __future__ import annotations

import pytest

from ftckpt.model.loaded import (
    NOTHING,
    Checkpoint,
    counts_until,
    earliest_of,
    is_undone,
    newest_of,
    next_origin,
    went_back,
)

FIRST = next_origin(NOTHING, NOTHING, storage_counts=True)


def test_what_a_script_went_back_from_never_happened_at_any_later_start() -> None:
    back = went_back(FIRST, 51)
    after = next_origin(NOTHING, back, storage_counts=False)
    # With a number on the command line, with another newest checkpoint on storage, and from the beginning.
    later = [
        after,
        next_origin(NOTHING, after, storage_counts=False, before=70),
        next_origin(Checkpoint(40), after, storage_counts=False),
    ]
    for newest in (back, *later[::2]):
        assert [is_undone(FIRST, newest, iteration) for iteration in (50, 51, 90)] == [False, True, True]
    assert is_undone(FIRST, later[1], 70)
    assert is_undone(FIRST, next_origin(NOTHING, after, storage_counts=True), 1)
    assert not any(is_undone(newest, newest, 90) for newest in later), "what has come since counts"


def test_a_number_on_the_command_line_stays_the_one_that_was_gone_back_before() -> None:
    """Otherwise the restart behind a script that went back would go back before the number once more."""
    named = next_origin(NOTHING, FIRST, storage_counts=False, before=100)
    assert (named.before, named.returned, named.limit) == (100, 2, 100)
    back = went_back(named, 150)
    assert back.before == 100 and next_origin(NOTHING, back, storage_counts=False, before=100) == back
    without = next_origin(NOTHING, named, storage_counts=False)
    assert without.before == 0 and is_undone(FIRST, without, 100), "a start without the number takes nothing back"


@pytest.mark.parametrize("newest", [went_back(FIRST, 51), next_origin(NOTHING, FIRST, storage_counts=True)])
def test_where_no_origin_was_marked_what_is_there_counts(newest: Checkpoint) -> None:
    assert counts_until(NOTHING, newest) is None and counts_until(FIRST, newest) is not None


def test_an_origin_counts_from_the_first_start_on() -> None:
    """Also where that finds snapshots, but the origin of none."""
    assert FIRST.generation == 1 and next_origin(NOTHING, NOTHING, storage_counts=False).generation == 1


def test_of_parts_with_several_origins_the_snapshot_has_the_earliest_that_is_known() -> None:
    back = went_back(FIRST, 51)
    assert earliest_of([back, NOTHING, FIRST]) is FIRST and newest_of([back, NOTHING, FIRST]) is back
    assert earliest_of([NOTHING]) == newest_of([]) == NOTHING


def test_going_back_to_the_very_beginning_undoes_all() -> None:
    assert counts_until(FIRST, went_back(FIRST, 0)) == -1 == counts_until(FIRST, went_back(FIRST, -3))
