"""State of torch-like optimizers as pieces: trained parameters, master weights and moments."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch

from ftckpt.errors import MismatchError, UnsupportedError
from ftckpt.frameworks.tensors import LogicalBox, ParameterBoxes, flat, fragments, number_piece
from ftckpt.model.objects import encode
from ftckpt.model.training_state import Piece


class ParameterRange(NamedTuple):
    """The range of ``parameter`` that an optimizer steps: its elements from ``first``, whose memory is ``weight``.

    This rank may read no other part of the parameter. ``owner`` is the key of the inner optimizer's state: a master
    or the parameter itself; the range starts at its element ``begin``. ``master``, if it is not the owner, has the
    owner's shape.
    """

    parameter: torch.nn.Parameter
    first: int
    weight: torch.Tensor
    owner: torch.Tensor
    begin: int = 0
    master: torch.Tensor | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The range's elements in a tensor of the owner's shape."""
        every, numel = flat(tensor), self.weight.numel()
        return every if every.numel() == numel else every[self.begin : self.begin + numel]


def stepped_pieces(
    boxes: ParameterBoxes, ranges: Iterable[ParameterRange], state: Callable[[ParameterRange], Mapping[str, Any]]
) -> Iterator[Piece]:
    """Yields the weight, the master (if any) and the moments of each range.

    Args:
        boxes: boxes of all parameters of this rank.
        ranges: all ranges that this rank steps.
        state: returns the inner optimizer's state for the owner of a range.

    Raises:
        UnsupportedError: a parameter without a box, or state that is neither per element nor a single number.
    """
    for part in ranges:
        places = boxes.get(part.parameter)
        if places is None:
            raise UnsupportedError(f"the optimizer steps a {tuple(part.parameter.shape)} that is not in the model")
        weights = fragments(places, "weight", flat(part.weight), part.first)
        whole = part.owner if part.master is None else part.master
        master = part.of(whole)
        # A parameter that is stepped in place is its own master and is saved once.
        if master.data_ptr() == part.weight.data_ptr():
            yield from (Piece(fragment, view, counted=part.weight) for fragment, view in weights)
        else:
            masters = fragments(places, "master", master, part.first)
            for (weight, live), (fragment, source) in zip(weights, masters, strict=True):
                yield Piece(weight, live, derived_from=source, counted=part.weight)
                yield Piece(fragment, source, counted=whole)
        # Sorted, because loading a checkpoint may reorder state. Another order is another manifest: a restart would
        # allocate new arenas next to those of its snapshots, with one slot until these can be freed.
        for name, value in sorted(state(part).items()):
            if value is not None:
                yield from _moment(places, part, name, value)


def _moment(places: Sequence[LogicalBox], part: ParameterRange, name: str, value: Any) -> Iterator[Piece]:
    key = places[0].key
    if not isinstance(value, torch.Tensor) or not value.is_contiguous():
        raise UnsupportedError(f"optimizer state {name} of {key} is not a contiguous tensor")
    if value.shape == part.owner.shape:
        for fragment, view in fragments(places, name, part.of(value), part.first):
            yield Piece(fragment, view, counted=value)
    # Such as a step count.
    elif value.numel() == 1:
        yield number_piece(places[0], name, value)
    else:
        raise UnsupportedError(
            f"optimizer state {name} of {key} has {value.numel()} elements for a parameter of "
            f"{part.owner.numel()}: neither per element nor a single number"
        )


def without_state(inner: Any) -> list[torch.Tensor]:
    """Parameters without optimizer state, because they have not been stepped yet."""
    return [p for group in inner.param_groups for p in group["params"] if not inner.state.get(p)]


def creates_state_ahead(inner: Any) -> bool:
    """Whether ``materialise`` can create the optimizer's state: it is a fused one, or torch's own with a function
    that creates state without a step."""
    functions = (getattr(type(inner), name, None) for name in ("step", "_init_group"))
    return is_fused_adam(inner) or all(
        getattr(function, "__module__", "").startswith("torch.optim.") for function in functions
    )


def materialise(inner: Any) -> None:
    """Creates the state that a FusedAdam, or an optimizer of torch, would create in its first step.

    The arena layout and the copy addresses are fixed before that step.

    Raises:
        UnsupportedError: an optimizer that ftckpt does not know.
    """
    if is_fused_adam(inner):
        check_fused_adam(inner)
        for parameter in without_state(inner):
            initialize_fused_adam(inner, parameter)
        return
    if not (creates_state_ahead(inner) or isinstance(inner, (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD))):
        name = f"{type(inner).__module__}.{type(inner).__qualname__}"
        raise UnsupportedError(f"inner optimizer {name} is not known; known are Adam, AdamW, SGD and {FUSED_ADAM}")
    _separate_numbers(inner)
    missing = without_state(inner)
    if missing and isinstance(inner, torch.optim.SGD):
        _materialise_sgd(inner, set(missing))
    elif missing:
        _init_groups(inner)


