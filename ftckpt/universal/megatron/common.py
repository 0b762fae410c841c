"""The objects of a Megatron checkpoint, ``common.pt``, and their conversion from other sources."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ftckpt.errors import ConvertError

_IDENTIFIERS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
CONTENT = "content_metadata"
SHARDING = "fully_reshardable"
# A counter that Megatron-LM stores at the top level of ``common.pt``, not in its arguments.
_FLOATING = "num_floating_point_operations_so_far"
_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "dp": "data_parallel_size",
}


@dataclass
class Hyperparameters:
    """Distinct parameter groups without their parameters, and the loss scaler."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    scaler: Any = None

    @property
    def steps(self) -> set[float]:
        return {float(group["step"]) for group in self.groups if group.get("step") is not None}


def identity_of(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """The key by which Megatron matches parameter groups; NeMo's multipliers are ``pre_wd_mult``, ``pre_lr_mult``."""
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in _IDENTIFIERS)


def layout_of(args: Mapping[str, Any]) -> dict[str, int | str | bool]:
    """The layout in a job's arguments; empty if they have none."""
    return {axis: args[name] for axis, name in _AXES.items() if isinstance(args.get(name), int)}


def arguments_of(objects: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the Megatron-LM job that wrote the source, with its position in the data.

    Empty for another job, such as one with its own train loop.
    """
    common = objects.get("megatron")
    if isinstance(common, Mapping):
        args = common.get("args")
        return dict(args) if isinstance(args, Mapping) else {}
    position = _position(objects)
    try:
        args = json.loads(position["arguments"])
        return {**args, **position["counters"]}
    except (KeyError, TypeError, ValueError):
        return {}


def recorded_model(objects: Mapping[str, Any]) -> dict[str, Any]:
    """The description of the model that the ranks of a snapshot saved; empty if they did not."""
    found = next((shard["model"] for shard in shards_of(objects) if shard.get("model")), "{}")
    return dict(json.loads(found))


def shards_of(objects: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The objects of each rank of a snapshot; empty for another source."""
    return [shard for shard in (objects.get("shards") or {}).values() if isinstance(shard, Mapping)]


def _position(objects: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of Megatron-LM's train loop in a snapshot; empty if there is none."""
    for shard in shards_of(objects):
        users = shard.get("objects")
        position = users.get("counters") if isinstance(users, Mapping) else None
        if isinstance(position, Mapping) and isinstance(position.get("counters"), Mapping):
            return position
    return {}


def optimizers_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """The state of each optimizer in ``optimizer`` of ``common.pt``: a single one, a chain, or an FP32 one."""
    # A chain of optimizers is saved as a mapping with their numbers as keys.
    if isinstance(value, Mapping) and value and all(isinstance(key, int) for key in value):
        for key in sorted(value):
            yield from optimizers_in(value[key])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from optimizers_in(each)
    elif isinstance(value, Mapping):
        # FP32 optimizers save torch's state at the top level, others under this name, next to their loss scaler.
        inner = value.get("optimizer", value)
        if isinstance(inner, Mapping):
            yield {"scaler": value.get("grad_scaler"), **inner}


def hyperparameters(objects: Mapping[str, Any]) -> Hyperparameters:
    """The hyperparameters of any source whose objects have Megatron's parameter groups; empty for others."""
    hyper = Hyperparameters()
    sources: list[tuple[Iterable[Any], Any]] = []
    common = objects.get("megatron")
    if isinstance(common, Mapping):
        optimizers = list(optimizers_in(common.get("optimizer")))
        sources += [(each.get("param_groups") or (), each.get("scaler")) for each in optimizers]
    for shard in shards_of(objects):
        sources += [(each.get("groups") or (), each.get("scaler")) for each in shard.get("optimizers") or ()]
    seen: set[tuple[Any, ...]] = set()
    for groups, scaler in sources:
        hyper.scaler = scaler if hyper.scaler is None else hyper.scaler
        for group in groups:
            identity = identity_of(group)
            if identity not in seen:
                seen.add(identity)
                hyper.groups.append({name: value for name, value in group.items() if name != "params"})
    # A rank without parameters of a group counts no steps for it; Megatron steps all groups together.
    counted = [group["step"] for group in hyper.groups if group.get("step") is not None]
    if len(hyper.steps) == 1:
        for group in hyper.groups:
            group["step"] = counted[0]
    return hyper


def common_step(objects: Mapping[str, Any], where: str) -> float | None:
    """The common step of torch's own optimizers in ``common.pt``; None for fused ones, which count in their groups.

    Raises:
        ConvertError: the steps differ.
    """
    common = objects.get("megatron") or {}
    steps: set[float] = set()
    for each in optimizers_in(common.get("optimizer")):
        shared = (each.get("state") or {}).get("common_step")
        if shared is not None:
            steps.add(float(shared))
        group_steps = [group.get("step") for group in each.get("param_groups") or ()]
        # An integer belongs to a fused optimizer: it stays in the group.
        steps |= {float(step) for step in group_steps if isinstance(step, (float, torch.Tensor))}
    if len(steps) > 1:
        raise ConvertError(f"{where}: optimizers are at different steps: {sorted(steps)}")
    return steps.pop() if steps else None


def make_common(
    objects: Mapping[str, Any], iteration: int, step: float | None, fp32: bool, content: Mapping[str, Any]
) -> dict[str, Any]:
    """``common.pt`` for Megatron: the source's own without state of its layout, or made from a snapshot's objects.

    ``step``: the step of torch's own optimizer; ``fp32``: there are no masters.
    """
    common: dict[str, Any] = copy.deepcopy(dict(objects.get("megatron") or {}))
    # They belong to the source's layout; the optimizer is assembled below.
    for name in ("optimizer", "rerun_state_machine", "rng_state"):
        common.pop(name, None)
    args = arguments_of(objects)
    if args:
        # RNG state has no meaning in another layout: Megatron must not look for it.
        common["args"] = argparse.Namespace(**{**args, "no_save_rng": True})
    floating = (_position(objects).get("counters") or {}).get(_FLOATING)
    if floating is not None:
        common.setdefault(_FLOATING, floating)
    # Megatron-LM's version: below 2 it assumes another order of query, key and value.
    common.setdefault("checkpoint_version", 3.0)
    common["iteration"] = iteration
    schedulers = (shard.get("scheduler") for shard in shards_of(objects))
    scheduler = next((one for one in schedulers if isinstance(one, Mapping)), None)
    if "opt_param_scheduler" not in common and scheduler is not None:
        common["opt_param_scheduler"] = copy.deepcopy(scheduler)
    common[CONTENT] = {**(common.get(CONTENT) or {}), **content}
    hyper = hyperparameters(objects)
    if hyper.groups:
        common["optimizer"] = _optimizer(hyper, step, fp32)
    return common


def _optimizer(hyper: Hyperparameters, step: float | None, fp32: bool) -> dict[Any, Any]:
    """The state of an optimizer or, if experts have groups and so an optimizer of their own, of a chain."""
    parts = [
        [group for group in hyper.groups if bool(group.get("is_expert_parallel")) is experts]
        for experts in (False, True)
    ]
    optimizers = [_one(groups, hyper.scaler, step, fp32) for groups in parts if groups]
    return optimizers[0] if len(optimizers) == 1 else dict(enumerate(optimizers))


def _one(groups: list[dict[str, Any]], scaler: Any, step: float | None, fp32: bool) -> dict[str, Any]:
    groups = copy.deepcopy(groups)
    for group in groups:
        if step is not None:
            group["step"] = step
    state = {} if step is None else {"common_step": torch.tensor(step, dtype=torch.float32)}
    inner = {"state": state, "param_groups": groups}
    made: dict[str, Any] = {"optimizer": inner, "param_state_sharding_type": SHARDING}
    if scaler is not None:
        made["grad_scaler"] = scaler
    if fp32:  # without the distributed optimizer FP32 state is one level higher
        made.update(copy.deepcopy(inner))
    return made
