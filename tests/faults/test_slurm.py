"""The batch script on real Slurm daemons, through a job's whole life: two nodes with memories of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftckpt.commands.main import main
from tests.support.launching import ROOT
from tests.support.slurm_lab import NODES, SlurmLab
from tests.support.waiting import until

pytestmark = [pytest.mark.multiproc, pytest.mark.faults, pytest.mark.slow]

MODEL = ["--layers", "2", "--hidden", "32", "--seq", "32", "--global-batch", "8", "--micro-batch", "2"]


class Job:
    """``launch/a100.sbatch`` with a small Megatron job that trains until it is stopped."""

    def __init__(self, lab: SlurmLab) -> None:
        self.lab, self.log, self.stored = lab, lab.root / "log.jsonl", lab.root / "stored"
        self.stored.mkdir()
        env = {
            "FTCKPT_DEVICE": "cpu", "FTCKPT_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "FTCKPT_RESTARTS": "3",
            "GLOO_SOCKET_IFNAME": "lo", "FTCKPT_SAVE_SECS": "30", "FTCKPT_WAIT_SECS": "10", "FTCKPT_PAUSE_SECS": "1",
        }  # fmt: skip
        ftckpt = {"persist": str(self.stored), "persist-interval": "1000000", "layouts": "tp1pp1"}
        flags = [word for name, value in ftckpt.items() for word in (f"--ftckpt-{name}", value)]
        script = ["launch/train_gpt.py", *MODEL, "--iterations", "1000000", "--log-file", str(self.log)]
        options = ["--nodes", "1:2", "--nproc", "2", "--job", "life"]
        self.number = lab.submit(
            ["--nodes=2", "--time=30", "--requeue"],
            ["launch/a100.sbatch", *options, *script, "--ftckpt", *flags], ROOT, env,
        )  # fmt: skip
        self._read = 0

    @property
    def iteration(self) -> int:
        """The last one that was trained."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return int(json.loads(lines[-1])["iteration"]) if lines else 0

    def trains_beyond(self, iteration: int) -> None:
        until(lambda: self.iteration >= iteration, self.lab.logs, 120)

    def says(self, text: str) -> re.Match[str]:
        """What the job has printed since the last call that matches ``text``, which it does soon."""
        found: re.Match[str] | None = None

        def look() -> bool:
            nonlocal found
            found = re.search(text, self.lab.out()[self._read :])
            return found is not None

        until(look, lambda: f"{text}{self.lab.logs()}", 120)
        assert found is not None
        self._read += found.end()
        return found


@pytest.fixture
def lab() -> Iterator[SlurmLab]:
    with SlurmLab() as cluster:
        yield cluster


def iteration_at(stored: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """That a restart would take from storage, every byte read."""
    capsys.readouterr()
    assert main(["verify", str(stored)]) == 0
    return int(capsys.readouterr().out.split()[-1])


@pytest.mark.timeout(400)
def test_a_whole_life(lab: SlurmLab, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(lab)
    job.says(r"4 ranks: nothing to restore")
    job.trains_beyond(10)
    assert "the SMP is in step" not in lab.out()  # each has a step of its own

    # A rank is killed: torchrun starts all again, from memory.
    before = job.iteration
    os.kill(lab.pids("node1", "-u -m ftckpt.megatron")[-1], signal.SIGKILL)
    assert int(job.says(r"4 ranks: iteration (\d+) from memory")[1]) >= before - 2
    job.trains_beyond(before + 100)

    # A node is lost with its memory, and no spare is there: the next step goes on with the other one, from parity.
    before = job.iteration
    smps = lab.pids("node0", "-m ftckpt.smp")
    lab.lose_node("node1")
    job.says(r"do not answer: node1")
    rebuilt = int(job.says(r"2 ranks: iteration (\d+) from \S*parity")[1])
    assert 0 < rebuilt <= before + 1
    job.trains_beyond(before + 30)
    assert set(smps) & set(lab.pids("node0", "-m ftckpt.smp")), "the SMP did not outlive the step"

    # Time is up: what memory has goes to storage before the memory is emptied. Requeued, the job goes on from there.
    lab.call("scontrol", "requeue", job.number)
    job.says(r"told to stop")
    until(lambda: lab.state(job.number) == "PENDING", lab.logs)
    assert not list(lab.memory("node0").glob("ftckpt-life*"))
    saved = iteration_at(job.stored, capsys)
    assert saved >= before + 28
    lab.start_node("node1")
    lab.call("scontrol", "update", "nodename=node1", "state=resume")
    from_storage = int(job.says(r"ranks: iteration (\d+) from [^\n]*storage")[1])
    assert from_storage == saved
    job.trains_beyond(saved + 10)
    lab.call("scancel", job.number)
    until(lambda: not lab.state(job.number), lab.logs, 90)
    left = [path for node in NODES for path in lab.memory(node).glob("ftckpt-life*")]
    assert not left, f"{left}{lab.out()[-3000:]}"
