"""Rank coordinates in the device mesh, and boxes of tensors: DTensors may be shards, other tensors are complete."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel

from ftckpt.errors import UnsupportedError
from ftckpt.frameworks.tensors import LogicalBox, check_contiguous, unwrapped
from ftckpt.model.fragment import Box

_Cut: TypeAlias = Callable[[tuple[int, ...], DeviceMesh, tuple[Placement, ...]], Box | str]

LOCAL = "_local_tensor"
"""Attribute of a DTensor with this rank's shard."""


def place_rank(model: torch.nn.Module) -> tuple[Mapping[str, int], Mapping[str, Any]]:
    """This rank's coordinates, and the sizes of the layout.

    If the device mesh of the model's DTensors has dimension names and spans all ranks, its dimensions are the axes;
    otherwise the only axis is ``dp``.
    """
    mesh = _mesh(model)
    names = mesh.mesh_dim_names if mesh is not None else None
    coordinate = mesh.get_coordinate() if mesh is not None else None
    sharded: dict[str, Any] = {"sharded": any(isinstance(p, DTensor) for p in model.parameters())}
    if mesh is None or names is None or coordinate is None:
        return {"dp": dist.get_rank()}, {"dp": dist.get_world_size(), **sharded}
    coords = {name: int(index) for name, index in zip(names, coordinate, strict=True)}
    return coords, {**{name: mesh.size(dim) for dim, name in enumerate(names)}, **sharded}


def _mesh(model: torch.nn.Module) -> DeviceMesh | None:
    """The device mesh of the parameters that spans all ranks, if any."""
    for parameter in model.parameters():
        # On a smaller mesh, several ranks would share coordinates.
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() == dist.get_world_size():
            return parameter.device_mesh
    return None


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the user's module inside DDP and torch.compile.

    Raises:
        UnsupportedError: the model contains FSDP1.
    """
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise UnsupportedError(
                f"module {name or '(the model)'} is a FullyShardedDataParallel (FSDP1), which flattens parameters; "
                "use torch.distributed.fsdp.fully_shard (FSDP2)"
            )
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def settle_shards(model: torch.nn.Module) -> None:
    """Runs the lazy initialization of FSDP2's first forward now. Collective.

    It may move a shard smaller than others into padded memory. Gathering parameters is the only public call that
    triggers it.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


def follows_buffers(model: torch.nn.Module) -> bool:
    """True if DDP broadcasts buffers of the first replica to this rank before each forward."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return bool(module.broadcast_buffers) and dist.get_rank(module.process_group) > 0
    return False


def keeps_replicas(model: torch.nn.Module, has_plain_hooks: bool) -> bool:
    """True if DDP or FSDP2 keeps all parameters identical across their replicas.

    ``has_plain_hooks``: every communication hook of DDP yields the same gradients on all ranks.
    """
    while isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):  # inside torch.compile
        model = inner
    if isinstance(model, DistributedDataParallel):
        return has_plain_hooks and not model.parameters_to_ignore
    return isinstance(model, FSDPModule) and all(isinstance(one, DTensor) for one in model.parameters())


def named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields every parameter once, under its name without wrappers."""
    return unwrapped(model.named_parameters())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor."""
    mine: torch.Tensor = getattr(tensor, LOCAL, tensor)
    return mine


def places(model: torch.nn.Module) -> dict[torch.nn.Parameter, list[LogicalBox]]:
    """This rank's box of every parameter; an empty box where an uneven shard is empty.

    Raises:
        UnsupportedError: a shard is not a box, is a partial sum, or is not contiguous.
    """
    cut = cache(_cut)  # many parameters share few shardings
    return {parameter: [place(name, parameter, cut)] for name, parameter in named_parameters(model)}


def place(name: str, tensor: torch.Tensor, cut: _Cut | None = None) -> LogicalBox:
    """This rank's box of a tensor; raises as ``places``. ``cut`` may remember boxes of equal shardings."""
    mine = local(tensor)
    check_contiguous(name, mine)
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return _logical(name, tensor, Box((0,) * len(shape), shape))
    box = (cut or _cut)(shape, tensor.device_mesh, tensor.placements)
    if isinstance(box, str):
        raise UnsupportedError(f"{name} {box}")
    # Torch's arithmetic is private: a changed placement must not shift boxes silently.
    if box.shape != mine.shape:
        raise UnsupportedError(f"{name} holds {tuple(mine.shape)} on this rank, and its placements say {box.shape}")
    return _logical(name, tensor, box)


def _logical(name: str, tensor: torch.Tensor, box: Box) -> LogicalBox:
    """``box`` of a tensor, with the dimension that ``as_real`` gives a complex one."""
    shape = tuple(tensor.shape)
    if tensor.is_complex():
        shape, box = (*shape, 2), Box((*box.offset, 0), (*box.shape, 2))
    return LogicalBox(name, shape, box, 0)


def _cut(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Box | str:
    """This rank's box of a tensor of ``shape``, or the reason as text why there is none."""
    if (problem := _unknown(mesh, placements)) is not None:
        return problem
    size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Box(tuple(map(int, offset)), tuple(map(int, size)))


def _unknown(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> str | None:
    if mesh.get_coordinate() is None:
        return "lies on a device mesh that this rank is not part of"
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            return f"is {placement}: a summand of its logical tensor, not a piece of it"
        factor = getattr(placement, "split_factor", None)
        if factor is None:
            continue
        # FSDP2 over tensor parallelism shards a dimension that the mesh dimensions after it have cut first; only
        # where they are all the cuts does a rank hold neighbouring rows.
        after = [
            mesh.size(place)
            for place in range(dim + 1, mesh.ndim)
            if getattr(placements[place], "dim", None) == getattr(placement, "dim", None)
        ]
        if math.prod(after) != factor:
            return f"is placed {placements}: what a rank holds of it is no single box"
    return None
