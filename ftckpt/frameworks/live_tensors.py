"""Detection, at each step boundary, of tensors whose memory has moved since it was described."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, compress
from operator import attrgetter, is_, methodcaller, not_
from typing import Any, NamedTuple

import numpy as np
import torch

from ftckpt.errors import CaptureError

Named = Callable[[], Iterator[tuple[str, object, torch.Tensor]]]
"""Yields all live tensors as (kind, name, tensor)."""

_TABLES = attrgetter("_parameters", "_buffers", "_modules")
_values = methodcaller("values")


class Holders(NamedTuple):
    """Owners of tensors: module trees, torch-like optimizers, and tensors that neither owns."""

    modules: Sequence[torch.nn.Module] = ()
    optimizers: Sequence[Any] = ()
    others: Sequence[torch.Tensor] = ()


_Places = Mapping[tuple[str, object], int]
"""Addresses by (kind, name)."""
_ADD_BEFORE = (
    "a job cannot add tensors: add all of them to modules and optimizers before ftckpt is attached, with a learning "
    "rate of 0 for those trained later"
)


class LiveTensors:
    """The addresses of all tensors that copies read, which must not change while the job runs.

    A copy reads the described address. If a script or an optimizer has replaced a tensor, that memory is not state,
    and may be in use by other code.

    A fast comparison of all owned tensors detects that nothing has changed; otherwise addresses are compared by name.

    Args:
        tensors: yields all live tensors.
        holders: returns their owners; parameters in the groups of optimizers are checked as well.
        inside: the attribute in which a distributed tensor stores this rank's part, if it has that attribute.
    """

    def __init__(self, tensors: Named, holders: Callable[[], Holders], inside: str = "") -> None:
        self._tensors = tensors
        self._holders = holders
        self._inside = inside
        self._described: dict[tuple[str, object], int] = {}
        self._look: _Look | None = None

    def note(self) -> None:
        """Records the current addresses as the described ones."""
        if self._look is None:
            _registrations.enter()
            weakref.finalize(self, _registrations.leave)
        self._described = self._addresses()
        self._look = _Look(self._holders(), self._inside)

    def check(self, remedy: str) -> None:
        """Raises CaptureError, which ends in ``remedy``, if a tensor was replaced or added since ``note``."""
        if self._look is not None and self._look.same(self._holders()):
            return
        now = self._addresses()
        if now != self._described:
            moved = [key for key in {**self._described, **now} if now.get(key) != self._described.get(key)]
            raise CaptureError(self._moved(moved, now, remedy))
        self._look = _Look(self._holders(), self._inside)  # same memory, other owners

    def _moved(self, moved: list[tuple[str, object]], now: _Places, remedy: str) -> str:
        """The error message: the change and its remedy."""
        what, name = moved[0]
        which = f"{what} {name}" + (f" and {len(moved) - 1} more tensors were" if len(moved) > 1 else " was")
        how = "replaced"
        if not self._described.keys() & moved:
            how, remedy = "added", _ADD_BEFORE
        elif not now.keys() & moved:
            how = "removed"
        return f"{which} {how} after training began; {remedy}"

    def _addresses(self) -> dict[tuple[str, object], int]:
        """Addresses of all tensors with elements: an empty shard has no address."""
        named = chain(self._tensors(), self._in_groups())
        return {(what, name): tensor.data_ptr() for what, name, tensor in named if tensor.numel()}

    def _in_groups(self) -> Iterator[tuple[str, object, torch.Tensor]]:
        """Parameters of optimizers, named by number: masters have no names."""
        for index, optimizer in enumerate(self._holders().optimizers):
            owners = chain.from_iterable(group["params"] for group in optimizer.param_groups)
            for place, owner in enumerate(owners):
                memory = getattr(owner, self._inside, owner) if self._inside else owner
                yield "parameter of optimizer", (index, place), memory


class _Look:
    """The tensor objects of all owners and their addresses at one time.

    Both are compared: an owner may get another tensor, and a tensor another address (``tensor.data = other``). The
    loops run inside the interpreter's C code. Cache misses dominate the cost, so each object is visited once; torch's
    registration hooks report additions to modules.
    """

    def __init__(self, holders: Holders, inside: str) -> None:
        modules = [module for root in holders.modules for module in root.modules()]
        tables = (table for module in modules for table in _TABLES(module))
        # Empty tables are skipped: ``_registrations`` counts their first entries.
        self._tables = [table for table in tables if table]
        self._registered = _registrations.count
        self._held = self._held_now(holders)
        is_watched = [value is None or isinstance(value, (torch.Tensor, torch.nn.Module)) for value in self._held]
        # Numbers in an optimizer's state, such as step counts, are new objects after each step.
        self._is_watched = None if all(is_watched) else is_watched
        tensors = list({id(value): value for value in self._held if isinstance(value, torch.Tensor)}.values())
        self._inside = attrgetter(inside) if inside else None
        is_inside = [bool(inside) and hasattr(tensor, inside) for tensor in tensors]
        self._apart = list(compress(tensors, is_inside))
        self._whole = list(compress(tensors, map(not_, is_inside)))
        self._addresses = self._addresses_now()

    def same(self, holders: Holders) -> bool:
        """Whether ``holders`` own the same tensors, at the same addresses."""
        if self._registered != _registrations.count or not self._same_held(self._held_now(holders)):
            return False
        return self._addresses_now() == self._addresses

    def _same_held(self, now: list[Any]) -> bool:
        if len(now) != len(self._held):
            return False
        if self._is_watched is None:
            return all(map(is_, now, self._held))
        watched = map(is_, compress(now, self._is_watched), compress(self._held, self._is_watched))
        numbers = compress(now, map(not_, self._is_watched))
        return all(watched) and not any(isinstance(value, torch.Tensor) for value in numbers)

    def _held_now(self, holders: Holders) -> list[Any]:
        states = [optimizer.state for optimizer in holders.optimizers]
        groups = [group["params"] for optimizer in holders.optimizers for group in optimizer.param_groups]
        of_owners = map(_values, chain.from_iterable(map(_values, states)))
        tables = map(_values, self._tables)
        return [*holders.modules, *chain.from_iterable(chain(tables, states, of_owners, groups)), *holders.others]

    def _addresses_now(self) -> bytes:
        apart = map(self._inside, self._apart) if self._inside is not None else ()
        # No list, not even a temporary one: each number would be an object, and a cache miss.
        return np.fromiter(map(torch.Tensor.data_ptr, chain(self._whole, apart)), np.uint64).tobytes()


class _Registrations:
    """A process-wide count of module tables that got their first entry, active between ``enter`` and ``leave``.

    Changes to other tables are detected by comparison. Counting every registration would not work: a module that
    counts in a buffer registers it in each forward.
    """

    def __init__(self) -> None:
        self.count = 0
        self._users = 0
        self._handles: list[Any] = []

    def enter(self) -> None:
        """Starts counting; calls nest."""
        self._users += 1
        if self._users == 1:
            self._handles = [register(partial(self._note, table)) for table, register in _REGISTER_HOOKS.items()]

    def leave(self) -> None:
        """Ends one ``enter``."""
        self._users -= 1
        while self._handles and not self._users:
            self._handles.pop().remove()

    def _note(self, table: str, module: torch.nn.Module, *_: Any) -> None:
        self.count += not getattr(module, table)  # torch calls this before the registration


_REGISTER_HOOKS = {
    "_parameters": torch.nn.modules.module.register_module_parameter_registration_hook,
    "_buffers": torch.nn.modules.module.register_module_buffer_registration_hook,
    "_modules": torch.nn.modules.module.register_module_module_registration_hook,
}
_registrations = _Registrations()
