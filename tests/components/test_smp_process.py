"""The SMP as a process: its loop, its signals, its probe, its memory and its reports."""

from __future__ import annotations

import argparse
import base64
import os
import signal
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ftckpt.errors import SmpError
from ftckpt.memory.inventory import NodeProtection, Problem
from ftckpt.memory.locks import JOB_LOCK_NAME
from ftckpt.model.snapshot import SnapshotId
from ftckpt.smp import __main__ as smp_main
from ftckpt.smp.arenas import MonitoredArenas
from ftckpt.smp.footprint import load_description, store_description
from ftckpt.smp.reports import MarkAge, packed, unpacked
from ftckpt.smp.requests import PersistRequest
from tests.support.mounting import rank_elsewhere
from tests.support.processes import run_python
from tests.support.smps import JOB, NODE, SmpSite, answers, site_at
from tests.support.waiting import until

# --- the loop of an SMP, in this process ---


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """A daemon takes the process's."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# --- the SMP's loop waits for requests, and for the signal that ends it ---


SIGNALLED = """
import signal, time
from ftckpt.events import Events
from ftckpt.smp.server import Server

def handler(*_):  # what delays it until behind the deadline may be a busy machine
    until = time.perf_counter() + 0.05
    while time.perf_counter() < until:
        pass

server = Server({}, find=lambda name: None, events=Events(None, 0))
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.01)
server.poll(0.02)
print("polled")
"""


def test_a_signal_that_comes_as_a_wait_runs_out_ends_the_wait() -> None:
    done = run_python(SIGNALLED, secs=30)
    assert done.stdout == "polled\n", done.stderr


# --- an SMP returns a node's memory when it has finished with it ---


SCRIPT = """
from ftckpt.smp.footprint import anon_bytes, bound_process
bound_process()
before = anon_bytes()
for _ in range(3):
    large = b"x" * (8 << 20)
    del large
print(anon_bytes() - before)
"""


def test_large_blocks_go_back_to_the_system() -> None:
    assert int(run_python(SCRIPT).stdout) < 4 << 20


PRIORITY = """
import os
from pathlib import Path
from ftckpt.smp.footprint import bound_process
os.setsid()
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
bound_process()
autogroup = Path("/proc/self/autogroup")
group = autogroup.read_text().split()[-1] if autogroup.exists() else "0"
print(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0) == os.SCHED_BATCH, group)
"""


def test_without_privileges_it_starts_no_nicer_than_who_starts_it() -> None:
    assert run_python(PRIORITY).stdout.split() == [str(os.nice(0)), "True", "0"]


def test_a_file_that_another_process_writes_at_the_moment_stays(tmp_path: Path) -> None:
    """A successor removes the half-made files of a killed SMP, not those of ranks."""
    smp, rank = tmp_path / ".smp.json.00c0ffee.new", tmp_path / ".run.00c0ffee.new"
    for path in (smp, rank):
        path.write_text("{")
    store_description(tmp_path, {"address": "here"})
    assert rank.exists() and not smp.exists()
    assert load_description(tmp_path) == {"address": "here"}


# --- the reports of an SMP about its node ---


ONE, OTHER = b"a" * 16, b"b" * 16


def test_ages_and_how_often_one_comes() -> None:
    history = MarkAge()
    assert history.fields(1.0) is None
    for place, now in enumerate((10.0, 14.0, 18.0)):
        history.note(SnapshotId(ONE, 5 + 10 * place), now)
        history.note(SnapshotId(ONE, 5 + 10 * place), now + 1)
    said = history.fields(20.0)
    assert said is not None
    assert (said["iteration"], said["age_secs"]) == (25, 2.0)
    history.note(SnapshotId(OTHER, 25), 21.0)  # behind a restart
    said = history.fields(22.0)
    assert said is not None and said["age_secs"] == 1.0
    history.note(None, 23.0)
    assert history.fields(24.0) is None


def marks_of(*whole: SnapshotId | None) -> SnapshotId | None:
    """The snapshot that the SMP considers committed when its node's ranks have marked these."""
    arenas = MonitoredArenas(Path())
    controls = [SimpleNamespace(whole=lambda mark=mark: mark) for mark in whole]
    arenas.by_shard = cast(
        Any, {str(n): SimpleNamespace(mapped=SimpleNamespace(control=c)) for n, c in enumerate(controls)}
    )
    return arenas.oldest_mark(lambda control: control.whole())


