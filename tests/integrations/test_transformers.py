"""The Trainer of Hugging Face transformers, killed twice and restored: the weights and losses of an unbroken run.

Installs ``RELEASES`` beside this environment's packages; ``FTCKPT_RELEASES`` names a folder that keeps them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.event_logs import read_events
from tests.support.processes import Processes
from tests.support.repository import ROOT
from tests.support.waiting import until

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

RELEASES = ("transformers==5.24.0", "accelerate==1.15.0", "tokenizers==0.23.3", "huggingface_hub==2.4.0", "regex")
TRAINING = (
    "--use_cpu", "--per_device_train_batch_size=2", "--gradient_accumulation_steps=3", "--num_train_epochs=30",
    "--logging_steps=1", "--eval_strategy=epoch", "--save_strategy=no", "--report_to=none", "--disable_tqdm=True",
)  # fmt: skip
"""40 samples on two ranks: ten batches, of which the last step of an epoch has one."""
DEADLINE_SECS = 150.0


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("FTCKPT_RELEASES", tmp_path_factory.getbasetemp())).resolve() / "transformers"
    if not folder.exists():
        partial = folder.with_name(".transformers")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(partial), *RELEASES]
        run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        if run.returncode:
            pytest.skip(f"transformers cannot be installed here: {run.stderr[-300:]}")
        partial.rename(folder)
    return folder


def train(packages: Path, folder: Path, arena: Path, kills: int, *options: str) -> dict[str, Any]:
    """The result and the losses of a training, of which rank 1 is killed so many times."""
    folder.mkdir()
    command = [
        sys.executable, "-m", "ftckpt", "run", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0", f"--rdzv-id={folder.name}", "launch/train_transformers.py",
        f"--output_dir={folder}", *TRAINING, *options, "--ftckpt", f"--ftckpt-job={folder.name}",
        "--ftckpt-interval=1", f"--ftckpt-arena={arena}", f"--ftckpt-events={folder / 'events'}",
    ]  # fmt: skip
    # Behind this environment's packages, which are the ones to test with.
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if "site-packages" in path), str(packages)])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with Processes() as processes:
        processes.start("node", command, env, folder / "log")
        (agent,) = processes.agents
        killed: set[int] = set()
        for _ in range(kills):

            def snapshots() -> list[dict[str, Any]]:
                assert agent.poll() is None, (folder / "log").read_text()[-3000:]
                found = read_events(folder / "events", "snapshot", of="rank1")
                return [event for event in found if event["pid"] not in killed]

            until(lambda: len(snapshots()) > 6, "snapshots", DEADLINE_SECS)
            pid = snapshots()[-1]["pid"]
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        assert agent.wait(DEADLINE_SECS) == 0, (folder / "log").read_text()[-3000:]
    restored = [event["iteration"] for event in read_events(folder / "events", "restored", of="rank0")]
    assert len([iteration for iteration in restored if iteration]) == kills, restored
    text = (folder / "log").read_text()
    losses = {epoch: (loss, rate) for loss, rate, epoch in LOSS.findall(text)}
    return {"losses": losses, **json.loads((folder / "result.json").read_text())}


LOSS = re.compile(r"^\{'loss': '(\S+)'.*'learning_rate': '(\S+)', 'epoch': '(\S+)'\}$", re.MULTILINE)


@pytest.mark.timeout(900)
def test_a_killed_training_is_the_unbroken_one(packages: Path, tmp_path: Path, arena_root: Path) -> None:
    whole = train(packages, tmp_path / "whole", arena_root, 0)
    killed = train(packages, tmp_path / "killed", arena_root, 2)
    assert len(whole["losses"]) == whole["step"] == 120
    assert killed == whole
