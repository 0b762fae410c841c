"""The layout of a plain torch job, and every rank's place in it."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ftckpt.comm import Group
from ftckpt.layout.topology import Member, Topology


def gather_topology(group: Group, node: str, model: torch.nn.Module) -> Topology:
    """Ask every rank for its coordinates and node. Collective.

    Coordinates are those of the device mesh that the model's DTensors lie on, by the names of its dimensions,
    where it has names and spans all ranks; otherwise ``dp``, the rank.
    """
    mesh = _mesh(model)
    names = mesh.mesh_dim_names if mesh is not None else None
    coordinate = mesh.get_coordinate() if mesh is not None else None
    if mesh is None or names is None or coordinate is None:
        coords, layout = {"dp": group.rank}, {"dp": group.size}
    else:
        coords = {name: int(place) for name, place in zip(names, coordinate, strict=True)}
        layout = {name: mesh.size(dim) for dim, name in enumerate(names)}
    mine = Member(coords, node).to_json()
    members = [Member.from_json(json.loads(data)) for data in group.gather(json.dumps(mine).encode())]
    sharded: dict[str, Any] = {"sharded": any(isinstance(p, DTensor) for p in model.parameters())}
    return Topology(group.rank, tuple(members), {**layout, **sharded})


def _mesh(model: torch.nn.Module) -> DeviceMesh | None:
    """The mesh of all ranks that parameters lie on."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() == dist.get_world_size():
            return parameter.device_mesh
    return None