def test_ranks_that_pass_a_boundary_one_after_the_other_leave_no_gap() -> None:
    history = MarkAge()
    for place in range(4):
        before, after = SnapshotId(ONE, 10 * place), SnapshotId(ONE, 10 * place + 10)
        for now, marks in ((0, (before, before)), (1, (after, before)), (2, (after, after))):
            history.note(marks_of(*marks), 4.0 * place + now)
            said = history.fields(4.0 * place + now)
            assert said is not None and said["iteration"] == (10 * place if now < 2 else 10 * place + 10)


def test_what_one_rank_has_not_or_of_another_lineage_is_whole_nowhere() -> None:
    one, other = SnapshotId(ONE, 10), SnapshotId(OTHER, 10)
    assert marks_of(one, one) == one
    assert [marks_of(*marks) for marks in ((), (one, None), (None, None), (one, other))] == [None] * 4


def test_protection_is_packed_and_what_is_none_is_refused() -> None:
    told = NodeProtection(problems=(Problem("file", "text"),))
    assert unpacked(packed(told)) == told
    for text in ("", "%", base64.b64encode(b"x").decode(), base64.b64encode(zlib.compress(b"{}[")).decode()):
        with pytest.raises(SmpError, match="protection"):
            unpacked(text)


# --- an SMP in a container of its own ---


@pytest.fixture
def site(arena_root: Path) -> Iterator[SmpSite]:
    with site_at(arena_root) as one:
        yield one


def test_a_probe_is_content_with_an_smp_that_moves_and_with_no_other(
    site: SmpSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = argparse.Namespace(job=JOB, node=NODE, arena=site.root)
    assert smp_main.alive(asked) == 1 and capsys.readouterr().err
    pid = site.start().status()["pid"]
    assert smp_main.alive(asked) == 0
    os.kill(pid, signal.SIGSTOP)
    assert smp_main.alive(asked) == 0, "one that is slow is healthy"
    monkeypatch.setattr(smp_main, "MAX_SILENT_SECS", 0.2)
    until(lambda: smp_main.alive(asked) == 1)
    assert capsys.readouterr().err
    os.kill(pid, signal.SIGKILL)
    until(lambda: not site.pids())
    assert smp_main.alive(asked) == 1


def test_one_that_stands_by_serves_when_the_other_one_has_ended(site: SmpSite) -> None:
    client = site.start()
    first = client.status()["pid"]
    with subprocess.Popen(site.command("--stand-by"), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stderr.readline()
        assert process.poll() is None and client.status()["pid"] == first
        os.kill(first, signal.SIGKILL)
        until(lambda: answers(client) and client.status()["pid"] == process.pid)
        process.terminate()
        assert process.wait(20) == 0


def test_the_name_of_the_node_is_that_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCKPT_NODE", "pod-0")
    parser = argparse.ArgumentParser()
    smp_main.add_arguments(parser)
    assert parser.parse_args(["--job", "a"]).node == "pod-0"


def test_nothing_is_saved_while_ranks_of_another_container_train(site: SmpSite, tmp_path: Path) -> None:
    client = site.start()
    client.configure(site.description(persist=str(tmp_path)))
    request = PersistRequest("", 5.0, anew=True)
    with rank_elsewhere(site.node_dir, site.node_dir / JOB_LOCK_NAME):
        with pytest.raises(SmpError):
            client.persist(request)
        assert [one["lives"] for one in client.status()["trainers"]] == [None]
    assert client.persist(request)["flush"] in ("working", "cannot")
    assert [one["lives"] for one in client.status()["trainers"]] == [False]
