"""Threads of a copier against each other: training and copies; seeds decide who is late."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch

from ftckpt.capture import copier as copier_module
from ftckpt.capture.chunks import ChunkCopy, Segment
from ftckpt.capture.copier import Flight, HostCopier, copy_chunk
from ftckpt.schedule.bubbles import Always, Bubbles, WindowPlan
from ftckpt.schedule.iteration import IterationForecast

LONG_SECS = 20.0
NUM = 8
COPIES = [ChunkCopy(chunk, (Segment(0, chunk * 4, 4, chunk * 16, 16),)) for chunk in range(NUM)]
KINDS = ("start", "window", "forward", "window", "backward", "tail", "fence", "optimizer")
PLAN = WindowPlan.of(IterationForecast(KINDS, (0.0, 2.0, 1.0, 2.0, 1.0, 1.0, 0.0, 1.0)), 16.0, 16)


def pause(dice: random.Random) -> None:
    """Nothing, let another thread run, or sleep."""
    kind = dice.randrange(4)
    if kind == 1:
        time.sleep(0)
    elif kind > 1:
        time.sleep(dice.random() * 1e-3)


class Snapshot:
    """A flight that knows what it must never be asked or told."""

    def __init__(self, live: torch.Tensor, slot: torch.Tensor, dice: random.Random, faulty: bool = False) -> None:
        self.live, self.slot, self.dice = live, slot, dice
        self.boundary = live.clone()
        self.fails_at = dice.choice([None, None, "arrived", "copied"]) if faulty else None
        self.chunk = dice.randrange(NUM)
        self.problems: list[str] = []
        self.told: list[object] = []
        self.over = False
        self.flight = Flight(COPIES, slot, self._arrived)

    def before_copy(self, chunk: int) -> None:
        pause(self.dice)
        if self.flight.ended:
            self.problems.append(f"chunk {chunk} was copied after the end")
        if self.fails_at == "copied" and chunk == self.chunk:
            raise OSError("copied")

    def _arrived(self) -> None:
        if self.over:
            self.problems.append("arrived after cancel")
        if not torch.equal(self.slot.view(torch.float32), self.boundary):
            self.problems.append("arrived without its bytes")
        pause(self.dice)
        if self.fails_at == "arrived":
            raise OSError("arrived")
        self.told.append("arrived")

    def cancel(self) -> bool:
        cancelled = self.flight.cancel()
        self.over = cancelled
        return cancelled

    def check(self, cancelled: bool) -> None:
        """After the end."""
        assert self.problems == []
        arrived = "arrived" in self.told
        assert arrived == (not cancelled and self.flight.error is None)
        assert len(self.told) <= 1


Following = Callable[[Snapshot], None]


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Following]:
    """Tells the copies of a snapshot to it."""
    current: list[Snapshot] = []

    def copy(tensors: list[torch.Tensor], copy: ChunkCopy, slot: torch.Tensor) -> None:
        current[-1].before_copy(copy.chunk)
        copy_chunk(tensors, copy, slot)

    monkeypatch.setattr(copier_module, "copy_chunk", copy)
    yield current.append


def go_through(bubbles: Bubbles, dice: random.Random) -> None:
    for place, kind in enumerate(KINDS[1:7], start=1):
        bubbles.enter(place, kind, float(place))
        pause(dice)


@pytest.mark.parametrize("queued", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_iterations_with_failures_drops_and_slow_threads(seed: int, queued: bool, follow: Following) -> None:
    """As a checkpointer does it: begin, places, fence, write, settle; the next one when nothing runs any more."""
    dice = random.Random(seed)
    live, slot, bubbles = torch.zeros(4 * NUM), torch.zeros(16 * NUM, dtype=torch.uint8), Bubbles(queued)
    with closing(HostCopier()) as copier:
        for iteration in range(25):
            live.add_(1)
            snapshot = Snapshot(live, slot, random.Random(dice.random()), faulty=True)
            follow(snapshot)
            bubbles.begin(16 * NUM, dice.choice([PLAN, None]))
            bubbles.enter(0, "start", 0.0)
            copier.start([live], snapshot.flight, bubbles)
            go_through(bubbles, dice)
            cancelled = False
            if copier.fence(snapshot.flight, dice.choice([LONG_SECS, 1e-4])):
                live.fill_(-iteration)  # the optimizer
            else:
                cancelled = snapshot.cancel()
            bubbles.enter(7, "optimizer", 7.0)
            pause(dice)
            if not cancelled and dice.random() < 0.3:
                cancelled = snapshot.cancel()
            assert snapshot.flight.wait(LONG_SECS)
            snapshot.check(cancelled)


@pytest.mark.parametrize("seed", range(4))
def test_close_at_any_moment(seed: int, follow: Following) -> None:
    dice = random.Random(seed)
    for _ in range(15):
        live, slot = torch.ones(4 * NUM), torch.zeros(16 * NUM, dtype=torch.uint8)
        snapshot, copier = Snapshot(live, slot, random.Random(dice.random())), HostCopier()
        follow(snapshot)
        copier.start([live], snapshot.flight, Always())
        for _ in range(dice.randrange(6)):
            pause(dice)
        cancelled = snapshot.cancel()
        copier.close()
        assert snapshot.flight.ended, "close came back while a copy ran"
        snapshot.check(cancelled)
        live.zero_()


def test_a_copy_stuck_during_close_still_ends_its_flight(follow: Following, monkeypatch: pytest.MonkeyPatch) -> None:
    live, slot, release = torch.ones(4 * NUM), torch.zeros(16 * NUM, dtype=torch.uint8), threading.Event()
    snapshot, copier, begun = Snapshot(live, slot, random.Random(0)), HostCopier(), threading.Event()

    def stuck(chunk: int) -> None:
        begun.set()
        assert release.wait(LONG_SECS)

    monkeypatch.setattr(snapshot, "before_copy", stuck)
    follow(snapshot)
    copier.start([live], snapshot.flight, Always())
    assert begun.wait(LONG_SECS)
    assert snapshot.cancel()
    close = copier._worker.close
    with monkeypatch.context() as patch:
        patch.setattr(copier._worker, "close", lambda: close(0.05))
        copier.close()
    release.set()
    assert snapshot.flight.wait(LONG_SECS), "its end was told to a thread that had been stopped"
    copier.close()
    snapshot.check(cancelled=True)


def test_cancel_and_end_from_any_thread() -> None:
    """Either the end or the drop comes first, and what comes second knows."""
    for seed in range(150):
        dice, told = random.Random(seed), list[object]()
        flight = Flight(COPIES, torch.zeros(0), lambda told=told: told.append("arrived"))
        ready = threading.Barrier(2)
        pauses = [random.Random(dice.random()) for _ in range(2)]

        def end(flight: Flight = flight, ready: threading.Barrier = ready, dice: random.Random = pauses[0]) -> None:
            ready.wait(LONG_SECS)
            if dice.random() < 0.7:
                time.sleep(dice.random() * 1e-4)
            flight.end()

        thread = threading.Thread(target=end)
        thread.start()
        ready.wait(LONG_SECS)
        if pauses[1].random() < 0.7:
            time.sleep(pauses[1].random() * 1e-4)
        cancelled = flight.cancel()
        known = list(told)
        thread.join(LONG_SECS)
        assert flight.ended and flight.submitted.is_set()
        assert cancelled == ("arrived" not in told)
        assert not cancelled or told == known, "told of a snapshot that had been dropped"


def test_an_error_is_not_forgotten_at_the_end() -> None:
    told: list[str] = []
    flight = Flight(COPIES, torch.zeros(0), lambda: told.append("arrived"))
    flight.error = OSError("at the fence")
    flight.end()
    assert repr(flight.error) == "OSError('at the fence')"
    assert told == []
