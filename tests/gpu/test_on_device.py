"""Copies from a real CUDA or ROCm device: bytes, the seal, the fence, registration."""

from __future__ import annotations

import time

import pytest
import torch

from ftckpt.capture import registration
from ftckpt.schedule.bubbles import Always
from tests.gpu.device_states import Landings, assert_holds, plan, prepared, shared_slot, started
from tests.gpu.fake_device import PAGE, SECS
from tests.gpu.real_device import MIB, delay, host_pages, needs_device, state

pytestmark = needs_device


@pytest.mark.parametrize("registered", [True, False])
def test_bytes_arrive_exactly(registered: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tensor alone is longer than one registration, so some copies touch two of them."""
    tensors = state(device)
    copies, size = plan(tensors, 16 * MIB, parity=True)
    slot = shared_slot(size)
    if not registered:
        monkeypatch.setattr(registration, "pin_pages", lambda address, nbytes: False)
    with prepared([slot], device) as copier:
        seen = started(copier, tensors, copies, slot)
        seen.wait()
        assert seen.flight.error is None
        assert (copier._staging is None) == registered
    assert seen.arrived
    assert seen.arrived
    assert_holds(slot, copies, tensors)


@pytest.mark.parametrize("registered", [True, False])
def test_volatile_state_is_that_of_the_boundary_and_training_does_not_wait(
    registered: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = state(device)
    copies, size = plan(tensors, 16 * MIB)
    slot = shared_slot(size)
    if not registered:
        monkeypatch.setattr(registration, "pin_pages", lambda address, nbytes: False)
    with prepared([slot], device) as copier:
        copier.warm_up(tensors, [], copies[-1:])
        seen = Landings([], slot, taken=copies[-1:])
        delay(torch.cuda.current_stream(), 0.5)
        tensors[1].fill_(3)
        begin = time.monotonic()
        copier.take(tensors, copies[-1:], slot)
        copier.start(tensors, seen.flight, Always())
        secs = time.monotonic() - begin
        boundary = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor.zero_()
        assert secs < 0.25, "training waited for the device"
        seen.wait()
    assert_holds(slot, copies[-1:], boundary)


def test_seal_waits_for_the_device(device: torch.device) -> None:
    tensors = state(device)
    copies, size = plan(tensors, 16 * MIB, parity=True)
    slot = shared_slot(size)
    with prepared([slot], device) as copier:
        seen = Landings(copies, slot)
        delay(copier._stream, 0.3)
        copier.start(tensors, seen.flight, Always())
        assert seen.flight.submitted.wait(SECS)
        assert not seen.flight.ended
        seen.wait()
    assert seen.arrived
    assert_holds(slot, copies, tensors)


@pytest.mark.parametrize("fenced", [True, False])
def test_fence_holds_back_writes_on_the_device(fenced: bool, device: torch.device) -> None:
    """The host runs ahead of a slow copy. Without the fence the write comes first, which shows it can."""
    tensors = [torch.empty(8 * MIB, device=device).fill_(1)]  # loads the kernel, which waits for the device
    copies, size = plan(tensors, 16 * MIB, parity=True)
    slot = shared_slot(size)
    with prepared([slot], device) as copier:
        torch.cuda.synchronize()
        seen = Landings(copies, slot)
        delay(copier._stream, 0.5)
        copier.start(tensors, seen.flight, Always())
        assert seen.flight.submitted.wait(SECS)
        begin = time.perf_counter()
        if fenced:
            assert copier.fence(seen.flight, SECS)
        tensors[0].fill_(2)
        assert time.perf_counter() - begin < 0.1, "the host waited for the device"
        assert not seen.flight.ended
        seen.wait()
        torch.cuda.synchronize()
    assert int(tensors[0][0]) == 2
    first = slot[PAGE : PAGE + 4].clone().view(torch.float32)
    assert float(first) == (1.0 if fenced else 2.0)
    if fenced:
        assert_holds(slot, copies, [torch.ones(8 * MIB)])


def test_close_unregisters(device: torch.device) -> None:
    slot = shared_slot(80 * MIB)
    with prepared([slot], device):
        assert host_pages(slot) != 0, "the slot was not registered"
    assert host_pages(slot) == 0
    torch.ones(1, device=device).add_(1)  # no error was left behind for the next kernel
