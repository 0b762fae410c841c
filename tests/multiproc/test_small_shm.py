"""A job whose snapshots lie where loader workers have their batches, in the small /dev/shm of a container."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounting import may_mount

pytestmark = pytest.mark.multiproc

ROOT = Path(__file__).parents[2]
JOB = """
import json, os, sys
import torch
import ftckpt.torch
from ftckpt.config import Config

def free():
    status = os.statvfs("/dev/shm")
    return status.f_bavail * status.f_frsize

config = Config(enabled=True, job="small", node="node")
ftckpt.torch.init_process_group(config, "gloo")
model = torch.nn.Linear(1024, 1024)  # 12 MiB with the moments of Adam
optimizer = torch.optim.Adam(model.parameters())
checkpointer = ftckpt.torch.attach(model, optimizer, config=config)
checkpointer.restore()
least = free()
for iteration in range(1, 11):
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    checkpointer.step(iteration)
    least = min(least, free())
print(json.dumps({"free": least, "snapshots": checkpointer.numbers()["snapshots"]}))
checkpointer.close()
"""


def train(size_mib: int, tmp_path: Path) -> Any:
    """What a job says that has a ``/dev/shm`` of so many MiB for itself; or why it was refused."""
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"}
    ended = subprocess.run(
        [
            *("unshare", "-m", "bash", "-c", f'mount -t tmpfs -o size={size_mib}m tmpfs /dev/shm; exec "$@"', "sh"),
            *(sys.executable, "-c", JOB),
        ],
        env={**os.environ, **env, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"},
        cwd=tmp_path, check=False, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    return json.loads(ended.stdout) if ended.returncode == 0 else ended.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not may_mount(), reason="a /dev/shm of its own takes root")
def test_snapshots_leave_loader_workers_a_quarter(tmp_path: Path) -> None:
    """Slots and a package take 44 MiB: more than three quarters of 48 MiB, and less than those of 64 MiB."""
    refused = train(48, tmp_path)
    assert "file system /dev/shm, plus 12.0 MiB reserved for other programs" in refused, refused
    trained = train(64, tmp_path)
    assert trained["snapshots"] > 0 and trained["free"] >= 16 << 20
