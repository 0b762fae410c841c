"""An SMP killed, frozen or misled: trainers continue, and a new one takes over alone."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import SmpError
from ftckpt.memory.directory import clean_job
from ftckpt.memory.end_notes import read as read_ends
from ftckpt.memory.locks import JobLock
from ftckpt.memory.process import Process
from ftckpt.smp.client import SmpClient
from ftckpt.smp.footprint import load_description, store_description
from ftckpt.smp.ports import PortHold
from ftckpt.smp.requests import VERSION
from ftckpt.smp.watch import Watch
from tests.support.killing import killed_at
from tests.support.processes import python
from tests.support.smps import JOB, NODE, SECRET, SmpSite, events, lives_on, site_at
from tests.support.waiting import until

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

TRAIN = """
import sys, time
from pathlib import Path
from ftckpt.memory.heartbeat import Heartbeat
pulse = Heartbeat.open(Path(sys.argv[1]), 0, 10)
print("up", flush=True)
for iteration in range(1000):
    pulse.beat(iteration, "forward")
    time.sleep(0.05)  # an iteration
"""


@pytest.fixture
def site(arena_root: Path) -> Iterator[SmpSite]:
    with site_at(arena_root) as made:
        yield made


def kill(client: SmpClient) -> int:
    """SIGKILL the SMP that answers ``client``."""
    process = Process.open(int(client.status()["pid"]))
    assert process is not None
    with process:
        process.send(signal.SIGKILL)
        assert process.gone(20)
        return process.pid


class Told:
    """Events that a Watch reports."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: str, **fields: Any) -> None:
        self.seen.append((event, fields))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.seen]


def listens(client: SmpClient, site: SmpSite, events_dir: Path) -> int:
    """Configured with the port at which it answers other nodes, as by a leader."""
    with closing(PortHold("127.0.0.1")) as port:
        port.lend()
        client.configure(site.listening(port.number) | site.description(events=str(events_dir)))
        return port.number


def test_a_new_one_takes_over_what_the_killed_one_was_told(site: SmpSite, tmp_path: Path) -> None:
    client = site.start()
    port = listens(client, site, tmp_path)
    trainer = python(TRAIN, site.node_dir)
    try:
        killed = kill(client)
        assert {"smp.sock", "smp.json"} <= site.files(), "as a killed one leaves it"
        hello = site.start().status()
        assert hello["pid"] != killed and hello["configured"] and hello["port"] == port
        until(lambda: site.start().status()["trainers"])
        trainer.kill()
        until(lambda: events(tmp_path, "ranks_ended"))  # where it was told to write events
        assert SECRET.hex() not in site.log
    finally:
        trainer.kill()
        trainer.communicate(timeout=10)


def test_the_watch_brings_it_back_again_and_again(site: SmpSite, tmp_path: Path) -> None:
    client, told = site.start(), Told()
    port = listens(client, site, tmp_path)
    watch = Watch(client, told)
    took = []
    try:
        for times in range(1, 4):
            pid = kill(client)
            begin = time.monotonic()
            until(lambda n=times: told.names.count("smp_restarted") == n)
            took.append(time.monotonic() - begin)
            hello = client.status()
            assert hello["pid"] != pid and hello["configured"] and hello["port"] == port
            assert len(site.pids()) == 1
    finally:
        watch.stop()
    assert told.names == ["smp_restarted"] * 3
    print("restarted after", took)
    assert min(took) < 8, f"{took} s; 0.6 s on an idle machine"
    kill(client)
    assert not [thread for thread in threading.enumerate() if thread.name == "ftckpt-smp-watch"]
    assert site.pids() == [], "a watch that was stopped starts none"


def test_what_it_sees_reaches_the_job(site: SmpSite) -> None:
    client, told = site.start(), list[str]()
    client.configure(site.description())
    watch = Watch(client, Told(), tell=told.append)
    trainer = python(TRAIN, site.node_dir)
    try:
        until(lambda: client.status()["trainers"])
        time.sleep(1.0)  # two looks: one that has never seen it alive knows nothing of its end
        trainer.kill()
        until(lambda: read_ends(site.node_dir))
        with suppress(SmpError):
            client.configure({**site.description(), "job": "another"})
        until(lambda: told)
    finally:
        watch.stop()
        trainer.kill()
        trainer.communicate(timeout=10)
    (end,) = read_ends(site.node_dir)
    assert end.text.startswith(f"rank 10 (pid {trainer.pid}) was ended by SIGKILL, in forward, after iteration")
    assert told == ["refused: configure: job is 'another', this is the SMP of 'job'"]
    client.end()


