"""Megatron's optimizers as pieces: masters, moments and steps, with the parameters they came from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer

from ftckpt.errors import UnsupportedError
from ftckpt.megatron.geometry import Placed, dtype_name, fragments
from ftckpt.state.fragment import Box, Fragment
from ftckpt.state.piece import Piece

Places = Mapping[torch.nn.Parameter, Sequence[Placed]]


@dataclass(frozen=True)
class Optimized:
    """What an optimizer steps: elements ``first`` and on of ``parameter``.

    ``owner`` is the tensor under which the inner optimizer keeps its state: a master, or the parameter's
    own memory. ``weight`` is the part of the parameter that this rank may read.
    """

    parameter: torch.nn.Parameter
    first: int
    owner: torch.Tensor
    weight: torch.Tensor


def leaf_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers in a chain that step something, in order.

    Raises:
        UnsupportedError: an optimizer that ftckpt does not know.
    """
    chain = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    leaves = [leaf for leaf in chain if not getattr(leaf, "is_stub_optimizer", False)]
    for leaf in leaves:
        if type(leaf) not in _READERS:
            known = ", ".join(kind.__name__ for kind in _READERS)
            raise UnsupportedError(f"optimizer {type(leaf).__name__} is not known; known are {known}")
        if getattr(getattr(leaf, "ddp_config", None), "use_megatron_fsdp", False):
            raise UnsupportedError("Megatron-FSDP shards state in a way that ftckpt does not know yet")
    return leaves


def pieces(leaf: Any, places: Places) -> Iterator[Piece]:
    """Every tensor that one optimizer steps, weights included.

    Raises:
        UnsupportedError: state that is neither per element nor a single number, with its parameter.
    """
    materialise(leaf)
    for item in _READERS[type(leaf)](leaf):
        placed = places.get(item.parameter)
        if placed is None:
            raise UnsupportedError("the optimizer steps a parameter that is in none of the model's chunks")
        has_master = item.owner.data_ptr() != item.weight.data_ptr()
        weights = fragments(placed, "weight", item.weight, item.first)
        if not has_master:
            yield from (Piece(fragment, view) for fragment, view in weights)
        else:
            masters = fragments(placed, "master", item.owner, item.first)
            for (weight, live), (master, source) in zip(weights, masters, strict=True):
                yield Piece(weight, live, derived_from=source)
                yield Piece(master, source)
        yield from _moments(leaf.optimizer.state[item.owner], placed, item)


def stepped_parameters(leaf: Any) -> set[torch.nn.Parameter]:
    """Parameters that the optimizer steps on some rank: under a distributed one, not only the owned."""
    if isinstance(leaf, DistributedOptimizer):
        return {parameter for buffer in leaf.buffers for parameter in buffer.params}
    return {item.parameter for item in _READERS[type(leaf)](leaf)}


def _moments(state: Mapping[str, Any], placed: Sequence[Placed], item: Optimized) -> Iterator[Piece]:
    for name, value in state.items():
        if value is None:
            continue
        if not isinstance(value, torch.Tensor) or not value.is_contiguous():
            raise UnsupportedError(f"optimizer state {name} of {placed[0].key} is not a contiguous tensor")
        if value.numel() == item.owner.numel() and value.dim() == item.owner.dim():
            for fragment, view in fragments(placed, name, value, item.first):
                yield Piece(fragment, view)
        elif value.numel() == 1:
            place = ",".join(map(str, placed[0].box.offset))  # experts of a layer share a key
            key = f"{name}/{placed[0].key}[{place}]"
            whole = Fragment.whole(key, dtype_name(value, key), (1,), Box((0,), (1,)))
            yield Piece(whole, value.detach().view(1))
        else:
            raise UnsupportedError(
                f"optimizer state {name} of {placed[0].key} has {value.numel()} elements for a parameter of "
                f"{item.owner.numel()}: neither per element nor a single number"
            )


