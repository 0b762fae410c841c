"""Trains a tiny model with accelerate under DDP; its prepared objects are given to ``ftckpt.torch.attach``."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed

import ftckpt.torch
from ftckpt import Config

WIDTH, NUM_SAMPLES, NUM_EPOCHS = 16, 40, 30


class Progress:
    """The epoch, and how many of its batches are done."""

    def __init__(self) -> None:
        self.epoch = self.batch = self.step = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def main(argv: Sequence[str]) -> None:
    config, rest = Config.from_flags(argv)
    (folder,) = rest
    ftckpt.torch.init_process_group(config, "gloo")
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=3,
        # The order of samples then depends on the epoch alone.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(1)
    layers = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
    model: Any = torch.nn.Sequential(*layers)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    samples = torch.randn(NUM_SAMPLES, WIDTH)
    # Its own generator: a restart, which creates the iterator again, draws nothing from torch's.
    loader: Any = torch.utils.data.DataLoader(samples, batch_size=2, shuffle=True, generator=torch.Generator())  # type: ignore[arg-type]
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    progress = Progress()
    checkpointer = ftckpt.torch.attach(model, optimizer, scheduler, {"progress": progress}, config)
    checkpointer.restore()
    while progress.epoch < NUM_EPOCHS:
        loader.set_epoch(progress.epoch)
        for batch in skip_first_batches(loader, progress.batch):
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(batch), batch)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.is_main_process:
                print(json.dumps({**vars(progress), "lr": scheduler.get_last_lr(), "loss": loss.item()}), flush=True)
            progress.batch += 1
            if accelerator.sync_gradients:
                progress.step += 1
                if progress.batch == len(loader):
                    progress.epoch, progress.batch = progress.epoch + 1, 0
                checkpointer.step(progress.step)
    write_result(accelerator, model, progress, Path(folder))
    checkpointer.close()
    dist.destroy_process_group()


def write_result(accelerator: Any, model: torch.nn.Module, progress: Progress, folder: Path) -> None:
    """What an undisturbed run and one that was restored have alike."""
    tensors = [*model.state_dict().values(), torch.get_rng_state()]
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in tensors))
    if accelerator.is_main_process:
        (folder / "result.json").write_text(json.dumps({**vars(progress), "sha256": digest.hexdigest()}))


if __name__ == "__main__":
    main(sys.argv[1:])
