"""The default network rate of protection: a share of the link, where its speed is known."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ftckpt.smp import link
from ftckpt.smp.link import (
    ASSUMED_GBITS,
    SHARE,
    interfaces,
    interfaces_at,
    network_limit,
    unknown_limit,
)
from tests.support.errors import lacks


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
