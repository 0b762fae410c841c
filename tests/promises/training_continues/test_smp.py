"""The SMP as a process: found by name, nobody's child, robust against nonsense, and ended on request."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftckpt.errors import ArenaError, SmpError
from ftckpt.memory.arena import Arena
from ftckpt.memory.directory import clean_job, list_arenas, node_directory, remove_job_if_empty
from ftckpt.memory.heartbeat import Heartbeat
from ftckpt.memory.locks import JobLock
from ftckpt.smp import client as client_module
from ftckpt.smp.channel import HELLO, MAGIC
from ftckpt.smp.client import SmpClient, find_or_start
from ftckpt.smp.footprint import load_description, store_description
from ftckpt.smp.requests import MAX_REQUEST_BYTES
from tests.support.arenas import Rank, ranks
from tests.support.errors import raises
from tests.support.mounting import leave_free, tmpfs
from tests.support.processes import python
from tests.support.repository import ROOT as REPOSITORY
from tests.support.smps import JOB, NODE, SECRET, SmpSite, answers, lives_on, send, site_at
from tests.support.waiting import until

pytestmark = pytest.mark.multiproc

FIND = """
import sys, time
from pathlib import Path
from ftckpt.smp.client import find_or_start
node_dir, root, go = map(Path, sys.argv[1:4])
print("up", flush=True)
while not go.exists():
    assert go.parent.exists(), "the test has gone"
    time.sleep(0.001)
