"""What is staged for a device arrives as it was, however late the device takes it; on ``FakeDevice``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ftckpt.restore import staging as staging_module
from ftckpt.restore.load import _staged
from ftckpt.restore.staging import Staging
from ftckpt.restore.threads import in_order
from tests.support.fake_device import FakeDevice, install

NUM, NBYTES = 40, 1000
THREADS = 3


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Whose copies run when somebody waits for them, and read their source then."""
    made = install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(staging_module, "pinned_memory", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(
        staging_module, "copy_later",
        lambda target, source: made.compute.enqueue(lambda: target.copy_(source)),
    )  # fmt: skip
    return made


@pytest.mark.parametrize("threads", [1, THREADS])
def test_each_part_arrives_as_it_was_read(fake: FakeDevice, threads: int) -> None:
    staging, targets = Staging(), torch.zeros(NUM, NBYTES, dtype=torch.uint8)

    def bring(number: int) -> None:
        memory = staging.memory(NBYTES - number)
        memory.fill_(number + 1)
        staging.send([(targets[number][: len(memory)], memory)])

    for _ in in_order(bring, range(NUM), threads):
        pass
    staging.settle()
    for number, target in enumerate(targets):
        assert (target[: NBYTES - number] == number + 1).all() and not target[NBYTES - number :].any()


def test_what_was_sent_before_an_error_keeps_its_memory(fake: FakeDevice) -> None:
    """A restart goes on to another source of these bytes while the device still takes the first half of them."""
    staging, target = Staging(), torch.zeros(2, NBYTES, dtype=torch.uint8)

    def half() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield target[0], memory
        raise OSError("the rest cannot be read")

    for number in range(1, 4):
        memory = staging.memory(NBYTES)
        memory.fill_(number)
        if number == 1:
            with pytest.raises(OSError, match="the rest"):
                staging.send(half())
        else:
            staging.send([(target[1], memory)])
    staging.settle()
    assert (target[0] == 1).all() and (target[1] == 3).all()


def test_runs_are_read_side_by_side(fake: FakeDevice) -> None:
    class File:
        def read_into(self, begin: int, memory: memoryview) -> None:
            memory[:] = bytes(range(begin, begin + len(memory)))

    from ftckpt.restore.exchange import Strip

    source, target = torch.zeros(0, dtype=torch.uint8), torch.zeros(20, dtype=torch.uint8)
    pairs = [
        (Strip(source, 5, (3,), (1,)), Strip(target, 0, (3,), (1,))),
        (Strip(source, 50, (9,), (1,)), Strip(target, 11, (9,), (1,))),
    ]
    staging = Staging()
    staging.send(_staged(pairs, {id(source): File()}, staging.memory(12)))
    staging.settle()
    assert target.tolist() == [5, 6, 7, *[0] * 8, *range(50, 59)]
