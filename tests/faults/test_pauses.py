"""A job under ``--ftckpt-on-hang abort`` pauses for longer than an iteration may take, and goes on; where it hangs in
such a pause it is ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ftckpt.store.directory import clean_job
from tests.support.event_logs import read_events
from tests.support.pool import spawn_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

ROOT = Path(__file__).parents[2]
HANG_SECS = 2.0
EVALUATED, SAVED, HUNG = 4, 7, 10
"""Iterations after which the job pauses, and after which one rank never comes back from an evaluation."""


def pausing(rank: int, world_size: int, settings: dict[str, Any], progress: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import ftckpt.plain
    from ftckpt.config import Config

    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = ftckpt.plain.attach(model, optimizer, config=Config(enabled=True, node="n0", **settings))
    assert checkpointer is not None
    checkpointer.restore()

    def evaluate(batches: int) -> None:
        model.eval()
        with torch.no_grad():
            for _ in range(batches):
                model(torch.ones(1, 64))
                time.sleep(0.7)  # of a batch
        model.train()

    def never_returns() -> None:
        time.sleep(600)  # until it is ended

    for iteration in range(1, HUNG + 1):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        checkpointer.step(iteration)
        (Path(progress) / f"rank{rank}").write_text(str(iteration))
        if iteration == EVALUATED:
            evaluate(round(2 * HANG_SECS / 0.7))
        if iteration == SAVED:
            with checkpointer.section("save"):
                time.sleep(1.5 * HANG_SECS if rank == 0 else 0)
                dist.barrier()
    evaluate(1)
    if rank == 1:
        never_returns()
    dist.barrier()


@pytest.mark.slow
def test_a_job_that_pauses_goes_on_and_one_that_never_comes_back_is_ended(
    settings: dict[str, Any], arena_root: Path, tmp_path: Path
) -> None:
    settings |= {"protect": "node", "chunk_size": "64KiB", "objects_size": "1MiB", "schedule": "thread"}
    settings |= {"hang_secs": HANG_SECS, "on_hang": "abort"}
    progress = tmp_path / "progress"
    progress.mkdir()
    try:
        with spawn_ranks(pausing, 3, settings, str(progress), stand_in=False) as ranks:
            results = ranks.wait(120)
        assert results is not None and all(result.exitcode for result in results), "it ends"
        assert {path.read_text() for path in progress.iterdir()} == {str(HUNG)}, "no pause was taken for a hang"
        (hang,) = read_events(Path(settings["events"]), "hang", of="smp-n0")
        assert {rank["section"] for rank in hang["ranks"]} == {"evaluation"} and hang["ends"]
        assert all(rank["iteration"] == HUNG and rank["secs"] >= 3 * HANG_SECS for rank in hang["ranks"])
        log = (arena_root / "ftckpt-test" / "n0" / "smp.log").read_text()
        assert log.count("in never_returns") == 1 and "in barrier" in log, json.dumps(hang)
    finally:
        clean_job(arena_root, "test")


SCRIPT = r"""
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ftckpt.plain
from ftckpt.config import Config

config, _ = Config.from_flags(sys.argv[1:])
ftckpt.plain.init_process_group(config, "gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
checkpointer = ftckpt.plain.attach(model, optimizer, config=config)
start = checkpointer.restore() or 0
os.write(1, f"BEGINS AFTER {start}\n".encode())  # in one piece: the ranks share the pipe

def never_returns():
    time.sleep(600)

for iteration in range(start + 1, 100):
    if iteration == 8 and dist.get_rank() == 1:
        never_returns()
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    checkpointer.step(iteration)
    time.sleep(0.1)  # of an iteration
"""


@pytest.mark.slow
def test_a_job_that_hangs_at_one_place_is_not_started_for_ever(arena_root: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"),
        *("--max-restarts", "5", "--monitor-interval", "0.1", str(tmp_path / "script.py"), "--ftckpt"),
        *("--ftckpt-job", "test", "--ftckpt-node", "n0", "--ftckpt-arena", str(arena_root)),
        *("--ftckpt-protect", "node", "--ftckpt-hang-secs", str(HANG_SECS), "--ftckpt-on-hang", "abort"),
    ]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("TORCH", "PET_"))}
    environment = {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
        told = ended.stdout + ended.stderr
        assert ended.returncode != 0, told[-3000:]
        # Three ranks, twice.
        begun = [int(line.split()[2]) for line in ended.stdout.splitlines() if line.startswith("BEGINS AFTER")]
        assert len(begun) == 6 and begun[:3] == [0] * 3 and set(begun[3:]) <= {5, 6, 7}, told[-3000:]
        assert "the job has hung twice at the same place (" in ended.stderr
        assert ended.stderr.count("in never_returns") == 2, "stacks are in the launcher's log"
    finally:
        clean_job(arena_root, "test")
