"""A job that ended exits: no thread of ftckpt asks a dying interpreter for anything, which C++ answers with abort."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[3]
RANKS = 4
EXITS = 200
# Each is the others' load.
JOBS_AT_ONCE = 4
LIMIT_SECS = 10 * EXITS
# Forked, because importing torch would take most of the time, and not by multiprocessing, whose children leave
# without the end of the interpreter.
SCRIPT = """
import gc, os, pathlib, sys
import torch
import torch.distributed as dist
import ftckpt.torch
from ftckpt.config import Config
from ftckpt.session import checkpointer
import ftckpt.torch.geometry, ftckpt.torch.hooks, ftckpt.torch.state, torch._dynamo

here, arena, rounds, ranks = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

def train(rank, store):
    config = Config(enabled=True, job="j", node="n", arena=arena)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    job = ftckpt.torch.attach(model, optimizer, config=config)
    job.restore()
    for iteration in range(1, 4):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        job.step(iteration)
    job.close()
    dist.destroy_process_group()

# Tests beside this one have limits of their own.
os.nice(10)
# What torch has imported each end would search for garbage, for longer than all the rest takes.
gc.freeze()
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
@pytest.mark.timeout(LIMIT_SECS + 60)
def test_ranks_of_a_job_that_ended_exit(tmp_path: Path, arena_root: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ends = time.monotonic() + LIMIT_SECS
    jobs: dict[Path, subprocess.Popen[bytes]] = {}
    try:
        for number in range(JOBS_AT_ONCE):
            (here := tmp_path / str(number)).mkdir()
            (arena := arena_root / str(number)).mkdir()
            with (here / "log").open("wb") as log:
                jobs[arena] = subprocess.Popen(
                    [sys.executable, "train.py", str(here), str(arena), str(EXITS // JOBS_AT_ONCE), str(RANKS)],
                    cwd=tmp_path, stdout=log, stderr=log, start_new_session=True,
                    env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                )  # fmt: skip
        codes = [job.wait(ends - time.monotonic()) for job in jobs.values()]
    finally:
        for job in jobs.values():
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    assert codes == [0] * JOBS_AT_ONCE, [(tmp_path / arena.name / "log").read_text()[-2000:] for arena in jobs]
    assert [list(arena.iterdir()) for arena in jobs] == [[]] * JOBS_AT_ONCE
