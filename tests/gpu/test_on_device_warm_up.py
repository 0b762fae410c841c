"""On a real CUDA or ROCm device: a snapshot and pinning beside a kernel that ends late, as a collective's does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ftckpt.capture.affinity import cores_of_node, near_cores, numa_node_of
from ftckpt.schedule.bubbles import Always
from tests.gpu.device_states import Landings, assert_holds, plan, prepared, shared_slot
from tests.gpu.fake_device import SECS
from tests.gpu.real_device import MIB, cycles_for, needs_device, sleep, state

pytestmark = needs_device
BUSY_SECS = 4.0


def first_snapshot(warm: bool) -> None:
    """The first snapshot of a process, in which nothing was loaded before, while another stream is busy."""
    device = torch.device("cuda", 0)
    tensors = [*state(device), torch.arange(9001, device=device).to(torch.bfloat16)[1:]]
    copies, size = plan(tensors, 16 * MIB, parity=True)
    slot = shared_slot(size)
    with prepared([slot], device) as copier:
        if warm:
            copier.warm_up(tensors, copies, [])
        allocated = torch.cuda.memory_stats(device)["num_alloc_retries"], torch.cuda.memory_reserved(device)
        busy, cycles = torch.cuda.Stream(device), cycles_for(BUSY_SECS)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        with torch.cuda.stream(busy):
            sleep(cycles)
        begin, seen = time.monotonic(), Landings(copies, slot)
        copier.start(tensors, seen.flight, Always())
        seen.wait()
        secs = time.monotonic() - begin
        assert not busy.query() or not warm, f"the snapshot took {secs:.1f} s: it waited for the kernel"
        if warm:
            after = torch.cuda.memory_stats(device)["num_alloc_retries"], torch.cuda.memory_reserved(device)
            assert after == allocated, "memory of the device was allocated"
    assert_holds(slot, copies, tensors)
    print(f"{secs:.3f} s")


@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
@pytest.mark.parametrize("warm", [True, False])
def test_the_first_snapshot_waits_for_no_kernel_of_training(loading: str, warm: bool) -> None:
    """Without the warm-up it may, and where kernels are loaded lazily it does: printed, and no error."""
    code = f"from tests.gpu.test_on_device_warm_up import first_snapshot; first_snapshot({warm})"
    root = Path(__file__).parents[2]
    environment = {"CUDA_MODULE_LOADING": loading, "PYTHONPATH": str(root)}
    done = subprocess.run(
        ["env", *(f"{name}={value}" for name, value in environment.items()), sys.executable, "-c", code],
        cwd=root, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    print(loading, "warm" if warm else "cold", done.stdout.strip())


def test_kernels_are_launched_while_slots_are_pinned(device: torch.device) -> None:
    """Nobody can have the driver to itself for long: not even a kernel that does not end holds a launch up."""
    slot = shared_slot(1024 * MIB)
    data = torch.zeros(1000, device=device)
    data.add_(1)
    busy, cycles = torch.cuda.Stream(device), cycles_for(BUSY_SECS)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        sleep(cycles)
    worst, begin = 0.0, time.monotonic()
    with prepared([], device) as copier:
        copier.prepare([slot])
        copier._registrar.begin()
        while not copier._registrar.idle and time.monotonic() - begin < SECS:
            before = time.monotonic()
            data.add_(1)
            worst = max(worst, time.monotonic() - before)
        assert copier._registrar.covers(slot, slot.numel())
        pinned_secs = time.monotonic() - begin
        torch.cuda.synchronize()
    print(f"pinned in {pinned_secs:.2f} s, a launch took {worst * 1e3:.1f} ms at most")
    assert worst < 0.5


def test_threads_are_near_the_device_where_there_are_several_nodes(device: torch.device) -> None:
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    own = cores_of_node(numa_node_of(device)) & os.sched_getaffinity(0)
    assert near_cores(device) == (own if len(nodes) > 1 else None) or not own
