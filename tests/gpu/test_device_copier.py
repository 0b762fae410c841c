"""Copies from a device on a side stream: bytes, order, the seal, the fence.

``FakeDevice`` runs queued work in the worst order that streams and events allow, and pins what no timing can
hit for certain; ``test_on_device.py`` asks a real one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from ftckpt.capture import copier as host
from ftckpt.capture import device_copier, volatile_memory
from ftckpt.schedule.bubbles import Always, Turn
from tests.gpu.device_states import (
    CPU,
    Blocked,
    Landings,
    assert_holds,
    laid_out,
    live_state,
    plan,
    prepared,
    shared_slot,
    started,
)
from tests.gpu.fake_device import PAGE, SECS, FakeDevice
from tests.support.waiting import until


class Failing(Always):
    """Two turns, then an error."""

    turns = 0

    def wait_turn(self, sizes: Sequence[int], hurry: threading.Event) -> Turn:
        self.turns += 1
        if self.turns == 3:
            raise ValueError("no third turn")
        return Turn()


@pytest.mark.parametrize("fake", ["batch", "each"], indirect=True)
@pytest.mark.parametrize("own_stream", [True, False])
@pytest.mark.parametrize("first", ["compute", "side"])
@pytest.mark.parametrize("pinned", [True, False])
def test_snapshot_is_the_boundary_in_any_order(fake: FakeDevice, first: str, pinned: bool, own_stream: bool) -> None:
    """A write before ``start`` is in the snapshot and one after the fence is not, whoever runs first."""
    fake.refuse_pinning = not pinned
    tensors, copies, slot = laid_out(parity=True)
    with prepared([slot], CPU, own_stream=own_stream) as copier:
        copier.warm_up(tensors, copies, [])
        fake.first = fake.compute if first == "compute" else fake.side
        fake.compute.enqueue(lambda: tensors[0].add_(1))
        boundary = [tensors[0] + 1, tensors[1].clone(), tensors[2].clone()]
        seen = Landings(copies, slot)
        if pinned:
            fake.go.clear()  # the device is slow: the host passes the fence long before any byte is copied
        copier.start(tensors, seen.flight, Always())
        assert copier.fence(seen.flight, SECS)
        fake.compute.enqueue(tensors[0].zero_)
        assert seen.arrived is False or not pinned
        fake.go.set()
        seen.wait()
        fake.compute.synchronize()
    assert seen.arrived
    assert not tensors[0].any()
    assert_holds(slot, copies, boundary)


@pytest.mark.parametrize("lifted", ["by the device", "by the fence", "by a cancel"])
def test_the_device_is_given_some_chunks_ahead_and_no_more(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, lifted: str
) -> None:
    """A full driver queue holds up the launches of training, too; whoever waits wants all of it."""
    monkeypatch.setattr(device_copier, "_MOST_AHEAD", 3)
    tensors, copies, slot = laid_out(PAGE)
    boundary = [tensor.clone() for tensor in tensors]
    with prepared([slot], CPU) as copier:
        slow = fake.hold(fake.side)
        seen = started(copier, tensors, copies, slot)
        until(lambda: fake.copies >= 3, "submitted", SECS)
        assert not seen.flight.submitted.wait(0.1) and fake.copies == 3
        if lifted == "by the fence":
            assert copier.fence(seen.flight, SECS) and fake.copies == len(copies)
            fake.compute.enqueue(tensors[0].zero_)
        elif lifted == "by a cancel":
            assert seen.flight.cancel() and seen.flight.submitted.wait(SECS) and fake.copies == 3
        slow.set()
        seen.wait()
        fake.compute.synchronize()
    assert seen.arrived == (lifted != "by a cancel")
    if seen.arrived:
        assert_holds(slot, copies, boundary)


def test_a_failed_flight_ends_only_when_the_device_is_at_rest(fake: FakeDevice) -> None:
    """Ended means that nothing writes the slot any more: it is unmapped or overwritten after that.

    The fence need not wait for it: nothing is to be sealed.
    """
    tensors, copies, slot = laid_out(parity=True)
    with prepared([slot], CPU) as copier:
        release = fake.hold(fake.side)
        seen = started(copier, tensors, copies, slot, Failing())
        begin = time.monotonic()
        assert not copier.fence(seen.flight, SECS)
        assert time.monotonic() - begin < SECS / 4
        assert not seen.flight.wait(0.05), "ended while two copies were still queued"
        release.set()
        seen.wait()
        assert fake.log == [0, 1]
    assert not fake.compute.waits
    assert isinstance(seen.flight.error, ValueError)
    assert not seen.arrived


@pytest.mark.parametrize("pinned", [True, False])
def test_state_in_host_memory_is_read_by_the_host_before_the_fence_lets_go(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    """The device stands still: offloaded optimizer state is in the slot, and may be written at once."""
    fake.refuse_pinning = not pinned
    tensors, copies, slot = laid_out(parity=True)
    boundary = [tensor.clone() for tensor in tensors]
    offloaded = tensors[1]
    monkeypatch.setattr(host, "in_host_memory", lambda tensor: tensor is offloaded)
    with prepared([slot], CPU) as copier:
        if pinned:
            fake.go.clear()
        seen = started(copier, tensors, copies, slot)
        assert copier.fence(seen.flight, SECS)
        offloaded.zero_()
        fake.compute.enqueue(tensors[0].zero_)
        fake.go.set()
        seen.wait()
        fake.compute.synchronize()
    assert_holds(slot, copies, boundary)


@pytest.mark.parametrize("first", ["compute", "side"])
@pytest.mark.parametrize("pinned", [True, False])
def test_volatile_state_is_that_of_the_boundary_and_training_does_not_wait(
    fake: FakeDevice, first: str, pinned: bool
) -> None:
    fake.refuse_pinning = not pinned
    tensors, copies, slot = laid_out()
    with prepared([slot], CPU) as copier:
        copier.warm_up(tensors, [], copies)
        fake.first = fake.compute if first == "compute" else fake.side
        for value in (1, 2):
            fake.go.clear()  # the device is slow: the host is long past the boundary when it comes to it
            fake.compute.enqueue(partial(tensors[0].fill_, value))
            boundary = [torch.full_like(tensors[0], value), tensors[1].clone(), tensors[2].clone()]
            copier.take(tensors, copies, slot)
            seen = Landings([], slot, taken=copies)
            copier.start(tensors, seen.flight, Always())
            fake.compute.enqueue(tensors[0].zero_)
            fake.go.set()
            seen.wait()
            fake.compute.synchronize()
            assert seen.arrived
            assert_holds(slot, copies, boundary)


def test_what_has_no_room_on_the_device_goes_to_the_slot_at_once(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volatile_memory, "_MOST_BYTES", 7 * PAGE)
    tensors, copies, slot = laid_out()
    with prepared([slot], CPU) as copier:
        copier.warm_up(tensors, [], copies)
        assert sum(buffer.numel() for buffer in fake.buffers) == 6 * PAGE, "two chunks of three"
        fake.copies = 0
        copier.take(tensors, copies, slot)
        assert fake.copies == len(copies) - 2
        boundary = [tensor.clone() for tensor in tensors]
        seen = Landings([], slot, taken=copies)
        copier.start(tensors, seen.flight, Always())
        fake.compute.enqueue(tensors[0].zero_)
        seen.wait()
    assert_holds(slot, copies, boundary)


class HeldUp(Always):
    """Two turns, and a third once somebody lets it."""

    def __init__(self) -> None:
        self.turns, self.asked, self.leave = 0, threading.Event(), threading.Event()

    def wait_turn(self, sizes: Sequence[int], hurry: threading.Event) -> Turn:
        self.turns += 1
        if self.turns == 3:
            self.asked.set()
            assert self.leave.wait(SECS)
        return Turn()


@pytest.mark.parametrize("own_stream", [True, False])
def test_copies_are_no_part_of_a_graph_that_training_captures(fake: FakeDevice, own_stream: bool) -> None:
    """If both have one stream the snapshot is dropped, and ends after the earlier work of the device."""
    tensors, copies, slot = laid_out(parity=True)
    windows = HeldUp()
    with prepared([slot], CPU, own_stream=own_stream) as copier:
        slow = fake.hold(fake.side)
        seen = started(copier, tensors, copies, slot, windows)
        assert windows.asked.wait(SECS)
        fake.capturing = True
        windows.leave.set()
        assert seen.flight.submitted.wait(SECS) and not seen.flight.wait(0.05)
        slow.set()
        seen.wait()
        fake.capturing = False
        assert copier.fence(seen.flight, SECS) == seen.arrived == own_stream
        assert fake.copies == (len(copies) if own_stream else 2)
    assert own_stream or "captures a graph" in repr(seen.flight.error)


@pytest.mark.parametrize("where", ["device", "host", "both"])
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("first", ["compute", "side"])
def test_parity_in_many_pieces_is_that_of_the_boundary(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, first: str, pinned: bool, where: str
) -> None:
    """One buffer on the device for all pieces, a slot full of an older snapshot, and a write after the fence."""
    monkeypatch.setattr(device_copier, "_XOR_BYTES", PAGE)
    fake.refuse_pinning = not pinned
    tensors = [*live_state(), torch.arange(9000, dtype=torch.float32) * 3]
    copies, size = plan(tensors, 3 * PAGE, parity=True)
    slot = shared_slot(size)
    for segment in (segment for copy in copies for segment in copy.segments):
        slot[segment.offset : segment.offset + segment.nbytes] = 0x5A
    homes = {"device": (), "host": tensors, "both": tensors[3:]}[where]
    monkeypatch.setattr(host, "in_host_memory", lambda tensor: any(tensor is home for home in homes))
    boundary = [tensor.clone() for tensor in tensors]
    with prepared([slot], CPU) as copier:
        fake.first = fake.compute if first == "compute" else fake.side
        seen = Landings(copies, slot)
        if pinned:
            fake.go.clear()
        copier.start(tensors, seen.flight, Always())
        assert copier.fence(seen.flight, SECS), "the host waits for a device that stands still"
        for tensor in tensors:
            if any(tensor is home for home in homes):
                tensor.zero_()
            else:
                fake.compute.enqueue(tensor.zero_)
        fake.go.set()
        seen.wait()
        fake.compute.synchronize()
    assert not any(tensor.any() for tensor in tensors)
    assert seen.arrived
    assert_holds(slot, copies, boundary)


def test_a_stuck_submission_is_given_up_at_the_deadline(fake: FakeDevice) -> None:
    tensors, copies, slot = laid_out(parity=True)
    stuck = Blocked()
    with prepared([slot], CPU) as copier:
        seen = started(copier, tensors, copies, slot, stuck)
        assert not copier.fence(seen.flight, 0.05)
        assert seen.flight.cancel()
        assert not fake.compute.waits, "the device was told to wait for copies that it does not have"
        stuck.leave.set()
        seen.wait()
    assert not slot.any()
    assert not seen.arrived


def test_no_wait_is_captured_into_a_graph(fake: FakeDevice) -> None:
    tensors, copies, slot = laid_out(parity=True)
    with prepared([slot], CPU) as copier:
        slow = fake.hold(fake.side)
        seen = started(copier, tensors, copies, slot)
        assert seen.flight.submitted.wait(SECS)
        fake.capturing = True
        assert not copier.fence(seen.flight, SECS)
        fake.capturing = False
        assert seen.flight.cancel()
        slow.set()
        seen.wait()
    assert "capture" in repr(seen.flight.error)
    assert not seen.arrived


def test_own_threads_have_no_part_in_captures(fake: FakeDevice) -> None:
    tensors = live_state()
    copies, size = plan(tensors, 3 * PAGE, parity=True)
    with prepared([shared_slot(size)], CPU) as copier:
        seen = Landings(copies, shared_slot(size))
        copier.start(tensors, seen.flight, Always())
        seen.wait()
    assert fake.beside_captures == {"ftckpt-copy", "ftckpt-finish", "ftckpt-register"}
