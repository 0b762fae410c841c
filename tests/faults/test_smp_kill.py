"""An SMP killed, frozen or fooled: trainers go on, a new one takes over alone, and hung trainers are ended."""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import SmpError
from ftckpt.smp.client import SmpClient, Watch, find_or_start
from ftckpt.smp.footprint import SmpConfig
from ftckpt.store.directory import clean_job
from ftckpt.store.ends import read as read_ends
from ftckpt.store.locks import JobLock
from ftckpt.store.outcome import LauncherRun
from ftckpt.store.process import Process
from ftckpt.store.pulse import Pulse
from tests.support.killing import killed_at
from tests.support.smps import JOB, NODE, SECRET, Site, events, lives_on, python, site_at
from tests.support.waiting import until

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

TRAIN = """
import signal, sys, time
from pathlib import Path
from ftckpt.store.process import Process
from ftckpt.store.pulse import Pulse, PulseSection
from ftckpt.store.stacks import answer_signals
pulse = Pulse.open(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[2]) + 10)
pulse.announce_stacks(answer_signals().word)
if sys.argv[3] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
for iteration in range(int(sys.argv[4])):
    pulse.beat(iteration, "forward")
    time.sleep(0.05)  # an iteration
for secs in map(float, sys.argv[5:]):
    pulse.beat(iteration, "start", PulseSection.SAVE)
    time.sleep(secs)
    pulse.beat(iteration, "start")

def hangs():
    time.sleep(100)

hangs()
"""


@pytest.fixture
def site(arena_root: Path) -> Iterator[Site]:
    with site_at(arena_root) as made:
        yield made


def kill(client: SmpClient) -> int:
    """SIGKILL the SMP that answers ``client``."""
    process = Process.open(int(client.hello()["pid"]))
    assert process is not None
    with process:
        process.send(signal.SIGKILL)
        assert process.gone(20)
        return process.pid


