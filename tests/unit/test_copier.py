"""Background copies: slow ones are waited for, failed, stuck and cancelled ones never seal a snapshot."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pytest
import torch

from ftckpt.capture import copier as copier_module
from ftckpt.capture.chunks import ChunkCopy, Segment
from ftckpt.capture.copier import Flight, HostCopier, Worker, copy_chunk
from ftckpt.capture.device_copier import make_copier
from ftckpt.schedule.bubbles import Always
from ftckpt.schedule.clock import HostClock

LONG_SECS = 20.0
"""Deadline of what is expected to happen."""

COPIES = [ChunkCopy(chunk, (Segment(0, chunk * 4, 4, chunk * 16, 16),)) for chunk in range(4)]

Hook = Callable[[ChunkCopy], None]


@pytest.fixture
def copier() -> Iterator[HostCopier]:
    with closing(HostCopier()) as made:
        yield made


class Watched:
    """A flight of four chunks and what was told of it, in order."""

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


def test_all_chunks_are_copied_and_then_the_snapshot_arrives_once(copier: HostCopier) -> None:
    watched = Watched()
    flight = watched.start(copier)
    assert copier.fence(flight, LONG_SECS)
    assert watched.copied
    assert flight.wait(LONG_SECS)
    assert watched.told == ["arrived"]
    assert flight.ended and not flight.cancelled and flight.error is None
    assert copier.fence(flight, 0.0)


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


def test_a_failure_while_sealing_is_a_failed_copy(copier: HostCopier) -> None:
    def fail() -> None:
        raise OSError("arrived")

    watched = Watched()
    watched.flight = Flight(COPIES, watched.slot, fail)
    flight = watched.start(copier)
    assert flight.wait(LONG_SECS)
    assert not copier.fence(flight, LONG_SECS)
    assert isinstance(flight.error, OSError)
    assert flight.cancel()


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


def test_cancel_is_refused_once_the_snapshot_has_arrived(copier: HostCopier) -> None:
    watched = Watched()
    flight = watched.start(copier)
    assert flight.wait(LONG_SECS)
    assert not flight.cancel()
    assert not flight.cancelled and watched.told[-1] == "arrived"


def test_the_next_flight_begins_after_a_failed_and_a_cancelled_one(
    copier: HostCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(copy: ChunkCopy) -> None:
        raise ValueError("told to")

    with monkeypatch.context() as patch:
        before_copy(patch, fail)
        assert not copier.fence(Watched().start(copier), LONG_SECS)
    cancelled = Watched().start(copier)
    cancelled.cancel()
    assert cancelled.wait(LONG_SECS)
    watched = Watched()
    assert copier.fence(watched.start(copier), LONG_SECS)
    assert watched.copied


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


def test_a_flight_without_copies_arrives(copier: HostCopier) -> None:
    told: list[str] = []
    flight = Flight([], torch.zeros(0, dtype=torch.uint8), lambda: told.append("arrived"))
    copier.start([], flight, Always())
    assert copier.fence(flight, LONG_SECS)
    assert flight.wait(LONG_SECS)
    assert told == ["arrived"]


def test_volatile_state_is_copied_as_it_is_at_each_boundary(copier: HostCopier) -> None:
    """Where it goes to is found out once; from other tensors, as they were kept, it comes from these."""
    watched = Watched()
    live, kept = [watched.live], [torch.full((16,), -1.0)]
    copier.prepare([watched.slot])
    for sources, value in ((live, 1.0), (live, 2.0), (kept, 9.0), (live, 3.0)):
        watched.live.fill_(value)
        copier.take(sources, COPIES, watched.slot)
        watched.live.zero_()  # by what comes behind the call
        assert watched.slot.view(torch.float32).tolist() == [value if sources is live else -1.0] * 16


def test_close_after_cancel_ends_the_thread_within_the_copy_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(0)
    before_copy(monkeypatch, gate)
    copier, watched = HostCopier(), Watched()
    flight = watched.start(copier)
    assert gate.reached.wait(LONG_SECS)
    assert flight.cancel()
    gate.opened.set()
    copier.close()
    assert flight.ended and watched.told == []
    assert not [thread for thread in threading.enumerate() if thread.name == "ftckpt-copy"]
    copier.close()


def test_a_stuck_thread_does_not_hold_up_close() -> None:
    worker, release = Worker("ftckpt-test"), threading.Event()
    worker.submit(lambda: bool(release.wait(LONG_SECS)))
    begin = time.monotonic()
    worker.close(timeout_secs=0.05)
    assert time.monotonic() - begin < LONG_SECS / 2
    release.set()


def test_host_memory_gets_the_host_copier() -> None:
    with closing(make_copier(HostClock())) as made:
        assert isinstance(made, HostCopier)


def test_background_threads_run_on_the_given_cores_and_no_other_thread_does() -> None:
    allowed = os.sched_getaffinity(0)
    core = max(allowed)
    with closing(HostCopier(cores={core})) as copier:
        watched = Watched()
        assert watched.start(copier).wait(LONG_SECS)
        threads = {t.name: t.native_id for t in threading.enumerate() if t.name.startswith("ftckpt-")}
        assert os.sched_getaffinity(threads["ftckpt-copy"] or 0) == {core}
    assert os.sched_getaffinity(0) == allowed


def test_copies_in_host_memory_take_no_core_from_a_rank_that_computes() -> None:
    own = os.sched_getscheduler(0)
    with closing(HostCopier()) as copier:
        assert Watched().start(copier).wait(LONG_SECS)
        (copies,) = [thread for thread in threading.enumerate() if thread.name == "ftckpt-copy"]
        assert os.sched_getscheduler(copies.native_id or 0) == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == own


def test_each_copy_is_told_while_it_is_under_way() -> None:
    told: list[bool] = []
    watched = Watched()
    with closing(HostCopier(tell_copying=told.append)) as copier:
        assert watched.start(copier).wait(LONG_SECS)
    assert told == [True, False] * 4
    assert [nbytes for _, _, nbytes in watched.flight.timed] == [16] * 4
