"""A real S3 server on this machine: OpenStack Swift with its S3 API, from Debian's packages, in a folder of its own.

It keeps what it has over SIGKILL, checks signatures, and refuses conditional writes. With ``conditional`` it takes
``If-None-Match: *``, which its object server honours in most cases, but not where two writers come at once: the worst
that a store may do which says that it knows conditions.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import until

USER, KEY, SECRET = "test:tester", "test:tester", "testing"
BUCKET = "bucket"
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
    "s3api": "use = egg:swift#s3api\nlocation = us-east-1\nmax_upload_part_num = 10000",
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


class SwiftServer:
    """Five processes; ``crash`` and ``start`` again as often as wanted."""

    def __init__(self, folder: Path, conditional: bool = False) -> None:
        self._folder, self._conditional = folder, conditional
        self._ports = free_ports(len(_KINDS) + 2)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._set_up()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._ports[0]}"

    def options(self, **more: Any) -> dict[str, Any]:
        """Of obstore's S3 store, without retries, which would hide faults."""
        return {
            "endpoint": self.url, "access_key_id": KEY, "secret_access_key": SECRET, "region": "us-east-1",
            "retry_config": {"max_retries": 0}, **more,
        }  # fmt: skip

    def start(self) -> None:
        """Serve; returns when requests are answered."""
        environment = {**os.environ, "PYTHONPATH": str(self._folder)}
        commands = [["memcached", "-l", "127.0.0.1", "-p", str(self._ports[-1]), "-u", _user(), "-m", "64"]]
        commands += [[f"swift-{kind}-server", f"{self._folder}/{kind}.conf", "-v"] for kind in (*_KINDS, "proxy")]
        for command in commands:
            with open(self._folder / f"{Path(command[0]).name}.log", "ab") as log:
                pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                self._processes.append(subprocess.Popen(command, env=environment, start_new_session=True, **pipes))
        until(self._answers, secs=_START_SECS)

    def crash(self) -> None:
        """SIGKILL to all of it."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait(10)
        self._processes.clear()

    def _answers(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/healthcheck", timeout=5) as answer:
            backs = (socket.create_connection(("127.0.0.1", port), 1).close() for port in self._ports[1:])
            return answer.read() == b"OK" and all(each is None for each in backs)
        return False

    def _set_up(self) -> None:
        for name in ("srv/d1", "cache"):
            (self._folder / name).mkdir(parents=True)
        common = {"folder": self._folder, "user": _user(), "memory": self._ports[-1]}
        for kind, port in zip(_KINDS, self._ports[1:], strict=False):
            (self._folder / f"{kind}.conf").write_text(_BACK.format(kind=kind, port=port, **common))
            builder = f"{self._folder}/{kind}.builder"
            for words in (
                ["create", "4", "1", "1"], ["add", f"r1z1-127.0.0.1:{port}/d1", "1"], ["rebalance"],
            ):  # fmt: skip
                subprocess.run(["swift-ring-builder", builder, *words], check=True, capture_output=True)
        filters = [name for name in _FILTERS if self._conditional or name != "conditional"]
        texts = [
            f"[filter:{name}]\n{_OPTIONS.get(name, f'use = egg:swift#{name}')}".format(**common) for name in filters
        ]
        front = _FRONT.format(port=self._ports[0], pipeline=" ".join(filters), filters="\n".join(texts), **common)
        (self._folder / "proxy.conf").write_text(front)
        (self._folder / "swift_conditions.py").write_text(_CONDITIONS)


@contextmanager
def swift(folder: Path, conditional: bool = False) -> Iterator[SwiftServer]:
    """A server with an empty bucket; the test is skipped where Swift is not installed."""
    if shutil.which("swift-proxy-server") is None or shutil.which("memcached") is None:
        pytest.skip(f"needs a real S3 server: apt-get install {PACKAGES}")
    server = SwiftServer(folder, conditional)
    with ExitStack() as stack:
        stack.callback(server.crash)
        server.start()
        make_bucket(server.url, USER, SECRET)
        yield server


def make_bucket(url: str, user: str, secret: str) -> None:
    """By Swift's own interface: obstore makes none."""
    auth = urllib.request.Request(f"{url}/auth/v1.0", headers={"X-Auth-User": user, "X-Auth-Key": secret})
    with urllib.request.urlopen(auth, timeout=10) as answer:
        place, token = answer.headers["X-Storage-Url"], answer.headers["X-Auth-Token"]
    make = urllib.request.Request(f"{place}/{BUCKET}", method="PUT", headers={"X-Auth-Token": token})
    urllib.request.urlopen(make, timeout=10).close()


def free_ports(count: int) -> list[int]:
    """Of the loopback, that nobody listens at now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name
