"""Real torchrun: a job that ended is not begun again, and one that cannot go on is not tried for ever."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[2]
SCRIPT = """
import atexit, json, os, pathlib, sys, threading
import torch
from ftckpt import plain
from ftckpt.config import Config

here, fault, rank = pathlib.Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
config = Config(enabled=True, job="j", node="n", arena=sys.argv[3], protect="none", events=str(here / "events"))
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def log(what):
    with open(here / f"rank{rank}.jsonl", "a") as out:
        out.write(json.dumps([attempt, what]) + "\\n")

plain.init_process_group(config, "gloo", init_method="env://")
log("start")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
ftckpt = plain.attach(model, optimizer, config=config)
begin = ftckpt.restore()
log(["restored", begin])
for iteration in range(1 if begin is None else begin + 1, 5):
    if fault == "at once" and rank == 1:
        os._exit(3)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    ftckpt.step(iteration)
    log(iteration)
ftckpt.close()
log("closed")
if fault == "in its exit" and rank == 1 and attempt == 0:
    os.abort()
torch.distributed.destroy_process_group()
"""


def torchrun(here: Path, *words: str, restarts: int, job: str = "j") -> tuple[int, str]:
    """Its exit code and what it and its two ranks have said."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH", "PET_", "FTCKPT"))}
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", "localhost:0", "--rdzv-id", job, "--nproc-per-node", "2"),
            *("--max-restarts", str(restarts), "--monitor-interval", "0.1", *words),
        ],
        env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(here), "FTCKPT_DEVICE": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )  # fmt: skip
    return ended.returncode, ended.stdout


def logged(here: Path, rank: int) -> list[list[object]]:
    return [json.loads(line) for line in (here / f"rank{rank}.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_crash_after_the_end_begins_nothing_anew(tmp_path: Path, arena_root: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = (str(tmp_path / "train.py"), str(tmp_path), "in its exit", str(arena_root))
    code, output = torchrun(tmp_path, *words, restarts=2)
    trained = [[0, "start"], [0, ["restored", None]], *([0, n] for n in (1, 2, 3, 4)), [0, "closed"]]
    assert code == 0 and logged(tmp_path, 0) == logged(tmp_path, 1) == trained, output
    assert output.count("ftckpt: job j finished at iteration 4: nothing is left to train") == 1
    assert output.count("ftckpt: job j, 2 ranks: nothing to restore") == 1, "though the script configures no logging"
    assert list(arena_root.iterdir()) == []


@pytest.mark.slow
def test_another_run_of_the_launcher_trains_again(tmp_path: Path, arena_root: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    for number in (1, 2):
        code, output = torchrun(tmp_path, str(tmp_path / "train.py"), str(tmp_path), "", str(arena_root), restarts=2)
        assert code == 0 and [what for _, what in logged(tmp_path, 0)].count("closed") == number, output
    assert len(list(tmp_path.glob("ftckpt-runs-*/*.run"))) == 1, "the record of the launcher that ended goes"


@pytest.mark.slow
def test_starts_that_come_to_nothing_end(tmp_path: Path, arena_root: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("-m", "ftckpt.megatron", str(tmp_path / "train.py"), str(tmp_path), "at once", str(arena_root))
    code, output = torchrun(tmp_path, *words, restarts=6)
    assert code != 0 and [what for _, what in logged(tmp_path, 0)].count("start") == 4, output
    assert output.count("3 attempts in a row have made no snapshot") == 2, (
        "where it is found, and by the last attempt"
    )


@pytest.mark.slow
def test_a_wrong_flag_is_said_once_however_often_it_is_tried(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('it was run')\n")
    words = ("-m", "ftckpt.megatron", str(tmp_path / "train.py"), "--ftckpt", "--ftckpt-intervall", "2")
    code, output = torchrun(tmp_path, *words, restarts=2)
    assert code != 0 and "it was run" not in output
    assert len(re.findall("^.*unknown flag --ftckpt-intervall", output, re.M)) == 2, output
