"""Slots are pinned in the background, and unpinned when no copy can write to them any more; on ``FakeDevice``."""

from __future__ import annotations

import time

import pytest

from ftckpt.capture.device_copier import DeviceCopier
from ftckpt.windows.bubbles import Always
from ftckpt.windows.clock import DeviceClock
from ftckpt.windows.node_budget import NoBudget
from tests.support.device_states import CPU, Blocked, Landings, live_state, plan, prepared, shared_slot
from tests.support.fake_device import PAGE, SECS, FakeDevice, FakeStream, install
from tests.support.waiting import until


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return install(monkeypatch)


def test_registration_is_undone_where_it_was_made(fake: FakeDevice) -> None:
    """Also of slots that came later: all are unpinned when ``close`` returns."""
    slots = [shared_slot(10 * PAGE), shared_slot(3 * PAGE)]
    with prepared(slots[:1], CPU) as copier:
        assert sum(fake.pinned.values()) == slots[0].numel()
        assert len(fake.pinned) == 3
        copier.prepare([])
        copier.prepare(slots[1:])
        until(lambda: len(fake.pinned) >= 4, "registered", SECS)
        assert sum(fake.pinned.values()) == sum(slot.numel() for slot in slots)
    assert not fake.pinned
    assert fake.unpinned_by == {"ftckpt-register"}


def test_a_stuck_flight_keeps_its_pages_registered(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unregistering pages that a device still writes to would be worse than leaving them."""
    tensors = live_state()
    copies, size = plan(tensors, 3 * PAGE)
    slot = shared_slot(size)
    with prepared([slot], CPU) as copier:
        with monkeypatch.context() as patch:
            patch.setattr(copier._finisher, "close", lambda: None)
            fake.go.clear()
            seen = Landings(copies, slot)
            copier.start(tensors, seen.flight, Always())
            copier.close()
        assert fake.pinned
        fake.go.set()
        seen.wait()
    assert not fake.pinned


def test_a_flight_ends_although_its_submission_was_stuck_during_close(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = live_state()
    copies, size = plan(tensors, 3 * PAGE)
    slot, stuck = shared_slot(size), Blocked()
    with prepared([slot], CPU) as copier:
        seen = Landings(copies, slot)
        copier.start(tensors, seen.flight, stuck)
        assert stuck.asked.wait(SECS)
        assert seen.flight.cancel()
        with monkeypatch.context() as patch:
            patch.setattr(copier._worker, "close", lambda: False)
            copier.close()
        assert fake.pinned
        stuck.leave.set()
        seen.wait()
    assert not fake.pinned
    assert not slot.any()


def test_a_copier_without_work_closes_at_once(fake: FakeDevice) -> None:
    begin = time.monotonic()
    DeviceCopier(DeviceClock(CPU), NoBudget(), own_stream=True).close()
    assert time.monotonic() - begin < SECS / 4
    assert len(fake.streams) == 2 and all(isinstance(stream, FakeStream) for stream in fake.streams)
