"""SMPs as real processes of a job under a test's own root; none outlives the block that made it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from ftckpt.errors import PeerError, SmpError
from ftckpt.memory.directory import end_smp, node_directory
from ftckpt.memory.heartbeat import Heartbeat
from ftckpt.session.node_smp import RepeatedDelivery
from ftckpt.smp.channel import Deadlines, Trust, connect
from ftckpt.smp.client import SmpClient, find_or_start
from ftckpt.smp.requests import MAX_REPLY_BYTES
from tests.support.event_logs import read_events
from tests.support.processes import command_line, running
from tests.support.waiting import until

JOB, NODE = "job", "n0"
SECRET = bytes(range(100, 132))


class SmpSite:
    """One node's directory and its SMP."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.node_dir = node_directory(root, JOB, NODE)

    def start(self, idle_secs: float = 300.0) -> SmpClient:
        return find_or_start(self.node_dir, self.root, JOB, NODE, idle_secs=idle_secs)

    def description(self, **settings: Any) -> dict[str, Any]:
        """The description that a leader sends, for a node without arenas."""
        return {
            "job": JOB, "node": NODE, "secret": SECRET.hex(), "peers": {}, "places": {}, "groups": [],
            "mirror_from": {}, "settings": settings,
        }  # fmt: skip

    def listening(self, port: int = 0, host: str = "127.0.0.1") -> dict[str, Any]:
        """The same of one that answers other nodes; port 0 is any."""
        return {**self.description(), "address": host, "port": port}

    def command(self, *more: str) -> list[str]:
        """The command line that starts one."""
        named = ["--job", JOB, "--node", NODE, "--arena", str(self.root)]
        return [sys.executable, "-m", "ftckpt.smp", *named, *more]

    @property
    def log(self) -> str:
        return (self.node_dir / "smp.log").read_text()

    def pids(self) -> list[int]:
        """All processes that were started as an SMP under this root."""
        lines = {pid: command_line(pid).split() for pid in running()}
        return [pid for pid, words in lines.items() if words[1:3] == ["-m", "ftckpt.smp"] and str(self.root) in words]

    def files(self) -> set[str]:
        return {path.name for path in self.node_dir.iterdir()} if self.node_dir.exists() else set()


@contextmanager
def site_at(root: Path) -> Iterator[SmpSite]:
    """A node's directory; at the end its SMP must have ended, or end."""
    site = SmpSite(root)
    try:
        yield site
    finally:
        assert end_smp(site.node_dir, 20)
        until(lambda: not site.pids())


_want = RepeatedDelivery.want


def spare_smps() -> None:
    """From now on jobs of this process that neither protect nor store anything start no SMP, as if its start failed:
    it costs a third of a second, and hundreds of tests have no use for it."""
    RepeatedDelivery.want = _want_unless_bare  # type: ignore[method-assign]


def start_smps() -> None:
    """All jobs of this process start SMPs, as they do for users."""
    RepeatedDelivery.want = _want  # type: ignore[method-assign]


def _want_unless_bare(delivery: RepeatedDelivery[Any], value: Any) -> None:
    if not isinstance(value, Mapping) or value["modes"] or value["settings"]["persist"]:
        _want(delivery, value)


def lives_on(node_dir: Path, secs: float) -> None:
    """Waits for a heartbeat of the SMP that is so much later, by which it has scanned its trainers."""
    pulse, begin = Heartbeat.open(node_dir, None), time.monotonic()
    until(lambda: time.monotonic() - begin - pulse.smp_age_secs() >= secs, "the SMP lives on")


def answers(client: SmpClient) -> bool:
    """Whether the SMP is there: its socket is before it answers."""
    with suppress(SmpError):
        return bool(client.status()["pid"])
    return False


def send(node_dir: Path, body: bytes) -> dict[str, Any]:
    """The SMP's answer to a frame with this body; empty where it disconnects."""
    try:
        with closing(connect(node_dir, 20)) as channel:
            channel.greet(Trust(), time.monotonic() + 20)
            channel.send(body, time.monotonic() + 20)
            reply: dict[str, Any] = json.loads(channel.receive(MAX_REPLY_BYTES, 0, Deadlines(step_secs=20)).body)
            return reply
    except PeerError:
        return {}


def events(directory: Path, name: str) -> list[dict[str, Any]]:
    """Events of that name that the node's SMP left."""
    return read_events(directory, name, of=f"smp-{NODE}")
