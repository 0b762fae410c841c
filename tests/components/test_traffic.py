"""When training leaves the network idle is learnt from what it moves, whatever phases it is in."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ftckpt.smp.traffic import ITERATIONS, PARTS, NetworkProfile, Sample, TrafficMonitor, counter_files, idle_parts
from tests.support.waiting import until

BURST = (0.5, 0.75)
"""Reductions concurrent with the backward: in no phase that measures the network."""


def iteration(secs: float, rate: float = 1e9, step: float = 0.004) -> tuple[float, list[Sample]]:
    times = [at * step for at in range(int(1 / step))]
    return secs, [(at, rate * step * secs if BURST[0] <= at < BURST[1] else 100.0, step * secs) for at in times]


def parts(*rates: float) -> list[Sample]:
    """An iteration in equal parts of these rates, each seen as often."""
    return [((at + 0.5) / PARTS, rates[at * len(rates) // PARTS], 1.0) for at in range(PARTS)]


def test_idle_is_what_is_far_below_the_highest_rate() -> None:
    assert idle_parts(parts(1e9, 1e7, -5.0, 2e8)) == ((0.25, 0.75),)
    assert idle_parts([*parts(1e9, 0.0, 0.0, 0.0), *parts(0.0, 3e8, 0.0, 0.0)]) == ((0.5, 1.0),), "the mean of all"
    unknown = [sample for sample in parts(0.0, 0.0, 1e9, 0.0) if not 0.25 < sample[0] < 0.5]
    assert idle_parts(unknown) == ((0.0, 0.25), (0.75, 1.0)), "what is unknown is in use"
    assert idle_parts(parts(1e3, 0.0)) == (), "it uses another network, or counters do not see it"
    assert idle_parts(parts(1e9)) == () == idle_parts([])


def test_what_iterations_have_in_common_is_learnt() -> None:
    usual = [iteration(2.0), iteration(2.1), iteration(1.95)] * 3
    odd = iteration(20.0, 0.0)  # an evaluation
    learnt = NetworkProfile.of([*usual, odd])
    assert learnt is not None and learnt.iteration_secs == 2.0
    assert learnt.idle == (pytest.approx((0.0, BURST[0])), pytest.approx((BURST[1], 1.0)))
    assert NetworkProfile.of([iteration(secs) for secs in (1.0, 2.0, 3.0, 4.0, 5.0)]) is None, "no two are alike"
    assert NetworkProfile.of([iteration(0.01)] * 5) is None, "too short to be seen"
    assert NetworkProfile.of([iteration(2.0, 0.0)] * 5) is None


def test_a_transfer_begins_where_it_ends_before_the_next_burst() -> None:
    profile = NetworkProfile(2.0, ((0.0, 0.5), (0.75, 1.0)))
    assert profile.has_room(0.1, 0.5) and profile.has_room(1.5, 0.4)
    assert not profile.has_room(0.7, 0.5) and not profile.has_room(1.2, 0.01)
    assert profile.has_room(0.4, 60.0) and not profile.has_room(0.6, 60.0), "what fits nowhere begins early"
    assert profile.has_room(2.01, 0.1) is None and profile.has_room(5e5, 0.1) is None


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_what_passes_an_interface_unseen_counts_too(tmp_path: Path) -> None:
    for name, kind in (("eth0", "1"), ("ib0", "32"), ("lo1", "1")):
        write(tmp_path / name / "type", f"{kind}\n")
        for way in ("rx_bytes", "tx_bytes"):
            write(tmp_path / name / "statistics" / way, "7\n")
    for name in ("eth0", "ib0"):
        for counter in ("port_rcv_data", "port_xmit_data", "port_rcv_errors"):
            write(tmp_path / name / "device/infiniband/mlx5_0/ports/1/counters" / counter, "9\n")
    found = {name: [(path.name, unit) for path, unit in counter_files(tmp_path / name)] for name in ("eth0", "ib0")}
    rdma, plain = [("port_rcv_data", 4), ("port_xmit_data", 4)], [("rx_bytes", 1), ("tx_bytes", 1)]
    assert found == {"eth0": rdma + plain, "ib0": rdma}, "on InfiniBand both would count the same bytes"
    assert [path.name for path, _ in counter_files(tmp_path / "lo1")] == ["rx_bytes", "tx_bytes"]
    assert counter_files(tmp_path / "gone0") == []


@contextmanager
def training(sysfs: Path, secs: float, own_bytes: list[int]) -> Iterator[list[float]]:
    """Moves bytes over eth0 in the middle of each iteration, and this process its own all the time."""
    began, over, moved = [0.0], threading.Event(), 0

    def run() -> None:
        nonlocal moved
        while not over.is_set():
            began[0] = time.monotonic()
            while (at := (time.monotonic() - began[0]) / secs) < 1:
                moved += 4_000_000 if BURST[0] <= at < BURST[1] else 0
                own_bytes[0] += 2_000_000
                fresh = sysfs / "fresh"
                fresh.write_text(str(moved + own_bytes[0]))
                fresh.rename(sysfs / "eth0/statistics/rx_bytes")
                time.sleep(0.004)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield began
    finally:
        over.set()
        thread.join(30)


def test_the_idle_parts_are_found_while_this_process_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftckpt.smp.link.interfaces", lambda: {"eth0": ["10.0.0.1"]})
    write(tmp_path / "eth0/statistics/rx_bytes", "0")
    own_bytes = [0]
    with training(tmp_path, 0.35, own_bytes) as began:
        traffic = TrafficMonitor("10.0.0.1", lambda: began[0], lambda: int(own_bytes[0] / 1.06), tmp_path)
        assert traffic.has_room(0.0) is None
        until(lambda: traffic.profile is not None, f"{ITERATIONS} iterations are seen", 60)
        traffic.stop()
    assert traffic.profile is not None
    busy = 1 - sum(end - begin for begin, end in traffic.profile.idle)
    assert 0.15 < busy < 0.6, traffic.profile
    assert not any(begin < 0.6 < end for begin, end in traffic.profile.idle), traffic.profile


def test_where_nothing_is_counted_nothing_is_known() -> None:
    assert TrafficMonitor("127.0.0.1", lambda: 0.0, int).has_room(1.0) is None


def test_a_profile_of_longer_iterations_refuses_for_two_of_them_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the learned idle part never occurs, phases decide, and the profile is learned again."""
    now = 100.0
    monkeypatch.setattr("ftckpt.smp.traffic.time.monotonic", lambda: now)
    traffic = TrafficMonitor("127.0.0.1", lambda: now - now % 0.7, int)
    traffic.profile = NetworkProfile(1.0, ((0.8, 1.0),))
    asked = 0
    while traffic.has_room(0.1) is False:
        now, asked = now + 0.05, asked + 1
    assert traffic.profile is None and 2.0 <= now - 100.0 <= 2.2
    traffic.profile = NetworkProfile(0.7, ((0.5, 1.0),))
    assert any(traffic.has_room(0.1) for now in (200.0 + step / 10 for step in range(20)))
    assert traffic.profile is not None
