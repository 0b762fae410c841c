"""Where an SMP listens, and which secrets are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftckpt.errors import ConfigError
from ftckpt.job.node_smp import SECRET_BYTES, listening_address, machine, read_secret
from tests.support.errors import raises


def test_one_machine_needs_only_loopback() -> None:
    assert listening_address("", [machine(), machine()], {"MASTER_ADDR": "192.0.2.1"}) == "127.0.0.1"


def test_several_machines_listen_towards_the_master_or_say_what_to_set() -> None:
    try:
        found = listening_address("", ["a", "b"], {"MASTER_ADDR": "127.0.0.1"})
    except ConfigError as error:
        assert "smp_listen" in str(error)
    else:
        assert not found.startswith("127.")


def test_a_configured_address_must_be_this_machines() -> None:
    assert listening_address("127.0.0.2", ["a", "b"], {}) == "127.0.0.2"
    with raises(ConfigError, "smp_listen", "'192.0.2.7'"):
        listening_address("192.0.2.7", ["a"], {})
    for host in (".bad", "a" * 70):  # no name at all: the codec of names refuses it
        with pytest.raises(ConfigError, match="cannot be listened at"):
            listening_address(host, ["a"], {})


def test_a_secret_comes_from_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with raises(ConfigError, "secret_file", "No such file", "make one"):
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
