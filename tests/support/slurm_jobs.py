"""A small Megatron job under one of the batch scripts, on the cluster of ``slurm_lab``."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from ftckpt.cli.main import main
from tests.support.launching import ROOT
from tests.support.slurm_lab import NODES, SlurmLab
from tests.support.waiting import until

_MODEL = ["--layers", "2", "--hidden", "32", "--seq", "32", "--global-batch", "8", "--micro-batch", "2"]


class SlurmJob:
    """Two ranks on each of two nodes that train until they are stopped; storage gets what the end brings there alone.

    Without a script all four ranks are under one torchrun in a step of a batch script that has nothing else.
    """

    NAME = "life"

    def __init__(
        self,
        lab: SlurmLab,
        script: str = "a100.sbatch",
        options: Sequence[str] = ("--time=30", "--requeue"),
        persists: bool = True,
    ) -> None:
        self.lab, self.log, self.stored = lab, lab.root / "log.jsonl", lab.root / "stored"
        self.stored.mkdir(exist_ok=True)
        env = {
            "FTCKPT_DEVICE": "tests.support.standin:cpu", "FTCKPT_PYTHON": sys.executable, "OMP_NUM_THREADS": "1",
            "FTCKPT_RESTARTS": "3",
            "GLOO_SOCKET_IFNAME": "lo", "FTCKPT_SAVE_SECS": "30", "FTCKPT_WAIT_SECS": "10", "FTCKPT_PAUSE_SECS": "1",
        }  # fmt: skip
        storage = {"persist": str(self.stored), "persist-interval": "1000000"}
        ftckpt = {"layouts": "tp1pp1", "interval": "1", **(storage if persists else {})}
        flags = [word for name, value in ftckpt.items() for word in (f"--ftckpt-{name}", value)]
        training = ["launch/train_gpt.py", *_MODEL, "--iterations", "1000000", "--log-file", str(self.log)]
        training = [*training, "--ftckpt", *flags]
        command = [f"launch/{script}", "--nodes", "1:2", "--nproc", "2", "--job", self.NAME, *training]
        if not script:
            step = shlex.join(["srun", "bash", "launch/torchrun.sh", "--nproc", "4", "--job", self.NAME, *training])
            command = ["--wrap", f"{step}; sleep 600"]
        nodes = "--nodes=2" if script else "--nodes=1"
        self.number = lab.submit([nodes, *options], command, ROOT, env)
        self._read = 0

    @property
    def iteration(self) -> int:
        """The last one that was trained."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return int(json.loads(lines[-1])["iteration"]) if lines else 0

    def memory(self, *nodes: str) -> list[Path]:
        """What nodes have of the job."""
        return [path for node in nodes for path in self.lab.memory(node).glob(f"ftckpt-{self.NAME}*")]

    def saved(self) -> int:
        """The iteration that a restart would take from storage, every byte read."""
        with redirect_stdout(StringIO()) as told:
            assert main(["verify", str(self.stored)]) == 0
        return int(told.getvalue().split()[-1])

    def smps(self) -> list[int]:
        """Processes of the SMPs."""
        return sorted(pid for node in NODES for pid in self.lab.pids(node, "-m ftckpt.smp"))

    def runs(self) -> float:
        """When it began to run, which it does soon: time since the epoch, in seconds."""
        until(lambda: self.lab.state(self.number) == "RUNNING", self.lab.logs)
        return time.time()

    def ends(self, within_secs: float) -> None:
        until(lambda: self.lab.state(self.number) not in ("RUNNING", "COMPLETING"), self.lab.logs, within_secs)

    def trains_beyond(self, iteration: int) -> None:
        until(lambda: self.iteration >= iteration, self.lab.logs, 120)

    def says(self, text: str, within_secs: float = 120) -> re.Match[str]:
        """What the job has printed since the last call that matches ``text``, which it does soon."""
        found: re.Match[str] | None = None

        def look() -> bool:
            nonlocal found
            found = re.search(text, self.lab.out()[self._read :])
            return found is not None

        until(look, lambda: f"{text}{self.lab.logs()}", within_secs)
        assert found is not None
        self._read += found.end()
        return found
