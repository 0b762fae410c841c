"""Checksums of several chunks are taken at a time, and neither an end nor a drop comes in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch

from ftckpt.capture.copier import Finisher, Flight

LONG_SECS = 10.0


@pytest.fixture
def finisher() -> Iterator[Finisher]:
    with closing(Finisher(threads=2)) as made:
        yield made


def flight_of(landed: Callable[[int], None], told: list[object]) -> Flight:
    return Flight([], torch.zeros(0), landed, lambda: told.append("arrived"))


def test_chunks_land_beside_each_other_and_the_end_comes_behind_all(finisher: Finisher) -> None:
    told, both = list[object](), threading.Barrier(2)

    def landed(chunk: int) -> None:
        both.wait(LONG_SECS)  # nobody comes through alone
        told.append(chunk)

    flight = flight_of(landed, told)
    for chunk in range(4):
        finisher.chunk(flight, chunk)
    finisher.end(flight)
    assert flight.wait(LONG_SECS) and flight.error is None
    assert set(told[:-1]) == {0, 1, 2, 3} and told[-1] == "arrived"


def test_the_end_waits_for_a_chunk_on_another_thread(finisher: Finisher) -> None:
    told, leave = list[object](), threading.Event()
    flight = flight_of(lambda chunk: None if chunk == 0 else told.append(leave.wait(LONG_SECS)), told)
    for chunk in range(2):
        finisher.chunk(flight, chunk)
    finisher.end(flight)
    assert not flight.wait(0.1) and not told
    leave.set()
    assert flight.wait(LONG_SECS)
    assert told == [True, "arrived"]


def test_a_drop_waits_for_what_lands_at_that_moment(finisher: Finisher) -> None:
    """Behind it the slot may be written anew, or its memory be given back."""
    told, begun, leave = list[object](), threading.Event(), threading.Event()

    def landed(chunk: int) -> None:
        begun.set()
        assert leave.wait(LONG_SECS)
        told.append(chunk)

    flight = flight_of(landed, told)
    finisher.chunk(flight, 7)
    assert begun.wait(LONG_SECS)
    dropping = threading.Thread(target=lambda: told.append(("cancelled", flight.cancel())))
    dropping.start()
    dropping.join(0.1)
    assert dropping.is_alive()
    leave.set()
    dropping.join(LONG_SECS)
    finisher.chunk(flight, 8)
    finisher.end(flight)
    assert flight.wait(LONG_SECS)
    assert told == [7, ("cancelled", True)]
