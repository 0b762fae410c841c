"""Staged bytes reach the device unchanged, however late it takes them; on ``FakeDevice``."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from ftckpt.restore import staging as staging_module
from ftckpt.restore.redistribute import Strip
from ftckpt.restore.staging import StagingBuffers, free_pinned, pin_ahead
from ftckpt.restore.threads import in_order
from tests.gpu.fake_device import FakeDevice, install

NUM, NBYTES = 40, 1000
THREADS = 3


@pytest.fixture(params=["batch", "each", "refused"])
def fake(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeDevice:
    """A device whose copies run, and read their source, when somebody waits for them; with a driver that accepts many
    copies per call, has no such call, or refuses it."""
    made = install(monkeypatch)
    made.refuse_calls = request.param == "refused"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: any(self is one for one in made.staging))
    monkeypatch.setattr(staging_module, "pinned_memory", made.pinned_memory)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(staging_module, "batch_copy", lambda: None if request.param == "each" else made.copy_batch)
    monkeypatch.setattr(
        staging_module, "copy_later",
        lambda target, source: made.current_stream().enqueue(lambda: target.copy_(source)),
    )  # fmt: skip
    return made


def strip(memory: torch.Tensor, begin: int, nbytes: int) -> Strip:
    """A run of bytes."""
    return Strip(memory, begin, (nbytes,), (1,))


@pytest.mark.parametrize("threads", [1, THREADS])
def test_each_part_arrives_as_it_was_read(fake: FakeDevice, threads: int) -> None:
    staging, targets = StagingBuffers(), torch.zeros(NUM, NBYTES, dtype=torch.uint8)

    def bring(number: int) -> None:
        memory = staging.memory(NBYTES - number)
        memory.fill_(number + 1)
        staging.send([(strip(targets[number], 0, len(memory)), strip(memory, 0, len(memory)))])

    for _ in in_order(bring, range(NUM), threads):
        pass
    staging.settle()
    for number, target in enumerate(targets):
        assert (target[: NBYTES - number] == number + 1).all() and not target[NBYTES - number :].any()


def test_copies_come_behind_what_the_script_has_given_the_device(fake: FakeDevice) -> None:
    """Live tensors may still be filled when they are restored."""
    target = torch.zeros(NBYTES, dtype=torch.uint8)
    fake.compute.enqueue(lambda: target.fill_(7))
    staging = StagingBuffers()
    fake.first = fake.side
    memory = staging.memory(NBYTES)
    memory.fill_(1)
    staging.send([(strip(target, 0, NBYTES), strip(memory, 0, NBYTES))])
    staging.settle()
    fake.advance()
    assert (target == 1).all()


def test_what_was_sent_before_an_error_keeps_its_memory(fake: FakeDevice) -> None:
    """A restart switches to another source of these bytes while the device still takes the first half of them."""
    staging, target = StagingBuffers(), torch.zeros(2, NBYTES, dtype=torch.uint8)

    def half() -> Iterator[tuple[Strip, Strip]]:
        yield Strip(target[0], 0, (NBYTES // 2,), (2,)), Strip(memory, 0, (NBYTES // 2,), (2,))
        raise OSError("the rest cannot be read")

    for number in range(1, 4):
        memory = staging.memory(NBYTES)
        memory.fill_(number)
        if number == 1:
            with pytest.raises(OSError):
                staging.send(half())
        else:
            staging.send([(strip(target[1], 0, NBYTES), strip(memory, 0, NBYTES))])
    staging.settle()
    assert (target[0][::2] == 1).all() and (target[1] == 3).all()


@pytest.mark.parametrize("fake", ["batch"], indirect=True)
def test_memory_is_not_lent_to_others_before_the_device_has_taken_it(fake: FakeDevice) -> None:
    """Torch does not know of a call's copies, and a thread that ends frees its buffers."""
    staging, targets = StagingBuffers(), torch.zeros(NUM, NBYTES, dtype=torch.uint8)

    def bring(number: int) -> None:
        memory = staging.memory(NBYTES)
        memory.fill_(number + 1)
        staging.send([(strip(targets[number], 0, NBYTES), strip(memory, 0, NBYTES))])

    for _ in in_order(bring, range(THREADS), THREADS):
        pass
    made = [weakref.ref(one) for one in fake.staging]
    fake.staging.clear()
    gc.collect()
    assert made and all(one() is not None for one in made)
    staging.settle()
    gc.collect()
    assert all(one() is None for one in made) and (targets[:THREADS, 0] == torch.arange(1, THREADS + 1)).all()


def test_without_a_device_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_module, "pinned_memory", lambda nbytes: pytest.fail("pinned"))
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: pytest.fail("freed"), raising=False)
    pin_ahead(NBYTES, THREADS).join()
    free_pinned().join()