def _separate_numbers(inner: Any) -> None:
    """Clones shared number tensors: after loading a checkpoint, all parameters may share one ``step`` tensor."""
    seen: set[int] = set()
    for state in inner.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1 and value.data_ptr():  # a DTensor has none
                if value.data_ptr() in seen:
                    value = state[name] = value.clone()  # noqa: PLW2901
                seen.add(value.data_ptr())


def _init_groups(inner: Any) -> None:
    """Creates state for parameters without it."""
    for group in inner.param_groups:
        mine = [p for p in group["params"] if not inner.state.get(p)]
        # For a DTensor its local tensor: creating DTensors by torch operations is slow.
        owners = [p.to_local().detach() if hasattr(p, "to_local") else p for p in mine]
        _init_group(inner, group, owners)
        shards = [(p, owner, inner.state.pop(owner)) for p, owner in zip(mine, owners, strict=True) if p is not owner]
        if all(value.shape in ((), owner.shape) for _, owner, state in shards for value in state.values()):
            for parameter, _, state in shards:
                inner.state[parameter] = _as_shards(parameter, state)
        else:  # sums over a dimension, which may be the sharded one
            _init_group(inner, group, [parameter for parameter, _, _ in shards])


def _init_group(inner: Any, group: Mapping[str, Any], owners: Sequence[torch.Tensor]) -> None:
    """Calls torch's ``_init_group``, which creates state for parameters with a gradient; any tensor can serve as one.

    No step is taken: moments start as zeros and the step count as 0.
    """
    # After the group, it takes lists to fill; their number differs between optimizers and versions of torch.
    lists = len(inspect.signature(inner._init_group).parameters) - 1
    before = [(owner, owner.grad) for owner in owners]
    for owner, _ in before:
        owner.grad = owner.detach()
    try:
        inner._init_group({**group, "params": owners}, *([] for _ in range(lists)))
    finally:
        for owner, grad in before:
            owner.grad = grad


