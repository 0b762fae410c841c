"""Coordinates of a DeepSpeed rank in the layout, and boxes of its parameters in logical tensors.

Keys are the module's parameter names: a PipelineModule numbers layers across its stages and gives a tied layer one
name on all of them. Each stage trains its own copy of such a layer's untied parameters: the first stage uses the key
of the tied layer, the others the layer's number. Experts are numbered among all experts of their layer. Marks on a
parameter define how ranks divide its tensor.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank, bwc_tensor_model_parallel_world_size

from ftckpt.errors import UnsupportedError
from ftckpt.frameworks.tensors import LogicalBox, unwrapped
from ftckpt.model.fragment import Box

_EXPERTS = "experts.deepspeed_experts."


def tensor_parallel(engine: Any) -> tuple[int, int]:
    """This rank's tensor-parallel rank and world size."""
    mpu = engine.mpu
    return int(bwc_tensor_model_parallel_rank(mpu)), int(bwc_tensor_model_parallel_world_size(mpu))


def coordinates(engine: Any) -> dict[str, int]:
    """This rank's coordinate along each axis that divides state."""
    return {
        "tp": tensor_parallel(engine)[0],
        "pp": int(engine.stage_id) if engine.pipeline_parallelism else 0,
        "dp": dist.get_rank(groups._get_data_parallel_group()),
    }


def layout_sizes(engine: Any) -> dict[str, int | str | bool]:
    """The sizes of the job's layout."""
    experts = sorted({int(layer.ep_size) for layer in engine.moe_layers})
    return {
        "tp": tensor_parallel(engine)[1],
        "pp": int(engine.num_stages) if engine.pipeline_parallelism else 1,
        "dp": dist.get_world_size(groups._get_data_parallel_group()),
        "ep": ",".join(map(str, experts)) or "1",
        "zero": int(engine.zero_optimization_stage()),
    }


def place_parameters(engine: Any) -> dict[torch.nn.Parameter, tuple[LogicalBox, ...]]:
    """The box of every parameter of this rank's module; each has one.

    Raises:
        UnsupportedError: a parameter whose position in its logical tensor is unknown, by name.
    """
    rank, size = tensor_parallel(engine)
    first_experts, own_copies = _first_experts(engine.module), _own_copies(engine.module)
    if first_experts and (size > 1 or engine.pipeline_parallelism):
        raise UnsupportedError(
            "experts together with a PipelineModule or tensor parallelism are not supported by ftckpt; train them "
            "with data and expert parallelism only"
        )
    places: dict[torch.nn.Parameter, tuple[LogicalBox, ...]] = {}
    for name, parameter in unwrapped(engine.module.named_parameters()):
        key = own_copies.get(parameter) or _key(name, parameter, first_experts)
        # Under ZeRO 3 a parameter that is not gathered is an empty 1-D tensor.
        local = tuple(getattr(parameter, "ds_shape", parameter.shape))
        dim = _divided_dim(name, parameter, len(local)) if size > 1 else None
        whole, offset = list(local), [0] * len(local)
        if dim is not None:
            whole[dim] *= size
            offset[dim] = rank * local[dim]
        places[parameter] = (LogicalBox(key, tuple(whole), Box(tuple(offset), local), 0),)
    return places


def _first_experts(module: torch.nn.Module) -> dict[str, int]:
    """For each layer of experts, the prefix of their names and the number of this rank's first expert."""
    firsts = {}
    for name, layer in unwrapped(module.named_modules()):
        if isinstance(layer, MOELayer):
            prefix = f"{name}.{_EXPERTS}" if name else _EXPERTS
            firsts[prefix] = dist.get_rank(layer.ep_group) * int(layer.num_local_experts)
    return firsts


def _own_copies(module: Any) -> dict[torch.nn.Parameter, str]:
    """Keys of this stage's own copies of untied parameters, in tied layers that start on an earlier stage."""
    if not getattr(module, "tied_comms", None):
        return {}
    tied = {weight for weight, _ in module.get_tied_weights_and_groups()}
    names = {}
    for key, layer in module.tied_modules.items():
        number = next(
            number
            for number, spec in enumerate(module._layer_specs)
            if getattr(spec, "key", None) == key and module.stage_owner(number) == module.stage_id
        )
        for name, parameter in unwrapped(layer.named_parameters()):
            # DeepSpeed marks all parameters of such a layer on later stages, tied or not.
            if parameter not in tied and getattr(parameter, "ds_pipe_replicated", False):
                names[parameter] = f"{number}.{name}"
    return names


def _key(name: str, parameter: torch.nn.Parameter, first_experts: dict[str, int]) -> str:
    for prefix, first in first_experts.items():
        if name.startswith(prefix):
            index, _, rest = name.removeprefix(prefix).partition(".")
            return f"{prefix}{first + int(index)}.{rest}"
    if is_moe_param(parameter):
        raise UnsupportedError(
            f"parameter {name} is marked as an expert's (allreduce is False) but is in no deepspeed.moe layer, so "
            "its expert is unknown; build experts with deepspeed.moe.layer.MoE"
        )
    return name


def _divided_dim(name: str, parameter: torch.nn.Parameter, num_dims: int) -> int | None:
    """The dimension in which tensor-parallel ranks divide a parameter; None if all have the same."""
    marks = (getattr(parameter, mark, False) for mark in ("tensor_model_parallel", "model_parallel"))
    if not any(marks):
        return None
    dim = getattr(parameter, "partition_dim", None)
    if dim is None or not 0 <= dim < num_dims:
        raise UnsupportedError(
            f"parameter {name} is marked tensor_model_parallel and its partition_dim is {dim}: set partition_dim "
            "to the dimension in which tensor-parallel ranks divide it, as megatron-core's layers do"
        )
    stride = getattr(parameter, "partition_stride", 1)
    if stride != 1:
        raise UnsupportedError(
            f"parameter {name} has partition_stride {stride}: its parts are interleaved over tensor-parallel ranks; "
            "only a stride of 1 is supported, so split it into separate parameters"
        )
    return int(dim)
