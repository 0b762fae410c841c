"""The SMP does not delay training, and still gets its work done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ftckpt.smp.work import MAX_NETWORK_SECS, MAX_SECS, Bucket, CooperativeYield, Throttle


class Clock:
    """A clock that advances when somebody waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def spend(self, waits: Iterator[float]) -> float:
        """Seconds that were waited."""
        begun = self.now
        for secs in waits:
            assert secs > 0
            self.now += secs
        return self.now - begun


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pace(
    clock: Clock, copying: Callable[[], bool] = bool, network: Callable[[], bool] = bool, **rates: Any
) -> Throttle:
    return Throttle(copying, network, clock=clock, **rates)


@pytest.mark.parametrize("piece", [1 << 12, 1 << 20, 16 << 20])
def test_a_rate_is_kept(clock: Clock, piece: int) -> None:
    bucket, begun, total = Bucket(1e8, clock), clock.now, 0
    while clock.now < begun + 10:
        clock.now += bucket.wait_secs()
        bucket.charge(piece)
        total += piece
    assert total / 1e8 == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize("which", ["smp_rate", "network_rate"])
def test_reads_and_what_is_received_have_limits_of_their_own(clock: Clock, which: str) -> None:
    limited = pace(clock, **{which: 1e6})
    read = sum(clock.spend(limited.memory(1_000_000)) for _ in range(11))
    received = 0.0
    for _ in range(11):
        received += clock.spend(limited.receive())
        limited.received.charge(1_000_000)  # it came
    expected = (10, 0) if which == "smp_rate" else (0, 10)
    assert (read, received) == pytest.approx(expected, abs=0.1)


def test_what_is_sent_has_the_same_limit(clock: Clock) -> None:
    limited, begun, sent, refused = pace(clock, network_rate=1e6), clock.now, 0, 0
    while clock.now < begun + 10:
        turn = limited.send(100_000)
        try:
            while True:
                clock.now += next(turn)
        except StopIteration as end:
            sent += 100_000 * end.value
    assert sent / 1e6 == pytest.approx(10, rel=0.05)
    turns = [limited.send(100_000) for _ in range(50)]  # of as many threads, at once
    for turn in turns:
        try:
            next(turn)
        except StopIteration as end:
            refused += not end.value
    assert refused >= 44, "who would have to wait long asks again"
    assert sum(clock.spend(limited.receive()) for _ in range(9)) == 0, "each way has its own"


@pytest.mark.parametrize("way", ["send", "receive", "memory"])
def test_each_thread_lets_training_go_first(clock: Clock, way: str) -> None:
    held, waited = pace(clock, copying=lambda: True, network=lambda: True), []
    before = {"send": lambda: held.send(1), "receive": held.receive, "memory": lambda: held.memory(1)}[way]
    for _ in range(3):
        thread = threading.Thread(target=lambda: waited.append(clock.spend(before())))
        thread.start()
        thread.join(30)
    most_secs = MAX_SECS if way == "memory" else MAX_NETWORK_SECS
    assert waited == pytest.approx([most_secs] * 3, abs=0.02), "none uses up the patience of the next"


@pytest.mark.parametrize("work_secs", [0.0005, 0.01, 0.1, 2.0])
def test_work_goes_on_however_busy_the_ranks_are(clock: Clock, work_secs: float) -> None:
    busy, begun, pieces = CooperativeYield(lambda: True, clock), clock.now, 0
    while clock.now < begun + 30:
        clock.spend(busy.wait())
        clock.now += work_secs
        pieces += 1
    assert pieces * work_secs > 30 * 0.45


def test_transfers_hold_while_training_uses_the_network(clock: Clock) -> None:
    for way in ("receive", "send"):
        free_at = clock.now + 1.7
        held = pace(clock, network=lambda: clock.now < free_at)  # noqa: B023
        assert list(held.memory(1)) == []
        assert clock.spend(held.receive() if way == "receive" else held.send(1)) == pytest.approx(1.7, abs=0.02)


def test_what_is_known_of_the_iteration_decides_in_the_place_of_phases(clock: Clock) -> None:
    """Three seconds are busy, and phases report that all are."""
    begun = clock.now
    needs: list[float] = []

    def has_room(need_secs: float) -> bool | None:
        needs.append(need_secs)
        return None if clock.now - begun > 100 else clock.now - begun > 3

    known = pace(clock, network=lambda: True, network_rate=1e6, has_room=has_room)
    assert clock.spend(known.receive(500_000)) == pytest.approx(3, abs=0.02) and set(needs) == {0.5}
    assert clock.spend(known.receive()) == 0 and list(known.send(100_000)) == []
    clock.now = begun + 101
    assert clock.spend(known.receive()) == pytest.approx(MAX_NETWORK_SECS, abs=0.02), "it takes longer than usual"