def _as_shards(parameter: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Wraps the state of the local part of ``parameter`` in DTensors like it, except single numbers."""
    return {
        name: value
        if name == "step" or value.shape != parameter._local_tensor.shape
        else type(parameter)(value, parameter._spec, requires_grad=False)
        for name, value in state.items()
    }


def _materialise_sgd(inner: Any, missing: set[torch.Tensor]) -> None:
    """Creates momentum of zeros, whose first step equals that without momentum, unless there is dampening."""
    for group in inner.param_groups:
        if group["momentum"] and group["dampening"]:
            raise UnsupportedError("SGD with dampening creates its momentum in the first step; use dampening 0")
        for parameter in group["params"]:
            if group["momentum"] and parameter in missing:
                inner.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


_KNOWN_PACKAGES = "torch.", "deepspeed.", "apex.", "transformer_engine.", "megatron."


def kind_of(inner: Any) -> str:
    """The optimizer's name in a snapshot: its class, or the algorithm if several fused classes implement it.

    With its module for a class of another package: several have classes of one name.
    """
    adds_decay, kind = getattr(inner, "adam_w_mode", None), type(inner)
    if adds_decay is not None:
        return f"{'AdamW' if adds_decay else 'Adam'} (fused)"
    return kind.__name__ if kind.__module__.startswith(_KNOWN_PACKAGES) else f"{kind.__module__}.{kind.__qualname__}"


def check_kind(inner: Any, saved: str) -> None:
    """Raises MismatchError if the snapshot belongs to another optimizer than ``inner``."""
    if (kind := kind_of(inner)) != saved:
        raise MismatchError(
            f"the snapshot belongs to optimizer {saved}, but this job trains with {kind}: start with {saved}, or "
            "remove the snapshot with 'ftckpt clean JOB'"
        )


CODE = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ModuleType,
    types.GenericAlias,
)
"""Types of code, which has no state of its own."""


def save_groups(inner: Any) -> list[dict[str, Any]]:
    """The settings of each group, without parameters: learning rate, weight decay, a fused optimizer's ``step``.

    Types, functions and enumerations are settings of the script that no step changes, and are left out. Other objects
    that can be called, which may count their calls, are not.
    """
    return [{k: v for k, v in group.items() if k != "params" and not is_constant(v)} for group in inner.param_groups]


def is_constant(value: Any) -> bool:
    """Whether ``save_groups`` leaves a value out."""
    return isinstance(value, (*CODE, partial, torch.dtype, torch.device, Enum))


def load_groups(inner: Any, saved: Sequence[Mapping[str, Any]]) -> None:
    """Restores the result of ``save_groups`` in place.

    Raises:
        MismatchError: the number of groups differs.
    """
    if len(saved) != len(inner.param_groups):
        raise MismatchError(
            f"the optimizer has {len(inner.param_groups)} parameter groups, but the snapshot has {len(saved)}: use "
            "the groups of the job that took it, or remove it with 'ftckpt clean JOB'"
        )
    for group, values in zip(inner.param_groups, saved, strict=True):
        load_group(group, values)


def load_groups_reshaped(
    inner: Any, saved: Sequence[Sequence[Mapping[str, Any]]], kind: str = "", stays: Collection[str] = ()
) -> None:
    """Restores the results of ``save_groups`` on ranks of another layout, in place.

    A group gets the values at its position on ranks with the same number of groups, if these agree, or those of any
    group if all are equal.

    Args:
        saved: the groups by rank.
        kind: a boolean hyperparameter; positions are counted separately among groups with and without it.
        stays: hyperparameters that depend on the layout and are not restored.

    Raises:
        MismatchError: no rank has the same number of groups, or such ranks differ, and not all groups are equal.
    """
    for has_kind in (False, True):
        mine = [group for group in inner.param_groups if bool(group.get(kind)) == has_kind]
        theirs = [[_without(group, stays) for group in of if bool(group.get(kind)) == has_kind] for of in saved]
        for group, values in zip(mine, _matching(len(mine), theirs), strict=True):
            load_group(group, values)


def _without(group: Mapping[str, Any], stays: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in stays}


def _matching(count: int, saved: Sequence[Sequence[Mapping[str, Any]]]) -> Sequence[Mapping[str, Any]]:
    """The groups of the ranks with ``count`` groups if these agree, or ``count`` copies if all groups are equal."""
    ranks = [of_rank for of_rank in saved if len(of_rank) == count]
    if ranks and len({encode([dict(group) for group in of_rank]) for of_rank in ranks}) == 1:
        return ranks[0]
    groups = [group for of_rank in saved for group in of_rank]
    if len({encode(dict(group)) for group in groups}) == 1:
        return groups[:1] * count
    raise MismatchError(
        f"the optimizer has {count} parameter groups of a kind of which ranks of the snapshot have "
        f"{' or '.join(sorted({str(len(of_rank)) for of_rank in saved}))}, with different settings: they cannot be "
        "matched to groups of another layout; start with the layout and the groups of the job that took it, or "
        "remove it with 'ftckpt clean JOB'"
    )


def load_group(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Sets the hyperparameters of one group, tensors in place."""
    for name, value in values.items():
        if isinstance(group.get(name), torch.Tensor):
            group[name].copy_(value)
        else:
            group[name] = value


def state_tensors(
    inner: Any, index: int = 0, names: Mapping[Any, str] | None = None
) -> Iterator[tuple[str, object, torch.Tensor]]:
    """Yields all state tensors of an optimizer, the ``index``-th of a job, for ``LiveTensors``.

    Owners are numbered unless ``names`` has a name for them.
    """
    for number, (owner, state) in enumerate(inner.state.items()):
        name = (names or {}).get(owner, (index, number))
        for kind, value in state.items():
            if isinstance(value, torch.Tensor):
                yield f"optimizer state {kind} of", name, value


FUSED_ADAM = "FusedAdam of Transformer Engine and Apex"
"""Both count steps in non-empty parameter groups. Their kernels write by address, so torch's version counters do not
change."""

_PACKAGES = ("transformer_engine.", "apex.optimizers.")
_DTYPES = ("exp_avg_dtype", "exp_avg_sq_dtype", "master_weight_dtype")


def is_fused_adam(inner: Any) -> bool:
    """Whether it is one of the two; DeepSpeed has another class of that name."""
    kind = type(inner)
    return kind.__qualname__ == "FusedAdam" and kind.__module__.startswith(_PACKAGES)


def check_fused_adam(inner: Any) -> None:
    """Rejects settings with which it has state outside of its ``state`` and its groups.

    Raises:
        UnsupportedError: the setting.
    """
    own_masters = getattr(inner, "master_weights", False) and not hasattr(inner, "initialize_state")
    # With ``capturable``, a flag of the last overflow decides whether the next step counts; own masters are outside
    # of ``state``.
    for name, is_on in (("capturable", getattr(inner, "capturable", False)), ("master_weights", own_masters)):
        if is_on:
            raise UnsupportedError(f"FusedAdam with {name} has state that ftckpt cannot save; leave it off")
    for name in _DTYPES:
        if (dtype := getattr(inner, name, torch.float32)) != torch.float32:
            raise UnsupportedError(f"FusedAdam with {name} {dtype}: its scales cannot be saved; use fp32")


def initialize_fused_adam(inner: Any, parameter: torch.Tensor) -> None:
    """Creates the state of one parameter before the first step, as the optimizer's first step would."""
    if not hasattr(inner, "initialize_state"):  # Apex, and Transformer Engine before 1.13
        inner.state[parameter].update({name: _zeros(parameter) for name in ("exp_avg", "exp_avg_sq")})
        return
    arguments = []
    if "store_param_remainders" in inspect.signature(inner.initialize_state).parameters:  # since 2.1
        arguments.append(inner.store_param_remainders and parameter.dtype == torch.bfloat16)
    inner.initialize_state(parameter, *arguments)


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter.detach(), dtype=torch.float32)
