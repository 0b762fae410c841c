"""Nothing is asked of the device for the first time, or allocated, while training runs; on ``FakeDevice``.

On a real device a collective's kernel that waits for another rank may then wait for ever: loading a kernel and
allocating wait for it, with a lock that the launch of what the other rank waits for needs.
"""

from __future__ import annotations

import pytest
import torch

from ftckpt.capture import copier as host
from ftckpt.capture import device_copier
from ftckpt.config import Config
from ftckpt.events import Events
from ftckpt.schedule.clock import DeviceClock
from ftckpt.schedule.window_scheduler import WindowScheduler
from tests.gpu.device_states import CPU, DeviceSnapshots, live_state
from tests.gpu.fake_device import PAGE, FakeDevice


def odd_state() -> list[torch.Tensor]:
    """Views that begin anywhere: each alignment has kernels of its own."""
    bf16 = torch.arange(9001, dtype=torch.bfloat16)
    return [*live_state(), bf16[1:], bf16[3:], torch.arange(99, dtype=torch.uint8)[7:], torch.ones(3)[1:]]


@pytest.mark.parametrize("fake", ["batch", "each"], indirect=True)
@pytest.mark.parametrize("volatile", [0, 2])
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_snapshot_asks_for_nothing_that_is_not_there(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, pinned: bool, offloaded: bool, volatile: int
) -> None:
    monkeypatch.setattr(device_copier, "_XOR_BYTES", PAGE)
    fake.refuse_pinning = not pinned
    tensors = odd_state()
    if offloaded:
        monkeypatch.setattr(host, "in_host_memory", lambda tensor: any(tensor is home for home in tensors[3:5]))
    snapshots = DeviceSnapshots(monkeypatch, tensors=tensors, volatile=volatile)
    assert len(fake.kernels) > (1 if volatile else 4) and fake.buffers
    with fake.train():
        for _ in range(3):
            snapshots.take()
    snapshots.capture.close()


@pytest.mark.parametrize("places", [5, 300])
def test_moments_of_training_are_provided_before_it(fake: FakeDevice, places: int) -> None:
    """As many as the longest iteration so far has places, for all iterations that may be looked at together."""
    clock = DeviceClock(CPU)
    pacer = WindowScheduler(Config(schedule="bubble"), clock, Events(None, 0), {"pp": 0})
    kinds = ["start", *["forward", "window"] * places]

    def iterate() -> None:
        pacer.boundary()
        for kind in kinds[1:]:
            pacer.enter(kind)
        pacer.learn()

    iterate()
    pacer.boundary()
    with fake.train():
        for _ in range(8):  # the device does not come to any of them
            iterate()
    fake.compute.synchronize()
    pacer.learn()
    pacer.close()


def test_slots_that_lie_in_wait_are_not_touched(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart's only snapshot may lie there."""
    snapshots = DeviceSnapshots(monkeypatch)
    assert not snapshots.slot.any() and snapshots.control.calls == []
    snapshots.capture.close()
