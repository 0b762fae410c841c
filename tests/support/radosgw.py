"""Ceph's S3 gateway on this machine, from Debian's packages, in a folder of its own: one monitor, one place for
objects, which it keeps in a file, and radosgw.

Of the servers that run here it alone creates an object for one of all who try at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.swift import free_ports, make_bucket
from tests.support.waiting import until

ACCOUNT, KEY, SECRET = "test", "test", "testing"
PACKAGES = "radosgw ceph-mon ceph-osd ceph-common"
_PROGRAMS = ("radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-osd", "ceph-authtool", "monmaptool")
_START_SECS = 60.0

_CONFIG = """
[global]
fsid = {identity}
mon host = [v2:127.0.0.1:{monitor}]
mon initial members = a
public addr = 127.0.0.1
cluster addr = 127.0.0.1
public network = 127.0.0.0/8
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data = {folder}/mon
osd data = {folder}/osd
run dir = {folder}/run
admin socket = {folder}/run/$name.asok
log file = {folder}/log/$name.log
keyring = {folder}/keyring
osd objectstore = bluestore
bluestore block size = 4294967296
bluestore fsck on mount = false
osd memory target = 939524096
ms bind ipv6 = false
# However full the disk of the machine is.
mon data avail warn = 1
mon data avail crit = 1
[client]
rgw frontends = beast endpoint=127.0.0.1:{gateway}
rgw lifecycle work time = 00:00-00:01
"""


class RadosGateway:
    """Three processes; ``crash`` and ``start`` again as often as wanted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._gateway, self._monitor = free_ports(2)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._set_up()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._gateway}"

    def options(self, **more: Any) -> dict[str, Any]:
        """Of obstore's S3 store, without retries, which would hide faults."""
        return {
            "endpoint": self.url, "access_key_id": KEY, "secret_access_key": SECRET, "region": "us-east-1",
            "retry_config": {"max_retries": 0}, **more,
        }  # fmt: skip

    def start(self) -> None:
        """Serve; returns when requests are answered."""
        self._serve("ceph-mon", "-i", "a")
        until(lambda: self._says("ceph", "--connect-timeout", "3", "mon", "stat"), secs=_START_SECS)
        if not (self._folder / "osd" / "block").exists():
            identity = str(uuid.uuid4())
            self._run("ceph", "osd", "new", identity, "0")
            self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", identity)
        self._serve("ceph-osd", "-i", "0")
        self._serve("radosgw", "-n", "client.admin")
        until(self._answers, secs=_START_SECS)

    def crash(self) -> None:
        """SIGKILL to all of it."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait(10)
        self._processes.clear()

    def make_account(self) -> None:
        """One that may do all, by either interface of the gateway."""
        more = ("--display-name", ACCOUNT, "--access-key", KEY, "--secret-key", SECRET)
        self._run("radosgw-admin", "user", "create", "--uid", ACCOUNT, *more)
        of_swift = ("--uid", ACCOUNT, "--subuser", f"{ACCOUNT}:tester")
        self._run("radosgw-admin", "subuser", "create", *of_swift, "--access", "full")
        self._run("radosgw-admin", "key", "create", *of_swift, "--key-type", "swift", "--secret-key", SECRET)

    def _set_up(self) -> None:
        for name in ("mon", "osd", "run", "log"):
            (self._folder / name).mkdir()
        identity, keys = str(uuid.uuid4()), str(self._folder / "keyring")
        text = _CONFIG.format(
            folder=self._folder, identity=identity, monitor=self._monitor, gateway=self._gateway
        )  # fmt: skip
        (self._folder / "ceph.conf").write_text(text)
        everything = {"mon": "allow *", "osd": "allow *", "mgr": "allow *"}
        may = {
            "mon.": {"mon": "allow *"}, "client.admin": everything,
            "osd.0": {"mon": "allow profile osd", "osd": "allow *", "mgr": "allow profile osd"},
        }  # fmt: skip
        for name, rights in may.items():
            caps = [word for right in rights.items() for word in ("--cap", *right)]
            make = ["--create-keyring"] if name == "mon." else []
            self._run("ceph-authtool", keys, *make, "--gen-key", "-n", name, *caps)
        members = str(self._folder / "monmap")
        place = f"[v2:127.0.0.1:{self._monitor}]"
        least = ("--set-min-mon-release", "pacific")
        self._run("monmaptool", "--create", "--addv", "a", place, "--fsid", identity, *least, members)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", members, "--keyring", keys)

    def _run(self, program: str, *words: str) -> None:
        done = subprocess.run(self._command(program, *words), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{program}: {done.stderr}"

    def _says(self, program: str, *words: str) -> bool:
        return subprocess.run(self._command(program, *words), capture_output=True, check=False).returncode == 0

    def _serve(self, program: str, *words: str) -> None:
        with open(self._folder / "log" / program, "ab") as log:
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            command = self._command(program, "-f", *words)
            self._processes.append(subprocess.Popen(command, start_new_session=True, **pipes))

    def _command(self, program: str, *words: str) -> list[str]:
        apart = program in ("ceph-authtool", "monmaptool")  # they know no cluster
        return [program, *([] if apart else ["-c", str(self._folder / "ceph.conf")]), *words]

    def _answers(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(self.url, timeout=5) as answer:
            return bool(answer.status == 200)
        return False


@contextmanager
def radosgw(folder: Path) -> Iterator[RadosGateway]:
    """A gateway with an empty bucket; the test is skipped where Ceph is not installed."""
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"needs Ceph's S3 gateway ({missing[0]} is not there): apt-get install {PACKAGES}")
    gateway = RadosGateway(folder)
    with ExitStack() as stack:
        stack.callback(gateway.crash)
        gateway.start()
        gateway.make_account()
        make_bucket(gateway.url, f"{ACCOUNT}:tester", SECRET)
        yield gateway
