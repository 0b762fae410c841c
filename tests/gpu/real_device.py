"""Tests on a real CUDA or ROCm device: its state, kernels that take a given time, and ranks that share it.

NCCL refuses ranks that share a device: what they exchange goes over gloo, in part through host memory.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.gpu.fake_device import PAGE

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
    """The driver's answer to registering the slot's first page: 0, or an error; undone at once.

    On a thread of its own: CUDA reports the last error to its thread alone.
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


@functools.lru_cache(maxsize=1)
def cycles_per_sec() -> float:
    """The rate of ``torch.cuda._sleep`` on this device."""
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


# The same bits in every run; and each rank's only device is the first one.
_SHARED = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def share_device(world_size: int) -> None:
    """A rank of the pool takes part in the first device; before its process group is made."""
    from tests.standin.distributed import install_distributed

    os.environ.update(_SHARED)
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Megatron-core 0.16.1 asks for this on a device without having imported it, without Transformer Engine.
    moe_utils: Any = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    if moe_utils is not None and not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if world_size == 1:  # over NCCL
        return
    install_distributed()
    for name in ("isend", "send"):
        _replace(name, _given(lambda tensor: tensor.detach().cpu(), getattr(c10d, name)))
    # gloo writes to a parameter as a script would, which autograd forbids.
    _replace("broadcast", _given(torch.Tensor.detach, c10d.broadcast))
    _replace("recv", _recv(c10d.recv))
    _replace("irecv", _irecv(c10d.irecv))
    # gloo cannot coalesce.
    _replace("batch_isend_irecv", lambda operations: [o.op(o.tensor, o.peer, o.group, o.tag) for o in operations])
    _replace("_coalescing_manager", _in_turn)


def _replace(name: str, function: Callable[..., Any]) -> None:
    """Also where Megatron has imported it by its name."""
    for home in (c10d, dist, sys.modules.get("megatron.core.distributed.param_and_grad_buffer")):
        if hasattr(home, name):
            setattr(home, name, function)


def _given(change: Callable[[torch.Tensor], torch.Tensor], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(change(tensor), *args, **kwargs)

    return call


def _recv(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def recv(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        source = original(host, *args, **kwargs)
        tensor.data.copy_(host)
        return source

    return recv


def _irecv(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def irecv(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        return _Receipt(original(host, *args, **kwargs), host, tensor)

    return irecv


class _Receipt:
    """A receive whose data is copied to the device when somebody waits for it."""

    def __init__(self, work: Any, host: torch.Tensor, target: torch.Tensor) -> None:
        self._work, self._host, self._target = work, host, target

    def wait(self, *args: Any) -> Any:
        result = self._work.wait(*args)
        self._target.data.copy_(self._host)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def _in_turn(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
    """Collectives that NCCL would coalesce, which gloo does not on a device."""
    group = group or c10d._get_default_group()
    c10d._world.pg_coalesce_state[group] = []
    yield c10d._CoalescingManager()
    for one in c10d._world.pg_coalesce_state.pop(group):
        if one.dst_tensor is None:
            one.op(one.tensor, one.redop, group)
        elif one.redop is None:
            one.op(one.dst_tensor, one.tensor, group)
        else:
            one.op(one.dst_tensor, one.tensor, one.redop, group)
