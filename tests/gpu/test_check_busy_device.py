"""What ``ftckpt check`` finds while a device is busy, and that it finds copies that go about it wrongly."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftckpt.capture import device_copier
from ftckpt.capture.copier import Finisher
from ftckpt.capture.device_copier import DeviceCopier
from ftckpt.commands import check_busy_device, device_bench
from ftckpt.commands.check_queues import QUEUES
from ftckpt.commands.device_bench import Bench, bench_on
from ftckpt.commands.findings import FAILED, PASSED, WARNED, Finding, attempt
from ftckpt.windows.clock import DeviceClock, HostClock
from tests.support import fake_device
from tests.support.device_states import CPU
from tests.support.fake_device import FakeDevice

NAMES = [name for name, _ in check_busy_device.LOOKS]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Busy for as long as it is told to be, and what training writes is queued."""
    device = fake_device.install(monkeypatch)

    def keep_busy(bench: Bench, secs: float) -> None:
        stream = device.current_stream()
        release = device.hold(stream)
        stream.enqueue(millis=secs * 1e3)
        threading.Timer(secs, release.set).start()

    def is_idle() -> bool:
        return not any(stream.queue for stream in device.streams)

    def write(bench: Bench) -> None:
        for tensor in bench.state:
            device.compute.enqueue(lambda tensor=tensor: tensor.add_(1))

    monkeypatch.setattr(check_busy_device, "keep_busy", keep_busy)
    monkeypatch.setattr(check_busy_device, "_BUSY_SECS", 0.2)
    monkeypatch.setattr(check_busy_device, "FLIGHT_SECS", 5.0)
    monkeypatch.setattr(check_busy_device, "_XOR_BYTES", 64 << 10)
    monkeypatch.setattr(device_bench, "_CHUNK_BYTES", 256 << 10)
    monkeypatch.setattr(Bench, "write", write)
    monkeypatch.setattr(
        Bench, "synchronize", lambda bench: device.run(lambda: not any(s.queue for s in device.streams))
    )
    return device


@pytest.fixture
def bench(fake: FakeDevice, arena_root: Path) -> Iterator[Bench]:
    with bench_on(arena_root, DeviceClock(CPU), 1 << 20) as bench:
        assert isinstance(bench.copier, DeviceCopier) and bench.copier.pin_now(20.0)
        yield bench


def look(bench: Bench, name: str) -> Finding:
    return attempt("device", name, lambda: dict(check_busy_device.LOOKS)[name](bench))


@pytest.mark.parametrize("first", ["compute", "side"])
def test_a_copier_that_is_right_passes(fake: FakeDevice, bench: Bench, first: str) -> None:
    fake.first = fake.compute if first == "compute" else fake.side
    found = [look(bench, name) for name in NAMES]
    assert [one.name for one in found if one.state == PASSED] == NAMES, found


def takes_it_late(monkeypatch: pytest.MonkeyPatch, fake: FakeDevice) -> None:
    whole = DeviceCopier._submit_taken

    def submit(self: DeviceCopier, flight: Any) -> None:
        fake.run(lambda: not fake.compute.queue)  # behind what training writes
        self._volatile.take(self._of)  # type: ignore[attr-defined]
        whole(self, flight)

    monkeypatch.setattr(DeviceCopier, "take", lambda self, tensors, copies, slot: setattr(self, "_of", tensors))
    monkeypatch.setattr(DeviceCopier, "_submit_taken", submit)


def seals_at_once(monkeypatch: pytest.MonkeyPatch, fake: FakeDevice) -> None:
    whole = Finisher.chunk
    monkeypatch.setattr(Finisher, "chunk", lambda self, flight, chunk, wait=None: whole(self, flight, chunk))


def fences_nothing(monkeypatch: pytest.MonkeyPatch, fake: FakeDevice) -> None:
    def fence(self: DeviceCopier, flight: Any, timeout_secs: float) -> bool:
        flight.hurry.set()
        return bool(flight.submitted.wait(timeout_secs))

    fake.first = fake.compute  # what training writes comes first where it may
    monkeypatch.setattr(DeviceCopier, "fence", fence)


def knows_no_gate(monkeypatch: pytest.MonkeyPatch, fake: FakeDevice) -> None:
    whole = DeviceCopier._submit

    class Ungated:
        def __init__(self, windows: Any) -> None:
            self._windows = windows

        def wait_turn(self, nbytes: int, hurry: threading.Event) -> Any:
            return type(self._windows.wait_turn(nbytes, hurry))()

    monkeypatch.setattr(DeviceCopier, "_submit", lambda self, t, flight, w: whole(self, t, flight, Ungated(w)))


def mixes_nothing(monkeypatch: pytest.MonkeyPatch, fake: FakeDevice) -> None:
    monkeypatch.setattr(device_copier, "combine", lambda tensors, segments, target, *rest, **more: target.zero_())


WRONG = {
    "boundary": (takes_it_late, "of later"), "seal": (seals_at_once, "sealed before"),
    "fence, busy": (fences_nothing, "written over"), "windows": (knows_no_gate, "before their window"),
    "parity": (mixes_nothing, "differ"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_copier_that_is_wrong_is_found(
    fake: FakeDevice, bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wrong, text = WRONG[name]
    make_wrong(monkeypatch, fake)
    found = look(bench, name)
    assert found.state == FAILED and text in found.text and "JSON" in found.remedy, found


def test_a_snapshot_that_waits_for_another_stream_is_told(
    fake: FakeDevice, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = DeviceCopier.start

    def start(self: DeviceCopier, *rest: Any) -> None:
        fake.side.synchronize()  # as a call does that the driver lets wait for all of the device
        whole(self, *rest)

    monkeypatch.setattr(DeviceCopier, "start", start)
    found = look(bench, "busy streams")
    assert found.state == WARNED and QUEUES in found.remedy


def test_a_host_that_waits_for_the_device_is_told(fake: FakeDevice, arena_root: Path) -> None:
    fake.refuse_pinning = True
    with bench_on(arena_root, DeviceClock(CPU), 1 << 20) as bench:
        found = look(bench, "fence, busy")
    assert found.state == WARNED and "the host waited" in found.text and found.figures["waited_secs"] > 0.1


def test_a_cpu_is_looked_at_as_far_as_it_goes(arena_root: Path) -> None:
    with bench_on(arena_root, HostClock(), 4 << 20) as bench:
        found = {name: look(bench, name) for name in NAMES}
    assert [name for name in NAMES if found[name].state != PASSED] == ["busy streams"], found
