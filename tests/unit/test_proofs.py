"""When replicas are proven again."""

from __future__ import annotations

from ftckpt.capture.proofs import WEIGH_AT, Proofs


def due(proofs: Proofs, last: int, steps_from: int) -> list[int]:
    """The snapshots, one per iteration, that have a proof; steps are skipped before iteration ``steps_from``."""
    found = []
    for number in range(1, last + 1):
        if proofs.due(number, number):
            found.append(number)
            proofs.proved(number, number >= steps_from)
    return found


def test_close_at_first_then_at_the_interval() -> None:
    assert due(Proofs(20), 45, steps_from=1) == [1, 2, 4, 8, 16, 20, 32, 40]


def test_close_from_where_steps_begin() -> None:
    assert due(Proofs(1000), 40, steps_from=6) == [1, 2, 3, 4, 5, 6, 7, 9, 13, WEIGH_AT, 21, 37]


def test_without_an_interval_at_the_start_only() -> None:
    assert due(Proofs(0), 40, steps_from=6) == [1, WEIGH_AT]
