"""What ``ftckpt check`` says of work beside copies, and of a driver that pins nothing; on no device at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ftckpt.commands import check_device, device_bench
from ftckpt.commands.device_bench import Bench, bench_on
from ftckpt.commands.findings import PASSED, WARNED, Finding
from ftckpt.windows.clock import DeviceClock
from tests.support.device_states import CPU
from tests.support.fake_device import FakeDevice, install


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    monkeypatch.setattr(device_bench, "_CHUNK_BYTES", 256 << 10)
    return install(monkeypatch)


@pytest.fixture
def bench(fake: FakeDevice, arena_root: Path) -> Iterator[Bench]:
    with bench_on(arena_root, DeviceClock(CPU), 1 << 20) as made:
        yield made


def test_a_driver_that_refuses_to_pin_is_told(
    fake: FakeDevice, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_device, "_LAUNCHES_SECS", 0.01)
    fake.refuse_pinning = True
    found = check_device._registered(bench)
    assert found.state == WARNED and "staged" in found.text and "memlock" in found.remedy
    assert "bytes_per_sec" not in found.figures, "of what was not done there is no rate"


def test_a_driver_that_pins_passes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_device, "_LAUNCHES_SECS", 0.01)
    found = check_device._registered(bench)
    assert found.state == PASSED and found.figures["bytes_per_sec"] > 0


def test_what_copies_do_to_work_is_timed_without_the_copies(fake: FakeDevice, bench: Bench) -> None:
    release = fake.hold(fake.side)
    flight = bench.flight()
    fake.compute_step("work")
    bench.finish()
    assert "work" in fake.log and not flight.ended
    release.set()
    bench.wait(flight)


class Timed:
    """A bench whose flights take ``flight_secs`` of a clock of its own; work takes ``factor`` as long beside them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, flight_secs: float, unit_secs: float, factor: float) -> None:
        self.now, self.lands = 0.0, 0.0
        self._flight_secs, self._unit_secs, self._factor = flight_secs, unit_secs, factor
        self.done = 0
        self.clock = SimpleNamespace(on_device=False, device=CPU)
        monkeypatch.setattr(check_device, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def work(self) -> None:
        self.done += 1
        self.now += self._unit_secs * (self._factor if self.now < self.lands else 1.0)

    def flight(self) -> None:
        self.lands = self.now + self._flight_secs

    def wait(self, _flight: None) -> None:
        self.now = max(self.now, self.lands)

    def finish(self) -> None: ...

    def look(self, agree: Callable[[int], int] = int) -> Finding:
        bench: Any = self
        return check_device._slower(bench, "work", "work takes", self.work, agree)


@pytest.mark.parametrize(("factor", "state"), [(1.3, WARNED), (1.1, PASSED)])
@pytest.mark.parametrize("unit_secs", [0.0003, 0.002, 0.02])
def test_work_is_as_much_as_a_flight_lasts(
    monkeypatch: pytest.MonkeyPatch, unit_secs: float, factor: float, state: str
) -> None:
    """What a device copies in 5 ms is to be beside work: of much more work the rest would hide what it costs."""
    found = Timed(monkeypatch, 0.005, unit_secs, factor).look()
    assert found.state == state and found.figures["ratio"] == pytest.approx(factor, rel=0.05), found


def test_all_ranks_reduce_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one whose flight is over first: one that reduced more often would wait for the others in vain."""
    bench: Any = Timed(monkeypatch, 0.005, 0.001, 1.0)
    ranks, fewest = object(), 3

    def all_reduce(numbers: Any, operation: Any, group: Any) -> None:
        assert group is ranks
        if operation == dist.ReduceOp.MIN:
            assert numbers.item() in (4, 5)
            numbers.fill_(fewest)
        else:
            bench.work()

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(check_device, "_REDUCED_BYTES", 4)
    found = check_device._beside_collectives(ranks, True, bench)  # type: ignore[arg-type]
    rounds = check_device._ROUNDS
    assert found.state == PASSED and bench.done == 1 + rounds + 2 * rounds * fewest
