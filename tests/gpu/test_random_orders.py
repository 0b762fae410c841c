"""Random orders of copies, compute and writes tear no snapshot: on a CPU, and on a device with one queue and many.

    python -m tests.gpu.test_random_orders SECS [SEED]

On a device in a process of its own because a driver reads CUDA_DEVICE_MAX_CONNECTIONS (ROCm: GPU_MAX_HW_QUEUES) once:
with one queue work starts in the order of its launches, with several a copy may overtake a kernel.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from ftckpt.cli.check_device import Bench, NoWindow, bench_on
from ftckpt.schedule.bubbles import Always, Turn, Windows
from ftckpt.schedule.clock import make_clock
from tests.gpu.device_states import CPU
from tests.gpu.fake_device import SECS
from tests.gpu.real_device import needs_device
from tests.support.repository import ROOT

QUEUES = "GPU_MAX_HW_QUEUES" if torch.version.hip else "CUDA_DEVICE_MAX_CONNECTIONS"
DEVICE_SECS = 10
MAX_PAUSE_SECS = 0.003
"""Between two chunks: about as long as one takes."""
STATE_BYTES = 256 << 20


class Pauses(Always):
    """Windows that come and go; the fence hurries some copies and not others."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    def wait_turn(self, sizes: Sequence[int], hurry: threading.Event) -> Turn:
        hurry.wait(self._dice.uniform(0, MAX_PAUSE_SECS))
        return Turn()


def train_randomly(bench: Bench, secs: float, seed: int) -> int:
    """Train for ``secs``: compute, reach the fence and write at random moments. Returns the number of snapshots.

    AssertionError names the first snapshot that has other bytes than the device had, and the seed, with which all is
    repeated but for device and kernel time.
    """
    dice, end, rounds = random.Random(seed), time.monotonic() + secs, 0
    while time.monotonic() < end:
        rounds += 1
        differing = _snapshot(bench, dice)
        assert not differing, f"snapshot {rounds} by seed {seed}: {differing} bytes are not those of the device"
    return rounds


def _snapshot(bench: Bench, dice: random.Random) -> int:
    """One iteration; returns how many bytes of its snapshot are wrong."""
    wanted = [tensor.cpu().clone() for tensor in bench.state]
    # Windows are asked on another thread, hence dice of their own.
    kinds: tuple[Callable[[], Windows], ...] = (Always, NoWindow, lambda: Pauses(random.Random(dice.random())))
    flight = bench.flight(dice.choice(kinds)())
    _compute(bench, dice)
    assert bench.copier.fence(flight, SECS), flight.error
    _write(bench, dice)
    if dice.random() < 0.5:  # what the device does behind the fence meets copies that are still under way
        _compute(bench, dice)
    bench.wait(flight)
    bench.synchronize()
    return bench.differing(wanted)


def _compute(bench: Bench, dice: random.Random) -> None:
    """Some kernels, and what a training thread may do besides: allocate, wait for the device, capture a graph."""
    device = bench.clock.device if bench.clock.on_device else torch.device("cpu")
    work = torch.ones(dice.choice((16, 256, 1024)), 256, device=device)
    for _ in range(dice.randrange(8)):
        work = work @ torch.ones(256, 256, device=device)
    if not bench.clock.on_device:
        time.sleep(dice.choice((0.0, 0.0, 0.001)))
        return
    kind = dice.randrange(4)
    if kind < 2:
        bench.synchronize()
    if kind == 1:  # behind the wait, as torch does it
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            work.add_(1)
    elif kind == 2:
        work.sum().item()


def _write(bench: Bench, dice: random.Random) -> None:
    """All tensors or some, in any order, by new values each time."""
    order = list(range(len(bench.state)))
    dice.shuffle(order)
    for index in order[: dice.randint(1, len(order))]:
        tensor = bench.state[index]
        tensor.copy_(torch.randint(-8, 8, tensor.shape, device=tensor.device))


def test_on_a_cpu(arena_root: Path) -> None:
    with bench_on(arena_root, make_clock(CPU), 4 << 20) as bench:
        assert train_randomly(bench, 1.0, seed=7) >= 1


@pytest.mark.gpu
@needs_device[1]
@pytest.mark.parametrize("queues", ["1", None])
def test_on_a_device(queues: str | None) -> None:
    environ = {name: value for name, value in os.environ.items() if name != QUEUES}
    environ |= {} if queues is None else {QUEUES: queues}
    command = [sys.executable, "-m", "tests.gpu.test_random_orders", str(DEVICE_SECS)]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and re.search("[1-9][0-9]* snapshots", done.stdout), (done.stdout, done.stderr)


def main(secs: str, seed: str = "") -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    number = int(seed) if seed else random.randrange(1 << 32)
    print(f"seed {number}", flush=True)
    with bench_on(Path("/dev/shm"), make_clock(device), STATE_BYTES) as bench:
        print(f"{train_randomly(bench, float(secs), number)} snapshots")


if __name__ == "__main__":
    main(*sys.argv[1:])
