"""Copies start when the device reaches their window, however far the host is ahead of it; on ``FakeDevice``."""

from __future__ import annotations

import threading

import pytest

from ftckpt.schedule.iteration import Iteration
from tests.gpu.device_states import CPU, KINDS, Run, prepared, slot_for
from tests.gpu.fake_device import PAGE, SECS, FakeDevice


@pytest.mark.parametrize("num", [1, 6, 10, 13])
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("first", ["compute", "side"])
def test_each_window_gets_its_bytes_while_the_host_is_past_them(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, num: int, late: bool, first: str
) -> None:
    """``late``: the copier requests its first turn after the host has passed the iteration."""
    slot = slot_for(num)
    with prepared([slot], CPU) as copier:
        fake.first = fake.compute if first == "compute" else fake.side
        fake.go.clear()
        run = Run(fake, copier, slot, num)
        passed, ask = threading.Event(), run.bubbles.wait_turn
        if late:
            monkeypatch.setattr(run.bubbles, "wait_turn", lambda *args: passed.wait(SECS) and ask(*args))
        run.start()
        run.enter(range(1, 9))
        passed.set()
        assert run.flight.submitted.wait(SECS)
        assert not [entry for entry in fake.log if isinstance(entry, int)]
        run.fence_and_step()
        run.enter(range(9, 10))
        run.finish()
    assert run.planned[8:] == [max(0, num - 13), 0]
    assert [entry for entry in fake.log if isinstance(entry, int)] == [copy.chunk for copy in run.copies]
    if first == "side":
        assert run.done == run.planned
    else:  # copies may be late, but none is early
        assert all(sum(run.done[:place]) <= sum(run.planned[:place]) for place in range(len(KINDS)))


@pytest.mark.parametrize("pinned", [True, False])
def test_no_copy_starts_before_the_device_reaches_its_window(fake: FakeDevice, pinned: bool) -> None:
    """Not even when the copy could run and training's stream is stuck before the window; staged ones neither."""
    fake.refuse_pinning = not pinned
    slot = slot_for(5)
    with prepared([slot], CPU) as copier:
        fake.first = fake.side
        run = Run(fake, copier, slot, 5)
        slow = fake.hold(fake.compute)
        run.start()
        run.enter(range(1, 9))
        assert not run.flight.submitted.wait(0.05) or pinned
        fake.advance()
        assert fake.log == []
        slow.set()
        assert run.flight.submitted.wait(SECS)
        run.fence_and_step()
        run.finish()
    if pinned:
        assert run.done == run.planned
    chunks = [place for place, num in enumerate(run.done) for _ in range(num)]
    assert chunks == sorted(chunks) and chunks[0] >= 1 and chunks[3] >= 3


def test_each_copy_is_timed_once_and_inside_its_window(fake: FakeDevice) -> None:
    num = 10
    slot = slot_for(num)
    with prepared([slot], CPU) as copier:
        fake.first = fake.side
        fake.go.clear()
        run = Run(fake, copier, slot, num)
        run.start()
        run.enter(range(1, 9))
        assert run.flight.submitted.wait(SECS)
        assert run.clock.secs(run.marks[0], run.marks[-1]) is None, "it lies ahead"
        run.fence_and_step()
        end = run.clock.mark()
        run.finish()
        edges = [run.clock.secs(run.marks[0], mark) for mark in (*run.marks, end)]
    assert all(edge is not None for edge in edges)
    timed = sorted(run.flight.timed)
    assert [nbytes for _, _, nbytes in timed] == [PAGE] * num
    assert all(end - begin == pytest.approx(1e-3) for begin, end, _ in timed)
    iteration = Iteration(KINDS[:9], tuple(edge for edge in edges if edge is not None), tuple(timed))
    expected = {"window": 5, "tail": 1, "forward": 3, "backward": 1}
    assert iteration.moved_bytes == {kind: chunks * PAGE for kind, chunks in expected.items()}