class Told:
    """Events that a Watch tells."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: str, **fields: Any) -> None:
        self.seen.append((event, fields))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.seen]


def test_a_new_one_takes_over_what_the_killed_one_was_told(site: Site, tmp_path: Path) -> None:
    client = site.start()
    port = client.listen("127.0.0.1", SECRET)
    client.configure(site.description(hang_secs=1.0, events=str(tmp_path)))
    trainer = python(TRAIN, site.node_dir, 0, "meek", 5)
    try:
        killed = kill(client)
        assert {"smp.sock", "smp.json"} <= site.files(), "as a killed one leaves it"
        hello = site.start().hello()
        assert hello["pid"] != killed and hello["configured"] and hello["port"] == port
        until(lambda: events(tmp_path, "hang"))  # it watches for what it was told to
        assert SECRET.hex() not in site.log
    finally:
        trainer.kill()
        trainer.communicate(timeout=10)


def test_the_watch_brings_it_back_again_and_again(site: Site, tmp_path: Path) -> None:
    client, told = site.start(), Told()
    port = client.listen("127.0.0.1", SECRET)
    client.configure(site.description(events=str(tmp_path)))
    watch = Watch(client, told)
    took = []
    try:
        for times in range(1, 4):
            pid = kill(client)
            begin = time.monotonic()
            until(lambda n=times: told.names.count("smp_restarted") == n)
            took.append(time.monotonic() - begin)
            hello = client.hello()
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


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the log of the SMP outlives the job."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "ftckpt" / f"{JOB}@{NODE}.log"


def test_what_it_sees_reaches_the_job_and_outlives_it(
    site: Site, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client, told = site.start(), list[str]()
    client.configure(site.description())
    watch = Watch(client, Told(), tell=told.append)
    trainer = python(TRAIN, site.node_dir, 0, "meek", 1000)
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
    assert end.text.startswith(f"rank 10 (pid {trainer.pid}) was ended by SIGKILL, in step, forward, after iteration")
    assert told == ["refused: configure: job is 'another', this is the SMP of 'job'"]
    assert not kept.exists()
    with caplog.at_level(logging.INFO, "ftckpt"):
        client.end()
    assert told[0] in kept.read_text(), "the directory of the node goes with the job"
    assert f"its log is kept in {kept}" in caplog.text


def test_its_log_outlives_a_job_that_failed(site: Site, kept: Path) -> None:
    client = site.start()
    with suppress(SmpError):
        client.configure({**site.description(), "job": "another"})
    said: list[str] = []
    clean_job(site.root, JOB, said.append)
    log = kept.read_text()
    assert "refused: configure" in log and "ends: signal SIGTERM" in log, "all of it, once"
    assert said == [f"ftckpt: what the SMP of node {NODE} warned of: its log is kept in {kept}"]
    assert not list(site.root.iterdir()) and len(list(kept.parent.iterdir())) == 1


@pytest.mark.parametrize("end", ["its directory is removed", "nobody trains"])
def test_its_log_outlives_the_directory_where_no_other_process_keeps_it(site: Site, kept: Path, end: str) -> None:
    client = site.start(idle_secs=2.0 if end == "nobody trains" else 300.0)
    with suppress(SmpError):
        client.configure({**site.description(), "job": "another"})
    if end != "nobody trains":
        shutil.rmtree(site.node_dir.parent)
    until(lambda: not site.pids())
    assert "refused: configure" in kept.read_text() and len(list(kept.parent.iterdir())) == 1
    assert not list(site.root.iterdir())


@pytest.mark.slow
def test_the_watch_replaces_one_that_stands_still_and_none_that_works(site: Site, tmp_path: Path) -> None:
    client, told = site.start(), Told()
    client.configure(site.description(events=str(tmp_path)))
    pid = client.hello()["pid"]
    watch = Watch(client, told, every_secs=0.1, silent_secs=1.5)
    try:
        lives_on(site.node_dir, 2.0)
        assert site.pids() == [pid] and not told.seen
        os.kill(pid, signal.SIGSTOP)
        until(lambda: "smp_restarted" in told.names)
        assert told.names == ["smp_error", "smp_restarted"] and "no sign of life" in told.seen[0][1]["error"]
        assert client.hello()["configured"] and site.pids() not in ([pid], [])
    finally:
        watch.stop()


def test_a_watch_tells_what_it_cannot_cure(site: Site) -> None:
    client, told = site.start(), Told()
    kill(client)
    (site.node_dir / "smp.lock").unlink()
    (site.node_dir / "smp.lock").mkdir()
    watch = Watch(client, told, every_secs=0.05)
    try:
        until(lambda: told.seen)
    finally:
        watch.stop()
    name, fields = told.seen[0]
    assert name == "smp_error" and "smp.lock" in fields["error"]
    (site.node_dir / "smp.lock").rmdir()


def test_killed_while_it_starts(site: Site) -> None:
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
        assert site.start().hello()["node"] == NODE
        # One that was not seen yet as others were killed finds the lock held, and goes.
        until(lambda: len(site.pids()) == 1)
        kill(site.start())


def test_killed_while_it_is_configured(site: Site) -> None:
    """What the next one reads is what the last configuration that was acknowledged said, or the one on its way."""
    rng = random.Random(7)
    acknowledged, sent = -1, 0
    for _ in range(8):
        client = site.start()
        kept = SmpConfig.load(site.node_dir)
        if kept is not None and kept.description is not None:
            assert kept.description["mirror_from"] == {}
            assert acknowledged <= kept.description["number"] < sent
        else:
            assert acknowledged < 0
        pid = client.hello()["pid"]
        killer = threading.Timer(rng.uniform(0.0, 0.1), os.kill, (pid, signal.SIGKILL))
        killer.start()
        try:
            while True:
                number, sent = sent, sent + 1
                client.configure({**site.description(), "number": number, "filler": "x" * 300_000})
                acknowledged = number
        except SmpError:
            pass
        killer.join()
        until(lambda: not site.pids())
    assert acknowledged > 0


def test_a_kill_while_the_configuration_is_kept_leaves_the_old_or_the_new_one(arena_root: Path) -> None:
    kept: list[Any] = []
    old, new = SmpConfig({"number": 1}), SmpConfig({"number": 2})
    for step in itertools.count():
        old.store(arena_root)
        killed = killed_at(step, lambda: new.store(arena_root))
        config = SmpConfig.load(arena_root)
        assert config is not None and config.description is not None
        kept.append(config.description["number"])
        if not killed:
            break
    assert kept[0] == 1 and kept[-1] == 2 and len(kept) >= 3
    assert {path.name for path in arena_root.iterdir()} == {"smp.json"}


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '{"version": 99}', '{"version": 1, "host": 5}', "\0" * 5000, "link"]
)
def test_what_was_kept_and_is_damaged_stops_nobody(site: Site, content: str) -> None:
    path = site.node_dir / "smp.json"
    if content == "link":
        path.symlink_to("/etc/hostname")
    else:
        path.write_text(content)
    hello = site.start().hello()
    assert not hello["configured"] and hello["port"] == 0
    until(lambda: "cannot be used" in site.log)
    site.start().configure(site.description())
    assert json.loads(path.read_text())["description"]["job"] == JOB and not path.is_symlink()


@pytest.mark.slow
def test_a_frozen_one_hangs_nobody(site: Site) -> None:
    client = site.start()
    pid = client.hello()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        for call in (client.hello, client.status):
            with pytest.raises(SmpError, match="does not answer"):
                call(0.5)
        with pytest.raises(SmpError, match="does not answer"):
            client.configure(site.description(), timeout_secs=0.5)
        with pytest.raises(SmpError, match="no SMP"):
            find_or_start(site.node_dir, site.root, JOB, NODE, timeout_secs=1.0)
        assert time.monotonic() - begin < 20
        assert site.pids() == [pid], "a second one is not started beside it"
        until(lambda: not Pulse.open(site.node_dir, None).smp_alive(0.5))
        client.end(timeout_secs=4)  # the job is over: nobody waits for it any more
        assert site.pids() == []
    finally:
        if site.pids() == [pid]:
            os.kill(pid, signal.SIGCONT)


def trainers(site: Site, *kinds: tuple[Any, ...]) -> list[subprocess.Popen[str]]:
    """Of each: ``meek`` or ``stubborn``, how many iterations it trains, and how long it saves after them."""
    return [python(TRAIN, site.node_dir, place, *kind, stderr=subprocess.PIPE) for place, kind in enumerate(kinds)]


def end_all(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.communicate(timeout=10)


@pytest.mark.slow
def test_a_hang_says_who_waits_where_and_ends_nobody(site: Site, tmp_path: Path) -> None:
    client = site.start()
    processes = trainers(site, ("meek", 10), ("meek", 30))
    try:
        client.configure(site.description(hang_secs=2.0, events=str(tmp_path)))
        until(lambda: events(tmp_path, "hang"))
        (hang,) = events(tmp_path, "hang")
        assert hang["process"] == f"smp-{NODE}" and 2 <= hang["secs"] < 10 and hang["on_hang"] == "report"
        first, second = hang["ranks"]
        assert (first["rank"], first["iteration"], first["phase"], first["pid"]) == (
            10,
            9,
            "forward",
            processes[0].pid,
        )
        assert (second["rank"], second["iteration"]) == (11, 29) and first["secs"] > second["secs"] >= 2
        lives_on(site.node_dir, 1.3)
        assert len(events(tmp_path, "hang")) == 1, "once per hang"
        assert all(process.poll() is None for process in processes)
        assert client.status()["hangs"] == 1 and "hang" in site.log
        until(lambda: events(tmp_path, "stacks"))
        (stacks,) = events(tmp_path, "stacks")
        assert stacks["ranks"] == [10, 11] and not stacks["missing"]
        assert site.log.count("in hangs") == 2, "of both ranks"
    finally:
        end_all(processes)


@pytest.mark.slow
def test_a_save_is_no_hang_until_it_takes_far_longer_than_any_before(site: Site, tmp_path: Path) -> None:
    client = site.start()
    client.configure(site.description(hang_secs=1.0, on_hang="abort", events=str(tmp_path)))
    # Longer than an iteration may take, and not three times as long as the one before; then one for ever.
    processes = trainers(site, ("meek", 3, 1.5, 2.5, 100), ("meek", 3, 1.5, 2.5, 100))
    try:
        until(lambda: events(tmp_path, "hang_aborted"), secs=60)
        (hang,) = events(tmp_path, "hang")
        assert [rank["section"] for rank in hang["ranks"]] == ["save", "save"] and hang["ends"]
        assert all(7.5 <= rank["limit_secs"] <= rank["secs"] for rank in hang["ranks"])
        assert [process.wait(10) for process in processes] == [-signal.SIGTERM] * 2
    finally:
        end_all(processes)
    # Another SMP knows how long a save took.
    kill(client)
    (trainer,) = trainers(site, ("meek", 3, 3.2, 100))
    try:
        until(lambda: site.start().status()["trainers"][0]["section"] == "save")
        assert site.start().status()["trainers"][0]["limit_secs"] >= 7.5
    finally:
        end_all([trainer])


@pytest.mark.slow
def test_a_save_that_nobody_has_seen_is_told_and_not_ended(site: Site, tmp_path: Path) -> None:
    site.start().configure(site.description(hang_secs=0.5, on_hang="abort", events=str(tmp_path)))
    processes = trainers(site, ("meek", 3, 100))
    try:
        until(lambda: events(tmp_path, "stacks"))
        (hang,) = events(tmp_path, "hang")
        assert not hang["ends"] and hang["ranks"][0]["limit_secs"] == 1.5
        lives_on(site.node_dir, 1.0)
        assert processes[0].poll() is None and not events(tmp_path, "hang_aborted")
    finally:
        end_all(processes)


@pytest.mark.slow
def test_a_hang_at_the_same_place_after_a_restart_is_the_end(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where records of launcher runs lie
    monkeypatch.setattr(tempfile, "tempdir", None)
    client = site.start()
    # In the third start it comes past that place, and is ended by something else.
    for number, (run, iterations, ends) in enumerate(
        [("a", 5, True), ("a", 5, True), ("a", 1000, False), ("a", 5, True), ("b", 5, True), ("b", 6, True)]
    ):
        client.configure({**site.description(hang_secs=1.0, on_hang="abort", events=str(tmp_path)), "run": run})
        before = len(events(tmp_path, "hang_aborted"))
        processes = trainers(site, ("meek", iterations), ("meek", iterations))
        try:
            if ends:
                until(lambda n=before: len(events(tmp_path, "hang_aborted")) > n, secs=60)
            else:
                until(lambda: (kept := SmpConfig.load(site.node_dir)) is not None and kept.hang is None)
        finally:
            end_all(processes)
        if number == 0:  # what it knows outlives it
            kill(client)
            client = site.start()
    assert [hang["again"] for hang in events(tmp_path, "hang")] == [False, True, False, False, False]
    assert [LauncherRun(run).read().code for run in ("a", "b")] == [2, None]
    assert "step, forward, after iteration 4" in LauncherRun("a").read().text
    (again,) = events(tmp_path, "hung_again")
    assert (again["iteration"], again["section"], again["phase"]) == (4, "step", "forward")


@pytest.mark.slow
def test_hung_trainers_are_ended_and_nobody_else(site: Site, tmp_path: Path) -> None:
    processes = trainers(site, ("meek", 3), ("stubborn", 3), ("meek", 3))
    bystander = trainers(site, ("meek", 3))[0]  # it has place 0 again: the entry of the first is its own now
    processes, former = [bystander, *processes[1:]], processes[0]
    os.kill(processes[2].pid, signal.SIGSTOP)
    try:
        client = site.start()
        client.configure(site.description(hang_secs=2.0, on_hang="abort", events=str(tmp_path)))
        until(lambda: events(tmp_path, "hang_aborted"), secs=30)
        assert [process.wait(10) for process in processes] == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGKILL]
        assert site.log.count("in hangs") == 2, "before anything was ended"
        (stacks,) = events(tmp_path, "stacks")
        assert stacks["ranks"] == [10, 11] and "T (stopped)" in stacks["missing"]["12"]
        (aborted,) = events(tmp_path, "hang_aborted")
        assert sorted(aborted["killed"]) == sorted(process.pid for process in processes[1:])
        assert former.poll() is None, "a process that no entry names"
        assert len(events(tmp_path, "hang")) == 1
        # The launcher starts them anew: they train, and are left alone.
        again = trainers(site, ("meek", 1000), ("meek", 1000))
        try:
            pulse = Pulse.open(site.node_dir, None)  # longer than the two seconds of a hang
            until(lambda: all(rank.iteration >= 50 for rank in pulse.ranks() if rank.place < len(again)))
            assert all(process.poll() is None for process in again)
            assert len(events(tmp_path, "hang")) == 1
        finally:
            end_all(again)
    finally:
        end_all([*processes, former])


def test_trainers_that_have_not_begun_do_not_hang(site: Site, tmp_path: Path) -> None:
    site.start().configure(site.description(hang_secs=1.0, on_hang="abort", events=str(tmp_path)))
    processes = trainers(site, ("meek", 0), ("meek", 0))
    try:
        lives_on(site.node_dir, 2.2)
        assert all(process.poll() is None for process in processes) and not events(tmp_path, "hang")
    finally:
        end_all(processes)


def test_the_end_of_the_job_after_a_kill_leaves_nothing(site: Site) -> None:
    client = site.start()
    client.configure(site.description())
    with JobLock(site.node_dir, 0):
        kill(client)
        site.start().end()
        assert site.files() - {".budget"} == {"job.lock"}
    assert site.pids() == []
