"""Attributes of an optimizer, which no snapshot holds: what its steps change in them shows in their digests.

Only values whose whole content can be compared have a digest: numbers, texts, tensors, containers of these, and
code. Any other, such as a random generator, may change unnoticed, and is an error.
"""

from __future__ import annotations

import logging
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.device_mesh import DeviceMesh

from ftckpt.errors import UnsupportedError
from ftckpt.frameworks.optimizers import CODE, is_constant
from ftckpt.model.objects import encode
from ftckpt.torch.geometry import local

_MAX_DEPTH = 16
_PLAIN = frozenset((type(None), bool, int, float, str, bytes, bytearray))
_MAPPINGS = frozenset((dict, OrderedDict, defaultdict, types.MappingProxyType))
_SEQUENCES = frozenset((list, tuple, set, frozenset, deque, torch.Size))
_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format, Enum, complex, range, slice)
_HANDLES = (
    logging.Logger,
    torch.distributed.ProcessGroup,
    DeviceMesh,
    torch.jit.ScriptFunction,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    type(lru_cache(len)),
)
_OF_TORCH = frozenset(("_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_opt_called", "step"))
_STANDARD = frozenset(("defaults", "param_groups", "state")) | _OF_TORCH


class _OpaqueError(Exception):
    """A value that cannot be compared, and the steps to it, innermost first."""

    def __init__(self, value: object) -> None:
        kind = type(value)
        self.kind = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        self.steps: list[str] = []


def digests(optimizer: Any, known: set[int], kind: str) -> dict[str, int]:
    """Digests of the attributes except the state, of settings in the groups that are not saved, and of marks on
    parameters. ``known`` are the ids of parameters and state tensors. ``kind`` names the optimizer in errors.

    Raises:
        UnsupportedError: a value of an attribute or a group that cannot be compared.
    """
    found: dict[str, int] = {}
    for name, value in attributes(optimizer).items():
        found[f"attribute {name}"] = _digest(value, optimizer, known, kind, f"attribute {name}")
    found |= settings(optimizer, kind)
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            for name, value in vars(parameter).items():
                where = f"attribute {name} of parameter {index} in group {number}"
                try:
                    found[where] = _hash(_plain(value, optimizer, known))
                except _OpaqueError:  # such as a layer that it belongs to
                    continue
    return found


def attributes(optimizer: Any) -> Mapping[str, Any]:
    """The attributes that neither are saved nor belong to torch."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _STANDARD and not (name.startswith("_optimizer_") and name.endswith("_hooks"))
    }


def settings(optimizer: Any, kind: str) -> dict[str, int]:
    """Digests of the values in groups that are not saved with them.

    Raises:
        UnsupportedError: see ``digests``.
    """
    found = {}
    for number, group in enumerate(optimizer.param_groups):
        for name, value in ((name, value) for name, value in group.items() if name != "params"):
            where = f"setting {name} of group {number}"
            if isinstance(value, Enum):
                raise _refused(kind, where, _OpaqueError(value))
            digest = _digest(value, optimizer, set(), kind, where)
            if is_constant(value):
                found[where] = digest
    return found


def is_plain(value: Any) -> bool:
    """Whether a value is a constant that no step changes in place."""
    return type(value) in {type(None), bool, str, bytes} or isinstance(value, (*CODE, *_HANDLES, *_CONSTANTS))


def _digest(value: Any, optimizer: Any, known: set[int], kind: str, where: str) -> int:
    try:
        return _hash(_plain(value, optimizer, known))
    except _OpaqueError as error:
        raise _refused(kind, where, error) from None


def _hash(plain: Any) -> int:
    return xxhash.xxh3_64_intdigest(encode(plain))


def _refused(kind: str, where: str, error: _OpaqueError) -> UnsupportedError:
    return UnsupportedError(
        f"optimizer {kind} is not supported: its {where}{''.join(reversed(error.steps))} is of type {error.kind}, "
        "which a snapshot cannot hold: keep numbers, texts and tensors in its state or its groups"
    )


def _plain(value: Any, optimizer: Any, known: set[int], depth: int = _MAX_DEPTH) -> Any:
    """A value as ``encode`` takes it: code by its name, tensors in ``known`` by type."""
    if type(value) in _PLAIN:
        return value
    if any(value is one for one in (optimizer, optimizer.state, optimizer.param_groups)):
        return "optimizer"  # its state and its groups may be those of one that it wraps
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value, known)
    if isinstance(value, _CONSTANTS):
        return [type(value).__qualname__, repr(value)]
    if isinstance(value, (np.generic, np.ndarray)):
        if value.dtype.kind not in "biufc" or type(value) not in {np.ndarray, value.dtype.type}:
            raise _OpaqueError(value)
        return value
    if isinstance(value, np.dtype):
        return str(value)
    if isinstance(value, _HANDLES):
        return type(value).__name__
    inner: Callable[[Any], Any] = partial(_plain, optimizer=optimizer, known=known, depth=depth - 1)
    if isinstance(value, CODE):
        return _plain_code(value, inner)
    if not depth:
        raise _OpaqueError(value)
    parts = [[_try(inner, key, " key"), _try(inner, item, step)] for step, key, item in _parts(value)]
    return [type(value).__qualname__, parts]


def _plain_tensor(value: torch.Tensor, known: set[int]) -> Any:
    if id(value) in known:
        return type(value).__name__
    mine = local(value.detach())
    if type(mine) not in {torch.Tensor, torch.nn.Parameter} or mine.is_quantized:
        raise _OpaqueError(mine)
    plain = mine.to_dense() if mine.layout != torch.strided else mine
    return [str(plain.dtype), plain.as_subclass(torch.Tensor)]


def _plain_code(value: Any, inner: Callable[[Any], Any]) -> Any:
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    owner = getattr(value, "__self__", None)
    if isinstance(owner, (type, types.ModuleType)):
        owner = None
    cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if _is_filled(cell)]
    return [name, inner(owner), [cell for cell in cells if type(cell) in _PLAIN]]


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _try(inner: Callable[[Any], Any], value: Any, step: str) -> Any:
    try:
        return inner(value)
    except _OpaqueError as error:
        error.steps.append(step)
        raise


def _parts(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """The parts of a container, or of an object of a class in Python that has nothing besides its attributes."""
    kind = type(value)
    if kind in _MAPPINGS:
        yield from ((f"[{key!r:.40}]", key, item) for key, item in list(value.items()))
        if kind is defaultdict:
            yield "", "default_factory", value.default_factory
    elif kind in _SEQUENCES or (isinstance(value, tuple) and hasattr(value, "_fields")):
        yield from ((f"[{index}]", index, item) for index, item in enumerate(value))
    elif kind is partial:
        yield from ((f".{name}", name, getattr(value, name)) for name in ("func", "args", "keywords"))
    elif _is_transparent(value):
        yield from ((f".{name}", name, item) for name, item in list(vars(value).items()))
    else:
        raise _OpaqueError(value)


def _is_transparent(value: Any) -> bool:
    # No memory of a base in C, and no slots.
    return hasattr(value, "__dict__") and type(value).__basicsize__ <= _Bare.__basicsize__ and not callable(value)


class _Bare:
    """An object of attributes only."""
