"""The network between SMPs: its limit, its idle parts, and the pace of work."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ftckpt.smp import link
from ftckpt.smp.link import (
    ASSUMED_GBITS,
    MARGIN,
    SHARE,
    NetworkLimit,
    TransferForecast,
    interfaces,
    interfaces_at,
    network_limit,
    unknown_limit,
)
from ftckpt.smp.traffic import ITERATIONS, PARTS, NetworkProfile, Sample, TrafficMonitor, counter_files, idle_parts
from ftckpt.smp.work import MAX_NETWORK_SECS, MAX_SECS, Bucket, CooperativeYield, Throttle
from tests.support.errors import lacks
from tests.support.waiting import until

# --- the default network rate of protection ---


def sysfs(root: Path, name: str, speed: str | None, hardware: bool = True) -> Path:
    interface = root / name
    interface.mkdir()
    if hardware:
        (interface / "device").mkdir()
    if speed is not None:
        (interface / "speed").write_text(f"{speed}\n")
    return interface


@pytest.fixture
def at_eth0(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine that runs tests has a link of a known speed for sure."""
    monkeypatch.setattr(link, "interfaces", lambda: {"eth0": ["10.0.0.1"]})


def test_a_limit_that_was_set_counts(tmp_path: Path) -> None:
    assert network_limit("20Gbit/s", "127.0.0.1", tmp_path).bytes_per_sec == 2.5e9
    assert network_limit("0", "10.0.0.1", tmp_path) == unknown_limit("0") and not unknown_limit("0").bytes_per_sec


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "localhost"])
def test_loopback_has_none(address: str) -> None:
    assert network_limit("auto", address).bytes_per_sec == 0


@pytest.mark.usefixtures("at_eth0")
def test_it_is_a_share_of_the_link(tmp_path: Path) -> None:
    sysfs(tmp_path, "eth0", "200000")
    limit = network_limit("auto", "10.0.0.1", tmp_path)
    assert limit.bytes_per_sec == SHARE * 25e9 and not lacks(limit.source, "25%", "200 Gbit/s", "eth0")
    assert limit.secs(int(SHARE * 25e9)) == 1.0 and not lacks(str(limit), "6.25GB/s", str(limit.source))


@pytest.mark.usefixtures("at_eth0")
@pytest.mark.parametrize("speed", ["-1", "4294967295", "0", "", None])
def test_where_the_speed_is_unknown_the_guess_is_told(tmp_path: Path, speed: str | None) -> None:
    sysfs(tmp_path, "eth0", speed)
    limit = network_limit("auto", "10.0.0.1", tmp_path)
    assert limit.bytes_per_sec == SHARE * ASSUMED_GBITS * 1e9 / 8
    assert not lacks(limit.source, "assumed", "eth0", "--ftckpt-network-rate")


@pytest.mark.usefixtures("at_eth0")
def test_what_is_virtual_counts_by_what_lies_below_it(tmp_path: Path) -> None:
    veth = sysfs(tmp_path, "eth0", "10000", hardware=False)  # a veth says so, whatever carries it
    assert "assumed" in network_limit("auto", "10.0.0.1", tmp_path).source
    (veth / "lower_ens1").symlink_to(sysfs(tmp_path, "ens1", "10000"))
    assert not lacks(network_limit("auto", "10.0.0.1", tmp_path).source, "25%", "10 Gbit/s", "eth0")


def test_the_interface_of_an_address_is_found() -> None:
    assert interfaces()["lo"][0] == "127.0.0.1" and interfaces_at("127.0.0.1") == []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return  # a machine without a network
        mine = probe.getsockname()[0]
    [name] = interfaces_at(mine)
    assert name in {each for _, each in socket.if_nameindex()} - {"lo"}


# --- when training leaves the network idle is learnt from what it moves, whatever phases it is in ---


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


# --- how long the network takes for a target, as it is allowed to, and as it was seen to ---


LIMIT = NetworkLimit(1e9, "the test")
WEEK_SECS = 7 * 86400.0


def test_a_target_may_take_a_multiple_of_what_its_bytes_need() -> None:
    assert TransferForecast(96_000_000_000, LIMIT, WEEK_SECS).wait_secs == MARGIN * 96
    assert TransferForecast(96_000_000_000, NetworkLimit(0.0, "any"), WEEK_SECS).wait_secs == 0
    assert TransferForecast(0, LIMIT, WEEK_SECS).wait_secs == 0
    assert TransferForecast(96_000_000_000, LIMIT, 100.0).wait_secs == 100, "a failure is due by then"


