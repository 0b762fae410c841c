"""``ftckpt run``: what torchrun does with the same words, and restarts from a process that has imported all."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import free_ports
from tests.support.processes import is_running
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
