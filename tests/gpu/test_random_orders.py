"""Random orders of copies, compute and writes tear no snapshot: on a CPU, and on a device with one queue and many."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ftckpt.capture.copier import Flight, HostCopier
from ftckpt.cli import check_device
from ftckpt.cli.check_device import bench_on
from ftckpt.schedule.clock import make_clock
from tests.gpu.random_orders import train_randomly
from tests.support.device_states import CPU
from tests.support.real_device import needs_device

ROOT = Path(__file__).resolve().parents[2]
QUEUES = "GPU_MAX_HW_QUEUES" if torch.version.hip else "CUDA_DEVICE_MAX_CONNECTIONS"
DEVICE_SECS = 10


class Impatient(HostCopier):
    """Hurries its copies at the fence, and does not wait for them."""

    def fence(self, flight: Flight, timeout_secs: float) -> bool:
        flight.hurry.set()
        return True


def test_on_a_cpu(arena_root: Path) -> None:
    with bench_on(arena_root, make_clock(CPU), 4 << 20) as bench:
        assert train_randomly(bench, 1.0, seed=7) >= 1


def test_a_copier_that_tears_is_found(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_device, "make_copier", lambda clock: Impatient())
    with bench_on(arena_root, make_clock(CPU), 4 << 20) as bench, pytest.raises(AssertionError, match="seed 7"):
        train_randomly(bench, 60.0, seed=7)


@pytest.mark.gpu
@needs_device[1]
@pytest.mark.parametrize("queues", ["1", None])
def test_on_a_device(queues: str | None) -> None:
    environ = {name: value for name, value in os.environ.items() if name != QUEUES}
    environ |= {} if queues is None else {QUEUES: queues}
    command = [sys.executable, "-m", "tests.gpu.random_orders", str(DEVICE_SECS)]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and re.search("[1-9][0-9]* snapshots", done.stdout), (done.stdout, done.stderr)
