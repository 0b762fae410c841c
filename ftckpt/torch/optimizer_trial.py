"""A trial of an optimizer on copies of its parameters: forecasts its state, and proves that a restore is exact.

The trial ends when a step creates nothing more. Each step minimizes another quadratic function, so that an optimizer
that remembers gradients fills its memory. After the first step and at the end a fresh copy gets what a snapshot would
hold, and both take the same steps: a difference is state in other places.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ftckpt.errors import UnsupportedError
from ftckpt.frameworks import optimizers
from ftckpt.frameworks.tensors import as_real
from ftckpt.frameworks.torch_state import load_generators, save_generators
from ftckpt.model.objects import encode
from ftckpt.torch.geometry import local
from ftckpt.torch.optimizer_attributes import Path, digests, leaves, parameters_of, watched

_MIN_STEPS, _MAX_STEPS = 4, 256


def try_out(optimizer: Any, kind: str) -> tuple[dict[Any, Any], dict[str, Any]]:
    """The state that the optimizer has after its first steps, by parameter or name, with values of the trial; and its
    ``watched`` attributes then.

    Needs memory for two copies of the parameters and the state, and for gradients. Changes neither parameters,
    optimizer nor generators. ``kind`` names the optimizer in errors.

    Raises:
        UnsupportedError: it cannot step a copy, its state grows without end, or it has state in other places.
    """
    generators = save_generators()
    try:
        try:
            return _proven(optimizer, kind, is_sparse=False)
        except _StepError as error:
            try:
                return _proven(optimizer, kind, is_sparse=True)  # of embeddings with sparse gradients
            except _StepError:
                raise UnsupportedError(
                    f"optimizer {kind} is not supported: a trial step on copies of its parameters, which shows its "
                    f"state before training, fails with {error}"
                ) from error
    finally:
        load_generators(generators)


class _StepError(Exception):
    """A trial step failed."""


def _proven(optimizer: Any, kind: str, is_sparse: bool) -> tuple[dict[Any, Any], dict[str, Any]]:
    first = _Trial(optimizer, kind, is_sparse)
    for advance in (first.step, first.settle):  # a list that is shared may only differ while it grows
        advance()
        again = _Trial(optimizer, kind, is_sparse)
        again.restore(first)
        generators = save_generators()
        for trial in (first, again):
            load_generators(generators)
            for _ in range(_MIN_STEPS):
                trial.step()
        first.compare(again)
    return first.forecast()


class _Trial:
    def __init__(self, optimizer: Any, kind: str, is_sparse: bool) -> None:
        self._kind, self._is_sparse = kind, is_sparse
        digests(optimizer, kind)  # first: not all that is refused can be copied
        try:
            self._copy = _copied(optimizer, kind)
        except UnsupportedError:
            raise
        except Exception as error:  # attributes of a third party may raise anything
            raise _StepError(f"{type(error).__name__}: {error}") from error
        self._parameters, self._originals = parameters_of(self._copy), parameters_of(optimizer)
        self._num_steps = 0
        self._before: Sequence[torch.Tensor] = ()
        self._attributes: Mapping[str, Any] = {}

    def settle(self) -> None:
        """Steps until a step creates no more state."""
        before: Mapping[str, Any] = {}
        while self._num_steps < _MAX_STEPS:
            self.step()
            now = {
                name: (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else None
                for name, leaf in self._leaves()
            }
            if now == before and self._num_steps > _MIN_STEPS:
                break
            before = now
        else:
            raise UnsupportedError(
                f"optimizer {self._kind} is not supported: its state still grows after {_MAX_STEPS} steps, so a "
                "snapshot has no fixed size"
            )

    def step(self) -> None:
        """Steps the copy, and checks that no step but the first has changed what no snapshot holds."""
        self._num_steps += 1
        self._loss()
        try:
            closure = inspect.signature(self._copy.step).parameters.get("closure")
            if closure is not None and closure.default is inspect.Parameter.empty:
                if any(isinstance(parameter, DTensor) for parameter in self._parameters):
                    raise ValueError("ranks with shards may evaluate its closure at different times")
                self._before = [parameter.detach().clone() for parameter in self._parameters]
                self._copy.step(self._closure)
            else:
                self._copy.step()
        except UnsupportedError:
            raise
        except Exception as error:  # see above
            raise _StepError(f"{type(error).__name__}: {error}") from error
        for parameter in self._parameters:
            parameter.grad = None  # frees its memory
        now = digests(self._copy, self._kind)
        before = self._attributes or now
        if changed := sorted(name for name in {**before, **now} if now.get(name) != before.get(name)):
            raise UnsupportedError(
                f"optimizer {self._kind} is not supported: its step changes its {changed[0]}, and only its state and "
                "parameter groups are saved"
            )
        self._attributes = now

    def restore(self, other: _Trial) -> None:
        """Loads what a snapshot of ``other`` would hold.

        The learning rate of both changes, as a scheduler's would have: an attribute may hold the first one.
        """
        for group in other._copy.param_groups:
            if isinstance(group.get("lr"), float):
                group["lr"] /= 2
        self._num_steps, owners = other._num_steps, dict(zip(other._parameters, self._parameters, strict=True))
        optimizers.load_groups(self._copy, copy.deepcopy(optimizers.save_groups(other._copy)))
        self._copy.state.clear()
        for owner, state in other._copy.state.items():
            if state != {}:
                self._copy.state[owners.get(owner, owner)] = _restored(state)
        with torch.no_grad():
            for parameter, value in zip(self._parameters, other._parameters, strict=True):
                parameter.copy_(value)

    def compare(self, other: _Trial) -> None:
        """Raises UnsupportedError if the same steps have led to another result in ``other``."""
        mine, theirs = (
            {**one._attributes, **dict(one._leaves()), "settings": optimizers.save_groups(one._copy)}
            for one in (self, other)
        )
        for name in {**mine, **theirs}:
            if not _same(mine.get(name), theirs.get(name)):
                raise UnsupportedError(
                    f"optimizer {self._kind} is not supported: after a restore its steps lead to another {name}: its "
                    "state and parameter groups, which alone are saved, are not all that it has"
                )

    def forecast(self) -> tuple[dict[Any, Any], dict[str, Any]]:
        """The result of ``try_out``."""
        owners = dict(zip(self._parameters, self._originals, strict=True))
        return {owners.get(owner, owner): state for owner, state in self._copy.state.items()}, watched(self._copy)

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        """The parameters and the values in the state, by name."""
        names = {parameter: f"parameter {index}" for index, parameter in enumerate(self._parameters)}
        yield from ((name, parameter) for parameter, name in names.items())
        for owner, state in self._copy.state.items():
            yield from ((f"{as_text(path)} of {names.get(owner, owner)}", leaf) for path, leaf in leaves(state))

    def _closure(self) -> torch.Tensor:
        # The fence of a step with a closure follows the first call.
        if not all(map(torch.equal, self._parameters, self._before)):
            raise UnsupportedError(
                f"optimizer {self._kind} is not supported: its step writes parameters before it calls its closure"
            )
        self._before = self._parameters
        return self._loss()

    def _loss(self) -> torch.Tensor:
        """A convex function whose minimum depends on the step; sets its gradients."""
        total = torch.zeros(())
        for parameter, original in zip(self._parameters, self._originals, strict=True):
            here, start = (as_real(local(one.detach())).reshape(-1) for one in (parameter, original))
            index = torch.arange(len(here), device=here.device)
            target = start + torch.sin(index + self._num_steps).to(here.dtype)
            curvature = 1 + (index % 7).to(here.dtype)
            parameter.grad = parameter.detach().clone()
            as_real(local(parameter.grad)).view(-1).copy_(curvature * (here - target))
            total += (curvature * (here - target).square()).sum().cpu() / 2
            if self._is_sparse:
                parameter.grad = parameter.grad.to_sparse(1)
        return total


def _restored(value: Any) -> Any:
    """A value of the state as a restore creates it: see ``OptimizerState``."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return type(value)({key: _restored(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(map(_restored, value))
    return value.copy() if isinstance(value, np.ndarray) else value


