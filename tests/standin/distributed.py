"""`torch.distributed` over gloo, for code that was written for NCCL."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# Deeper than any schedule leaves sends unfinished.
_MAX_PENDING_SENDS = 64
_pending_sends: deque[Any] = deque()


def install_distributed() -> None:
    collectives = (_barrier, _isend, _all_to_all_single, _all_gather, _reduce_scatter)
    for stand_in in (_init_process_group, _new_group, *collectives):
        name = stand_in.__name__[1:]
        setattr(c10d, name, _over(getattr(c10d, name), stand_in))
        setattr(dist, name, getattr(c10d, name))
    # The coalescing manager compares with c10d's own name for it, which stays as it is.
    dist.all_reduce = _over(dist.all_reduce, _all_reduce)


def _over(original: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """``stand_in``, which gets the original function first."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return stand_in(original, *args, **kwargs)

    return call


def _backend(name: str | None) -> str | None:
    """gloo for anything that names nccl, such as "nccl" or "cpu:gloo,cuda:nccl"."""
    return "gloo" if name is not None and "nccl" in name else name


def _init_process_group(original: Callable[..., Any], backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    # Options (streams, channels) and the device are NCCL's, here and below.
    kwargs.pop("device_id", None)
    kwargs.pop("pg_options", None)
    original(_backend(backend) or "gloo", *args, **kwargs)


def _new_group(
    original: Callable[..., Any],
    ranks: Any = None,
    timeout: Any = None,
    backend: str | None = None,
    pg_options: Any = None,
    **kwargs: Any,
) -> Any:
    kwargs.pop("device_id", None)
    return original(ranks, timeout, _backend(backend), None, **kwargs)


def _barrier(original: Callable[..., Any], group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    return original(group, async_op)


def _isend(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A send that outlives its tensor, as one on a CUDA stream does.

    The pipeline schedules free the storage of a tensor (`tensor.data = ...`) and forget the handle while
    the send may be under way: an alias keeps the storage, and the queue keeps the handle.
    """
    alias = tensor.detach()
    send = _Send(original(alias, *args, **kwargs), alias)
    _pending_sends.append(send)
    if len(_pending_sends) > _MAX_PENDING_SENDS:
        _pending_sends.popleft()
    return send


class _Send:
    """A send and its tensor, which is released once somebody has waited for it."""

    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self, *args: Any) -> Any:
        result = self._work.wait(*args)
        with contextlib.suppress(ValueError):  # no longer among the latest
            _pending_sends.remove(self)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _all_to_all_single(
    original: Callable[..., Any],
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    **kwargs: Any,
) -> Any:
    """Megatron's MoE copies split sizes from the device into lists, but leaves CPU tensors alone."""
    sizes = (s.tolist() if isinstance(s, torch.Tensor) else s for s in (output_split_sizes, input_split_sizes))
    return original(output, input, *sizes, **kwargs)


def _even(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.shape == tensors[0].shape for tensor in tensors)


def _all_gather(
    original: Callable[..., Any], tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None,
    async_op: bool = False,
) -> Any:  # fmt: skip
    """With parts of different sizes, which NCCL also turns into broadcasts (experts with TP)."""
    if async_op or _even(tensor_list):
        return original(tensor_list, tensor, group, async_op)
    tensor_list[dist.get_rank(group)].copy_(tensor)
    for rank, part in zip(dist.get_process_group_ranks(group), tensor_list, strict=True):
        dist.broadcast(part, rank, group=group)
    return None


def _reduce_scatter(  # noqa: PLR0917 - as the real one
    original: Callable[..., Any], output: torch.Tensor, input_list: list[torch.Tensor], op: Any = dist.ReduceOp.SUM,
    group: Any = None, async_op: bool = False,
) -> Any:  # fmt: skip
    if async_op or _even(input_list):
        return original(output, input_list, op, group, async_op)
    for rank, part in zip(dist.get_process_group_ranks(group), input_list, strict=True):
        # A reduction leaves rubbish in the other ranks' buffers.
        total = part.contiguous().clone()
        dist.reduce(total, rank, op, group=group)
        if rank == dist.get_rank():
            output.copy_(total)
    return None


def _all_reduce(
    original: Callable[..., Any], tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None,
    async_op: bool = False,
) -> Any:  # fmt: skip
    """gloo has no average: dividing first also serves asynchronous and coalesced calls."""
    if op == dist.ReduceOp.AVG:
        tensor.div_(dist.get_world_size(group))
        op = dist.ReduceOp.SUM
    return original(tensor, op, group, async_op)
