"""``ftckpt run``: what torchrun does with the same words, and restarts from a process that has imported all."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import free_ports
from tests.support.processes import command_line, is_running
from tests.support.running import READY, Running
from tests.support.waiting import until

pytestmark = pytest.mark.multiproc

ONCE = "report()\n"
TWICE = """
import csv, wave  # preloaded
report()
if attempt == 0:
    wait_for("go")
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
"""
"""Rank 1 is killed in the first attempt, once the test says so."""
TWO = ("--nproc-per-node", "2", "--max-restarts", "1")

OF_ONE_RUN = (
    "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "FTCKPT_TEST_OWNER", "TMPDIR",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip
"""Each attempt opens a store of its own."""


def comparable(report: dict[str, Any], here: Path, *leave_out: str) -> dict[str, Any]:
    """What two runs of one job have alike."""
    env = {name: value for name, value in report["env"].items() if name not in (*OF_ONE_RUN, *leave_out)}
    facts = {**report, "env": env}
    for name in ("random", "pid", "modules", *leave_out):
        facts.pop(name, None)
    text = re.sub(r"(socket|pipe|anon_inode):\[\d+\]", r"\1", json.dumps(facts).replace(str(here), "HERE"))
    return json.loads(text)  # type: ignore[no-any-return]


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    found = {name: (one[name], other[name]) for name in one if one[name] != other[name]}
    if "env" in found:
        envs = one["env"], other["env"]
        found["env"] = {
            n: [e.get(n) for e in envs] for n in {**envs[0], **envs[1]} if envs[0].get(n) != envs[1].get(n)
        }
    return found


OPTIONS: dict[str, tuple[str, ...]] = {
    "standalone": ("--standalone", "--nproc-per-node", "2", "train.py", "--lr", "1", "-m"),
    "one node": ("--nproc_per_node=2", "--role", "r", "train.py"),
    "a module": ("--nproc-per-node", "1", "-m", "train", "word"),
    "static": ("--rdzv-backend", "static", "--master-port", "PORT", "--node-rank", "0", "./train.py"),
    "c10d": (
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        "--rdzv-id",
        "i",
        "--nnodes",
        "1:1",
        "train.py",
    ),
    "virtual local ranks": ("--nproc-per-node", "2", "--virtual-local-rank", "train.py", "${local_rank}"),
    "no python": ("--no-python", "python3", "train.py", "a"),
    "run path": ("--run-path", "train.py", "a"),
    "logs": ("--nproc-per-node", "2", "--log-dir", "logs", "--redirects", "0:3,1:1", "--tee", "1:1", "train.py"),
    "filters": ("--nproc-per-node", "2", "--log-dir", "logs", "-t", "3", "--local-ranks-filter", "1", "train.py"),
}


def logs(here: Path) -> dict[str, str]:
    return {
        re.sub("^[^/]*", "RUN", str(path.relative_to(here / "logs"))): path.read_text()
        for path in sorted((here / "logs").rglob("*.log"))
    }


@pytest.mark.parametrize("name", OPTIONS)
def test_a_worker_sees_what_it_sees_under_torchrun(name: str, tmp_path: Path) -> None:
    script = ONCE + 'print("out", rank)\nprint("err", rank, file=sys.stderr)\n'
    found = []
    for launcher in ("torchrun", "ftckpt"):
        here = tmp_path / launcher
        words = [word.replace("PORT", str(free_ports(1))) for word in OPTIONS[name]]
        with Running(here, script, *words, launcher=launcher) as job:
            assert job.end() == 0, job.output()
        num = len(list(job.reports.iterdir()))
        printed = sorted(
            line for line in job.output().splitlines() if "rank" not in line and ("out" in line or "err" in line)
        )
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
    assert {"csv", "wave"} <= {*restarted.report(1, rank)["modules"]}


def test_forked_workers_draw_different_numbers(restarted: Running) -> None:
    numbers = [restarted.report(attempt, rank)["random"] for attempt in (0, 1) for rank in (0, 1)]
    assert len(set(numbers)) == 4


def test_a_forked_worker_writes_to_its_log(restarted: Running) -> None:
    assert sorted(logs(restarted.here)) == [f"RUN/attempt_{n}/{rank}/stdout.log" for n in (0, 1) for rank in (0, 1)]


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


@pytest.mark.parametrize(("how", "code"), [("exits", 7), ("9", -9), ("11", -11)])
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
            until(lambda pids=pids: not any(map(is_running, pids)), f"{pids}")


def server_of(job: Running) -> int:
    """The server that has forked the workers of the second attempt."""
    return int(Path(f"/proc/{job.report(1, 0)['pid']}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_server_that_dies_is_started_anew(tmp_path: Path) -> None:
    script = STAYS.replace("signal.pause()", "if attempt < 3:\n    signal.pause()")
    with Running(tmp_path / "job", script, "--nproc-per-node", "2", "--max-restarts", "3", "train.py") as job:
        job.until(READY)
        job.touch("go")
        os.kill(server_of(job), signal.SIGKILL)
        job.report(2, 1)  # of a new process
        job.until(READY, times=2)
        os.kill(job.report(2, 1)["pid"], signal.SIGKILL)
        assert job.end() == 0, job.output()
        assert "wave" not in job.report(2, 1)["modules"]
