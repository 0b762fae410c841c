"""Storage of tests: its checkpoints, and a real S3 server on this machine, OpenStack Swift of Debian's packages."""

from __future__ import annotations

import functools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ftckpt.persist.commit import checkpoints
from ftckpt.persist.objects import ObjectStorage
from ftckpt.persist.storage import Storage
from tests.support.processes import free_ports
from tests.support.waiting import until

BUCKET, REGION = "bucket", "us-east-1"
PACKAGES = "swift-proxy swift-account swift-container swift-object memcached"
REFUSES, TAKES = "refuses conditions", "takes conditions"
"""Swift as it is, and as a store that accepts a condition and does not always honor it."""
SERVERS = (REFUSES, TAKES)
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
    "tempauth": "use = egg:swift#tempauth\nuser_test_tester = testing .admin",
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


def committed(storage: Storage) -> list[int]:
    """The iterations with a checkpoint under its own name, newest first."""
    return [name.iteration for name in checkpoints(storage) if not name.generation]


class S3Server:
    """Five processes of Swift that serve a bucket ``BUCKET``; ``crash`` and ``start`` again as often as wanted.

    Its objects survive SIGKILL; it checks signatures, and refuses conditional writes. With ``conditional`` it takes
    ``If-None-Match: *``, which its object server honours, but not where two writers come at once.
    """

    def __init__(self, folder: Path, conditional: bool) -> None:
        self._folder = folder
        first = free_ports(len(_KINDS) + 2)
        self._ports = range(first, first + len(_KINDS) + 2)
        self._url = f"http://127.0.0.1:{self._ports[0]}"
        self._processes: list[subprocess.Popen[bytes]] = []
        for name in ("srv/d1", "cache"):
            (folder / name).mkdir(parents=True)
        common = {"folder": folder, "user": _user(), "memory": self._ports[-1]}
        for kind, port in zip(_KINDS, self._ports[1:], strict=False):
            (folder / f"{kind}.conf").write_text(_BACK.format(kind=kind, port=port, **common))
            builder = f"{folder}/{kind}.builder"
            for words in (["create", "4", "1", "1"], ["add", f"r1z1-127.0.0.1:{port}/d1", "1"], ["rebalance"]):
                subprocess.run(["swift-ring-builder", builder, *words], check=True, capture_output=True)
        filters = [name for name in _FILTERS if conditional or name != "conditional"]
        texts = [
            f"[filter:{name}]\n{_OPTIONS.get(name, f'use = egg:swift#{name}')}".format(**common) for name in filters
        ]
        front = _FRONT.format(port=self._ports[0], pipeline=" ".join(filters), filters="\n".join(texts), **common)
        (folder / "proxy.conf").write_text(front)
        (folder / "swift_conditions.py").write_text(_CONDITIONS)

    def start(self) -> None:
        """Returns when requests are answered."""
        self._serve(["memcached", "-l", "127.0.0.1", "-p", str(self._ports[-1]), "-u", _user(), "-m", "64"])
        for kind in (*_KINDS, "proxy"):
            self._serve([f"swift-{kind}-server", f"{self._folder}/{kind}.conf", "-v"])
        until(self._answers, secs=_START_SECS)

    def crash(self) -> None:
        """SIGKILL to all of it."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait(10)
        self._processes.clear()

    def options(self, **more: Any) -> dict[str, Any]:
        """Options of obstore's S3 store, without retries, which would hide faults."""
        return {
            "endpoint": self._url, "access_key_id": "test:tester", "secret_access_key": "testing", "region": REGION,
            "retry_config": {"max_retries": 0}, **more,
        }  # fmt: skip

    def make_bucket(self) -> None:
        """Creates the bucket by Swift's own interface: obstore has no call for it."""
        account = {"X-Auth-User": "test:tester", "X-Auth-Key": "testing"}
        ask = urllib.request.Request(f"{self._url}/auth/v1.0", headers=account)
        with urllib.request.urlopen(ask, timeout=10) as answer:
            place, token = answer.headers["X-Storage-Url"], answer.headers["X-Auth-Token"]
        make = urllib.request.Request(f"{place}/{BUCKET}", method="PUT", headers={"X-Auth-Token": token})
        urllib.request.urlopen(make, timeout=10).close()

    def _serve(self, command: Sequence[str]) -> None:
        with open(self._folder / f"{Path(command[0]).name}.log", "ab") as log:
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            env = {**os.environ, "PYTHONPATH": str(self._folder)}
            self._processes.append(subprocess.Popen(command, env=env, start_new_session=True, **pipes))

    def _answers(self) -> bool:
        with suppress(OSError):
            for port in self._ports[1:]:
                socket.create_connection(("127.0.0.1", port), 1).close()
            with urllib.request.urlopen(f"{self._url}/healthcheck", timeout=5) as answer:
                return bool(answer.read() == b"OK")
        return False


@contextmanager
def swift(folder: Path, conditional: bool = False) -> Iterator[S3Server]:
    """A server that runs, with an empty bucket; the test is skipped where Swift is not installed."""
    if shutil.which("swift-proxy-server") is None or shutil.which("memcached") is None:
        pytest.skip(f"needs a real S3 server: apt-get install {PACKAGES}")
    server = S3Server(folder, conditional)
    try:
        server.start()
        server.make_bucket()
        yield server
    finally:
        server.crash()


@contextmanager
def servers(folders: pytest.TempPathFactory) -> Iterator[Callable[[str], S3Server]]:
    """Gives the server of a kind, which starts when it is first wanted."""
    with ExitStack() as stack:
        yield functools.cache(lambda kind: stack.enter_context(swift(folders.mktemp("server"), kind == TAKES)))


def in_bucket(server: S3Server, **more: Any) -> ObjectStorage:
    """A new place on it."""
    return ObjectStorage(f"s3://{BUCKET}/{uuid.uuid4().hex}", **server.options(**more))


def _user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name
