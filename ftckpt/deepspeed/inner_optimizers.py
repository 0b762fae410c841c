"""The inner optimizers of DeepSpeed's: state before the first step, hyperparameters, and state other than tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ftckpt.errors import MismatchError, UnsupportedError
from ftckpt.frameworks import optimizers as live
from ftckpt.frameworks.optimizers import FUSED_ADAM, is_fused_adam
from ftckpt.model.text import listed

Numbers = list[dict[str, Any]]


def is_number(value: Any) -> bool:
    """Whether state is a Python number, such as a step count, and not a tensor."""
    return type(value) in (bool, int, float)


def materialise(inner: Any) -> None:
    """Creates the state that the optimizer would create in its first step.

    Raises:
        UnsupportedError: an optimizer that ftckpt does not know.
    """
    first_state = _FIRST_STATE.get(_name(inner))
    with _trained_only(inner):
        if type(inner) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD) or is_fused_adam(inner):
            live.materialise(inner)
        elif first_state is not None:
            for group in inner.param_groups:
                for parameter in group["params"]:
                    if not inner.state.get(parameter):
                        inner.state[parameter] = first_state(inner, group, parameter)
        # Adagrad has state from its construction on.
        elif type(inner) is not torch.optim.Adagrad or live.without_state(inner):
            known = ["Adam, AdamW, SGD and Adagrad of torch", *(name.rpartition(".")[2] for name in _FIRST_STATE)]
            known.append(FUSED_ADAM)
            raise UnsupportedError(f"inner optimizer {_name(inner)} is not known; known are {', '.join(known)}")


def save(inner: Any, owners: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The hyperparameters of each group, and the Python numbers in each owner's state."""
    numbers = [{name: value for name, value in inner.state[o].items() if is_number(value)} for o in owners]
    return {"kind": live.kind_of(inner), "groups": live.save_groups(inner), "numbers": numbers}


def load(inner: Any, owners: Sequence[torch.Tensor], saved: Mapping[str, Any]) -> None:
    """Restores the result of ``save`` in place.

    Raises:
        MismatchError: it belongs to another optimizer, or the number of groups differs.
    """
    live.check_kind(inner, saved["kind"])
    live.load_groups(inner, saved["groups"])
    _set_numbers(inner, owners, saved["numbers"])


def load_reshaped(inner: Any, owners: Sequence[torch.Tensor], saved: Sequence[Mapping[str, Any]]) -> None:
    """Restores the results of ``save`` on ranks of another layout, in place.

    Raises:
        MismatchError: they belong to another optimizer, parameter groups differ, or the parameters' step counts
            differ: they cannot be assigned to the owners of another layout.
    """
    live.check_kind(inner, saved[0]["kind"])
    live.load_groups_reshaped(inner, [of_rank["groups"] for of_rank in saved], "moe", ("moe", "name"))
    found: dict[str, set[Any]] = {}
    for numbers in (numbers for of_rank in saved for numbers in of_rank["numbers"]):
        for name, value in numbers.items():
            found.setdefault(name, set()).add(value)
    for name, values in found.items():
        if len(values) > 1:
            raise MismatchError(
                f"optimizer state {name} differs between parameters ({listed(sorted(map(str, values)))}), so no "
                "other layout can load it: start with the layout of the snapshot"
            )
    shared = {name: values.pop() for name, values in found.items()}
    numbers = {name for owner in owners for name, value in inner.state[owner].items() if is_number(value)}
    if missing := numbers - shared.keys():
        raise MismatchError(
            f"optimizer state {listed(sorted(missing))} is a number in {_name(inner)} but not in the snapshot, which "
            "belongs to another optimizer: start with that one, or load a checkpoint from storage"
        )
    of_owners = [{name: shared[name] for name in inner.state[owner] if name in shared} for owner in owners]
    _set_numbers(inner, owners, of_owners)


def _set_numbers(inner: Any, owners: Sequence[torch.Tensor], numbers: Numbers) -> None:
    for owner, of_owner in zip(owners, numbers, strict=True):
        inner.state[owner].update(of_owner)
    if hasattr(inner, "ds_opt_adam"):
        _catch_up_cpu_adam(inner, numbers)


@contextlib.contextmanager
def _trained_only(inner: Any) -> Iterator[None]:
    """A context in which the groups contain no frozen parameters, for which no step would create state."""
    before = [group["params"] for group in inner.param_groups]
    try:
        for group in inner.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
        yield
    finally:
        for group, parameters in zip(inner.param_groups, before, strict=True):
            group["params"] = parameters


def _name(inner: Any) -> str:
    return f"{type(inner).__module__}.{type(inner).__qualname__}"


def _fused_adam(inner: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    # FusedAdam counts steps per parameter; the group's count is only the initial value.
    group.setdefault("step", 0)
    return {"step": group["step"], "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


def _cpu_adam(inner: Any, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    dtype = torch.float32 if inner.fp32_optimizer_states else parameter.dtype
    moments = {name: torch.zeros_like(parameter, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": 0, **moments}


def _catch_up_cpu_adam(inner: Any, numbers: Numbers) -> None:
    """Advances the compiled optimizer to the loaded step, so that its bias correction is bit-exact.

    It updates powers of the betas by one multiplication per step. If it is asked for a later step directly, it uses
    pow(), which rounds differently. Repeated steps on dummy tensors give the product, in a few microseconds each. The
    betas are assumed to have been constant.
    """
    steps = max((int(of_owner.get("step", 0)) for of_owner in numbers), default=0)
    nothing = [torch.zeros(1) for _ in range(4)]
    settings = [(*group["betas"], group["eps"], 0.0, group["bias_correction"]) for group in inner.param_groups]
    for step in range(1, steps + 1):
        for values in settings:
            # Learning rate and weight decay 0 on tensors of one element: only the powers of the betas change.
            inner.ds_opt_adam.adam_update(inner.opt_id, step, 0.0, *values, *nothing)


_FIRST_STATE: dict[str, Callable[[Any, dict[str, Any], torch.Tensor], dict[str, Any]]] = {
    "deepspeed.ops.adam.fused_adam.FusedAdam": _fused_adam,
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": _cpu_adam,
}
