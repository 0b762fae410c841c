"""The layout of a Megatron job, and every rank's place in it."""

from __future__ import annotations

import json
from typing import Any

from megatron.core import parallel_state

from ftckpt.comm import Group
from ftckpt.layout.topology import Member, Topology


def gather_topology(group: Group, node: str, distributed_optimizer: bool) -> Topology:
    """Ask every rank for its coordinates and node. Collective."""
    mine = Member(_coordinates(), node).to_json()
    members = [Member.from_json(json.loads(data)) for data in group.gather(json.dumps(mine).encode())]
    return Topology(group.rank, tuple(members), _layout(distributed_optimizer))


def _coordinates() -> dict[str, int]:
    return {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "cp": parallel_state.get_context_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(),
    }


def _layout(distributed_optimizer: bool) -> dict[str, Any]:
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "vpp": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "cp": parallel_state.get_context_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "etp": parallel_state.get_expert_tensor_parallel_world_size(),
        "distributed_optimizer": distributed_optimizer,
    }