print(find_or_start(node_dir, root, "job", "n0").status()["pid"], flush=True)
time.sleep(float(sys.argv[4]))  # until it is killed
"""
TRAIN = """
import sys, time
from pathlib import Path
from ftckpt.memory.locks import JobLock
from ftckpt.memory.heartbeat import Heartbeat
how, node_dir = sys.argv[1], Path(sys.argv[2])
held = JobLock(node_dir, 0) if how == "lock" else Heartbeat.open(node_dir, 0, 0)
print("up", flush=True)
time.sleep(100)  # until it is killed
"""
ANON_LIMIT_BYTES = 64 << 20


@pytest.fixture
def site(arena_root: Path) -> Iterator[SmpSite]:
    with site_at(arena_root) as made:
        yield made


def proc(pid: int, name: str) -> str:
    return (Path("/proc") / str(pid) / name).read_text()


def arena_of(site: SmpSite) -> Path:
    member: Rank = ranks(site.root, 1)[0]
    arena = Arena.create(site.node_dir, member.manifest(), 2)
    arena.close()
    return arena.path


def test_ranks_that_race_get_one_and_the_same(site: SmpSite) -> None:
    go = site.root / "go"
    starters = [python(FIND, site.node_dir, site.root, go, 0) for _ in range(6)]
    go.touch()
    told = set()
    for starter in starters:
        out, _ = starter.communicate(timeout=60)
        assert starter.returncode == 0
        told.add(int(out))
    assert told == set(site.pids()) and len(told) == 1


def test_it_is_nobodys_child_and_holds_nothing_of_who_started_it(site: SmpSite, tmp_path: Path) -> None:
    with open(tmp_path / "marker", "w") as marker:
        os.set_inheritable(marker.fileno(), True)
        starter = python(
            FIND, site.node_dir, site.root, site.root, 100, pass_fds=[marker.fileno()], start_new_session=True
        )
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    try:
        fields = proc(pid, "stat").rpartition(")")[2].split()
        parent, group, session = (int(field) for field in fields[1:4])
        assert parent != starter.pid and starter.pid not in (group, session) and pid not in (group, session)
        for thread in Path(f"/proc/{pid}/task").iterdir():  # each inherits it from who has started it
            of_thread = (thread / "stat").read_text().rpartition(")")[2].split()
            assert int(of_thread[16]) == os.nice(0) and int(of_thread[38]) == os.SCHED_BATCH
        if Path("/proc/self/autogroup").exists():
            assert proc(pid, "autogroup").split()[-1] == "0"
        links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.exists()]
        allowed = ("/dev/null", "socket:", "anon_inode:", str(site.node_dir))
        assert all(link.startswith(allowed) for link in links), links
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        assert "libtorch" not in proc(pid, "maps")
        os.killpg(starter.pid, signal.SIGKILL)  # what torchrun does to a worker
        starter.wait(10)
        assert site.pids() == [pid] and site.start().status()["pid"] == pid
    finally:
        starter.kill()
        starter.communicate(timeout=10)


def test_it_is_no_worker_to_launchers_that_kill_workers_without_a_parent(
    site: SmpSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "run1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    pid = site.start().status()["pid"]
    assert "\0MASTER_PORT=" not in "\0" + proc(pid, "environ")


def test_modes_and_secrets(site: SmpSite) -> None:
    client = site.start()
    assert client.status()["port"] == 0
    client.configure(site.listening())
    hello = client.status()
    assert hello["port"] > 0 and hello["configured"] and (hello["job"], hello["node"]) == (JOB, NODE)
    assert Heartbeat.open(site.node_dir, None).smp_alive(10)
    for name in ("smp.lock", "smp.sock", "smp.json", "smp.log", ".pulse"):
        assert stat.S_IMODE((site.node_dir / name).stat().st_mode) == 0o600, name
    pid = hello["pid"]
    for told in (proc(pid, "cmdline"), proc(pid, "environ"), site.log, json.dumps(client.status())):
        assert SECRET.hex() not in told and str(SECRET) not in told


def test_a_second_one_says_so_and_ends(site: SmpSite) -> None:
    pid = site.start().status()["pid"]
    for more in ([], ["--detach"]):  # the output of a detached one ends with it
        run = subprocess.run(
            site.command(*more), cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
        )
        assert run.returncode == (0 if more else 3), run
        assert f"process {pid}" in run.stderr and "has an SMP" in run.stderr, run
        assert "Traceback" not in run.stderr and not run.stdout
    until(lambda: site.pids() == [pid])  # a detached one tells why before it has gone
    assert site.start().status()["pid"] == pid


def test_one_that_says_no_hello_is_replaced(site: SmpSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_ANSWER_SECS", 0.5)
    old = site.start().status(10)["pid"]
    os.kill(old, signal.SIGSTOP)
    with raises(SmpError, "in time"):
        find_or_start(site.node_dir, site.root, JOB, NODE, timeout_secs=0.4)
    assert proc(old, "stat").rpartition(")")[2].split()[0] == "T", "less time proves nothing"
    found = find_or_start(site.node_dir, site.root, JOB, NODE, timeout_secs=10)
    assert found.status(10)["pid"] != old


def test_it_guards_though_it_cannot_answer_other_nodes(site: SmpSite) -> None:
    """The node has another address than in the description of its predecessor."""
    description = site.listening(12345, "192.0.2.7")
    store_description(site.node_dir, description)
    client = site.start()
    assert client.status()["configured"] and client.status()["port"] == 0
    assert load_description(site.node_dir) == description
    assert "192.0.2.7" in client.configure(site.listening(12345, "192.0.2.7"))
    assert client.configure(site.listening()) == "" and client.status()["port"] > 0


def test_where_it_listens_elsewhere_than_others_know_it_is_said(site: SmpSite) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        client = site.start()
        assert client.configure(site.listening(port)) == ""
    got = client.status()["port"]
    assert got not in (0, port)
    assert any(f"port {port} is taken" in line and f"port {got}" in line for line in client.status()["warnings"])


def test_one_that_cannot_store_what_it_is_told_does_it_all_the_same(arena_root: Path) -> None:
    """On a full tmpfs; it is stored for its successor as soon as memory is free."""
    peers = {f"n{number}": ["192.0.2.7", 1] for number in range(1, 2000)}
    description = {"job": JOB, "node": NODE, "places": {}, "groups": [], "mirror_from": {}, "peers": peers}
    with tmpfs(arena_root, "4m"), site_at(arena_root) as site:
        client = site.start()
        leave_free(arena_root, 0)
        client.configure({**description, "secret": b"s".hex() * 32})
        assert client.status()["configured"] and load_description(site.node_dir) is None
        leave_free(arena_root, 1 << 20)
        until(lambda: load_description(site.node_dir) is not None)


def test_a_path_longer_than_a_socket_address(arena_root: Path) -> None:
    root = arena_root / ("r" * 100) / ("s" * 100)
    root.mkdir(parents=True)
    with site_at(root) as site:
        assert len(str(site.node_dir / "smp.sock")) > 200
        assert site.start().status()["node"] == NODE


def test_a_message_that_never_ends_is_refused(site: SmpSite) -> None:
    client = site.start()
    assert send(site.node_dir, b"x" * (MAX_REQUEST_BYTES + 1)) == {}
    with pytest.raises(SmpError, match="the most is"):
        client.configure({"x": "y" * MAX_REQUEST_BYTES})
    assert client.status()["node"] == NODE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_refused(site: SmpSite) -> None:
    client = site.start()
    for path in (site.root, site.node_dir.parent, site.node_dir):
        path.chmod(0o755)
    (site.node_dir / "smp.sock").chmod(0o666)  # what only a mistake could do
    child = os.fork()
    if child == 0:
        answer = b"none"
        try:
            os.chdir(site.node_dir)
            os.setuid(12345)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(20)
                connection.connect("smp.sock")
                connection.sendall(HELLO.pack(MAGIC, 0, bytes(32)))
                answer = connection.recv(100)
        except (ConnectionResetError, BrokenPipeError):
            answer = b""
        finally:
            os._exit(1 if answer else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    until(lambda: "user 12345" in site.log)
    assert client.status()["node"] == NODE


@pytest.mark.slow
def test_its_own_memory_and_its_log_are_bounded(site: SmpSite) -> None:
    client = site.start()
    pid = client.status()["pid"]
    limits = next(line for line in proc(pid, "limits").splitlines() if line.startswith("Max data size"))
    assert limits.split()[3] == str(1 << 30)
    for _ in range(4):
        send(site.node_dir, b"[" + b"[]," * ((MAX_REQUEST_BYTES - 100) // 3) + b"[]]")
    wrong = {"request": "configure", "description": {"job": "z" * 900, "node": NODE}}
    for n in range(600):
        send(site.node_dir, b"nonsense %d" % n)
        send(site.node_dir, json.dumps(wrong).encode())
    send(site.node_dir, b'{"request": "the last"}')
    client.configure(site.description())
    status = client.status()
    anon = next(line for line in proc(pid, "status").splitlines() if line.startswith("RssAnon"))
    print("own memory", anon, status["anon_bytes"])
    assert abs(int(anon.split()[1]) * 1024 - status["anon_bytes"]) < 8 << 20
    assert status["anon_bytes"] < ANON_LIMIT_BYTES
    assert 10_000 < (site.node_dir / "smp.log").stat().st_size < 300_000
    assert "unknown request 'the last'" in site.log, "the newest is kept"


@pytest.mark.parametrize("how", ["lock", "pulse"])
def test_without_trainers_it_ends_and_arenas_stay(site: SmpSite, how: str) -> None:
    arena = arena_of(site)
    trainer = python(TRAIN, how, site.node_dir)
    try:
        client = site.start(idle_secs=1.0)
        client.configure(site.description())
        pid = client.status()["pid"]
        lives_on(site.node_dir, 1.8)
        assert site.pids() == [pid], "a trainer lives"
        assert client.status()["ends_in_secs"] is None and "no trainer lives" not in site.log
    finally:
        trainer.kill()
        trainer.communicate(timeout=10)
    until(lambda: not site.pids())
    assert not {"smp.sock", "smp.lock"} & site.files()
    assert list_arenas(site.node_dir) == [arena] and "smp.json" in site.files(), "a save needs both"
    assert "no trainer lives: the SMP ends after 1 s" in site.log and "no trainer for 1 s; arenas stay" in site.log


def test_without_trainers_and_arenas_nothing_stays(site: SmpSite) -> None:
    site.start(idle_secs=1.0)
    until(lambda: not site.pids())
    assert list(site.root.iterdir()) == []


def test_the_end_of_the_job_takes_its_files_and_no_arena(site: SmpSite) -> None:
    arena = arena_of(site)
    with JobLock(site.node_dir, 0):
        client = site.start()
        client.configure(site.description())
        (site.node_dir / ".mirror").mkdir()
        (site.node_dir / ".mirror" / "tp1.00000000.5").write_text("package")
        client.end()
        assert site.pids() == []
        assert site.files() == {"job.lock", arena.name}
        client.end()
        with pytest.raises(SmpError, match="does not answer"):
            client.status(1)


def test_sigterm_ends_it_cleanly_and_a_new_one_can_start(site: SmpSite) -> None:
    arena_of(site)
    process = subprocess.Popen(site.command(), cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    try:
        client = SmpClient(site.node_dir, site.root, JOB, NODE)
        until(lambda: answers(client))
        assert client.status()["pid"] == process.pid, "in the foreground"
        process.terminate()
        _, said = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0 and "ends: signal SIGTERM" in said and "Traceback" not in said
    assert not {"smp.sock", "smp.lock"} & site.files()
    assert site.start().status()["pid"] != process.pid


def test_clean_ends_it_unless_trainers_live(site: SmpSite) -> None:
    arena = arena_of(site)
    other = node_directory(site.root, JOB, "n1")
    pid = site.start().status()["pid"]
    trainer = python(TRAIN, "lock", site.node_dir)
    try:
        with pytest.raises(ArenaError, match=f"process {trainer.pid}"):
            clean_job(site.root, JOB)
        assert site.start().status()["pid"] == pid and arena.exists() and other.exists()
    finally:
        trainer.kill()
        trainer.communicate(timeout=10)
    assert clean_job(site.root, JOB) == [arena]
    assert site.pids() == [] and list(site.root.iterdir()) == []


def test_clean_takes_what_a_killed_one_left(site: SmpSite) -> None:
    client = site.start()
    client.configure(site.description())
    os.kill(client.status()["pid"], signal.SIGKILL)
    until(lambda: not site.pids())
    assert {"smp.sock", "smp.lock", "smp.json", "smp.log", ".pulse"} <= site.files()
    assert remove_job_if_empty(site.root, JOB, NODE)
    assert list(site.root.iterdir()) == []


def test_one_that_comes_up_when_its_job_was_cleaned_makes_nothing(site: SmpSite) -> None:
    site.node_dir.rmdir()
    with raises(SmpError, str(site.node_dir)):
        site.start()
    assert site.pids() == [] and not site.node_dir.exists()


def test_a_start_that_cannot_succeed_tells_why(site: SmpSite) -> None:
    site.node_dir.rmdir()
    site.node_dir.write_text("a file in place of the directory")
    begin = time.monotonic()
    with raises(SmpError, "directory", "remove"):
        site.start()
    assert time.monotonic() - begin < 19, "it was tried until the deadline"
    assert site.pids() == []
    site.node_dir.unlink()
