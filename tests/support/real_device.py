"""What tests on a real CUDA or ROCm device share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import pytest
import torch

from tests.support.fake_device import PAGE

# Asked while tests are collected: later the CPU stand-in may answer for torch.cuda.
HAS_DEVICE = bool(torch.version.cuda or torch.version.hip) and torch.cuda.device_count() > 0
needs_device = [pytest.mark.gpu, pytest.mark.skipif(not HAS_DEVICE, reason="needs a CUDA or ROCm device")]
MIB = 1 << 20
CALIBRATION_CYCLES = 1_000_000


def state(device: torch.device) -> list[torch.Tensor]:
    """Large and small tensors of several types on the device, and one in host memory (Adam's ``step``)."""
    numbers = [(18 * MIB, torch.float32), (1001, torch.bfloat16), (7, torch.uint8), (3 * MIB, torch.bfloat16)]
    tensors = [torch.randint(0, 100, (n,), device=device).to(dtype) for n, dtype in numbers]
    return [*tensors, torch.tensor([41.0])]


def host_pages(slot: torch.Tensor) -> int:
    """What the driver says of registering the slot's first page: 0, or an error; undone at once.

    On a thread of its own, whose last error nobody else is told of.
    """

    def ask() -> int:
        code = int(torch.cuda.cudart().cudaHostRegister(slot.data_ptr(), PAGE, 0))
        if code == 0:
            torch.cuda.cudart().cudaHostUnregister(slot.data_ptr())
        return code

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(ask).result()


def sleep(cycles: int) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


@lru_cache(maxsize=1)
def cycles_per_sec() -> float:
    """Of ``torch.cuda._sleep`` on this device."""
    millis = 0.0
    for _ in range(2):  # the first loads the kernel
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        sleep(CALIBRATION_CYCLES)
        end.record()
        end.synchronize()
        millis = begin.elapsed_time(end)
    return CALIBRATION_CYCLES * 1e3 / millis


def cycles_for(secs: float) -> int:
    """For ``sleep``."""
    return int(cycles_per_sec() * secs)


def delay(stream: Any, secs: float) -> None:
    """Keep a stream busy for about ``secs``."""
    with torch.cuda.stream(stream):
        sleep(cycles_for(secs))
