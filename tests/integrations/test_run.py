"""``ftckpt run``: what torchrun does with the same words, and restarts from a process that has imported all."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ftckpt.runner import notes
from ftckpt.runner.preload import ForkServer, RefusedError
from tests.support.processes import command_line, free_ports, is_running
from tests.support.running import READY, Running
from tests.support.tiers import by_default
from tests.support.waiting import until

pytestmark = pytest.mark.multiproc

ONCE = "report()\n"
TWICE = """
import numpy
from ftckpt.memory.launch_record import launcher_run
drawn = numpy.random.random()
report()
(here / f"more-{attempt}-{rank}").write_text(f"{drawn} {launcher_run(os.environ).name}")
if attempt == 0:
    wait_for("go")
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
"""
"""Rank 1 is killed in the first attempt, when the test requests it."""
TWO = ("--nproc-per-node", "2", "--max-restarts", "1")

OF_ONE_RUN = (
    "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "FTCKPT_TEST_OWNER", "TMPDIR",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip
"""Each attempt opens a store of its own."""


def comparable(report: dict[str, Any], here: Path, *leave_out: str) -> dict[str, Any]:
    """The facts that are equal in two runs of one job."""
    env = {name: value for name, value in report["env"].items() if name not in (*OF_ONE_RUN, *leave_out)}
    facts = {**report, "env": env}
    for name in ("random", "pid", "modules", "is_forked", *leave_out):
        facts.pop(name, None)
    text = re.sub(r"(socket|pipe|anon_inode):\[\d+\]", r"\1", json.dumps(facts).replace(str(here), "HERE"))
    return json.loads(text)  # type: ignore[no-any-return]


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {name: (one[name], other[name]) for name in one if one[name] != other[name]}
    if "env" in found:
        envs = one["env"], other["env"]
        found["env"] = {
            n: [e.get(n) for e in envs] for n in {**envs[0], **envs[1]} if envs[0].get(n) != envs[1].get(n)
        }
    return found


OPTIONS: dict[str, tuple[str, ...]] = {
    "standalone": ("--standalone", "--nproc-per-node", "2", "train.py", "--lr", "1", "-m"),
    "a module": ("--nproc-per-node", "1", "-m", "train", "word"),
    "static": ("--rdzv-backend", "static", "--master-port", "PORT", "--node-rank", "0", "./train.py"),
    "virtual local ranks": ("--nproc-per-node", "2", "--virtual-local-rank", "train.py", "${local_rank}"),
    "no python": ("--no-python", "python3", "train.py", "a"),
    "logs": ("--nproc-per-node", "2", "--log-dir", "logs", "--redirects", "0:3,1:1", "--tee", "1:1", "train.py"),
}


def logs(here: Path) -> dict[str, str]:
    return {
        re.sub("^[^/]*", "RUN", str(path.relative_to(here / "logs"))): path.read_text()
        for path in sorted((here / "logs").rglob("*.log"))
    }


USUAL = ("standalone", "a module", "static", "virtual local ranks", "logs")


@pytest.mark.parametrize("name", by_default(OPTIONS, USUAL))
def test_a_worker_sees_what_it_sees_under_torchrun(name: str, tmp_path: Path) -> None:
    script = ONCE + r"sys.stdout.write(f'out {rank}\n'); sys.stderr.write(f'err {rank}\n')"
    found = []
    for launcher in ("torchrun", "ftckpt"):
        here = tmp_path / launcher
        words = [word.replace("PORT", str(free_ports(1))) for word in OPTIONS[name]]
        with Running(here, script, *words, launcher=launcher) as job:
            assert job.end() == 0, job.output()
        num = len(list(job.reports.iterdir()))
        printed = sorted(line for line in job.output().splitlines() if re.search(r"(out|err) \d", line))
        found.append(([comparable(job.report(0, rank), here) for rank in range(num)], logs(here), printed))
    (theirs, *their_logs), (ours, *our_logs) = found
    assert their_logs == our_logs and len(theirs) == len(ours) > 0
    for one, other in zip(theirs, ours, strict=True):
        assert differences(one, other) == {}


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A job whose second attempt was forked from the server."""
    here = tmp_path_factory.mktemp("restarted")
    with Running(here, TWICE, *TWO, "--log-dir", "logs", "-r", "1", "train.py", "--word") as job:
        job.until(READY)
        job.touch("go")
        assert job.end() == 0, job.output()
        yield job


