"""Tiny replicated state, such as Adam's counts of steps under FSDP, ties no shard to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ftckpt
import ftckpt.torch
from ftckpt.restore.load import Reads
from tests.support.pool import run_ranks

pytestmark = pytest.mark.multiproc


def train(rank: int, world_size: int, arena: str, iterations: int) -> tuple[int | None, list[str], list[float], bool]:
    """Under FSDP2, two ranks on a node. What was restored, the shards that were read for it straight into place, the
    counts of steps, and whether each is in this rank's own slot."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    read: list[str] = []
    whole = Reads.of

    def of(*args: Any) -> Reads:
        planned = whole(*args)
        read.extend(chunk.source.image.manifest.shard for chunk in planned.chunks)
        return planned

    Reads.of = of  # type: ignore[method-assign]
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    config = ftckpt.Config(enabled=True, job="small", node=f"node{rank // 2}", arena=arena, on_error="raise")
    checkpointer = ftckpt.torch.attach(model, optimizer, None, {}, config)
    restored = checkpointer.restore()
    steps = [float(state["step"]) for state in optimizer.state.values()]
    for iteration in range((restored or 0) + 1, (restored or 0) + iterations + 1):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
        checkpointer.step(iteration)
    assert checkpointer.arena is not None
    keys = [fragment.key for fragment in checkpointer.arena.manifest.stepped]
    has_all = sum(key.startswith("step/") for key in keys) == len(list(model.parameters()))
    checkpointer.close(remove=iterations == 0)
    return restored, read, steps, has_all


def test_no_rank_reads_what_another_has(arena_root: Path) -> None:
    first = [one.value for one in run_ranks(train, 4, str(arena_root), 3)]
    assert all(restored is None and has_all for restored, _, _, has_all in first)
    again = [one.value for one in run_ranks(train, 4, str(arena_root), 0)]
    for rank, (restored, read, steps, _) in enumerate(again):
        assert restored == 3 and steps == [3.0] * 4
        assert set(read) == {f"dp{rank}"}, "straight, and from its own shard alone"
