"""A trial of an optimizer on copies of its parameters: the state that its steps create, forecast before training.

The trial ends when a step creates nothing more. Each step minimizes another quadratic function, so that an optimizer
that remembers gradients fills its memory.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ftckpt.errors import UnsupportedError
from ftckpt.frameworks.tensors import as_real
from ftckpt.frameworks.torch_state import load_generators, save_generators
from ftckpt.torch.geometry import local
from ftckpt.torch.optimizer_attributes import digests

Path = tuple[Hashable, ...]
"""The keys and indices that lead to a value in nested dicts, lists and tuples."""

_MIN_STEPS, _MAX_STEPS = 4, 256


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


def parameters_of(optimizer: Any) -> list[torch.nn.Parameter]:
    """All parameters in the optimizer's groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def try_out(optimizer: Any, kind: str) -> dict[Any, Any]:
    """The state that the optimizer has after its first steps, by parameter or name; its values are the trial's.

    Needs memory for a copy of the parameters, their gradients and the state. Changes neither parameters, optimizer
    nor generators. ``kind`` names the optimizer in errors.

    Raises:
        UnsupportedError: it cannot step a copy, its state grows without end, or it has state in other places.
    """
    generators = save_generators()
    try:
        try:
            trial = _Trial(optimizer, kind, is_sparse=False)
        except _StepError as error:
            try:
                trial = _Trial(optimizer, kind, is_sparse=True)  # of embeddings with sparse gradients
            except _StepError:
                raise UnsupportedError(
                    f"optimizer {kind} is not supported: a trial step on copies of its parameters, which shows its "
                    f"state before training, fails with {error}"
                ) from error
    finally:
        load_generators(generators)
    return trial.state


class _StepError(Exception):
    """A trial step failed."""


class _Trial:
    def __init__(self, optimizer: Any, kind: str, is_sparse: bool) -> None:
        self._kind, self._is_sparse = kind, is_sparse
        known = {id(one) for one in parameters_of(optimizer)}
        known |= {id(leaf) for state in optimizer.state.values() for _, leaf in leaves(state)}
        digests(optimizer, known, kind)  # first: not all that is refused can be copied
        try:
            self._copy = _copied(optimizer, kind)
        except UnsupportedError:
            raise
        except Exception as error:  # attributes of a third party may raise anything
            raise _StepError(f"{type(error).__name__}: {error}") from error
        self._parameters, self._originals = parameters_of(self._copy), parameters_of(optimizer)
        self._num_steps = 0
        self._before: Sequence[torch.Tensor] = ()
        before, attributes = self._step()
        for _ in range(_MAX_STEPS):
            now, attributes_now = self._step()
            if changed := sorted(n for n in attributes_now if attributes_now[n] != attributes.get(n)):
                raise UnsupportedError(
                    f"optimizer {kind} is not supported: its step changes its {changed[0]}, and only its "
                    "state and parameter groups are saved"
                )
            if now == before and self._num_steps >= _MIN_STEPS:
                break
            before, attributes = now, attributes_now
        else:
            raise UnsupportedError(
                f"optimizer {kind} is not supported: its state still grows after {_MAX_STEPS} steps, so a snapshot "
                "has no fixed size"
            )
        self._refuse_aliases()
        owners = dict(zip(self._parameters, self._originals, strict=True))
        self.state = {owners.get(owner, owner): value for owner, value in self._copy.state.items()}

    def _step(self) -> tuple[Mapping[Any, Any], Mapping[str, int]]:
        """Steps the copy; returns the form of its state, and digests of its other attributes."""
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
        form = {
            (owner, *path): (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else None
            for owner, state in self._copy.state.items()
            for path, leaf in leaves(state)
        }
        return form, self._digests()

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

    def _refuse_aliases(self) -> None:
        """Raises UnsupportedError if two values share memory, because described memory cannot be shared."""
        spans = [_Span(local(parameter), "a parameter") for parameter in self._parameters]
        for owner, state in self._copy.state.items():
            for path, leaf in leaves(state):
                if isinstance(leaf, torch.Tensor) and local(leaf).numel():
                    spans.append(_Span(local(leaf), as_text(path) if isinstance(owner, torch.Tensor) else str(owner)))
        spans.sort(key=lambda span: span.begin)
        for one, other in itertools.pairwise(spans):
            if other.begin < one.end and (one.name, other.name) != ("a parameter",) * 2:  # tied ones may
                raise UnsupportedError(
                    f"optimizer {self._kind} is not supported: its state {other.name} shares memory with {one.name}"
                )

    def _digests(self) -> dict[str, int]:
        known = {id(one) for one in self._parameters}
        known |= {id(leaf) for state in self._copy.state.values() for _, leaf in leaves(state)}
        return digests(self._copy, known, self._kind)


class _Span:
    """The addresses of a tensor's elements."""

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.begin, self.name = tensor.data_ptr(), name
        self.end = self.begin + (last + 1) * tensor.element_size()


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
