"""Copies in the windows of an iteration, turn by turn."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.schedule.bubbles import Bubbles, Turn, WindowPlan
from ftckpt.schedule.iteration import IDLE, Iteration, IterationForecast, Profile, divide

# --- copies use free time ---


KINDS = ("boundary", "window", "forward", "window", "backward", "window", "tail", "fence", "optimizer")
SECS = (0.0, 2.0, 1.0, 0.0, 2.0, 0.0, 1.0, 0.0, 0.5)


def plan(
    rate: float = 10.0, unit: int = 1, kinds: tuple[str, ...] = KINDS, secs: tuple[float, ...] = SECS
) -> WindowPlan:
    return WindowPlan.of(IterationForecast(kinds, secs), rate, unit)


def placed(plan: WindowPlan, total_bytes: int) -> dict[str, int]:
    """Bytes by kind of place if the iteration goes as planned."""
    left, found = total_bytes, dict.fromkeys(("window", "forward", "backward", "fence"), 0)
    for place, kind in enumerate(plan.timeline.kinds):
        nbytes = plan.allowed(place, left)
        found["window" if kind in IDLE else kind if kind in found else "fence"] += nbytes
        left -= nbytes
    return found


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        (30, {"window": 30, "forward": 0, "backward": 0, "fence": 0}),
        (35, {"window": 30, "forward": 5, "backward": 0, "fence": 0}),
        (55, {"window": 30, "forward": 10, "backward": 15, "fence": 0}),
        (75, {"window": 30, "forward": 10, "backward": 20, "fence": 15}),
    ],
)
def test_what_does_not_fit_spills_in_order(total: int, expected: dict[str, int]) -> None:
    assert placed(plan(), total) == expected


timelines = st.lists(
    st.tuples(st.sampled_from(["window", "forward", "backward", "tail"]), st.floats(0, 5)), min_size=1, max_size=30
).map(lambda places: IterationForecast((*(k for k, _ in places), "fence"), (*(s for _, s in places), 0.0)))


@given(timelines, st.integers(0, 500), st.floats(0.1, 20), st.integers(1, 16))
def test_every_byte_goes_somewhere_and_nothing_spills_that_windows_take(
    timeline: IterationForecast, total: int, rate: float, unit: int
) -> None:
    made = WindowPlan.of(timeline, rate, unit)
    found = placed(made, total)
    assert sum(found.values()) == total
    assert found["window"] == min(total, made.window_bytes)
    forwards = sum(n for kind, n in zip(timeline.kinds, made.capacity, strict=True) if kind == "forward")
    if found["backward"]:
        assert found["window"] == made.window_bytes
    if found["fence"]:
        assert found["forward"] == forwards


class Copier:
    """Takes turns until it would have to wait."""

    def __init__(self, bubbles: Bubbles, nbytes: int) -> None:
        self.bubbles, self.nbytes = bubbles, nbytes

    def run(self) -> list[Any]:
        gates = []
        while (turn := self.bubbles.next_turn([self.nbytes])) is not None:
            gates.append(turn.gate)
            assert len(gates) < 1000
        return gates


def test_a_place_that_was_left_is_over_for_the_host_and_to_come_for_a_device() -> None:
    for queued, expected in ((False, 0), (True, 20)):
        bubbles = Bubbles(queued)
        bubbles.begin(30, plan())
        bubbles.enter(0, "boundary", "a")
        assert not Copier(bubbles, 1).run()
        bubbles.enter(1, "window", "b")
        bubbles.enter(2, "forward", "c")
        gates = Copier(bubbles, 1).run()
        assert gates.count("b") == expected
        # On the host the window's bytes are missed: the later ones take 10, the forward step what they cannot.
        assert gates.count("c") == (0 if queued else 10)


def test_steps_shorter_than_a_copy_add_up() -> None:
    made = plan(rate=1.0, kinds=("forward",) * 8 + ("fence",), secs=(1.0,) * 8 + (0.0,))
    bubbles = Bubbles(queued=False)
    bubbles.begin(8, made)
    taken = []
    for place in range(8):
        bubbles.enter(place, "forward", place)
        taken += Copier(bubbles, 4).run()
    assert taken == [1, 5]


def test_without_a_plan_and_off_the_plan_copies_go_at_once() -> None:
    bubbles = Bubbles(queued=False)
    bubbles.begin(10, None)
    assert bubbles.next_turn([5]) is None, "the trainer still stands at the boundary"
    bubbles.enter(1, "start", 0)
    assert bubbles.next_turn([5]) == Turn()
    bubbles.begin(10, plan())
    bubbles.enter(0, "boundary", 0)
    assert bubbles.next_turn([5]) is None
    bubbles.enter(1, "backward", 1)
    assert bubbles.next_turn([5]) == Turn()


def iteration(scale: float = 1.0, kinds: tuple[str, ...] = KINDS, secs: tuple[float, ...] = SECS) -> Iteration:
    edges = [0.0]
    for length in secs:
        edges.append(edges[-1] + length * scale)
    return Iteration(kinds, tuple(edges))


def test_the_first_iteration_is_not_counted_and_one_slow_one_moves_nothing() -> None:
    profile = Profile()
    for scale in (50.0, 1.0, 1.0, 9.0):
        assert not profile.measured
        profile.add(iteration(scale))
    assert profile.measured
    timeline = profile.timeline
    assert timeline is not None
    assert timeline.secs == SECS


def test_another_schedule_is_measured_anew() -> None:
    profile = Profile()
    for _ in range(5):
        profile.add(iteration())
    profile.add(iteration(kinds=KINDS[1:], secs=SECS[1:]))
    assert not profile.measured
    for _ in range(5):
        profile.add(iteration(2.0, KINDS[1:], SECS[1:]))
    timeline = profile.timeline
    assert timeline is not None
    assert timeline.kinds == KINDS[1:]
    before = IterationForecast(KINDS, SECS)
    assert timeline.distance(before) == 1.0
    assert before.distance(IterationForecast(KINDS, (*SECS[:-1], 1.15))) == pytest.approx(0.1)


spans = st.lists(st.tuples(st.sampled_from(sorted(IDLE | {"forward"})), st.floats(0.01, 3)), min_size=1, max_size=12)
copies = st.lists(st.tuples(st.floats(0, 4), st.floats(0, 2), st.integers(1, 10**9)), max_size=12)


@given(spans, copies)
def test_no_byte_is_counted_twice_or_lost(
    spans: list[tuple[str, float]], copies: list[tuple[float, float, int]]
) -> None:
    """Each copy begins some time after the one before it; what it moves is divided by time."""
    made = iteration(1.0, tuple(k for k, _ in spans), tuple(s for _, s in spans))
    placed, now = [], -1.0
    for pause, secs, nbytes in copies:
        placed.append((now + pause, now + pause + secs, nbytes))
        now += pause + secs
    moved = divide(placed, made.kinds, made.edges)
    assert sum(moved.values()) == sum(n for _, _, n in copies)
    for kind in set(made.kinds):
        expected = 0.0
        for index, name in enumerate(made.kinds):
            low = made.edges[index] if index else -1e9
            high = made.edges[index + 1] if index + 1 < len(made.kinds) else 1e9
            for begin, end, nbytes in placed:
                if name == kind and end > begin:
                    expected += nbytes * max(0.0, min(end, high) - max(begin, low)) / (end - begin)
                elif name == kind and low <= begin < high:
                    expected += nbytes
        instants = sum(n for b, e, n in placed if e - b < 1e-6)
        assert abs(moved.get(kind, 0) - expected) <= instants + len(made.kinds) + 1e-3 * expected


# --- turns between two threads and two snapshots ---


LONG_SECS = 20.0
PLACES = ("start", "window", "forward", "window", "backward", "tail", "fence", "optimizer")
PLAN = WindowPlan.of(IterationForecast(PLACES, (0.0, 2.0, 1.0, 2.0, 1.0, 1.0, 0.0, 1.0)), 16.0, 16)


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
    for place, kind in enumerate(PLACES):
        if kind != "optimizer":
            bubbles.enter(place, kind, place)
    for _ in range(4):
        gates.append(bubbles.wait_turn([16], hurry).gate)
    assert gates == [1, 1, 3, 3]


class Event:
    """An event of a device."""


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
    plan = WindowPlan.of(IterationForecast(PLACES, (*map(float, secs), 0.0, 1.0)), 8.0, max(chunks))
    bubbles, hurry, turns = Bubbles(queued=True), late_hurry(), list[Turn]()
    bubbles.begin(total, plan)

    def ask() -> None:
        for nbytes in chunks:
            turns.append(bubbles.wait_turn([nbytes], hurry))

    asker = threading.Thread(target=ask)
    asker.start()
    for place, kind in enumerate(PLACES[:7]):
        bubbles.enter(place, kind, place)
        if dice.random() < 0.3:
            time.sleep(0)
    asker.join(LONG_SECS)
    assert not hurry.is_set(), "the fence's place has room for all"
    gates = [turn.gate for turn in turns]
    assert len(gates) == len(chunks) and gates == sorted(gates)
    for place, kind in enumerate(PLACES[:6]):
        given_here = [n for n, gate in zip(chunks, gates, strict=True) if gate == place]
        if kind in IDLE and given_here:
            assert sum(given_here) <= plan.capacity[place] + given_here[-1] / 2
