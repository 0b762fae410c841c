"""What ranks conclude from the same answers: which snapshot is protected, which is next, which slots are kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftckpt.capture.targets import Targets
from ftckpt.comm import Agreement, Told

LINEAGE = b"l" * 16


def told(newest: int, target: int = -1, cover: int = Agreement.DONE) -> Told:
    return Told(0, 1, newest, target, cover)


def at(iteration: int) -> tuple[bytes, int]:
    return LINEAGE, iteration


def test_a_whole_snapshot_is_the_target_until_all_have_covered_it() -> None:
    targets = Targets(LINEAGE, 1)
    assert targets.hear([told(4)]) and targets.target == at(4) and targets.protected is None
    assert not targets.hear([told(5, 4, Agreement.WORKING)])
    assert targets.keep(at(5)) == {at(4), at(5)}
    assert targets.hear([told(6, 4, Agreement.DONE)])
    assert targets.protected == at(4) and targets.target == at(6)
    assert targets.keep(at(6)) == {at(4), at(6)}


def test_a_target_that_cannot_be_covered_is_given_up_and_the_protected_one_stays() -> None:
    targets = Targets(LINEAGE, 1)
    targets.hear([told(4), told(5, 4, Agreement.DONE)])
    targets.hear([told(6, 5, Agreement.CANNOT), told(7)])
    assert targets.protected == at(4) and targets.target == at(7) and targets.given_up == [at(5)]


def test_no_target_is_chosen_while_a_node_could_not_protect_it() -> None:
    targets = Targets(LINEAGE, 1)
    targets.hear([told(4), told(5, 4, Agreement.CANNOT), told(6, -1, Agreement.CANNOT)])
    assert targets.target is None and targets.keep(at(6)) == {at(6)}
    targets.hear([told(7)])
    assert targets.target == at(7)
    targets.stop()
    targets.hear([told(8)])
    assert targets.target is None


def test_an_answer_about_an_older_target_settles_nothing() -> None:
    targets = Targets(LINEAGE, 1)
    targets.hear([told(4), told(5, 4, Agreement.DONE), told(6, 4, Agreement.DONE)])
    assert targets.protected == at(4) and targets.target == at(5)


def test_each_kth_snapshot_is_a_target_and_the_first_one_too() -> None:
    targets, chosen = Targets(LINEAGE, 3), []
    for iteration in range(12):
        target = targets.target
        targets.hear([told(iteration, target[1] if target else -1)])
        if targets.target is not None:
            chosen.append(targets.target[1])
    assert chosen == [0, 3, 6, 9]


def test_without_protection_only_the_whole_one_is_kept() -> None:
    targets = Targets(LINEAGE, 0)
    targets.begin(at(3))
    assert not targets.hear([told(4), told(5)])
    assert targets.keep(at(5)) == {at(5)} and targets.keep(None) == set()


def test_a_restored_snapshot_is_the_first_target_and_what_was_protected_before_stays() -> None:
    targets = Targets(LINEAGE, 1)
    older, old = (b"o" * 16, 7), (b"o" * 16, 9)
    targets.begin(old)
    targets.protected = older
    assert targets.keep(old) == {older, old} and targets.target == old
    targets.hear([told(10, 9, Agreement.WORKING)])
    assert targets.keep(at(10)) == {older, old, at(10)}
    targets.hear([told(11, 9, Agreement.DONE)])
    assert targets.protected == old and targets.target == at(11)


@given(st.lists(st.tuples(st.booleans(), st.integers(-1, 1)), max_size=30), st.integers(1, 3), st.data())
def test_answers_read_at_once_lead_to_the_same_as_one_by_one(
    answers: list[tuple[bool, int]], interval: int, data: st.DataObject
) -> None:
    """A rank that reads late comes to where the others are; three slots of four are kept at most."""
    one, told_all = Targets(LINEAGE, interval), []
    for iteration, (alike, cover) in enumerate(answers):
        target = one.target
        told_all.append(told(iteration if alike else -1, target[1] if target else -1, cover))
        one.hear(told_all[-1:])
        assert len(one.keep(at(iteration))) <= 3
    other = Targets(LINEAGE, interval)
    cut = data.draw(st.integers(0, len(told_all)))
    other.hear(told_all[:cut])
    other.hear(told_all[cut:])
    assert (one.protected, one.target) == (other.protected, other.target)
