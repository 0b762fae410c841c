"""Background copies: slow ones are waited for, failed, stuck and cancelled ones never seal a snapshot."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pytest
import torch

from ftckpt.capture import copier as copier_module
from ftckpt.capture.chunks import ChunkCopy, Segment
from ftckpt.capture.copier import Flight, HostCopier, Worker, copy_chunk
from ftckpt.schedule.bubbles import Always, Bubbles, WindowPlan
from ftckpt.schedule.iteration import IterationForecast

LONG_SECS = 20.0
"""Deadline of what is expected to happen."""

COPIES = [ChunkCopy(chunk, (Segment(0, chunk * 4, 4, chunk * 16, 16),)) for chunk in range(4)]

Hook = Callable[[ChunkCopy], None]


@pytest.fixture
def copier() -> Iterator[HostCopier]:
    with closing(HostCopier()) as made:
        yield made


class Watched:
    """A flight of four chunks and the reports about it, in order."""

    def __init__(self) -> None:
        self.live = torch.arange(16, dtype=torch.float32)
        self.slot = torch.zeros(64, dtype=torch.uint8)
        self.told: list[object] = []
        self.flight = Flight(COPIES, self.slot, lambda: self.told.append("arrived"))

    @property
    def copied(self) -> bool:
        return bool(torch.equal(self.slot.view(torch.float32), torch.arange(16, dtype=torch.float32)))

    def start(self, copier: HostCopier) -> Flight:
        copier.start([self.live], self.flight, Always())
        return self.flight


def before_copy(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    """Have ``hook`` run on the copier's thread before each chunk."""

    def copy(tensors: list[torch.Tensor], copy: ChunkCopy, slot: torch.Tensor) -> None:
        hook(copy)
        copy_chunk(tensors, copy, slot)

    monkeypatch.setattr(copier_module, "copy_chunk", copy)


class Gate:
    """Holds the copy of one chunk until it is opened."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, copy: ChunkCopy) -> None:
        if copy.chunk == self.chunk:
            self.reached.set()
            assert self.opened.wait(LONG_SECS)


def test_the_fence_waits_for_a_slow_copy(copier: HostCopier, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(2)
    before_copy(monkeypatch, gate)
    watched = Watched()
    flight = watched.start(copier)
    assert gate.reached.wait(LONG_SECS) and not flight.ended
    threading.Timer(0.1, gate.opened.set).start()
    assert copier.fence(flight, LONG_SECS)
    watched.live.fill_(-1)  # what the optimizer does after the fence
    assert flight.wait(LONG_SECS)
    assert watched.copied and watched.told[-1] == "arrived"


def test_a_failed_copy_is_told_at_the_fence_and_never_arrives(
    copier: HostCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(copy: ChunkCopy) -> None:
        if copy.chunk == 2:
            raise OSError("no more memory")

    before_copy(monkeypatch, fail)
    watched = Watched()
    flight = watched.start(copier)
    assert not copier.fence(flight, LONG_SECS)
    assert flight.wait(LONG_SECS) and isinstance(flight.error, OSError)
    assert not watched.told
    assert flight.cancel() and flight.cancelled


def test_a_stuck_copy_passes_its_deadline_and_nothing_is_told_after_cancel(
    copier: HostCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(1)
    before_copy(monkeypatch, gate)
    watched = Watched()
    flight = watched.start(copier)
    assert gate.reached.wait(LONG_SECS)
    begin = time.monotonic()
    assert not copier.fence(flight, 0.05)
    assert time.monotonic() - begin < LONG_SECS / 2
    assert flight.cancel()
    assert not flight.ended, "its thread still writes the slot"
    gate.opened.set()
    assert flight.wait(LONG_SECS)
    assert not watched.told
    assert not watched.slot[32:].any(), "no copy begins after cancel"
    assert not copier.fence(flight, 0.0) or flight.cancelled


def test_each_chunk_asks_for_its_turn_and_the_fence_hurries(
    copier: HostCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(1)
    before_copy(monkeypatch, gate)
    asked: list[tuple[int, float]] = []

    class Turns:
        def wait_turn(self, sizes: Sequence[int], hurry: threading.Event) -> None:
            asked.append((*sizes, hurry.is_set()))

    watched = Watched()
    copier.start([watched.live], watched.flight, Turns())
    assert gate.reached.wait(LONG_SECS)
    assert not copier.fence(watched.flight, 0.01)
    gate.opened.set()
    assert watched.flight.wait(LONG_SECS)
    assert [nbytes for nbytes, _ in asked] == [16] * 4
    assert [hurried for _, hurried in asked] == [False, False, True, True]
    assert asked[-1][1] <= time.monotonic()


def test_volatile_state_is_copied_as_it_is_at_each_boundary(copier: HostCopier) -> None:
    """The destinations are computed once; for other sources, such as saved tensors, the copies come from these."""
    watched = Watched()
    live, kept = [watched.live], [torch.full((16,), -1.0)]
    copier.prepare([watched.slot])
    for sources, value in ((live, 1.0), (live, 2.0), (kept, 9.0), (live, 3.0)):
        watched.live.fill_(value)
        copier.take(sources, COPIES, watched.slot)
        watched.live.zero_()  # by what comes behind the call
        assert watched.slot.view(torch.float32).tolist() == [value if sources is live else -1.0] * 16


def test_copies_in_host_memory_take_no_core_from_a_rank_that_computes() -> None:
    own = os.sched_getscheduler(0)
    with closing(HostCopier()) as copier:
        assert Watched().start(copier).wait(LONG_SECS)
        (copies,) = [thread for thread in threading.enumerate() if thread.name == "ftckpt-copy"]
        assert os.sched_getscheduler(copies.native_id or 0) == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == own


NUM = 8
RACING = [ChunkCopy(chunk, (Segment(0, chunk * 4, 4, chunk * 16, 16),)) for chunk in range(NUM)]
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
    """A flight that notes calls which it must never get."""

    def __init__(self, live: torch.Tensor, slot: torch.Tensor, dice: random.Random, faulty: bool = False) -> None:
        self.live, self.slot, self.dice = live, slot, dice
        self.boundary = live.clone()
        self.fails_at = dice.choice([None, None, "arrived", "copied"]) if faulty else None
        self.chunk = dice.randrange(NUM)
        self.problems: list[str] = []
        self.told: list[object] = []
        self.over = False
        self.flight = Flight(RACING, slot, self._arrived)

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
    """Reports the copies of a snapshot to it."""
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
    """Snapshots as by a checkpointer: begin, places, fence, write, settle; the next one when nothing runs."""
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


def test_copies_wait_for_a_core_no_longer_than_their_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []
    monkeypatch.setattr(copier_module, "has_idle_core", lambda: bool(looks.append(None)))
    with closing(HostCopier()) as copier:
        flight = Watched().start(copier)
        assert flight.wait(LONG_SECS)
    # The patience is one for all of a snapshot's copies.
    assert len(looks) == copier_module._PATIENCE


def test_a_stuck_thread_does_not_hold_up_close() -> None:
    worker, release = Worker("ftckpt-test"), threading.Event()
    worker.submit(lambda: bool(release.wait(LONG_SECS)))
    begin = time.monotonic()
    worker.close(timeout_secs=0.05)
    assert time.monotonic() - begin < LONG_SECS / 2
    release.set()