def test_its_warnings_outlive_a_job_that_failed(site: SmpSite) -> None:
    client = site.start()
    with suppress(SmpError):
        client.configure({**site.description(), "job": "another"})
    said: list[str] = []
    clean_job(site.root, JOB, said.append)
    assert [NODE in line and "refused: configure" in line for line in said] == [True]
    assert not list(site.root.iterdir())


@pytest.mark.parametrize("end", ["its directory is removed", "nobody trains"])
def test_one_that_nobody_needs_leaves_nothing(site: SmpSite, end: str) -> None:
    site.start(idle_secs=2.0 if end == "nobody trains" else 300.0)
    if end != "nobody trains":
        shutil.rmtree(site.node_dir.parent)
    until(lambda: not site.pids())
    assert not list(site.root.iterdir())


@pytest.mark.slow
def test_the_watch_replaces_one_that_stands_still_and_none_that_works(site: SmpSite, tmp_path: Path) -> None:
    client, told = site.start(), Told()
    client.configure(site.description(events=str(tmp_path)))
    pid = client.status()["pid"]
    watch = Watch(client, told, every_secs=0.1, silent_secs=1.5)
    try:
        lives_on(site.node_dir, 2.0)
        assert site.pids() == [pid] and not told.seen
        os.kill(pid, signal.SIGSTOP)
        until(lambda: "smp_restarted" in told.names)
        assert told.names == ["smp_error", "smp_restarted"] and "no heartbeat" in told.seen[0][1]["error"]
        assert client.status()["configured"] and site.pids() not in ([pid], [])
    finally:
        watch.stop()


def test_killed_while_it_starts(site: SmpSite) -> None:
    for delay in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4):
        found: list[Any] = []
        starter = threading.Thread(target=lambda found=found: found.append(site.start()))
        starter.start()
        until(lambda starter=starter: site.pids() or not starter.is_alive())
        time.sleep(delay)  # an instant of its start
        for pid in site.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        starter.join(60)
        assert not starter.is_alive()
        assert found, "it was started once more"
        assert site.start().status()["node"] == NODE
        # One that was not seen yet as others were killed finds the lock held, and goes.
        until(lambda: len(site.pids()) == 1)
        kill(site.start())


def test_a_kill_while_the_configuration_is_kept_leaves_the_old_or_the_new_one(arena_root: Path) -> None:
    kept: list[Any] = []
    for step in itertools.count():
        store_description(arena_root, {"number": 1})
        killed = killed_at(step, lambda: store_description(arena_root, {"number": 2}))
        kept.append((load_description(arena_root) or {})["number"])
        if not killed:
            break
    assert kept[0] == 1 and kept[-1] == 2 and len(kept) >= 3
    assert {path.name for path in arena_root.iterdir()} == {"smp.json"}


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '{"version": 99}', f'{{"version": {VERSION}, "description": 5}}', "\0" * 5000, "link"]
)
def test_what_was_kept_and_is_damaged_stops_nobody(site: SmpSite, content: str) -> None:
    path = site.node_dir / "smp.json"
    if content == "link":
        path.symlink_to("/etc/hostname")
    else:
        path.write_text(content)
    hello = site.start().status()
    assert not hello["configured"] and hello["port"] == 0
    until(lambda: "configuration of the previous SMP failed" in site.log)
    site.start().configure(site.description())
    assert json.loads(path.read_text())["description"]["job"] == JOB and not path.is_symlink()


def test_the_end_of_the_job_after_a_kill_leaves_nothing(site: SmpSite) -> None:
    client = site.start()
    client.configure(site.description())
    with JobLock(site.node_dir, 0):
        kill(client)
        site.start().end()
        assert site.files() - {".budget"} == {"job.lock"}
    assert site.pids() == []
