"""Attributes of an optimizer and its class, which no snapshot holds: a change in them shows in their digests.

Only values whose whole content can be compared have a digest: numbers, texts, tensors, containers of these, and
code. Any other, such as a random generator, may change unnoticed, and is an error for an optimizer that is not
torch's own.
"""

from __future__ import annotations

import logging
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from enum import Enum
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from ftckpt.errors import UnsupportedError
from ftckpt.frameworks.optimizers import CODE, is_constant
from ftckpt.model.objects import encode
from ftckpt.torch.geometry import local

_MAX_DEPTH, _MAX_PARTS = 16, 10_000
_PLAIN = frozenset((type(None), bool, int, float, str, bytes, bytearray))
_MAPPINGS = frozenset((dict, OrderedDict, defaultdict, types.MappingProxyType))
_SEQUENCES = frozenset((list, tuple, deque, torch.Size))
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
_OF_TORCH = frozenset((
    "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused",
    "_opt_called", "step",
))  # fmt: skip
_STANDARD = frozenset(("defaults", "param_groups", "state")) | _OF_TORCH

Path = tuple[Hashable, ...]
"""The keys and indices that lead to a value in nested dicts, lists and tuples."""
_digested: Any = WeakIdKeyDictionary()
"""Tensors of attributes: address and number of writes, and the digest of the content then."""


class _OpaqueError(Exception):
    """A value that cannot be compared, and the steps to it, innermost first."""

    def __init__(self, value: object) -> None:
        kind = type(value)
        self.kind = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        self.steps: list[str] = []


def parameters_of(optimizer: Any) -> list[torch.nn.Parameter]:
    """All parameters in the optimizer's groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields the values in nested dicts, lists and tuples."""
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        yield path, value
        return
    for key, inner in items:
        yield from leaves(inner, (*path, key))


def digests(optimizer: Any, kind: str) -> dict[str, int]:
    """Digests of all that the optimizer can change and no snapshot holds: see ``watched``, and marks on parameters.

    ``kind`` names the optimizer in errors.

    Raises:
        UnsupportedError: a value of an attribute or a group that cannot be compared.
    """
    found = watched(optimizer, kind) | settings(optimizer, kind)
    for index, parameter in enumerate(parameters_of(optimizer)):
        for name, value in vars(parameter).items():
            # None for others, such as a layer that it belongs to.
            found[f"attribute {name} of parameter {index}"] = _digest(value, _Context(optimizer, is_read=True))
    return found


def watched(optimizer: Any, kind: str = "") -> dict[str, Any]:
    """Digests of the attributes of an optimizer and its class, and of settings of groups that are not saved.

    Without ``kind`` the digest of a value that cannot be compared is None, and takes microseconds: few attributes are
    not torch's, and a tensor is read again only after torch has counted a write.

    Raises:
        UnsupportedError: see ``digests``.
    """
    found, context = {}, _Context(optimizer, bool(kind))
    own = {**_of_class(type(optimizer)), **attributes(optimizer)}
    if not type(optimizer).__module__.startswith(
        "torch."
    ):  # torch's never write theirs, but a script's lr may be there
        own["defaults"] = vars(optimizer).get("defaults")
    for name, value in own.items():
        where = f"attribute {name}"
        found[where] = _digest(value, context, kind, where)
    for number, group in enumerate(() if kind else optimizer.param_groups):
        for name in (name for name, value in group.items() if is_constant(value)):
            found[f"setting {name} of group {number}"] = _digest(group[name], context)
    return found


def _of_class(kind: type) -> dict[str, Any]:
    """Attributes of classes that are not torch's, except code."""
    return {
        name: value
        for one in reversed(kind.__mro__)
        if not f"{one.__module__}.".startswith(("torch.", "builtins.", "abc."))
        for name, value in vars(one).items()
        if not name.startswith(("__", "_abc_")) and not hasattr(value, "__get__") and not isinstance(value, CODE)
    }


class _Context:
    """The optimizer of a value: its parameters, its state and its groups are not compared.

    ``is_read``: all tensors are read, not only those that torch has counted a write of.
    """

    def __init__(self, optimizer: Any, is_read: bool) -> None:
        self._optimizer, self.is_read = optimizer, is_read
        self._known: set[int] | None = None
        self.num_left = _MAX_PARTS
        """Containers and objects that may still be compared: others have cycles, or are most of the script."""

    def is_own(self, value: Any) -> bool:
        """Whether it is the optimizer, its state or its groups, which may be those of one that it wraps."""
        return any(value is one for one in (self._optimizer, self._optimizer.state, self._optimizer.param_groups))

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether it is a parameter, or in the state or a group."""
        if self._known is None:
            held = chain(self._optimizer.state.values(), self._optimizer.param_groups)
            self._known = {id(leaf) for one in held for _, leaf in leaves(one)}
        return id(tensor) in self._known


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
            digest = _digest(value, _Context(optimizer, is_read=True), kind, where)
            if digest is not None and is_constant(value):
                found[where] = digest
    return found


def is_plain(value: Any) -> bool:
    """Whether a value is a constant that no step changes in place."""
    return type(value) in {type(None), bool, str, bytes} or isinstance(value, (*CODE, *_HANDLES, *_CONSTANTS))


def _digest(value: Any, context: _Context, kind: str = "", where: str = "") -> int | None:
    """The digest of a value; None if it cannot be compared, which is an error if ``kind`` is given."""
    try:
        return _hash(_plain(value, context))
    except _OpaqueError as error:
        if kind:
            raise _refused(kind, where, error) from None
        return None


def _hash(plain: Any) -> int:
    return xxhash.xxh3_64_intdigest(encode(plain))


def _refused(kind: str, where: str, error: _OpaqueError) -> UnsupportedError:
    return UnsupportedError(
        f"optimizer {kind} is not supported: its {where}{''.join(reversed(error.steps))} is of type {error.kind}, "
        "which a snapshot cannot hold: keep numbers, texts and tensors in its state or its groups"
    )


def _plain(value: Any, context: _Context, depth: int = _MAX_DEPTH) -> Any:
    """A value as ``encode`` takes it: code by its name, parameters and tensors of the state by type."""
    if type(value) in _PLAIN:
        return value
    if context.is_own(value):
        return "optimizer"
    if isinstance(value, torch.Tensor):
        return type(value).__name__ if context.knows(value) else _plain_tensor(value, context.is_read)
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
    inner: Callable[[Any], Any] = partial(_plain, context=context, depth=depth - 1)
    if isinstance(value, CODE):
        return _plain_code(value, inner)
    context.num_left -= 1
    if not depth or context.num_left < 0:
        raise _OpaqueError(value)
    parts = [[_try(inner, key, " key"), _try(inner, item, step)] for step, key, item in _parts(value)]
    return [type(value).__qualname__, parts]


def _plain_tensor(value: torch.Tensor, is_read: bool) -> Any:
    mine = local(value.detach())
    if type(mine) not in {torch.Tensor, torch.nn.Parameter} or mine.is_quantized:
        raise _OpaqueError(mine)
    writes = mine.data_ptr() if mine.layout == torch.strided else 0, mine._version
    if is_read or _digested.get(value, ((), 0))[0] != writes:
        plain = mine.to_dense() if mine.layout != torch.strided else mine
        _digested[value] = writes, _hash([str(plain.dtype), plain.as_subclass(torch.Tensor)])
    return _digested[value][1]


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
    elif kind in {set, frozenset}:
        yield from (("", None, item) for item in sorted(value, key=repr))
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
