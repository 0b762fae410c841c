"""Slots are pinned in the background, and unpinned when no copy can write to them any more; on ``FakeDevice``."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from ftckpt.capture import device_copier, registration
from ftckpt.capture.device_copier import DeviceCopier
from ftckpt.capture.registration import Registrar
from ftckpt.memory.locks import FileLock
from ftckpt.schedule.clock import DeviceClock
from tests.gpu.device_states import CPU, DeviceSnapshots, assert_holds, laid_out, prepared, shared_slot, started
from tests.gpu.fake_device import PAGE, SECS, FakeDevice, pages_present
from tests.support.waiting import until


def test_registration_is_undone_where_it_was_made(fake: FakeDevice) -> None:
    """Slots that were added later too: all are unpinned when ``close`` returns."""
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


def test_nothing_is_pinned_in_the_first_two_iterations(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training loads, allocates and connects then. Copies are staged meanwhile."""
    snapshots = DeviceSnapshots(monkeypatch, settled=False)
    until(lambda: all(pages_present(snapshots.slot.data_ptr(), snapshots.slot.numel())), "pages", SECS)
    snapshots.take()  # behind the first iteration
    with pytest.raises(AssertionError, match="registered"):
        until(lambda: fake.pinned, "registered", 0.3)
    snapshots.take()  # behind the second
    until(lambda: sum(fake.pinned.values()) == snapshots.slot.numel(), "registered", SECS)
    snapshots.take()
    snapshots.capture.close()
    assert not fake.pinned


def test_a_slot_that_cannot_be_pinned_is_waited_for_no_longer(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.refuse_pinning = True
    monkeypatch.setattr(device_copier, "_MOST_STAGED_SECS", 0.0)
    monkeypatch.setattr(device_copier, "_MOST_STAGED_SHARE", 0.0)
    snapshots = DeviceSnapshots(monkeypatch, settled=False)
    assert not snapshots.capture.is_ready(())
    for _ in range(2):
        snapshots.capture.at_boundary()
    until(lambda: snapshots.capture.is_ready(()), "refused", SECS)
    snapshots.capture.close()


HOLD = """
import sys
from pathlib import Path
from ftckpt.memory.locks import FileLock
lock = FileLock(Path(sys.argv[1]), 0, "a turn", "")
print("held", flush=True)
sys.stdin.readline()
"""


@contextmanager
def turn_of_another_rank(path: Path) -> Iterator[Callable[[], None]]:
    """Another process registers; yields what ends that."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "held\n"
        try:
            yield child.kill
        finally:
            child.kill()


def registrar_with(turns: Path, slots: list[torch.Tensor]) -> Registrar:
    registrar = Registrar(CPU, None, turns)
    registrar.add(slots)
    registrar.begin()
    return registrar


def test_a_failure_leaves_nothing_pinned_behind_the_end(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor unpins what copies go to while training runs: that may wait for all of the device."""
    slots, touch = [shared_slot(2 * PAGE), shared_slot(3 * PAGE)], registration.touch

    def fail(slot: torch.Tensor, stop: Callable[[], bool]) -> None:
        if slot is slots[1]:
            raise OSError("no such page")
        touch(slot, stop)

    monkeypatch.setattr(registration, "touch", fail)
    with closing(Registrar(CPU, None)) as registrar:
        registrar.begin()
        registrar.add(slots[:1])
        registrar.add(slots[1:])
        until(lambda: registrar.idle, "dealt with", SECS)
        assert registrar.covers(slots[0], 2 * PAGE) and not registrar.covers(slots[1], PAGE)
        assert sum(fake.pinned.values()) == 2 * PAGE and not fake.unpinned_by
    assert not fake.pinned
    assert caplog.text.count("no such page") == 1


def test_one_rank_of_a_node_registers_at_a_time(fake: FakeDevice, tmp_path: Path) -> None:
    slot = shared_slot(10 * PAGE)
    with turn_of_another_rank(tmp_path / "turns") as end, closing(registrar_with(tmp_path / "turns", [slot])) as mine:
        until(lambda: all(pages_present(slot.data_ptr(), slot.numel())), "pages", SECS)
        time.sleep(0.1)
        assert not fake.pinned and not mine.idle
        end()
        until(lambda: mine.idle, "registered", SECS)
        assert sum(fake.pinned.values()) == slot.numel()
        FileLock(tmp_path / "turns", 0, "a turn", "").release()  # it was given back


def test_a_rank_that_is_stuck_while_it_registers_does_not_keep_the_others(
    fake: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registration, "_TURN_SECS", 0.2)
    slot = shared_slot(10 * PAGE)
    with turn_of_another_rank(tmp_path / "turns"), closing(registrar_with(tmp_path / "turns", [slot])) as mine:
        until(lambda: mine.idle, "registered", SECS)
        assert sum(fake.pinned.values()) == slot.numel()
    assert caplog.text.count("registers memory concurrently") == 1


def test_where_ftckpt_turned_off_nothing_is_unpinned_while_training_goes_on(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpinning may wait for all work of the device. Tensors of training and buffers are released."""
    snapshots = DeviceSnapshots(monkeypatch)
    snapshots.take()
    held = [weakref.ref(tensor) for tensor in (*snapshots.tensors, *fake.buffers, *fake.staging)]
    assert fake.pinned and fake.buffers and fake.staging
    snapshots.capture.stop()
    assert fake.pinned and not fake.unpinned_by
    snapshots.tensors.clear()
    fake.buffers.clear()
    fake.staging.clear()
    fake.streams.clear()
    gc.collect()
    assert not any(ref() is not None for ref in held)
    snapshots.capture.close()
    assert not fake.pinned


def test_where_nothing_is_to_be_pinned_copies_are_staged(fake: FakeDevice) -> None:
    tensors, copies, slot = laid_out()
    registrar = Registrar(CPU, None, pins=False)
    with closing(DeviceCopier(DeviceClock(CPU), True, registrar)) as copier:
        copier.prepare([slot])
        assert copier.pin_now(SECS), "dealt with"
        seen = started(copier, tensors, copies, slot)
        seen.wait()
        assert not fake.pinned
    assert_holds(slot, copies, tensors)
