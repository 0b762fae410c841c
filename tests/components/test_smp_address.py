"""The addresses on which an SMP listens, and refused secrets."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ftckpt.errors import ConfigError
from ftckpt.session.addresses import listening_address, machine, nccl_names
from ftckpt.session.node_smp import SECRET_BYTES, read_secret
from tests.support.errors import raises


def test_one_machine_needs_only_loopback() -> None:
    assert listening_address("", [machine(), machine()], {"MASTER_ADDR": "192.0.2.1"}) == "127.0.0.1"


IN_A_NETWORK = """
import json, subprocess, sys
from ftckpt.errors import ConfigError
from ftckpt.session.addresses import interfaces, listening_address
up, asked = json.loads(sys.argv[1])
for line in up:
    subprocess.run(["ip", *line.split()], check=True)
for configured, env in asked:
    try:
        print(listening_address(configured, ["a", "b"], env), flush=True)
    except ConfigError as error:
        print(f"error {error}", flush=True)
"""
NETWORK = (
    "link set lo up",
    "link add docker0 type veth peer name docker0p",
    "address add 172.17.0.1/16 dev docker0",
    "link add eth0 type veth peer name eth0p",
    "address add 10.0.0.8/24 dev eth0",
    "address add fd00:7::8/64 dev eth0 nodad",
    "link add hsn0 type veth peer name hsn0p",
    "link add hsn1 type veth peer name hsn1p",
    "address add 10.1.0.8/24 dev hsn1",
    "link add hsn2 type veth peer name hsn2p",
    "address add 10.2.0.8/24 dev hsn2",
    "address add fd00:2::8/64 dev hsn2 nodad",
    "link add six0 type veth peer name six0p",
    "address add fd00:6::8/64 dev six0 nodad",
    "link add down0 type veth peer name down0p",
    "address add 10.9.0.8/24 dev down0",
    *(
        f"link set {name}{end} up"
        for name in ("docker0", "eth0", "hsn0", "hsn1", "hsn2", "six0")
        for end in ("p", "")
    ),
)
"""A slow network, a fast one with two ports and a third without address, one of IPv6 alone, one that is down."""


FAST = "10.1.0.8,10.2.0.8"


def listens(*asked: tuple[str, dict[str, str]], up: Sequence[str] = NETWORK) -> list[str]:
    """The address for settings and environments in a network namespace with the interfaces ``up``."""
    may = ["unshare", "-n", "sh", "-c", "ip link add veth-a type veth peer name veth-b"]
    if shutil.which("unshare") is None or subprocess.run(may, check=False, capture_output=True).returncode:
        pytest.skip("making a network takes root, and iproute2")
    run = ["unshare", "-n", sys.executable, "-c", IN_A_NETWORK, json.dumps([up, asked])]
    return subprocess.run(run, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()


def test_where_an_smp_listens_in_a_network_of_its_own() -> None:
    meet, own = {"MASTER_ADDR": "10.0.0.1"}, {"MASTER_ADDR": "127.0.1.1"}
    cases: dict[str, tuple[str, dict[str, str], str]] = {
        "the way to the master": ("", meet, "10.0.0.8"),
        "a hosts file of Debian": ("", own, "10.0.0.8"),
        "gloo": ("", meet | {"GLOO_SOCKET_IFNAME": "hsn1", "NCCL_SOCKET_IFNAME": "eth"}, "10.1.0.8"),
        "gloo, without address": ("", meet | {"GLOO_SOCKET_IFNAME": "hsn0", "NCCL_SOCKET_IFNAME": "hsn"}, FAST),
        "gloo, another machine's": ("", meet | {"GLOO_SOCKET_IFNAME": "ib7"}, "10.0.0.8"),
        "nccl, IPv6": ("", meet | {"NCCL_SOCKET_IFNAME": "six"}, "fd00:6::8"),
        "nccl, excluded": ("", {"NCCL_SOCKET_IFNAME": "^docker,eth,lo"}, FAST),
        "nccl, one": ("", {"NCCL_SOCKET_IFNAME": "=hsn2"}, "10.2.0.8"),
        "nccl, several": ("", {"MASTER_ADDR": "10.1.0.1", "NCCL_SOCKET_IFNAME": "^docker"}, FAST),
        "the way to the master, over several": ("", {"MASTER_ADDR": "10.2.0.1"}, "10.2.0.8,10.1.0.8"),
        "an interface": ("hsn1", meet, "10.1.0.8"),
        "the first that has one": ("hsn0,hsn1,eth0", meet, "10.1.0.8"),
        "several": ("hsn1, hsn2,eth0", meet, FAST),
        "an address": ("10.1.0.8", meet, "10.1.0.8"),
        "an address of IPv6": ("fd00:7::8", meet, "fd00:7::8"),
        "an interface with IPv6 alone": ("six0", meet, "fd00:6::8"),
    }
    found = listens(*((configured, env) for configured, env, _ in cases.values()))
    assert dict(zip(cases, found, strict=True)) == {name: expected for name, (_, _, expected) in cases.items()}


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ("hsn", {"hsn0", "hsn10"}),
        ("hsn,eth", {"hsn0", "hsn10", "eth0"}),
        ("=hsn0", {"hsn0"}),
        ("=hsn,eth0", {"eth0"}),
        ("^docker,lo", {"hsn0", "hsn10", "eth0"}),
        ("^=hsn0,eth", {"hsn10", "eth0", "lo", "docker0"}),
    ],
)
def test_the_interfaces_that_nccl_is_told_to_use(setting: str, wanted: set[str]) -> None:
    """The syntax of NVIDIA's documentation of NCCL_SOCKET_IFNAME."""
    assert set(filter(nccl_names(setting), ["lo", "docker0", "eth0", "hsn0", "hsn10"])) == wanted


def test_a_configured_address_must_be_this_machines() -> None:
    assert listening_address("127.0.0.2", ["a", "b"], {}) == "127.0.0.2"
    for everywhere in ("0.0.0.0", "::"):
        with raises(ConfigError, "smp_listen", everywhere):
            listening_address(everywhere, ["a", "b"], {})
    with raises(ConfigError, "smp_listen", "'192.0.2.7'"):
        listening_address("192.0.2.7", ["a"], {})
    for host in (".bad", "a" * 70):  # no name at all: the codec of names refuses it
        with pytest.raises(ConfigError):
            listening_address(host, ["a"], {})


def test_a_secret_comes_from_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with raises(ConfigError, "secret_file"):
        read_secret(path)
    path.write_bytes(b"x" * 40)
    path.chmod(0o640)
    with raises(ConfigError, "640", "chmod 600"):
        read_secret(path)
    path.chmod(0o600)
    secret = read_secret(path)
    assert len(secret) == SECRET_BYTES and secret != b"x" * 32
    path.write_bytes(b"y" * 40)
    assert read_secret(path) != secret
    path.write_bytes(b"short\n" + b" " * 60)
    with raises(ConfigError, "16 bytes"):
        read_secret(path)
