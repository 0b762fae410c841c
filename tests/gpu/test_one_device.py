"""A rank trains on one device, the current one, whose RNG alone is saved. State on another device is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftckpt.errors import UnsupportedError
from ftckpt.model.training_state import Description
from ftckpt.session.shard import device_of
from tests.support.errors import raises


def piece_on(device: str) -> Any:
    """A piece of a tensor that names its device and needs none."""
    return SimpleNamespace(tensor=SimpleNamespace(device=torch.device(device), is_cuda=device.startswith("cuda")))


def described(stepped: list[str], volatile: list[str]) -> Description:
    return Description(tuple(map(piece_on, stepped)), tuple(map(piece_on, volatile)))


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return 1


def test_state_beside_the_device_in_host_memory_is_well(current: int) -> None:
    device = torch.device("cuda", current)
    assert device_of(described(["cpu", "cuda:1"], ["cpu"])) == device
    assert device_of(described(["cpu"], ["cuda:1", "cpu"])) == device, "all that is stepped was offloaded"
    assert device_of(described(["cpu"], ["cpu"])) == torch.device("cpu")


@pytest.mark.parametrize(("stepped", "volatile"), [(["cuda:1", "cuda:0"], []), (["cpu", "cuda:1"], ["cuda:0"])])
def test_state_on_two_devices_is_refused(current: int, stepped: list[str], volatile: list[str]) -> None:
    with raises(UnsupportedError, "cuda:0", "cuda:1", "one device"):
        device_of(described(stepped, volatile))


def test_state_on_another_device_than_the_current_one_is_refused(current: int) -> None:
    with raises(UnsupportedError, "cuda:0", "cuda:1", "torch.cuda.set_device(0)"):
        device_of(described(["cuda:0"], []))