def _same(one: Any, other: Any) -> bool:
    """Whether two values have the same bits."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(encode(one) == encode(other))
    mine, theirs = (as_real(local(tensor.detach())).contiguous().view(-1) for tensor in (one, other))
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(
        mine.view(torch.uint8), theirs.view(torch.uint8)
    )


def _copied(optimizer: Any, kind: str) -> Any:
    """A copy of an optimizer that steps copies of its parameters, without hooks except those of its class.

    ``copy.deepcopy`` would lose all attributes but the state and the groups.
    """
    one = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): one}
    for parameter in parameters_of(optimizer):
        memo[id(parameter)] = torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    for parameter in parameters_of(optimizer):
        copied = memo[id(parameter)]
        vars(copied).update((name, _mark(value, memo)) for name, value in vars(parameter).items())
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step"}  # a scheduler's wrapper
    hooks = {name: OrderedDict[int, Any]() for name in attributes if name.endswith("_hooks")}
    for name in hooks.keys() & {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}:
        hooks[name].update((key, hook) for key, hook in attributes[name].items() if _is_own(hook, optimizer, kind))
    vars(one).update(copy.deepcopy({**attributes, **hooks}, memo))
    return one


def _mark(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of a mark on a parameter that the optimizer may read; the mark itself if it cannot be copied."""
    if isinstance(value, torch.nn.Module):
        return value
    try:
        return copy.deepcopy(value, memo)
    except (TypeError, RuntimeError, ValueError, AttributeError):  # such as a process group
        return value


def _is_own(hook: Any, optimizer: Any, kind: str) -> bool:
    """Whether the optimizer's class has registered a hook on its own steps; all others are the script's.

    Raises:
        UnsupportedError: it has, and the hook would not run on the copy.
    """
    name, module = (getattr(hook, of, "") or "" for of in ("__qualname__", "__module__"))
    classes = [one for one in type(optimizer).__mro__ if not one.__module__.startswith("torch.")]
    if not any((module, name.startswith(f"{one.__qualname__}.")) == (one.__module__, True) for one in classes):
        return False
    if getattr(hook, "__closure__", None) or getattr(hook, "__self__", optimizer) is not optimizer:
        raise UnsupportedError(
            f"optimizer {kind} is not supported: its step hook {name} refers to other objects, so that a trial step "
            "on copies of its parameters, which shows its state before training, cannot call it"
        )
    return True


def as_text(path: Path) -> str:
    """A path as part of a name."""
    return ".".join(map(str, path)) or "value"
