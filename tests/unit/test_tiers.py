"""Which cases of a table run by default."""

from __future__ import annotations

import pytest

from tests.support.tiers import by_default


def test_the_others_are_slow_and_all_keep_their_order() -> None:
    cases = by_default(["a", ("b", 1), "c"], ["a"])
    assert cases[0] == "a"
    assert [case.values for case in cases[1:]] == [("b", 1), ("c",)]
    assert all([mark.name for mark in case.marks] == ["slow"] for case in cases[1:])


def test_a_case_that_is_not_there_is_an_error() -> None:
    """Renamed in one list alone it would run in neither tier, and nobody would see it."""
    with pytest.raises(ValueError, match="'d'"):
        by_default(["a"], ["a", "d"])