def _read_distributed(leaf: DistributedOptimizer) -> Iterator[Optimized]:
    """Only the owned range of a parameter is read: with overlapped gathers the rest is stale."""
    for models, shards, masters in zip(
        leaf.model_float16_groups, leaf.shard_float16_groups, leaf.shard_fp32_from_float16_groups, strict=True
    ):
        for parameter, shard, master in zip(models, shards, masters, strict=True):
            if shard is None:
                raise UnsupportedError("FP8 parameters under the distributed optimizer are not known yet")
            first = leaf._get_model_param_range_map(parameter)["param"].start
            yield Optimized(parameter, first, shard if master is None else master, shard)
    for models, shards in zip(leaf.model_fp32_groups, leaf.shard_fp32_groups, strict=True):
        for parameter, shard in zip(models, shards, strict=True):
            first = leaf._get_model_param_range_map(parameter)["param"].start
            yield Optimized(parameter, first, shard, shard)


def _read_float16(leaf: Float16OptimizerWithFloat16Params) -> Iterator[Optimized]:
    for models, masters in zip(leaf.float16_groups, leaf.fp32_from_float16_groups, strict=True):
        for parameter, master in zip(models, masters, strict=True):
            yield Optimized(parameter, 0, master, parameter)
    for parameter in (parameter for group in leaf.fp32_from_fp32_groups for parameter in group):
        yield Optimized(parameter, 0, parameter, parameter)


def _read_fp32(leaf: FP32Optimizer) -> Iterator[Optimized]:
    for group in leaf.optimizer.param_groups:
        for parameter in group["params"]:
            yield Optimized(parameter, 0, parameter, parameter)


_READERS: dict[type, Callable[[Any], Iterator[Optimized]]] = {
    DistributedOptimizer: _read_distributed,
    Float16OptimizerWithFloat16Params: _read_float16,
    FP32Optimizer: _read_fp32,
}


def materialise(leaf: Any) -> None:
    """Let the inner optimizer create the state that it would create in its first step.

    Raises:
        UnsupportedError: an inner optimizer that ftckpt does not know.
    """
    inner = leaf.optimizer
    missing = [p for group in inner.param_groups for p in group["params"] if not inner.state.get(p)]
    if not missing:
        return
    name = f"{type(inner).__module__}.{type(inner).__qualname__}"
    if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
        _materialise_adam(inner)
    elif isinstance(inner, torch.optim.SGD):
        _materialise_sgd(inner, missing)
    elif name.startswith(("transformer_engine.", "apex.optimizers.")) and name.endswith(".FusedAdam"):
        leaf.init_state_fn(inner, leaf.config)
    else:
        raise UnsupportedError(f"inner optimizer {name} is not known; known are Adam, AdamW, SGD and FusedAdam")


def _materialise_adam(inner: Any) -> None:
    """``Adam._init_group`` creates state for parameters that have a gradient; any tensor will do as one."""
    lists = len(inspect.signature(inner._init_group).parameters) - 1
    for group in inner.param_groups:
        before = [(p, p.grad) for p in group["params"]]
        for parameter, _ in before:
            parameter.grad = parameter.detach()
        try:
            inner._init_group(group, *([] for _ in range(lists)))
        finally:
            for parameter, grad in before:
                parameter.grad = grad


def _materialise_sgd(inner: Any, missing: Sequence[torch.Tensor]) -> None:
    """A momentum of zeros gives the first step that no momentum gives, unless it is dampened."""
    for group in inner.param_groups:
        if group["momentum"] and group["dampening"]:
            raise UnsupportedError("SGD with dampening creates its momentum in the first step; use dampening 0")
        for parameter in group["params"]:
            if group["momentum"] and any(parameter is other for other in missing):
                inner.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def save_hyperparameters(leaf: Any) -> dict[str, Any]:
    """Learning rates, weight decays and a fused optimizer's ``step``, and the loss scaler."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in leaf.optimizer.param_groups]
    scaler = getattr(leaf, "grad_scaler", None)
    return {"groups": groups, "scaler": scaler.state_dict() if scaler else None}


def load_hyperparameters(leaf: Any, saved: Mapping[str, Any]) -> None:
    """Inverse of ``save_hyperparameters``, in place."""
    for group, values in zip(leaf.optimizer.param_groups, saved["groups"], strict=True):
        for name, value in values.items():
            if isinstance(group.get(name), torch.Tensor):
                group[name].copy_(value)
            else:
                group[name] = value
    if saved["scaler"] is not None:
        leaf.grad_scaler.load_state_dict(saved["scaler"])


def addresses(leaf: Any) -> Iterator[int]:
    """Where the inner optimizer's state lies: it must not move during a job."""
    for state in leaf.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield value.data_ptr()
