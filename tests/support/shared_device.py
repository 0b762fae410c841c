"""Ranks that share one device, which NCCL refuses: what they exchange goes over gloo, in part through host memory."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.support.standin.distributed import install_distributed

# The same bits in every run; and each rank's only device is the first one.
ENVIRONMENT: Mapping[str, str] = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def install(world_size: int) -> None:
    """For a rank of the pool, before its process group is made."""
    os.environ.update(ENVIRONMENT)
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    _mend_megatron()
    if world_size == 1:  # over NCCL
        return
    install_distributed()
    wraps = {"isend": _isend, "irecv": _irecv, "send": _send, "recv": _recv, "broadcast": _broadcast}
    for name, wrap in wraps.items():
        _replace(name, wrap(getattr(c10d, name)))
    _replace("batch_isend_irecv", _one_by_one)
    _replace("_coalescing_manager", _in_turn)


def _replace(name: str, function: Callable[..., Any]) -> None:
    """Also where Megatron has imported it by its name."""
    for home in (c10d, dist, sys.modules.get("megatron.core.distributed.param_and_grad_buffer")):
        if hasattr(home, name):
            setattr(home, name, function)


def _mend_megatron() -> None:
    """0.16.1 asks for this on a device without having imported it, where Transformer Engine is not installed."""
    moe_utils = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    if moe_utils is not None and not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


def _isend(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(tensor.detach().cpu(), *args, **kwargs)

    return isend


def _send(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def send(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        original(tensor.detach().cpu(), *args, **kwargs)

    return send


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
    """What was received comes to the device where somebody waits for it."""

    def __init__(self, work: Any, host: torch.Tensor, target: torch.Tensor) -> None:
        self._work, self._host, self._target = work, host, target

    def wait(self, *args: Any) -> Any:
        result = self._work.wait(*args)
        self._target.data.copy_(self._host)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _broadcast(original: Callable[..., Any]) -> Callable[..., Any]:
    """gloo writes to a parameter as a script would, which autograd forbids."""

    @functools.wraps(original)
    def broadcast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(tensor.detach(), *args, **kwargs)

    return broadcast


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


def _one_by_one(operations: Sequence[Any]) -> list[Any]:
    """gloo cannot coalesce."""
    return [one.op(one.tensor, one.peer, one.group, one.tag) for one in operations]
