"""Ceph's S3 gateway on this machine, from Debian's packages, in a folder of its own: one monitor, one place for
objects, which it keeps in a file, and radosgw.

Of the servers that run here it alone creates an object for one of all who try at once.
"""

from __future__ import annotations

import shutil
import subprocess
import uuid
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support.s3_server import S3Server, free_ports, serving
from tests.support.waiting import until

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


class RadosGateway(S3Server):
    """Three processes."""

    key, user = "test", "test:tester"

    def __init__(self, folder: Path) -> None:
        gateway, self._monitor = free_ports(2)
        super().__init__(folder, gateway)
        self._set_up(gateway)

    def start(self) -> None:
        self._serve(self._command("ceph-mon", "-f", "-i", "a"))
        until(lambda: self._does("ceph", "--connect-timeout", "3", "mon", "stat"), secs=_START_SECS)
        if not (self.folder / "osd" / "block").exists():
            identity = str(uuid.uuid4())
            self._run("ceph", "osd", "new", identity, "0")
            self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", identity)
        self._serve(self._command("ceph-osd", "-f", "-i", "0"))
        self._serve(self._command("radosgw", "-f", "-n", "client.admin"))
        until(lambda: self._says() is not None, secs=_START_SECS)

    def make_account(self) -> None:
        """One that may do all, by either interface of the gateway."""
        account = self.user.partition(":")[0]
        more = ("--display-name", account, "--access-key", self.key, "--secret-key", self.secret)
        self._run("radosgw-admin", "user", "create", "--uid", account, *more)
        of_swift = ("--uid", account, "--subuser", self.user)
        self._run("radosgw-admin", "subuser", "create", *of_swift, "--access", "full")
        self._run("radosgw-admin", "key", "create", *of_swift, "--key-type", "swift", "--secret-key", self.secret)

    def _set_up(self, gateway: int) -> None:
        for name in ("mon", "osd", "run", "log"):
            (self.folder / name).mkdir()
        identity, keys = str(uuid.uuid4()), str(self.folder / "keyring")
        text = _CONFIG.format(folder=self.folder, identity=identity, monitor=self._monitor, gateway=gateway)
        (self.folder / "ceph.conf").write_text(text)
        everything = {"mon": "allow *", "osd": "allow *", "mgr": "allow *"}
        may = {
            "mon.": {"mon": "allow *"}, "client.admin": everything,
            "osd.0": {"mon": "allow profile osd", "osd": "allow *", "mgr": "allow profile osd"},
        }  # fmt: skip
        for name, rights in may.items():
            caps = [word for right in rights.items() for word in ("--cap", *right)]
            make = ["--create-keyring"] if name == "mon." else []
            self._run("ceph-authtool", keys, *make, "--gen-key", "-n", name, *caps)
        members = str(self.folder / "monmap")
        place = f"[v2:127.0.0.1:{self._monitor}]"
        least = ("--set-min-mon-release", "pacific")
        self._run("monmaptool", "--create", "--addv", "a", place, "--fsid", identity, *least, members)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", members, "--keyring", keys)

    def _run(self, program: str, *words: str) -> None:
        done = subprocess.run(self._command(program, *words), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{program}: {done.stderr}"

    def _does(self, program: str, *words: str) -> bool:
        return subprocess.run(self._command(program, *words), capture_output=True, check=False).returncode == 0

    def _command(self, program: str, *words: str) -> list[str]:
        apart = program in ("ceph-authtool", "monmaptool")  # they know no cluster
        return [program, *([] if apart else ["-c", str(self.folder / "ceph.conf")]), *words]


def radosgw(folder: Path) -> AbstractContextManager[RadosGateway]:
    """A gateway with an empty bucket; the test is skipped where Ceph is not installed."""
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"needs Ceph's S3 gateway ({missing[0]} is not there): apt-get install {PACKAGES}")
    gateway = RadosGateway(folder)
    return serving(gateway, gateway.make_account)
