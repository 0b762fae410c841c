"""Ranks that share one device, which NCCL refuses: what they exchange goes over gloo, in part through host memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ftckpt.standin.distributed import install_distributed

# The same bits in every run; and each rank's only device is the first one.
ENVIRONMENT: Mapping[str, str] = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def install() -> None:
    """For a rank of the pool, before its process group is made."""
    os.environ.update(ENVIRONMENT)
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    install_distributed()
    for name, wrap in (("isend", _isend), ("irecv", _irecv), ("send", _send), ("recv", _recv)):
        for home in (c10d, dist):
            setattr(home, name, wrap(getattr(home, name)))
    c10d.batch_isend_irecv = dist.batch_isend_irecv = _one_by_one


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


def _one_by_one(operations: Sequence[Any]) -> list[Any]:
    """gloo cannot coalesce."""
    return [one.op(one.tensor, one.peer, one.group, one.tag) for one in operations]
