"""A real S3 server on this machine: OpenStack Swift with its S3 API, from Debian's packages, in a folder of its own.

It keeps what it has over SIGKILL, checks signatures, and refuses conditional writes. With ``conditional`` it takes
``If-None-Match: *``, which its object server honours in most cases, but not where two writers come at once: the worst
that a store may do which says that it knows conditions.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest

from tests.support.s3_server import REGION, S3Server, free_ports, serving
from tests.support.waiting import until

PACKAGES = "swift-proxy swift-account swift-container swift-object memcached"
_START_SECS = 30.0
_KINDS = ("account", "container", "object")

_BACK = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
user = {user}
workers = 0
swift_dir = {folder}
devices = {folder}/srv
mount_check = false
log_level = WARNING
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
recon_cache_path = {folder}/cache
"""

_FILTERS = (
    "catch_errors", "gatekeeper", "healthcheck", "cache", "listing_formats", "bulk", "conditional", "s3api",
    "tempauth", "copy", "slo", "dlo", "versioned_writes", "symlink",
)  # fmt: skip
_OPTIONS = {
    "cache": "use = egg:swift#memcache\nmemcache_servers = 127.0.0.1:{memory}",
    "conditional": "paste.filter_factory = swift_conditions:filter_factory",
    "s3api": f"use = egg:swift#s3api\nlocation = {REGION}\nmax_upload_part_num = 10000",
    "tempauth": f"use = egg:swift#tempauth\nuser_test_tester = {S3Server.secret} .admin",
    "slo": "use = egg:swift#slo\nmax_manifest_segments = 10000",
}

_FRONT = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
user = {user}
workers = 0
swift_dir = {folder}
log_level = WARNING
[pipeline:main]
pipeline = {pipeline} proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true
# Else a server that was killed is not asked again for a minute.
error_suppression_interval = 0
{filters}
"""

# The S3 API refuses every conditional write; the servers behind it know this one condition.
_CONDITIONS = """
from swift.common.middleware.s3api import s3request
check = s3request.S3Request._validate_headers

def let_through(self):
    taken = self.method == "PUT" and self.environ.get("HTTP_IF_NONE_MATCH") == "*"
    if taken:
        del self.environ["HTTP_IF_NONE_MATCH"]
    try:
        return check(self)
    finally:
        if taken:
            self.environ["HTTP_IF_NONE_MATCH"] = "*"

s3request.S3Request._validate_headers = let_through

def filter_factory(global_conf, **options):
    return lambda app: app
"""


class SwiftServer(S3Server):
    """Five processes."""

    user = key = "test:tester"

    def __init__(self, folder: Path, conditional: bool = False) -> None:
        self._conditional = conditional
        self._ports = free_ports(len(_KINDS) + 2)
        super().__init__(folder, self._ports[0])
        self._set_up()

    def start(self) -> None:
        self._serve(["memcached", "-l", "127.0.0.1", "-p", str(self._ports[-1]), "-u", _user(), "-m", "64"])
        for kind in (*_KINDS, "proxy"):
            self._serve([f"swift-{kind}-server", f"{self.folder}/{kind}.conf", "-v"], PYTHONPATH=str(self.folder))
        until(self._answers, secs=_START_SECS)

    def _answers(self) -> bool:
        with suppress(OSError):
            for port in self._ports[1:]:
                socket.create_connection(("127.0.0.1", port), 1).close()
            return self._says("/healthcheck") == b"OK"
        return False

    def _set_up(self) -> None:
        for name in ("srv/d1", "cache"):
            (self.folder / name).mkdir(parents=True)
        common = {"folder": self.folder, "user": _user(), "memory": self._ports[-1]}
        for kind, port in zip(_KINDS, self._ports[1:], strict=False):
            (self.folder / f"{kind}.conf").write_text(_BACK.format(kind=kind, port=port, **common))
            builder = f"{self.folder}/{kind}.builder"
            for words in (["create", "4", "1", "1"], ["add", f"r1z1-127.0.0.1:{port}/d1", "1"], ["rebalance"]):
                subprocess.run(["swift-ring-builder", builder, *words], check=True, capture_output=True)
        filters = [name for name in _FILTERS if self._conditional or name != "conditional"]
        texts = [
            f"[filter:{name}]\n{_OPTIONS.get(name, f'use = egg:swift#{name}')}".format(**common) for name in filters
        ]
        front = _FRONT.format(port=self._ports[0], pipeline=" ".join(filters), filters="\n".join(texts), **common)
        (self.folder / "proxy.conf").write_text(front)
        (self.folder / "swift_conditions.py").write_text(_CONDITIONS)


def swift(folder: Path, conditional: bool = False) -> AbstractContextManager[SwiftServer]:
    """A server with an empty bucket; the test is skipped where Swift is not installed."""
    if shutil.which("swift-proxy-server") is None or shutil.which("memcached") is None:
        pytest.skip(f"needs a real S3 server: apt-get install {PACKAGES}")
    return serving(SwiftServer(folder, conditional))


def _user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name