@pytest.mark.parametrize("rank", [0, 1])
def test_a_forked_worker_sees_what_a_new_process_sees(restarted: Running, rank: int) -> None:
    new, forked = (comparable(restarted.report(attempt, rank), restarted.here) for attempt in (0, 1))
    found = differences(new, forked)
    assert found.pop("env") == {"TORCHELASTIC_RESTART_COUNT": ["0", "1"]}
    assert found == {}
    assert [restarted.report(attempt, rank)["is_forked"] for attempt in (0, 1)] == [False, True]


def test_forked_workers_draw_different_numbers(restarted: Running) -> None:
    numbers = [restarted.report(attempt, rank)["random"] for attempt in (0, 1) for rank in (0, 1)]
    assert len(set(numbers)) == 4
    numbers = [more(restarted, attempt, rank)[0] for attempt in (0, 1) for rank in (0, 1)]
    assert len(set(numbers)) == 4, "of numpy"


def more(job: Running, attempt: int, rank: int) -> list[str]:
    """A number that numpy has drawn, and the name of the launcher run."""
    return (job.here / f"more-{attempt}-{rank}").read_text().split()


ENDS = """
report()
if attempt == 0:
    wait_for("go")
    os._exit(3)
if rank == "0":
    signal.pause()
if sys.argv[1] == "exits":
    os._exit(7)
os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.parametrize(("how", "code"), [("exits", 7), ("9", -9)])
def test_the_agent_sees_how_a_forked_worker_has_ended(how: str, code: int, tmp_path: Path) -> None:
    with Running(tmp_path / "job", ENDS, *TWO, "train.py", how) as job:
        job.until(READY)
        job.touch("go")
        assert job.end() == 1
        assert job.attempts() == 2 and f"failed (exitcode: {code}) local_rank: 1" in job.output()


HANGS = """
signal.signal(signal.SIGTERM, lambda *_: (here / f"told-{attempt}-{rank}").touch())
report()
if attempt == 0:
    wait_for("go")
if rank == "1" and attempt < 2:
    wait_for(f"reports/{attempt}-0.json")
    os.kill(os.getpid(), signal.SIGKILL)
while attempt < 2:
    signal.pause()
"""


def test_others_do_not_outlive_a_worker_that_has_failed(tmp_path: Path) -> None:
    """Neither by torch's interval, here a minute, nor by its grace of 30 s, whether they are new or forked."""
    words = ("--nproc-per-node", "2", "--max-restarts", "2", "--monitor-interval", "60", "train.py")
    with Running(tmp_path / "job", HANGS, *words) as job:
        job.until(READY)
        begin = time.monotonic()
        job.touch("go")
        assert job.end() == 0, job.output()
        assert time.monotonic() - begin < 15
        assert {path.name for path in job.here.glob("told-*")} == {"told-0-0", "told-1-0"}


LAST = """
def last(*_):
    import time
    time.sleep(1.5)  # longer than workers have once another one has failed
    (here / f"last-{rank}").touch()
    sys.exit(1)

report()
if attempt == 0:
    wait_for("go")
    os._exit(3)
signal.signal(signal.SIGTERM, last)
(here / f"ready-{rank}").touch()
signal.pause()
"""


def test_an_agent_that_is_told_to_end_lets_forked_workers_finish(tmp_path: Path) -> None:
    with Running(tmp_path / "job", LAST, *TWO, "train.py") as job:
        job.until(READY)
        job.touch("go")
        until(lambda: len(list(job.here.glob("ready-*"))) == 2, job.output)
        os.kill(job.agent, signal.SIGTERM)
        # To all processes of a step, as Slurm does: the server goes on, and so its workers.
        for pid in job.pids():
            if "ftckpt.runner.server" in command_line(pid) and pid == os.getpgid(pid) and pid not in workers(job):
                os.kill(pid, signal.SIGTERM)
        assert job.end() == 1
        assert len(list(job.here.glob("last-*"))) == 2


