"""Turns between two threads and two snapshots: each chunk gets one, and none is waited for in vain."""

from __future__ import annotations

import random
import threading
import time
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.schedule.bubbles import Bubbles, Turn, WindowPlan
from ftckpt.schedule.iteration import IDLE, IterationForecast

LONG_SECS = 20.0
KINDS = ("start", "window", "forward", "window", "backward", "tail", "fence", "optimizer")
PLAN = WindowPlan.of(IterationForecast(KINDS, (0.0, 2.0, 1.0, 2.0, 1.0, 1.0, 0.0, 1.0)), 16.0, 16)


def late_hurry() -> threading.Event:
    """Ends a wait that should not be one."""
    hurry = threading.Event()
    timer = threading.Timer(LONG_SECS / 4, hurry.set)
    timer.daemon = True
    timer.start()
    return hurry


def test_a_dropped_snapshot_takes_nothing_from_the_next() -> None:
    """Its copier may ask for turns until it notices."""
    bubbles, dropped, hurry = Bubbles(queued=True), threading.Event(), late_hurry()
    bubbles.begin(64, PLAN)
    bubbles.enter(0, "start", 0)
    late = threading.Thread(target=lambda: [bubbles.wait_turn([16], dropped) for _ in range(4)])
    late.start()
    dropped.set()
    bubbles.begin(64, PLAN)
    late.join(LONG_SECS)
    gates = []
    for place, kind in enumerate(KINDS):
        if kind != "optimizer":
            bubbles.enter(place, kind, place)
    for _ in range(4):
        gates.append(bubbles.wait_turn([16], hurry).gate)
    assert gates == [1, 1, 3, 3]


class Event:
    """An event of a device."""


@pytest.mark.parametrize("queued", [True, False])
def test_events_do_not_pile_up_where_nobody_asks(queued: bool) -> None:
    """Not between snapshots, nor without a plan."""
    bubbles, held = Bubbles(queued), list[weakref.ref[Event]]()
    for plan in (None, PLAN):
        bubbles.begin(64, plan)
        for _ in range(3):
            for place, kind in enumerate(KINDS):
                bubbles.enter(place, kind, event := Event())
                held.append(weakref.ref(event))
                del event
            assert not any(event() for event in held)


def test_what_a_step_owes_is_not_held_against_the_fence() -> None:
    """A step may give half a chunk too much. The fence has no later place that could make up for it."""
    bubbles, hurry = Bubbles(queued=True), late_hurry()
    bubbles.begin(5, WindowPlan.of(IterationForecast(("forward", "fence"), (3.0, 0.0)), 1.0, 1))
    bubbles.enter(0, "forward", "step")
    bubbles.enter(1, "fence", "fence")
    assert [bubbles.wait_turn([nbytes], hurry).gate for nbytes in (4, 1)] == ["step", "fence"]


sizes = st.lists(st.integers(1, 40), min_size=1, max_size=20)
lengths = st.lists(st.integers(0, 5), min_size=6, max_size=6)


@settings(max_examples=40)
@given(sizes, lengths, st.integers(0, 1 << 30))
def test_every_chunk_gets_one_turn_in_the_order_of_places(chunks: list[int], secs: list[int], seed: int) -> None:
    """With the host anywhere: gates never go back, and windows are not overfilled by more than half a chunk."""
    dice, total = random.Random(seed), sum(chunks)
    plan = WindowPlan.of(IterationForecast(KINDS, (*map(float, secs), 0.0, 1.0)), 8.0, max(chunks))
    bubbles, hurry, turns = Bubbles(queued=True), late_hurry(), list[Turn]()
    bubbles.begin(total, plan)

    def ask() -> None:
        for nbytes in chunks:
            turns.append(bubbles.wait_turn([nbytes], hurry))

    asker = threading.Thread(target=ask)
    asker.start()
    for place, kind in enumerate(KINDS[:7]):
        bubbles.enter(place, kind, place)
        if dice.random() < 0.3:
            time.sleep(0)
    asker.join(LONG_SECS)
    assert not hurry.is_set(), "the fence's place has room for all"
    gates = [turn.gate for turn in turns]
    assert len(gates) == len(chunks) and gates == sorted(gates)
    for place, kind in enumerate(KINDS[:6]):
        given_here = [n for n, gate in zip(chunks, gates, strict=True) if gate == place]
        if kind in IDLE and given_here:
            assert sum(given_here) <= plan.capacity[place] + given_here[-1] / 2
