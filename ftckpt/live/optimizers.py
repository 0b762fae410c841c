"""Optimizers of torch's kind as pieces: what they step, its masters and its moments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ftckpt.errors import UnsupportedError
from ftckpt.live.tensors import Placed, fragments, number_piece
from ftckpt.state.piece import Piece


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


def stepped_pieces(placed: Sequence[Placed], item: Optimized, state: Mapping[str, Any]) -> Iterator[Piece]:
    """Weight, master where there is one, and moments; ``state`` is what the inner optimizer keeps for the owner.

    Raises:
        UnsupportedError: state that is neither per element nor a single number, with its parameter.
    """
    weights = fragments(placed, "weight", item.weight, item.first)
    if item.owner.data_ptr() == item.weight.data_ptr():
        yield from (Piece(fragment, view) for fragment, view in weights)
    else:
        masters = fragments(placed, "master", item.owner, item.first)
        for (weight, live), (master, source) in zip(weights, masters, strict=True):
            yield Piece(weight, live, derived_from=source)
            yield Piece(master, source)
    for name, value in state.items():
        if value is not None:
            yield from _moment(placed, item, name, value)


def _moment(placed: Sequence[Placed], item: Optimized, name: str, value: Any) -> Iterator[Piece]:
    key = placed[0].key
    if not isinstance(value, torch.Tensor) or not value.is_contiguous():
        raise UnsupportedError(f"optimizer state {name} of {key} is not a contiguous tensor")
    if value.numel() == item.owner.numel() and value.dim() == item.owner.dim():
        yield from (Piece(fragment, view) for fragment, view in fragments(placed, name, value, item.first))
    elif value.numel() == 1:
        yield number_piece(placed[0], name, value)
    else:
        raise UnsupportedError(
            f"optimizer state {name} of {key} has {value.numel()} elements for a parameter of "
            f"{item.owner.numel()}: neither per element nor a single number"
        )


def without_state(inner: Any) -> list[torch.Tensor]:
    """Parameters for which the optimizer has no state yet, because it has not stepped them."""
    return [p for group in inner.param_groups for p in group["params"] if not inner.state.get(p)]


def materialise(inner: Any) -> None:
    """Let torch's Adam, AdamW or SGD create the state that it would create in its first step.

    Raises:
        UnsupportedError: an optimizer that ftckpt does not know.
    """
    if not isinstance(inner, (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)):
        name = f"{type(inner).__module__}.{type(inner).__qualname__}"
        raise UnsupportedError(f"inner optimizer {name} is not known; known are Adam, AdamW, SGD and FusedAdam")
    _part_numbers(inner)
    missing = without_state(inner)
    if missing and isinstance(inner, torch.optim.SGD):
        _materialise_sgd(inner, missing)
    elif missing:
        _materialise_adam(inner)


def _part_numbers(inner: Any) -> None:
    """Loading a checkpoint can leave all parameters one ``step`` between them, which each would count up."""
    seen: set[int] = set()
    for state in inner.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1 and value.data_ptr():  # a DTensor has none
                if value.data_ptr() in seen:
                    value = state[name] = value.clone()  # noqa: PLW2901
                seen.add(value.data_ptr())


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


def save_groups(inner: Any) -> list[dict[str, Any]]:
    """All of each group but its parameters: learning rate, weight decay, a fused optimizer's ``step``."""
    return [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]


def load_groups(inner: Any, saved: Sequence[Mapping[str, Any]]) -> None:
    """Inverse of ``save_groups``, in place."""
    for group, values in zip(inner.param_groups, saved, strict=True):
        load_group(group, values)


def load_group(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set hyperparameters of one group, tensors in place."""
    for name, value in values.items():
        if isinstance(group.get(name), torch.Tensor):
            group[name].copy_(value)
        else:
            group[name] = value


def addresses(inner: Any) -> Iterator[int]:
    """Where the optimizer's state lies: it must not move during a job."""
    for state in inner.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield value.data_ptr()
