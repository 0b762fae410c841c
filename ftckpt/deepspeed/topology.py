"""The layout of a DeepSpeed job, and every rank's place in it."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank, bwc_tensor_model_parallel_world_size

from ftckpt.comm import Group
from ftckpt.layout.topology import Member, Topology


def gather_topology(group: Group, node: str, engine: Any) -> Topology:
    """Ask every rank for its coordinates and node. Collective.

    Raises:
        ConfigError: two ranks claim the same coordinates.
    """
    mine = Member(_coordinates(engine), node).to_json()
    members = [Member.from_json(json.loads(data)) for data in group.gather(json.dumps(mine).encode())]
    return Topology(group.rank, tuple(members), _layout(engine))


def tensor_parallel(engine: Any) -> tuple[int, int]:
    """This rank's place among the ranks that share its layers, and their number."""
    mpu = engine.mpu
    return int(bwc_tensor_model_parallel_rank(mpu)), int(bwc_tensor_model_parallel_world_size(mpu))


def _coordinates(engine: Any) -> dict[str, int]:
    return {
        "tp": tensor_parallel(engine)[0],
        "pp": int(engine.stage_id) if engine.pipeline_parallelism else 0,
        "dp": dist.get_rank(groups._get_data_parallel_group()),
    }


def _layout(engine: Any) -> dict[str, int | str | bool]:
    experts = sorted({int(layer.ep_size) for layer in engine.moe_layers})
    return {
        "tp": tensor_parallel(engine)[1],
        "pp": int(engine.num_stages) if engine.pipeline_parallelism else 1,
        "dp": dist.get_world_size(groups._get_data_parallel_group()),
        "ep": ",".join(map(str, experts)) or "1",
        "zero": int(engine.zero_optimization_stage()),
    }
