"""A job that ended exits: no thread of ftckpt asks a dying interpreter for anything, which C++ answers with abort."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[2]
RANKS = 4
ROUNDS = 200
# Forked, because importing torch would take most of the time, and not by multiprocessing, whose children leave
# without the end of the interpreter.
SCRIPT = """
import os, pathlib, sys
import torch
import torch.distributed as dist
from ftckpt import plain
from ftckpt.config import Config
from ftckpt.job import checkpointer
import ftckpt.plain.geometry, ftckpt.plain.hooks, ftckpt.plain.state, torch._dynamo

here, arena, rounds, ranks = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

def train(rank, store):
    config = Config(enabled=True, job="j", node="n", arena=arena, smp_idle_secs=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    job = plain.attach(model, optimizer, config=config)
    job.restore()
    for iteration in range(1, 4):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        job.step(iteration)
    job.close()
    dist.destroy_process_group()

for number in range(rounds):
    store = here / f"store{number}"
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            train(rank, store)
            sys.exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        sys.exit(f"round {number}: {codes}")
"""


@pytest.mark.slow
@pytest.mark.timeout(120 + 15 * ROUNDS)
def test_ranks_of_a_job_that_ended_exit(tmp_path: Path, arena_root: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        ended = subprocess.run(
            [sys.executable, "train.py", str(tmp_path), str(arena_root), str(ROUNDS), str(RANKS)], cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True, text=True, timeout=60 + 15 * ROUNDS, check=False,
        )  # fmt: skip
    finally:
        for process in load:
            process.kill()
            process.wait()
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert list(arena_root.iterdir()) == []
