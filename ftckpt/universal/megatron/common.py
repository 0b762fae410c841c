"""What is no tensor in a Megatron checkpoint: ``common.pt``, and what of others' objects can go into it."""

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
# A counter that Megatron-LM keeps in ``common.pt`` itself, beside its arguments.
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
    """Groups of parameters without the parameters, each once, the loss scaler, and the steps that groups name."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    scaler: Any = None

    @property
    def steps(self) -> set[float]:
        return {float(group["step"]) for group in self.groups if group.get("step") is not None}


def identity_of(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What Megatron finds a group of parameters by; NeMo calls multipliers ``pre_wd_mult`` and ``pre_lr_mult``."""
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in _IDENTIFIERS)


def layout_of(args: Mapping[str, Any]) -> dict[str, int | str | bool]:
    """The layout that a job's arguments say; empty where they say none."""
    return {axis: args[name] for axis, name in _AXES.items() if isinstance(args.get(name), int)}


def arguments_of(objects: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the Megatron-LM job that wrote the source, its position in the data among them.

    Empty where it was another job, such as one that has a train loop of its own.
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


def shards_of(objects: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Of a snapshot what its ranks saved."""
    return [shard for shard in (objects.get("shards") or {}).values() if isinstance(shard, Mapping)]


def _position(objects: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a snapshot says of Megatron-LM's train loop; empty where it says nothing."""
    for shard in shards_of(objects):
        users = shard.get("objects")
        position = users.get("counters") if isinstance(users, Mapping) else None
        if isinstance(position, Mapping) and isinstance(position.get("counters"), Mapping):
            return position
    return {}


def optimizers_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """The state of each optimizer in ``common.pt``'s ``optimizer``: of one, of a chain, or of an FP32 one."""
    # A chain of optimizers is saved as a mapping from their numbers.
    if isinstance(value, Mapping) and value and all(isinstance(key, int) for key in value):
        for key in sorted(value):
            yield from optimizers_in(value[key])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from optimizers_in(each)
    elif isinstance(value, Mapping):
        # FP32 optimizers save torch's state as it is; others put it under this name, beside their loss scaler.
        inner = value.get("optimizer", value)
        if isinstance(inner, Mapping):
            yield {"scaler": value.get("grad_scaler"), **inner}


def hyperparameters(objects: Mapping[str, Any]) -> Hyperparameters:
    """Those of any checkpoint whose objects have groups as Megatron's optimizers have them."""
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
    # A rank that has no parameters of a group counts no steps for it; Megatron steps all groups together.
    counted = [group["step"] for group in hyper.groups if group.get("step") is not None]
    if len(hyper.steps) == 1:
        for group in hyper.groups:
            group["step"] = counted[0]
    return hyper


def common_step(objects: Mapping[str, Any], where: str) -> float | None:
    """The step that all tensors of ``common.pt`` share, where torch's own optimizers count it, else None.

    Fused optimizers count it in their groups, as an integer; there it stays.

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
        # An integer is a fused optimizer's: it goes with the group, and is no tensor of the checkpoint.
        steps |= {float(step) for step in group_steps if isinstance(step, (float, torch.Tensor))}
    if len(steps) > 1:
        raise ConvertError(f"{where}: optimizers are at different steps: {sorted(steps)}")
    return steps.pop() if steps else None


def make_common(
    objects: Mapping[str, Any], iteration: int, step: float | None, fp32: bool, content: Mapping[str, Any]
) -> dict[str, Any]:
    """``common.pt`` for Megatron: ``step`` is that of torch's own optimizer, ``fp32`` says that it has no masters.

    Whatever the source's own had stays, but what belongs to one layout.
    """
    common: dict[str, Any] = copy.deepcopy(dict(objects.get("megatron") or {}))
    # Of the layout of the source; the optimizer is put together anew below.
    for name in ("optimizer", "rerun_state_machine", "rng_state"):
        common.pop(name, None)
    args = arguments_of(objects)
    if args:
        # Generators of another layout mean nothing: nobody is to look for them.
        common["args"] = argparse.Namespace(**{**args, "no_save_rng": True})
    floating = (_position(objects).get("counters") or {}).get(_FLOATING)
    if floating is not None:
        common.setdefault(_FLOATING, floating)
    # What Megatron-LM writes; below 2 query, key and value were ordered otherwise.
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
    """One optimizer's state, or that of a chain where experts have groups, and so an optimizer, of their own."""
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
    if fp32:  # without the distributed optimizer it stands one level higher
        made.update(copy.deepcopy(inner))
    return made
