"""A whole capture over ``FakeDevice``: slow and stuck copies delay training or cost a snapshot, never tear one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from ftckpt.capture import capture as capture_module
from ftckpt.capture.capture import Capture
from ftckpt.capture.device_copier import DeviceCopier
from ftckpt.errors import CaptureError
from ftckpt.model.snapshot import SnapshotId
from ftckpt.store.control import SlotState
from ftckpt.windows.bubbles import Always, Turn
from ftckpt.windows.clock import DeviceClock
from ftckpt.windows.node_budget import NoBudget
from tests.support.device_states import CPU, assert_holds, live_state, plan, shared_slot
from tests.support.fake_device import PAGE, SECS, FakeDevice, install
from tests.support.waiting import until

SNAPSHOT = SnapshotId(b"l" * 16, 7)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return install(monkeypatch)


class Control:
    """The control block's part in a capture: what was told of its one slot, in order."""

    slots = 1

    def __init__(self) -> None:
        self.told: list[str] = []
        self.state = SlotState.EMPTY

    def record(self, _slot: int) -> Any:
        return SimpleNamespace(snapshot=SNAPSHOT if self.state == SlotState.SEALED else None)

    def begin(self, _slot: int) -> None:
        self._tell("begin", SlotState.WRITING)

    def set_objects(self, _slot: int, nbytes: int, digest: int) -> None: ...

    def set_chunk_hash(self, _slot: int, chunk: int, digest: int) -> None:
        self.told.append(f"chunk {chunk}")

    def seal(self, _slot: int, _snapshot: SnapshotId, hashed: bool) -> None:
        self._tell("seal", SlotState.SEALED)

    def void(self, _slot: int) -> None:
        self._tell("void", SlotState.EMPTY)

    def _tell(self, what: str, state: SlotState) -> None:
        self.told.append(what)
        self.state = state


class Snapshots:
    """A capture of ``live_state`` into one slot. ``copier`` is the device's, ``slot`` the bytes in host memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, windows: Any = None) -> None:
        self.tensors = live_state()
        self.boundary = [tensor.clone() for tensor in self.tensors]
        self.copies, size = plan(self.tensors, 3 * PAGE, parity=True)
        self.slot, self.control = shared_slot(size), Control()
        arena: Any = SimpleNamespace(
            control=self.control,
            image=SimpleNamespace(
                num_stepped_chunks=len(self.copies),
                objects=SimpleNamespace(begin=0, end=PAGE, nbytes=PAGE),
                manifest=None,
            ),
            slot=lambda _slot: memoryview(self.slot.numpy()),
            slot_error=lambda _slot: None,
            checks=None,
            hash_chunk=lambda _slot, _chunk: 0,
        )
        monkeypatch.setattr(capture_module, "chunk_copies", lambda image, parts: self.copies)
        pieces: Any = [SimpleNamespace(tensor=tensor) for tensor in self.tensors]
        self.copier = DeviceCopier(DeviceClock(CPU), NoBudget(), own_stream=True)
        self.capture = Capture(arena, pieces, [], self.copier, windows)
        until(lambda: self.copier.register_secs, "registered", SECS)

    def begin(self) -> None:
        self.capture.begin(SNAPSHOT, (), {})

    def assert_boundary(self) -> None:
        assert_holds(self.slot, self.copies, self.boundary, begin=PAGE)  # the first page is that of the objects


@contextmanager
def short_joins(snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``close`` gives stuck threads a moment only."""
    with monkeypatch.context() as patch:
        for worker in (snapshots.copier._worker, snapshots.copier._finisher._worker):
            close = worker.close
            patch.setattr(worker, "close", lambda close=close: close(0.05))
        patch.setattr(capture_module, "_SEAL_SECS", 0.05)
        yield


def test_a_slow_copy_delays_the_optimizer_on_the_device_only(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = Snapshots(monkeypatch)
    slow = fake.hold(fake.side)
    snapshots.begin()
    assert snapshots.capture.fence(SECS) < SECS / 4
    fake.compute.enqueue(snapshots.tensors[0].zero_)
    fake.advance()
    assert snapshots.capture.flying
    assert snapshots.control.told == ["begin"]
    slow.set()
    snapshots.capture.settle(SECS)
    fake.compute.synchronize()
    assert snapshots.control.told == ["begin", *(f"chunk {copy.chunk}" for copy in snapshots.copies), "seal"]
    snapshots.assert_boundary()
    assert not snapshots.tensors[0].any()
    snapshots.capture.close()
    assert not fake.pinned


def test_a_stuck_copy_costs_the_snapshot_and_never_the_trainer(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence passes, as the device holds training back; what the host waits for after it has a deadline."""
    snapshots = Snapshots(monkeypatch)
    stuck = fake.hold(fake.side)
    snapshots.begin()
    snapshots.capture.fence(SECS)
    assert fake.compute.waits == [len(snapshots.copies)]
    with pytest.raises(CaptureError, match="not there"):
        snapshots.capture.settle(0.05)
    assert snapshots.capture.busy, "the device may still write the slot"
    with pytest.raises(CaptureError, match="not ended"):
        snapshots.begin()
    with short_joins(snapshots, monkeypatch):
        snapshots.capture.close()
    assert fake.pinned, "pages that a device may write to were given back"
    stuck.set()
    flight = snapshots.copier._flight
    assert flight is not None and flight.wait(SECS)
    assert snapshots.control.told == ["begin", "void"], "sealed, or a hash written, after it was dropped"
    snapshots.copier.close()
    assert not fake.pinned


def test_a_stuck_submission_costs_the_snapshot_before_the_device_is_told(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = threading.Event()

    class Blocked(Always):
        def wait_turn(self, nbytes: int, hurry: threading.Event) -> Turn:
            assert leave.wait(SECS)
            return Turn()

    snapshots = Snapshots(monkeypatch, Blocked())
    snapshots.begin()
    with pytest.raises(CaptureError, match=r"not done after 0\.05 s"):
        snapshots.capture.fence(0.05)
    assert not fake.compute.waits
    leave.set()
    flight = snapshots.copier._flight
    assert flight is not None and flight.wait(SECS)
    snapshots.tensors[0].zero_()
    assert snapshots.control.told == ["begin", "void"]
    assert snapshots.capture.fence(SECS) == 0.0
    snapshots.capture.settle(SECS)
    snapshots.capture._windows = Always()
    snapshots.boundary = [tensor.clone() for tensor in snapshots.tensors]
    snapshots.begin()
    snapshots.capture.fence(SECS)
    snapshots.capture.settle(SECS)
    assert snapshots.control.told[-1] == "seal"
    snapshots.assert_boundary()
    snapshots.capture.close()


def test_close_while_the_copier_is_stuck_in_a_submission(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.refuse_pinning = True
    snapshots = Snapshots(monkeypatch)
    stuck = fake.hold(fake.side)
    snapshots.begin()
    begin = time.monotonic()
    until(lambda: fake.copies, "submitted", SECS)
    with short_joins(snapshots, monkeypatch):
        snapshots.capture.close()
    assert time.monotonic() - begin < SECS / 4
    flight = snapshots.copier._flight
    assert flight is not None and not flight.ended
    stuck.set()
    assert flight.wait(SECS), "its end was told to a thread that had been stopped"
    assert snapshots.control.told == ["begin", "void"]
    snapshots.copier.close()
