"""``ftckpt check`` of a device: a real one that is right, and a driver that refuses to pin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ftckpt.capture.device_copier import DeviceCopier
from ftckpt.cli import check_device
from ftckpt.cli.check_device import Bench, bench_on, device_checks
from ftckpt.cli.findings import FAILED, PASSED, SKIPPED, WARNED
from ftckpt.schedule.clock import DeviceClock
from tests.gpu.device_states import CPU
from tests.gpu.fake_device import FakeDevice, install
from tests.gpu.real_device import needs_device


@pytest.mark.gpu
@needs_device[1]
def test_a_device_that_is_right_passes(arena_root: Path) -> None:
    found = list(device_checks(arena_root, 256))
    assert not [one for one in found if one.state in (FAILED, SKIPPED) and one.name != "NUMA"], found


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    monkeypatch.setattr(check_device, "_CHUNK_BYTES", 256 << 10)
    return install(monkeypatch)


@pytest.fixture
def bench(fake: FakeDevice, arena_root: Path) -> Iterator[Bench]:
    with bench_on(arena_root, DeviceClock(CPU), 1 << 20) as made:
        yield made


def test_a_driver_that_refuses_to_pin_is_told(fake: FakeDevice, bench: Bench) -> None:
    fake.refuse_pinning = True
    found = check_device._registered(bench)
    assert found.state == WARNED and "staged" in found.text and "memlock" in found.remedy
    assert "bytes_per_sec" not in found.figures, "of what was not done there is no rate"


@pytest.mark.parametrize("batches", [True, False])
def test_copies_go_by_calls_of_many_where_there_are_such(
    monkeypatch: pytest.MonkeyPatch, arena_root: Path, batches: bool
) -> None:
    monkeypatch.setattr(check_device, "_CHUNK_BYTES", 256 << 10)
    fake = install(monkeypatch, batches=batches)
    with bench_on(arena_root, DeviceClock(CPU), 1 << 20) as bench:
        assert check_device._registered(bench).state == PASSED
        bench.wait(bench.flight())
        assert isinstance(bench.copier, DeviceCopier)
        assert bench.copier.has_plan == bool(fake.calls) == batches
