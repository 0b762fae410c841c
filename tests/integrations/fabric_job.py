"""Trains a tiny model with lightning's Fabric under DDP or FSDP2; ``ftckpt.torch.attach`` gets what it has set up."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ftckpt.torch
from ftckpt import Config

WIDTH, NUM_SAMPLES, NUM_EPOCHS, NUM_MICRO = 16, 40, 30, 3


class Progress:
    """The epoch, and how many of its batches are done."""

    def __init__(self) -> None:
        self.epoch = self.batch = self.step = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def shard(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    return fully_shard(model, mesh=mesh["data_parallel"])


def main(argv: Sequence[str]) -> None:
    config, (folder, strategy) = Config.from_flags(argv)
    ftckpt.torch.init_process_group(config, "gloo")
    sharded = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=sharded if strategy == "fsdp2" else "ddp")
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    layers = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
    module = fabric.setup_module(torch.nn.Sequential(*layers))
    optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=0.01))
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    samples: Any = torch.randn(NUM_SAMPLES, WIDTH)
    sampler: Any = torch.utils.data.DistributedSampler(samples)
    # Its own generator: a restart, which creates the iterator again, draws nothing from torch's.
    loader: Any = torch.utils.data.DataLoader(samples, batch_size=2, sampler=sampler, generator=torch.Generator())
    progress = Progress()
    checkpointer = ftckpt.torch.attach(module, optimizer, scheduler, {"progress": progress}, config)
    checkpointer.restore()
    while progress.epoch < NUM_EPOCHS:
        sampler.set_epoch(progress.epoch)
        for batch in islice(loader, progress.batch, None):
            progress.batch += 1
            is_last = progress.batch == len(loader)
            steps = is_last or progress.batch % NUM_MICRO == 0
            with fabric.no_backward_sync(module, enabled=not steps):
                loss = torch.nn.functional.mse_loss(module(batch), batch)
                fabric.backward(loss)
            if fabric.is_global_zero:
                print(json.dumps({**vars(progress), "lr": scheduler.get_last_lr(), "loss": loss.item()}), flush=True)
            if steps:
                fabric.clip_gradients(module, optimizer, max_norm=1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                progress.step += 1
                if is_last:
                    progress.epoch, progress.batch = progress.epoch + 1, 0
                checkpointer.step(progress.step)
    write_result(fabric, module, progress, Path(folder))
    checkpointer.close()
    dist.destroy_process_group()


def write_result(fabric: Any, model: torch.nn.Module, progress: Progress, folder: Path) -> None:
    """What an undisturbed run and one that was restored have alike."""
    tensors = [one.full_tensor() if isinstance(one, DTensor) else one for one in model.state_dict().values()]
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in [*tensors, torch.get_rng_state()]))
    if fabric.is_global_zero:
        (folder / "result.json").write_text(json.dumps({**vars(progress), "sha256": digest.hexdigest()}))


if __name__ == "__main__":
    main(sys.argv[1:])