def test_what_is_never_in_time_is_said_with_a_rate_that_is() -> None:
    assert LIMIT.too_slow(10**12, 1000.0) is None
    fault = LIMIT.too_slow(10**12, 100.0)
    assert fault is not None and "16.7 min" in fault[0] and fault[1] == "--ftckpt-network-rate 40GB/s"
    assert NetworkLimit(0.0, "any").too_slow(10**12, 100.0) is None


# --- the SMP does not delay training, and still gets its work done ---


class Clock:
    """A clock that advances when somebody waits."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def spend(self, waits: Iterator[float]) -> float:
        """Seconds that were waited."""
        begun = self.now
        for secs in waits:
            assert secs > 0
            self.now += secs
        return self.now - begun


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pace(
    clock: Clock, copying: Callable[[], bool] = bool, network: Callable[[], bool] = bool, **rates: Any
) -> Throttle:
    return Throttle(copying, network, clock=clock, **rates)


@pytest.mark.parametrize("piece", [1 << 12, 1 << 20, 16 << 20])
def test_a_rate_is_kept(clock: Clock, piece: int) -> None:
    bucket, begun, total = Bucket(1e8, clock), clock.now, 0
    while clock.now < begun + 10:
        clock.now += bucket.wait_secs()
        bucket.charge(piece)
        total += piece
    assert total / 1e8 == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize("which", ["smp_rate", "network_rate"])
def test_reads_and_what_is_received_have_limits_of_their_own(clock: Clock, which: str) -> None:
    limited = pace(clock, **{which: 1e6})
    read = sum(clock.spend(limited.memory(1_000_000)) for _ in range(11))
    received = 0.0
    for _ in range(11):
        received += clock.spend(limited.receive())
        limited.received.charge(1_000_000)  # it came
    expected = (10, 0) if which == "smp_rate" else (0, 10)
    assert (read, received) == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("way", ["send", "receive", "memory"])
def test_each_thread_lets_training_go_first(clock: Clock, way: str) -> None:
    held, waited = pace(clock, copying=lambda: True, network=lambda: True), []
    before = {"send": lambda: held.send(1), "receive": held.receive, "memory": lambda: held.memory(1)}[way]
    for _ in range(3):
        thread = threading.Thread(target=lambda: waited.append(clock.spend(before())))
        thread.start()
        thread.join(30)
    most_secs = MAX_SECS if way == "memory" else MAX_NETWORK_SECS
    assert waited == pytest.approx([most_secs] * 3, abs=0.02), "none uses up the patience of the next"


@pytest.mark.parametrize("work_secs", [0.0005, 0.01, 0.1, 2.0])
def test_work_goes_on_however_busy_the_ranks_are(clock: Clock, work_secs: float) -> None:
    busy, begun, pieces = CooperativeYield(lambda: True, clock), clock.now, 0
    while clock.now < begun + 30:
        clock.spend(busy.wait())
        clock.now += work_secs
        pieces += 1
    assert pieces * work_secs > 30 * 0.45


def test_transfers_hold_while_training_uses_the_network(clock: Clock) -> None:
    for way in ("receive", "send"):
        free_at = clock.now + 1.7
        held = pace(clock, network=lambda: clock.now < free_at)  # noqa: B023
        assert list(held.memory(1)) == []
        assert clock.spend(held.receive() if way == "receive" else held.send(1)) == pytest.approx(1.7, abs=0.02)


def test_what_is_known_of_the_iteration_decides_in_the_place_of_phases(clock: Clock) -> None:
    """Three seconds are busy, and phases report that all are."""
    begun = clock.now
    needs: list[float] = []

    def has_room(need_secs: float) -> bool | None:
        needs.append(need_secs)
        return None if clock.now - begun > 100 else clock.now - begun > 3

    known = pace(clock, network=lambda: True, network_rate=1e6, has_room=has_room)
    assert clock.spend(known.receive(500_000)) == pytest.approx(3, abs=0.02) and set(needs) == {0.5}
    assert clock.spend(known.receive()) == 0 and list(known.send(100_000)) == []
    clock.now = begun + 101
    assert clock.spend(known.receive()) == pytest.approx(MAX_NETWORK_SECS, abs=0.02), "it takes longer than usual"