def workers(job: Running) -> set[int]:
    """Process ids of workers that have reported."""
    return {json.loads(path.read_text())["pid"] for path in job.reports.iterdir()}


STAYS = """
report()
if attempt == 0:
    wait_for("go")
    os._exit(3)
signal.pause()
"""


def test_nothing_is_left_of_an_agent_that_is_killed(tmp_path: Path) -> None:
    for attempt in (0, 1):
        with Running(tmp_path / str(attempt), STAYS, *TWO, "train.py") as job:
            job.until(READY)
            if attempt:
                job.touch("go")
            pids = {job.report(attempt, rank)["pid"] for rank in (0, 1)} | {*job.pids()}
            job.group.kill(0)
            gone = partial(lambda pids: not any(map(is_running, pids)), pids)
            until(gone, f"{pids}")
    with Running(tmp_path / "1", ONCE, "train.py") as job:
        assert len(list(job.here.glob("ftckpt-run-*"))) <= 1, "of the agent that was killed"
        assert job.end() == 0, job.output()
        assert not list(job.here.glob("ftckpt-run-*"))


def test_only_notes_of_agents_that_have_died_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own, elsewhere = tmp_path / "ftckpt-run-own", tmp_path / "elsewhere"
    for folder in (own, elsewhere):
        folder.mkdir()
        (folder / "lock").touch()
        (folder / "results").touch()
    (tmp_path / "ftckpt-run-link").symlink_to(elsewhere)
    died, lock = notes.make_directory()
    lock.close()
    lives, kept = notes.make_directory()
    newest, other = notes.make_directory()
    with kept, other:
        assert not died.exists() and lives.exists() and newest.exists()
    assert {path.name for path in elsewhere.iterdir()} == {"lock", "results"} and (own / "results").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def server_of(job: Running) -> int:
    """The server that has forked the workers of the second attempt."""
    return int(Path(f"/proc/{job.report(1, 0)['pid']}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_server_that_dies_is_started_anew(tmp_path: Path) -> None:
    script = STAYS.replace("signal.pause()", "if attempt < 3:\n    signal.pause()")
    with Running(tmp_path / "job", script, "--nproc-per-node", "2", "--max-restarts", "3", "train.py") as job:
        job.until(READY)
        job.report(0, 1)  # before rank 0 ends and takes it along
        job.touch("go")
        job.report(1, 1)
        os.kill(server_of(job), signal.SIGKILL)
        job.report(2, 1)  # of a new process
        job.until(READY, times=2)
        os.kill(job.report(2, 1)["pid"], signal.SIGKILL)
        assert job.end() == 0, job.output()
        assert [job.report(attempt, 1)["is_forked"] for attempt in range(4)] == [False, True, False, True]


def site_packages(here: Path, **modules: str) -> None:
    """Modules that count as installed."""
    for name, text in modules.items():
        path = here / "site-packages" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def restart(job: Running, text: str = READY) -> None:
    """Kill rank 1 of the first attempt of TWICE, once ``text`` was written, and wait for the end."""
    job.until(text)
    job.touch("go")
    assert job.end() == 0, job.output()


def test_a_module_that_starts_a_thread_is_left_out_with_what_imports_it(tmp_path: Path) -> None:
    site_packages(
        tmp_path / "job",
        quiet_one="",
        threads_one="import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        uses_it="try:\n    import threads_one\nexcept Exception:\n    pass",
    )
    script = (
        """
before = {"quiet_one", "threads_one", "uses_it"} & {*sys.modules}
import quiet_one, uses_it, colorsys
(here / f"before-{attempt}").write_text(" ".join(sorted(before)))
"""
        + TWICE
    )
    with Running(tmp_path / "job", script, *TWO, "train.py") as job:
        job.until(READY)
        (found,) = re.findall(r"(\d+) modules are not preloaded \((.*)\): see (.*)", job.output())
        assert found[:2] == ("2", "threads_one, ...")
        why = dict(line.split(": ", 1) for line in Path(found[2]).read_text().splitlines())
        assert why.keys() == {"threads_one", "uses_it"} and "thread" in why["threads_one"]
        restart(job)
        assert (job.here / "before-1").read_text() == "quiet_one"


def test_what_a_script_sets_before_it_imports_holds_for_preloaded_modules(tmp_path: Path) -> None:
    here = tmp_path / "job"
    site_packages(
        here, reads_it="import os\nvalue = os.environ.get('A_SETTING')\nos.environ['MADE_BY_IMPORT'] = 'yes'"
    )
    site_packages(here / "other", found_there="")
    script = (
        f"""
os.environ["A_SETTING"] = "set"
sys.path.insert(0, {str(here / "other" / "site-packages")!r})
before = {{"reads_it", "found_there"}} & {{*sys.modules}}
import reads_it, found_there, colorsys
facts = [reads_it.value, os.environ["MADE_BY_IMPORT"], len(before), sys.path.count(sys.path[0])]
(here / f"facts-{{attempt}}-{{rank}}").write_text(" ".join(map(str, facts)))
"""
        + TWICE
    )
    with Running(here, script, *TWO, "train.py") as job:
        restart(job)
    facts = {path.name: path.read_text() for path in here.glob("facts-*")}
    assert facts == {f"facts-{n}-{rank}": f"set yes {2 * n} 1" for n in (0, 1) for rank in (0, 1)}


def test_modules_of_the_users_own_are_preloaded_by_name_and_while_they_stay_as_they_are(tmp_path: Path) -> None:
    script = """
is_there = {"own_one", "own_two"} & {*sys.modules}
import own_one, own_two, colorsys
(here / f"own-{attempt}").write_text(f"{sorted(is_there)} {own_one.value}")
""" + TWICE.replace("attempt == 0", "attempt < 2").replace('"go"', 'f"go{attempt}"')
    words = ("--nproc-per-node", "2", "--max-restarts", "2", "--preload", "own_one", "train.py")
    here = tmp_path / "job"
    here.mkdir()
    for name in ("own_one", "own_two"):
        (here / f"{name}.py").write_text("value = 1\n")
    with Running(here, script, *words) as job:
        job.until(READY)
        job.touch("go0")
        job.report(1, 1)
        assert (here / "own-1").read_text() == "['own_one'] 1"
        (here / "own_one.py").write_text("value = 22\n")
        job.touch("go1")
        assert job.end() == 0, job.output()
        assert (here / "own-2").read_text() == "[] 22"


@pytest.mark.parametrize(
    ("script", "starts"),
    [
        ("import no_such_module", 2),
        ("import argparse; argparse.ArgumentParser().parse_args(['--unknown'])", 1),  # the next one ends before it
        ("raise ConnectionError('may be over soon')", 4),
        pytest.param("sys.exit(5)", 4, marks=pytest.mark.slow),
        pytest.param("[int, abs][attempt % 2]('x')", 4, marks=pytest.mark.slow),
    ],
)
def test_a_script_that_fails_twice_alike_before_it_meets_others_is_not_started_again(
    script: str, starts: int, tmp_path: Path
) -> None:
    words = ("--nproc-per-node", "2", "--max-restarts", "3", "train.py")
    with Running(tmp_path / "job", f"report()\n{script}\n", *words) as job:
        assert job.end() == 1
        assert job.attempts() == starts, job.output()


OF_TWO_NODES = """
signal.signal(signal.SIGTERM, lambda *_: None)
(here / f"start-{os.getpid()}").touch()
report()
if len(list(here.glob("start-*"))) == 1:
    wait_for("go")
    if here.name == "second":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        signal.pause()
"""


def test_a_node_whose_workers_hang_follows_another_one_at_once(tmp_path: Path) -> None:
    words = ("--nnodes", "2", "--max-restarts", "2", "--rdzv-backend", "c10d", "--rdzv-id", "two",
             "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)}", "train.py")  # fmt: skip
    with (
        Running(tmp_path / "first", OF_TWO_NODES, *words) as first,
        Running(tmp_path / "second", OF_TWO_NODES, *words) as second,
    ):
        until(lambda: len(list(tmp_path.glob("*/start-*"))) == 2, first.output)
        begin = time.monotonic()
        second.touch("go")
        assert [first.end(), second.end()] == [0, 0], first.output() + second.output()
        assert time.monotonic() - begin < 15


STANDS_BY = """
(here / f"start-{os.getpid()}").touch()
if here.name != "standby" and len(list(here.glob("start-*"))) == 1:
    wait_for("never")
report()
"""


@pytest.mark.slow
def test_a_standby_is_forked_from_what_the_others_have_imported_before_heartbeats_are_overdue(tmp_path: Path) -> None:
    port = free_ports(1)

    def start(name: str) -> Running:
        conf = f"keep_alive_interval=100,is_host={int(name == 'first')}"
        words = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "three", "--rdzv-conf", conf,
                 "--rdzv-endpoint", f"127.0.0.1:{port}", "train.py")  # fmt: skip
        return Running(tmp_path / name, STANDS_BY, *words)

    with start("first") as first, start("second") as second:
        first.until(READY)
        second.until(READY)
        with start("standby") as standby:
            standby.until(READY)
            assert not list(standby.here.glob("start-*"))
            os.kill(second.agent, signal.SIGKILL)
            assert [first.end(), standby.end()] == [0, 0], first.output() + standby.output()
            (told,) = standby.reports.iterdir()
            assert json.loads(told.read_text())["is_forked"]


def test_a_module_that_the_script_finds_elsewhere_is_not_preloaded_from_here(tmp_path: Path) -> None:
    """A finder of the script's own that the server does not have."""
    here = tmp_path / "job"
    site_packages(here, moved="value = 1")
    site_packages(here / "other", moved="value = 2")
    script = (
        f"""
from importlib.machinery import PathFinder
class Elsewhere(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        place = {str(here / "other" / "site-packages")!r}
        return PathFinder.find_spec(name, [place], target) if name == "moved" else None
sys.meta_path.insert(sys.meta_path.index(PathFinder), Elsewhere)
import moved, colorsys
(here / f"moved-{{attempt}}").write_text(str(moved.value))
"""
        + TWICE
    )
    with Running(here, script, *TWO, "train.py") as job:
        restart(job)
        assert [(here / f"moved-{attempt}").read_text() for attempt in (0, 1)] == ["2", "2"]
        assert job.report(1, 0)["is_forked"]


def test_a_worker_with_another_interpreter_is_not_forked(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    order = {"directory": str(tmp_path), "words": ["train.py"], "stdout": "", "stderr": "", "records": False}
    server = ForkServer(env, {**order, "extra": [], "left_out": []})
    try:
        until(lambda: server.receive() or server.report, str(server.channel.is_closed))
        for name in ("PYTHONSAFEPATH", "PYTHONWARNINGS"):
            with pytest.raises(RefusedError, match=name):
                server.fork({**order, "env": {**env, name: "1"}})
        with pytest.raises(RefusedError, match="PYTHONPATH"):
            server.fork({**order, "env": {}})
        assert server.fork({**order, "env": {**env, "OTHER": "1"}}).pid
    finally:
        server.close()


def test_a_worker_may_end_before_the_agent_has_read_its_answer(tmp_path: Path, monkeypatch: Any) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    order = {"directory": str(tmp_path), "words": ["missing.py"], "stdout": "", "stderr": "", "records": False}
    server = ForkServer(env | {"PYTHONPATH": os.pathsep.join(sys.path)}, {**order, "extra": [], "left_out": []})
    try:
        until(lambda: server.receive() or server.report, str(server.channel.is_closed))
        receive, end = server.channel.receive, socket.socket(fileno=os.dup(server.channel.fileno()))

        def receive_both(timeout_secs: float | None = 0.0) -> list[dict[str, Any]]:
            until(lambda: b"ended" in end.recv(4096, socket.MSG_PEEK))
            return receive(timeout_secs)

        with end, monkeypatch.context() as patch:
            patch.setattr(server.channel, "receive", receive_both)
            worker = server.fork({**order, "env": {**env, "PYTHONPATH": os.pathsep.join(sys.path)}})
        assert worker.poll() == 2
    finally:
        server.close()
