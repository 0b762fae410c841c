"""Batched copy calls: their bytes, their number, and the effect of a refusal."""

from __future__ import annotations

import ctypes
import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from ftckpt.capture import copy_plan
from ftckpt.capture.chunks import ChunkCopy, Segment
from ftckpt.capture.copy_plan import CALL_COPIES, CopyPlan
from ftckpt.capture.driver import Call
from ftckpt.errors import CaptureError
from tests.gpu.device_states import CPU, Blocked, DeviceSnapshots, assert_holds, plan, shared_slot
from tests.gpu.fake_device import PAGE, FakeDevice
from tests.support.waiting import until


def run(call: Call) -> list[int]:
    """Copies as a driver does; the size of each."""
    words = [np.ctypeslib.as_array((ctypes.c_uint64 * call.number).from_address(at)).tolist() for at in call[:3]]
    for target, source, nbytes in zip(*words, strict=True):
        ctypes.memmove(target, source, nbytes)
    return words[2]


def bring(made: CopyPlan, slot: torch.Tensor, chunks: int) -> list[list[int]]:
    """All chunks to the slot; the sizes of the copies of each call."""
    found, at = list[list[int]](), 0
    while at < chunks:
        stop = made.stop(at)
        found += [run(call) for call in made.calls(slot, at, stop)]
        at = max(stop, at + 1)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_calls_bring_the_bytes_that_are_planned_and_no_others(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    dice = random.Random(seed)
    monkeypatch.setattr(copy_plan, "CALL_COPIES", dice.choice([1, 3, 128]))
    monkeypatch.setattr(copy_plan, "CALL_BYTES", dice.choice([PAGE, 5 * PAGE, 1 << 30]))
    monkeypatch.setattr(copy_plan, "_SMALL_BYTES", dice.choice([0, 100, 3000]))
    monkeypatch.setattr(copy_plan, "_MOST_SMALL_BYTES", dice.choice([500, 1 << 20]))
    flat = torch.arange(30000, dtype=torch.int16)
    tensors, at = list[torch.Tensor](), 0
    while at < 20000:
        numel = dice.choice([1, 2, 7, 33, 500, 4000])
        tensors.append(flat[at : at + numel])  # neighbours in one buffer, or with something between them
        at += numel + dice.choice([0, 0, 3])
    copies, size = plan(tensors, dice.choice([1, 2, 5]) * PAGE)
    slot = shared_slot(size)
    made = CopyPlan(tensors, copies, CPU)
    for _ in range(2):
        flat.add_(1)
        made.gather()
        fake.compute.synchronize()
        calls = bring(made, slot, len(copies))
        assert_holds(slot, copies, tensors)
    assert all(len(sizes) <= copy_plan.CALL_COPIES for sizes in calls)


def test_small_tensors_go_as_one_and_so_do_neighbours(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_plan, "_SMALL_BYTES", 1000)
    flat = torch.zeros(1 << 17)
    large = [flat[: 1 << 16], flat[1 << 16 :]]
    small = [torch.ones(n) for n in (3, 100, 5, 8)]
    copies, size = plan([*large, *small], 1 << 20)
    made = CopyPlan([*large, *small], copies, CPU)
    made.gather()
    fake.compute.synchronize()
    sizes = [one for call in bring(made, shared_slot(size), len(copies)) for one in call]
    assert sum(sizes[:-1]) == flat.nbytes and max(sizes) == 4 * PAGE, "cut at registrations, and nowhere else"
    assert len(sizes) == flat.nbytes // (4 * PAGE) + 2


def test_a_call_takes_no_more_than_a_driver_should_be_given(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And yet all of a chunk that is more than that by itself, by several calls."""
    monkeypatch.setattr(copy_plan, "_SMALL_BYTES", 0)
    few = [ChunkCopy(n, tuple(Segment(0, 0, 1, 8 * (n * 50 + k), 4) for k in range(50))) for n in range(4)]
    many = ChunkCopy(4, tuple(Segment(0, 0, 1, 8 * (200 + k), 4) for k in range(300)))
    made = CopyPlan([torch.zeros(1)], [*few, many], CPU)
    assert [made.stop(at) for at in range(5)] == [2, 3, 4, 4, 5]
    counts = [call.number for call in made.calls(shared_slot(PAGE), 4, 5)]
    assert counts == [CALL_COPIES, CALL_COPIES, 300 - 2 * CALL_COPIES]
    monkeypatch.setattr(copy_plan, "CALL_BYTES", 499)
    assert CopyPlan([torch.zeros(1)], few, CPU).stop(0) == 2
    monkeypatch.setattr(copy_plan, "CALL_BYTES", 399)
    assert CopyPlan([torch.zeros(1)], few, CPU).stop(0) == 1


def test_what_is_an_xor_or_in_host_memory_is_not_planned(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.zeros(100), torch.zeros(100)]
    monkeypatch.setattr("ftckpt.capture.copier.in_host_memory", lambda tensor: tensor is tensors[1])
    whole = [ChunkCopy(n, (Segment(n, 0, 100, 400 * n, 400),)) for n in range(2)]
    made = CopyPlan(tensors, [*whole, ChunkCopy(2, whole[0].segments, xor=True)], CPU)
    assert [made.covers(at) for at in range(3)] == [True, False, False]


def test_a_driver_that_refuses_is_asked_for_each_copy(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake.refuse_calls = True
    snapshots = DeviceSnapshots(monkeypatch)
    assert [record.args for record in caplog.records] == [(801,)]
    snapshots.take()
    assert not fake.calls and fake.copies
    snapshots.capture.close()


def test_a_refusal_while_training_runs_costs_one_snapshot(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = DeviceSnapshots(monkeypatch)
    snapshots.take()
    fake.refuse_calls = True
    snapshots.begin()
    with pytest.raises(CaptureError):
        snapshots.capture.fence(20.0)
    assert snapshots.control.calls[-1] == "void"
    fake.log.clear()
    snapshots.take()
    assert "call" not in fake.log
    snapshots.capture.close()


def test_what_a_refused_call_lets_go_of_stays_until_the_device_is_done(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = DeviceSnapshots(monkeypatch)
    snapshots.take()
    plan = weakref.ref(snapshots.copier._plan)
    release, fake.refuse_calls = fake.hold(fake.side), True
    snapshots.begin()
    flight: Any = snapshots.capture.flight
    until(lambda: flight.error is not None, "it is refused", 20.0)
    flight.error.with_traceback(None)  # which would hold it, too
    gc.collect()
    assert plan() is not None, "its buffer is the device's"
    release.set()
    assert flight.wait(20.0)
    snapshots.capture.close()


def test_no_copy_reaches_from_one_allocation_into_the_next(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver refuses that, however near they lie."""
    monkeypatch.setattr(copy_plan, "_SMALL_BYTES", 0)
    memory = np.zeros(2 * PAGE, np.uint8)
    near = [torch.from_numpy(memory[:PAGE]), torch.from_numpy(memory[PAGE:])]
    one = torch.from_numpy(memory)
    copies = [ChunkCopy(0, tuple(Segment(n, 0, PAGE, n * PAGE, PAGE) for n in range(2)))]
    slot = shared_slot(2 * PAGE)
    assert [call.number for call in CopyPlan(near, copies, CPU).calls(slot, 0, 1)] == [2]
    assert [call.number for call in CopyPlan([one[:PAGE], one[PAGE:]], copies, CPU).calls(slot, 0, 1)] == [1]


def test_a_dropped_snapshot_ends_behind_what_was_gathered_for_it(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathered bytes are in memory that is freed when the copies have ended."""
    windows = Blocked()
    snapshots = DeviceSnapshots(monkeypatch, windows)
    slow = fake.hold(fake.side)
    snapshots.begin()
    assert windows.asked.wait(20.0)
    flight = snapshots.capture.flight
    assert flight is not None and flight.cancel()
    windows.leave.set()
    assert not flight.wait(0.1)
    slow.set()
    assert flight.wait(20.0) and not fake.side.queue
    snapshots.capture.close()
