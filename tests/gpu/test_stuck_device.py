"""A capture over ``FakeDevice``: slow and stuck copies delay training or cost a snapshot, never tear one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ftckpt.capture import capture as capture_module
from ftckpt.errors import CaptureError
from tests.gpu.device_states import DeviceSnapshots
from tests.gpu.fake_device import SECS, FakeDevice
from tests.support.waiting import until


@contextmanager
def short_joins(snapshots: DeviceSnapshots, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``close`` gives stuck threads a moment only."""
    with monkeypatch.context() as patch:
        for worker in (snapshots.copier._worker, snapshots.copier._finisher):
            close = worker.close
            patch.setattr(worker, "close", lambda secs=0.0, close=close: close(0.05))
        patch.setattr(capture_module, "_SEAL_SECS", 0.05)
        yield


def test_a_slow_copy_delays_the_optimizer_on_the_device_only(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = DeviceSnapshots(monkeypatch)
    slow = fake.hold(fake.side)
    snapshots.begin()
    assert snapshots.capture.fence(SECS) < SECS / 4
    fake.compute.enqueue(snapshots.tensors[0].zero_)
    fake.advance()
    assert snapshots.capture.flying
    assert snapshots.control.calls == ["begin"]
    slow.set()
    snapshots.capture.settle(SECS)
    fake.compute.synchronize()
    assert snapshots.control.calls == ["begin", "seal"]
    snapshots.assert_boundary()
    assert not snapshots.tensors[0].any()
    snapshots.capture.close()
    assert not fake.pinned


def test_a_stuck_copy_costs_the_snapshot_and_never_the_trainer(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence passes, as the device holds training back; what the host waits for after it has a deadline."""
    snapshots = DeviceSnapshots(monkeypatch)
    stuck = fake.hold(fake.side)
    snapshots.begin()
    flight = snapshots.capture.flight
    snapshots.capture.fence(SECS)
    assert fake.compute.waits == [fake.copies] and fake.calls
    snapshots.capture.poll(SECS, 0.0)
    assert snapshots.capture.flying, "a boundary looks, and training goes on"
    with pytest.raises(CaptureError, match="iteration 7"):
        snapshots.capture.poll(0.0, 0.05)
    assert snapshots.capture.busy, "the device may still write the slot"
    with pytest.raises(CaptureError, match="not ended"):
        snapshots.begin()
    with short_joins(snapshots, monkeypatch):
        snapshots.capture.close()
    assert fake.pinned, "pages that a device may write to were given back"
    stuck.set()
    assert flight is not None and flight.wait(SECS)
    assert snapshots.control.calls == ["begin", "void"], "sealed after it was dropped"
    snapshots.copier.close()
    assert not fake.pinned


def test_close_while_the_copier_is_stuck_in_a_submission(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.refuse_pinning = True
    snapshots = DeviceSnapshots(monkeypatch)
    stuck = fake.hold(fake.side)
    snapshots.begin()
    flight = snapshots.capture.flight
    begin = time.monotonic()
    until(lambda: fake.copies, "submitted", SECS)
    with short_joins(snapshots, monkeypatch):
        snapshots.capture.close()
    assert time.monotonic() - begin < SECS / 4
    assert flight is not None and not flight.ended
    stuck.set()
    assert flight.wait(SECS), "its end was told to a thread that had been stopped"
    assert snapshots.control.calls == ["begin", "void"]
    snapshots.copier.close()
