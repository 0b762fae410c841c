"""Runs ``launch/train_transformers.py`` under FSDP2 on CPUs, where accelerate would silently train with DDP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, DistributedType
from torch.distributed.fsdp import FSDPModule

from tests.support.repository import ROOT

sys.path.insert(0, str(ROOT / "launch"))
import train_transformers

create, write_result = AcceleratorState.__init__, train_transformers.write_result


def create_sharded(state: Any, *args: Any, fsdp_plugin: Any = None, **named: Any) -> None:
    create(state, *args, fsdp_plugin=fsdp_plugin, **named)
    if fsdp_plugin is not None:
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin


def write_result_of_shards(trainer: Any, folder: Path) -> None:
    assert isinstance(trainer.model, FSDPModule)
    write_result(trainer, folder)


AcceleratorState.__init__ = create_sharded
train_transformers.write_result = write_result_of_shards
train_transformers.main(sys.argv[1:])
