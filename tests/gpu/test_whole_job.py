"""A job over ``FakeDevice``: from its first iteration to its last nothing is loaded, allocated or unpinned."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ftckpt.capture.device_copier import DeviceCopier
from ftckpt.schedule.clock import DeviceClock
from tests.gpu.fake_device import SECS, FakeDevice, install
from tests.support import jobs, plain
from tests.support.pool import run_ranks
from tests.support.waiting import until

pytestmark = pytest.mark.multiproc
NODES = ["a", "b", "c"]
UNTIL = 7
ROW = 1 << 15
"""Elements: enough for each rank to have a share that the others protect by parity."""


def on_a_device(
    rank: int, world_size: int, settings: dict[str, Any], off_at: int, large: bool = False
) -> dict[str, int]:
    """Trains on the device with its own clock; from ``off_at`` on no snapshot succeeds, and ftckpt turns off.
    ``large``: a snapshot is too large to be staged."""
    patch = pytest.MonkeyPatch()
    if large:
        patch.setattr("ftckpt.capture.device_copier._STAGED_BYTES_PER_SEC", 1.0)
        patch.setattr(DeviceCopier, "_through_staging", lambda *_: pytest.fail("staged"))
    fake = install(patch)
    patch.setattr("ftckpt.session.start.make_clock", DeviceClock)
    patch.setattr(plain, "ROW", ROW)
    checkpointer, state = plain.make(rank, world_size, settings, NODES)
    checkpointer.restore()
    capture, arena = checkpointer.capture, checkpointer.arena
    assert capture is not None and arena is not None
    with fake.train():
        iteration = 0
        # Beside busy cores some are skipped, while the SMPs protect an earlier snapshot, or a slot has no memory yet.
        while iteration < 4 or not everywhere(not capture.lacks_slots):
            train(fake, checkpointer, state, iteration := iteration + 1)
        all_slots = arena.control.slots * arena.image.file_bytes
        until(lambda: sum(fake.pinned.values()) == all_slots, "pinned", SECS)
        last = iteration + UNTIL - 4
        if off_at:
            state.failing = {number: OSError("no more") for number in range(iteration + off_at - 4, last + 1)}
        while iteration < last:
            train(fake, checkpointer, state, iteration := iteration + 1)
        assert sum(fake.pinned.values()) == all_slots and not fake.unpinned_by
    checkpointer.close(remove=False)
    assert not fake.pinned
    return {"kernels": len(fake.kernels), "off": int(checkpointer.off)}


def everywhere(is_so: bool) -> bool:
    """The same answer for all ranks, which train as many iterations: slots get their memory at different moments."""
    flag = torch.tensor(is_so, dtype=torch.uint8)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def restored(rank: int, world_size: int, settings: dict[str, Any]) -> Any:
    plain.ROW = ROW
    return plain.restored(rank, world_size, settings, NODES)


def train(fake: FakeDevice, checkpointer: Any, state: plain.PlainState, iteration: int) -> None:
    for kind in ("forward", "window", "backward"):
        checkpointer.phase(kind)
        fake.compute_step(kind, millis=1.0)
    checkpointer.fence()
    fake.compute.enqueue(lambda: state.advance(iteration, iteration + 0.5))
    fake.compute.synchronize()  # as where the loss is read
    checkpointer.step(iteration)


def test_ranks_do_without_snapshots_together_until_slots_are_pinned(settings: dict[str, Any]) -> None:
    run_ranks(on_a_device, 3, {**settings, "protect": "replica"}, 0, True)
    reasons = ("slots are still being allocated", "slots are still being pinned")
    skipped = Counter(e["iteration"] for e in jobs.events(settings, "skipped") if e["reason"] in reasons)
    assert skipped[1] == 3 and {*skipped.values()} == {3}, skipped
    (newest,) = {event["iteration"] for event in jobs.events(settings, "snapshot")[-3:]}
    for result in run_ranks(restored, 3, settings):
        assert result.value[:3] == (newest, newest, [newest + 0.5])


@pytest.mark.parametrize("off_at", [0, 5])
def test_nothing_is_asked_for_the_first_time_while_training_runs(settings: dict[str, Any], off_at: int) -> None:
    settings = {**settings, "protect": "replica", "error_limit": 2}
    results = [result.value for result in run_ranks(on_a_device, 3, settings, off_at)]
    assert max(value["kernels"] for value in results) >= 3, results
    assert [value["off"] for value in results] == [int(bool(off_at))] * 3
    errors = [event["error"] for event in jobs.events(settings, "snapshot_error")]
    assert all("no more" in error for error in errors) and bool(errors) == bool(off_at)
    if not off_at:
        # The last boundaries may be skipped, while the SMPs protect an earlier snapshot.
        (newest,) = {event["iteration"] for event in jobs.events(settings, "snapshot")[-3:]}
        for result in run_ranks(restored, 3, settings):
            assert result.value[:3] == (newest, newest, [newest + 0.5])
