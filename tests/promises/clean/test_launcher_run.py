"""Real torchrun: a finished job is not started again, and one that cannot continue is not retried for ever."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[3]
SCRIPT = """
import atexit, json, os, pathlib, sys, threading
import torch
import ftckpt.torch
from ftckpt.config import Config

here, fault, rank = pathlib.Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
config = Config(
    enabled=True, job="j", node="n", arena=sys.argv[3], protect="none", events=str(here / "events"),
    interval=int(os.environ.get("EVERY", "1")),
)
told = (here / f"rank{rank}.jsonl").read_text() if (here / f"rank{rank}.jsonl").exists() else ""
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def log(what):
    with open(here / f"rank{rank}.jsonl", "a") as out:
        out.write(json.dumps([attempt, what]) + "\\n")

ftckpt.torch.init_process_group(config, "gloo", init_method="env://")
log("start")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
job = ftckpt.torch.attach(model, optimizer, config=config)
saved = here / f"saved{rank}"
begin = job.restore(newer_than=int(saved.read_text()) if saved.exists() else -1)
log(["restored", begin])
for iteration in range(1 if begin is None else begin + 1, int(os.environ.get("LAST", "4")) + 1):
    if fault == "at once" and rank == 1:
        os._exit(3)
    if fault == "every fourth" and rank == 1 and iteration % 4 == 0 and f"fault at {iteration}" not in told:
        log(f"fault at {iteration}")
        os._exit(3)
    if fault == "at the fourth" and rank == 1 and iteration == 4:
        os._exit(3)
    if "fourth" in fault:
        torch.distributed.barrier()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    job.step(iteration)
    log(iteration)
    if fault == "every fourth" and iteration % 2 == 0:
        saved.write_text(str(iteration))
job.close()
log("closed")
if fault == "behind its end" and rank == 1 and attempt == 0:
    raise ConnectionError("upload of the model: Connection reset by peer")
if fault == "in its exit":
    torch.distributed.barrier()  # torchrun ends the other rank, which must have logged its end
    if rank == 1 and attempt == 0:
        os.abort()
torch.distributed.destroy_process_group()
"""


def torchrun(here: Path, *words: str, restarts: int, job: str = "j", **env: str) -> tuple[int, str]:
    """Its exit code and the output of it and its two ranks."""
    command = [
        *("-m", "torch.distributed.run", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "localhost:0", "--rdzv-id", job, "--nproc-per-node", "2"),
        *("--max-restarts", str(restarts), "--monitor-interval", "0.1", *words),
    ]
    return python(here, *command, **env)


def trained_by_torchrun(here: Path, fault: str, arena: Path, *, restarts: int, **env: str) -> tuple[int, str]:
    """Likewise, of ranks that train SCRIPT with a fault."""
    (here / "train.py").write_text(SCRIPT)
    return torchrun(here, str(here / "train.py"), str(here), fault, str(arena), restarts=restarts, **env)


def python(here: Path, *words: str, **env: str) -> tuple[int, str]:
    """Likewise."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH", "PET_", "FTCKPT"))}
    ours = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(here),
        "FTCKPT_DEVICE": "tests.support.standin:cpu",
    }
    ended = subprocess.run(
        [sys.executable, *words],
        env={**clean, **ours, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    return ended.returncode, ended.stdout


def logged(here: Path, rank: int) -> list[list[object]]:
    return [json.loads(line) for line in (here / f"rank{rank}.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_crash_after_the_end_begins_nothing_anew(tmp_path: Path, arena_root: Path) -> None:
    code, output = trained_by_torchrun(tmp_path, "in its exit", arena_root, restarts=2)
    trained = [[0, "start"], [0, ["restored", None]], *([0, n] for n in (1, 2, 3, 4)), [0, "closed"]]
    assert code == 0 and logged(tmp_path, 0) == logged(tmp_path, 1) == trained, output
    assert output.count("ftckpt: job j finished at iteration 4: nothing is left to train") == 1
    assert output.count("ftckpt: job j, 2 ranks: nothing to restore") == 1, "though the script configures no logging"
    assert list(arena_root.iterdir()) == []


LAUNCHES = """
import sys
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
import ftckpt.torch
from ftckpt.config import Config

def train(job, last):
    config = Config(enabled=True, job=job, node="n", arena=sys.argv[1], protect="none")
    ftckpt.torch.init_process_group(config, "gloo", init_method="env://")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = ftckpt.torch.attach(model, optimizer, config=config)
    checkpointer.restore()
    for iteration in range(1, last + 1):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step(iteration)
    checkpointer.close()
    print(f"trained {job} to {iteration}", flush=True)

def launch(job):
    return LaunchConfig(
        1, 1, 1, run_id=job, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1
    )

if __name__ == "__main__":
    config = launch("a")
    for job, of, last in (("a", config, 5), ("b", launch("b"), 5), ("a", launch("a"), 6), ("a", config, 7)):
        elastic_launch(of, train)(job, last)
"""


@pytest.mark.slow
def test_each_launch_of_a_program_trains(tmp_path: Path, arena_root: Path) -> None:
    """A sweep over jobs; a notebook, which launches the same job again, to more iterations."""
    (tmp_path / "sweep.py").write_text(LAUNCHES)
    code, output = python(tmp_path, str(tmp_path / "sweep.py"), str(arena_root))
    trained = re.findall("^.*trained (.*)$", output, re.M)
    assert code == 0 and trained == ["a to 5", "b to 5", "a to 6", "a to 7"], output


@pytest.mark.slow
def test_attempts_that_fail_at_the_same_place_end(tmp_path: Path, arena_root: Path) -> None:
    code, output = trained_by_torchrun(tmp_path, "at the fourth", arena_root, restarts=6, EVERY="50")
    assert code != 0 and [what for _, what in logged(tmp_path, 0)].count(["restored", None]) == 3, output
    assert "3 attempts in a row have made no snapshot" in output


@pytest.mark.slow
def test_starts_that_come_to_nothing_end(tmp_path: Path, arena_root: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("-m", "ftckpt.megatron", str(tmp_path / "train.py"), str(tmp_path), "at once", str(arena_root))
    code, output = torchrun(tmp_path, *words, restarts=6)
    assert code != 0 and [what for _, what in logged(tmp_path, 0)].count("start") == 4, output
    said = "3 attempts in a row have made no snapshot"
    assert len(re.findall(f"^ftckpt: .*{said}", output, re.M)) == 1 and said in output[output.index("Root Cause") :]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--ftckpt-intervall", "2", "unknown flag --ftckpt-intervall"),
        ("--ftckpt-persist", "/no/where", "/no/where: "),
    ],
)
def test_a_wrong_flag_is_said_once_however_often_it_is_tried(
    flag: str, value: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('it was run')\n")
    words = ("-m", "ftckpt.megatron", str(tmp_path / "train.py"), "--ftckpt", flag, value)
    code, output = torchrun(tmp_path, *words, restarts=2)
    assert code != 0 and "it was run" not in output
    assert len(re.findall(f"^ftckpt: .*{said}", output, re.M)) == 1, output
    assert said in output[output.index("Root Cause") :], "the last lines"
