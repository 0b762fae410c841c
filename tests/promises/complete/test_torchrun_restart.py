"""Real torchrun: workers kill themselves with SIGKILL, the job comes back and finishes its all-reduces."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import Launched
from tests.support.processes import free_ports

pytestmark = pytest.mark.faults

# A fault (rank, step) fires once, in the order given: the file it leaves tells the following attempts, and
# the test, that it did.
WORKER = """
import json, os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from ftckpt.frameworks.rendezvous import isolate_attempts

def log(**fields):
    with open(here / f"rank{rank}.jsonl", "a") as out:
        out.write(json.dumps({"time": time.time(), **fields}) + "\\n")

def fault_due(step):
    for number, (victim, at) in enumerate(faults):
        fired = here / f"fired{number}"
        if not fired.exists():
            if (victim, at) == (rank, step):
                fired.touch()
                return True
            return False
    return False

here, faults, rank = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), int(os.environ["RANK"])
done = isolate_attempts(timeout_secs=60)
log(event="start", done=done)
dist.init_process_group("gloo", init_method="env://")
world = dist.get_world_size()
for step in range(4):
    if fault_due(step):
        log(event="die", step=step)
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == world * (world + 1) / 2
    log(event="step", step=step)
dist.barrier()
log(event="done", world=world)
dist.destroy_process_group()
"""


class Job(Launched):
    """The agents of one job, and the directory its workers write to."""

    def agent(self, *flags: str, faults: list[tuple[int, int]], **env: str) -> None:
        script = self.here / "worker.py"
        script.write_text(WORKER)
        common = ("--max-restarts", "3", "--monitor-interval", "0.1")
        command = [sys.executable, "-m", "torch.distributed.run", *common, *flags]
        self.start([*command, str(script), str(self.here), json.dumps(faults)], TMPDIR=str(self.here), **env)

    def log_of(self, rank: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.here / f"rank{rank}.jsonl").read_text().splitlines()]


@pytest.fixture
def job(tmp_path: Path, arena_root: Path) -> Iterator[Job]:
    started = Job(tmp_path, arena_root, [])
    yield started
    started.stop()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["static", "file"])
def test_attempts_are_isolated_where_a_store_outlives_them(job: Job, how: str) -> None:
    """Standalone and c10d have tests with their launchers."""
    rendezvous = {
        "static": (
            *("--rdzv-backend", "static", "--nnodes", "1", "--node-rank", "0"),
            *("--master-addr", "127.0.0.1", "--master-port", str(free_ports(1))),
        ),
        "file": (
            *("--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-id", "file"),
            *("--rdzv-endpoint", str(job.here / "rendezvous"), "--rdzv-conf", "store_type=file"),
        ),
    }
    job.agent(*rendezvous[how], "--nproc-per-node", "2", faults=[(1, 1), (0, 2)])
    job.finish()
    # Every fault fired, every rank finished, and all ranks of the last attempt had one name that was new.
    assert [(job.here / f"fired{number}").exists() for number in range(2)] == [True] * 2
    logs = [job.log_of(rank) for rank in range(2)]
    assert [log[-1].get("world") for log in logs] == [2] * 2
    names = [[line["done"] for line in log if line["event"] == "start"] for log in logs]
    assert names[0][-1] == names[1][-1] and len(set(names[0])) == 3


@pytest.mark.slow
def test_a_private_store_needs_nothing(job: Job) -> None:
    job.agent(*("--standalone", "--nproc-per-node", "2"), faults=[(1, 1)], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    job.finish()
    starts = [line["done"] for line in job.log_of(0) if line["event"] == "start"]
    assert len(starts) == 2
    assert all("nothing to isolate" in done for done in starts)
